"""Wait for what garbage collections bring about."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

DEADLINE_S = 60


def collect_until(is_so: Callable[[], bool]) -> None:
    """Collect until it is so: another thread may hold an object a little longer, or be in a collection itself."""
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end
        gc.collect()
