"""Pictures of a recorded run: in the terminal, and as one page that steps through it."""

from pagedkv.lab.show.document import page as page
from pagedkv.lab.show.text import picture as picture
from pagedkv.lab.show.text import steps as steps
