"""The toy server of tests/scheduler under asyncio; a gate can hold its model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.scheduler import Plan
from pagedkv.serving import AsyncScheduler
from tests.in_blocks import in_blocks
from tests.scheduler.conftest import SPEC, Server

LIMIT_S = 120.0  # only a hang reaches it


class Model:
    """Computes what tests/scheduler's server does, in the thread of an AsyncScheduler.

    Attributes
    ----------
    open : threading.Event
        While it is not set, a step waits before it computes.
    is_held : whether a step waits, or did the last time.
    fails : what the next steps raise, one each.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.open = server, threading.Event()
        self.open.set()
        self.fails: list[BaseException] = []
        self.steps = self.thread = 0
        self.is_held = False

    def __call__(self, plan: Plan, step: pk.Step) -> list[Any]:
        self.is_held = not self.open.is_set()
        assert self.open.wait(LIMIT_S)
        assert self.thread in (0, threading.get_ident()), "one thread computes all steps"
        self.thread = threading.get_ident()
        self.steps += 1
        if self.fails:
            raise self.fails.pop(0)
        self.server.write(plan, step)
        return [self.server.choose(branch) for branch in plan.lanes]


Open = Callable[..., tuple[AsyncScheduler, Model]]


@pytest.fixture
def serving() -> Iterator[Open]:
    """Opens them; at the end nothing is held, and the books agree."""
    opened: list[tuple[pk.KVCache, AsyncScheduler]] = []

    def open_it(device: int = 64, *, host: int | None = None, runs: Any = None, **options: Any) -> Any:
        cache = pk.KVCache(SPEC, in_blocks(device), in_blocks(host))
        options = {"max_running": 8, "max_batch_tokens": 16, **options}
        server = Server(cache, pk.SchedulerOptions(**options))
        model = Model(server)
        made = AsyncScheduler(server.scheduler, model, **(runs or {}))
        opened.append((cache, made))
        return made, model

    yield open_it
    for cache, made in opened:
        assert not made.is_running, "a test stops what it started"
        made.scheduler.check_integrity()
        assert cache.table.num_rows == 0
        assert not made.scheduler.has_work
        assert not made._stepper._boxes
        cache.close()


def play(test: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine with a limit, with asyncio's own checks."""
    asyncio.run(asyncio.wait_for(test(), LIMIT_S), debug=True)


async def until(true: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    while not true():
        await asyncio.sleep(0.001)
