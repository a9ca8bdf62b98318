"""While all requests of an AsyncScheduler load, its thread waits and does not spin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest.mock import patch

import pytest

import pagedkv as pk
from pagedkv.serving import AsyncScheduler
from tests.held_storage import HeldStorage, held_cache
from tests.scheduler.conftest import BLOCK, SPEC, Server, greedy, prompt

from .conftest import Model, play, until

COLD = prompt(1, 6 * BLOCK + 1)


@pytest.fixture
def held() -> Iterator[tuple[AsyncScheduler, HeldStorage]]:
    """Not started; six blocks of COLD lie on a slow tier, which brings nothing by itself."""
    with held_cache(SPEC, device=32, host=200) as (cache, storage):
        server = Server(cache, pk.SchedulerOptions(max_running=8, max_batch_tokens=64, watermark=0.0))
        storage.by_itself = True
        server.submit(COLD, 1)
        server.run()
        with cache.sequence(prompt(99, 32 * BLOCK)) as seq, cache.step([seq]) as step:
            step.mark_written(0)
        storage.by_itself = False
        assert cache.match(COLD) == {"device": 0, "host": 6 * BLOCK}
        made = AsyncScheduler(server.scheduler, Model(server))
        yield made, storage
        assert not made.is_running


def test_a_load_is_waited_for_and_not_asked_after_again_and_again(held):
    made, storage = held
    storage.rounds = 4  # of a caller that waits: it looks at moves that often before they arrive
    plan, plans = made.scheduler.schedule, []

    def schedule():
        plans.append(plan())
        return plans[-1]

    async def test():
        async with made:
            stream = await made.submit(COLD, 3)
            (chunk,) = await stream.whole()
            assert chunk.tokens == greedy(stream.request)
            assert stream.request.hit_tokens["host"] == 6 * BLOCK

    with patch.object(made.scheduler, "schedule", schedule):
        play(test)
    assert [bool(plan) for plan in plans] == [False, True, True, True]


def test_a_thread_that_waits_for_a_load_takes_orders(held):
    made, storage = held

    async def test():
        async with made:
            loads = await made.submit(COLD, 3)
            await until(lambda: made._stepper._waits)
            stream = await made.submit(prompt(5), 3)
            (chunk,) = await stream.whole()
            assert chunk.tokens == greedy(stream.request)
            assert loads.request.state == "loading"
            await until(lambda: made._stepper._waits)
            await loads.aclose()
            assert await loads.whole() == []
        assert loads.request.finish_reason == "aborted"
        assert storage.under_way, "nothing has come meanwhile"

    play(test)


def test_an_order_wakes_a_thread_that_waits_and_no_other(held):
    made, _ = held
    stepper, orders = made._stepper, []
    with patch.object(made.scheduler, "wake", lambda: orders.append(stepper._inbox.qsize())):
        stepper.put(lambda refused: None)
        assert orders == []
        stepper._waits = True
        stepper.put(lambda refused: None)
    assert orders == [2], "the order is there before the thread wakes"


def test_readers_hear_of_the_end_of_others_before_the_thread_waits(held):
    made, _ = held

    async def test():
        async with made:
            loads = await made.submit(COLD, 3)
            await until(lambda: made._stepper._waits)
            ends = await made.submit(COLD, 3, deadline_s=0.0)
            (chunk,) = await ends.whole()
            assert (chunk.tokens, chunk.finish_reason) == ([], "deadline")
            asyncio.get_running_loop().call_soon(made._stepper.abort_all)
            (chunk,) = await loads.whole()
            assert (chunk.tokens, chunk.finish_reason) == ([], "aborted")

    play(test)
