"""What holds for every test that executes a page's snippets in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pagedkv import cpu


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """What a page sets for the whole process ends with it."""
    log, threads = logging.getLogger("pagedkv"), cpu.num_threads()
    level, handlers = log.level, list(log.handlers)
    yield
    log.setLevel(level)
    log.handlers[:] = handlers
    cpu.set_num_threads(threads)
