"""What tests of the remote tier share."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from tests.remote.servers import WATCHDOG_S


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A call that hangs ends the process with all stacks, instead of the run's patience."""
    pytest.importorskip("redis")
    faulthandler.dump_traceback_later(10 * WATCHDOG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
