"""An AsyncScheduler from its start to its end, and what ends it early."""

from __future__ import annotations

import asyncio
import logging

import pytest

import pagedkv as pk
from pagedkv.serving import AsyncScheduler, Chunk
from tests.scheduler.conftest import SPEC, greedy, prompt

from .conftest import play, until


def test_stopping_waits_for_the_requests_that_there_are_and_takes_no_more(serving):
    async def test():
        made, model = serving(max_running=2)
        made.start()
        model.open.clear()
        asked = [asyncio.ensure_future(made.submit(prompt(i), 4)) for i in range(5)]
        await asyncio.sleep(0.01)
        stopping = asyncio.ensure_future(made.stop())
        await asyncio.sleep(0.01)
        assert not stopping.done()
        with pytest.raises(pk.ClosedError, match="was stopped"):
            await made.submit(prompt(9), 4)
        model.open.set()
        await stopping
        for stream in await asyncio.gather(*asked):
            (chunk,) = await stream.whole()
            assert chunk.tokens == greedy(stream.request)
        assert not made.is_running
        assert made.problem is None
        await made.stop()

    play(test)


def test_stopping_in_a_hurry_aborts_what_is_left(serving):
    async def test():
        made, model = serving(max_running=1)
        made.start()
        long = await made.submit(prompt(1), 200)
        waits = await made.submit(prompt(2), 3)
        await anext(long)
        model.open.clear()
        stopping = asyncio.ensure_future(made.stop(abort_after_s=0.0))
        await asyncio.sleep(0.05)
        model.open.set()
        await stopping
        assert (await long.whole())[-1].finish_reason == "aborted"
        assert await waits.whole() == [Chunk(0, [], "aborted")]

    play(test)


def test_an_exception_in_the_block_stops_at_once(serving):
    async def test():
        made, _ = serving()
        requests = []

        async def block():
            async with made:
                requests.append((await made.submit(prompt(1), 200)).request)
                raise ValueError("block")

        with pytest.raises(ValueError, match="block"):
            await block()
        assert requests[0].ended

    play(test)


def test_idle_it_waits_and_works_again(serving):
    async def test():
        made, model = serving()
        async with made:
            for i in range(3):
                (chunk,) = await (await made.submit(prompt(i), 2)).whole()
                assert len(chunk.tokens) == 2
                steps = model.steps
                await asyncio.sleep(0.02)
                assert model.steps == steps

    play(test)


def test_one_that_was_not_started_takes_no_requests_and_one_is_started_once(serving):
    async def test():
        made, _ = serving()
        with pytest.raises(pk.ClosedError, match="not started"):
            await made.submit(prompt(1), 2)
        async with made:
            with pytest.raises(pk.InvalidArgument, match="started before"):
                made.start()
        with pytest.raises(pk.ClosedError):
            await made.submit(prompt(1), 2)

    play(test)


def test_readers_hear_of_a_cache_that_is_closed(caplog):
    async def test():
        cache = pk.KVCache(SPEC, pk.Blocks(16))
        made = AsyncScheduler(pk.Scheduler(cache, pk.SchedulerOptions(2, 16)), lambda plan, step: closing(cache))
        made.start()
        stream = await made.submit(prompt(1), 5)
        with pytest.raises((pk.StepFailed, pk.ClosedError)):
            await stream.whole()
        with pytest.raises(pk.ClosedError, match="cache is closed"):
            await made.submit(prompt(2), 5)
        await made.stop()

    def closing(cache):
        cache.close()
        return []

    with caplog.at_level(logging.WARNING, "pagedkv.serving"):
        play(test)
    assert "requests in it are aborted" in caplog.text


def test_what_is_no_exception_ends_the_thread_and_is_named(serving):
    async def test():
        made, model = serving()
        made.start()
        streams = [await made.submit(prompt(i), 200) for i in range(2)]
        model.fails.append(SystemExit(3))
        for stream in streams:
            with pytest.raises(pk.ClosedError, match="ended with SystemExit"):
                await stream.whole()
        assert isinstance(made.problem, SystemExit)
        with pytest.raises(pk.ClosedError):
            await made.submit(prompt(3), 5)
        await made.stop()
        assert [stream.request.finish_reason for stream in streams] == ["aborted"] * 2

    play(test)


def test_blocks_that_others_hold_are_waited_for(serving):
    async def test():
        made, _ = serving(8)
        cache = made.scheduler.cache
        held = cache.sequence(prompt(9, 24))
        with cache.step([held]) as step:
            step.mark_written(0)
        async with made:
            stream = await made.submit(prompt(1, 17), 4)
            await asyncio.sleep(0.05)
            assert not stream.request.ended
            held.release()
            (chunk,) = await stream.whole()
            assert chunk.tokens == greedy(stream.request)

    play(test)


def test_a_loop_that_is_closed_takes_its_requests_with_it(serving):
    made, model = serving()
    made.start()
    requests = []

    async def leave():
        stream = await made.submit(prompt(1), 200)
        requests.append(stream)
        await anext(stream)

    loop = asyncio.new_event_loop()
    model.open.set()
    loop.run_until_complete(leave())
    loop.close()

    async def test():
        (chunk,) = await (await made.submit(prompt(2), 3)).whole()
        assert len(chunk.tokens) == 3
        await until(lambda: requests[0].request.ended)
        await made.stop()

    play(test)
    assert requests[0].request.finish_reason == "aborted"


def test_a_propose_that_raises_costs_its_drafts_and_nothing_else(serving, caplog):
    async def test():
        made, _ = serving(runs={"propose": lambda scheduler: 1 / 0})
        async with made:
            (chunk,) = await (await made.submit(prompt(1), 5)).whole()
            assert len(chunk.tokens) == 5

    play(test)
    assert "propose raised" in caplog.text
