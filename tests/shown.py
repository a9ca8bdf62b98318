"""Values as ids of tests, the same in every process.

So pytest-xdist's workers collect the same tests.
"""

from __future__ import annotations

import re


def shown(value: object) -> str:
    """The value's repr without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
