"""Wait for an effect of garbage collections."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

DEADLINE_S = 60


def collect_until(is_so: Callable[[], bool]) -> None:
    """Collect until it is so.

    Another thread may hold an object a little longer, or be in a collection itself.
    """
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end
        gc.collect()
