"""Pictures of a recorded run: in the terminal, and as one page that steps through it."""

from pagedkv.show.document import page as page
from pagedkv.show.text import picture as picture
from pagedkv.show.text import steps as steps
