"""Streams of an AsyncScheduler: every token once and in order, whatever happens beside."""

from __future__ import annotations

import asyncio
import gc

import pytest

import pagedkv as pk
from pagedkv.serving import AsyncScheduler, Chunk
from tests.scheduler.conftest import after, greedy, prompt

from .conftest import play, until


def test_tokens_stream_as_they_are_generated(serving):
    async def test():
        made, model = serving()
        async with made:
            model.open.clear()
            stream = await made.submit(prompt(1), 3)
            wanted = greedy(stream.request)
            seen = []
            for token in wanted:
                model.open.set()
                seen.append(await anext(stream))
                assert seen[-1].tokens == [token]
            assert [chunk.finish_reason for chunk in seen] == [None, None, "length"]
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert stream.request.finish_reason == "length"

    play(test)


def test_many_requests_from_many_tasks_come_to_what_each_comes_to_alone(serving):
    async def test():
        made, _ = serving(24, host=60, watermark=0.0)
        requests = []

        async def ask(i):
            stream = await made.submit(prompt(i, 3 + i % 7), 1 + i % 11, tenant="ab"[i % 2])
            requests.append(stream.request)
            (chunk,) = await stream.whole()
            assert chunk.tokens == greedy(stream.request)

        async with made:
            await asyncio.gather(*(ask(i) for i in range(40)))
        assert len({request.id for request in requests}) == 40
        assert made.scheduler.stats().finished == 40

    play(test)


def test_samples_stream_side_by_side_and_beams_come_whole(serving):
    async def test():
        made, _ = serving(100)
        async with made:
            stop = after(prompt(1, 14), 1)
            samples = await made.submit(prompt(1, 14), 6, n=3, stop_tokens=[stop])
            whole = await samples.whole()
            assert whole[1] == Chunk(1, [stop], "stop")
            assert [chunk.tokens for chunk in whole] == [greedy(samples.request, i) for i in range(3)]
            beams = await made.submit(prompt(2, 9), 5, beams=2)
            chunks = [chunk async for chunk in beams]
            assert [chunk.sample for chunk in chunks] == [0, 1]
            assert sorted(chunk.tokens for chunk in chunks) == sorted(greedy(beams.request, i) for i in range(2))

    play(test)


def test_a_draft_gives_several_tokens_at_once(serving):
    async def test():
        def propose(scheduler):
            for request in list(scheduler._running.requests):
                branch = request.branches[0]
                if branch.num_output:
                    scheduler.draft(branch, [after(branch.tokens)])

        made, _ = serving(runs={"propose": propose})
        async with made:
            stream = await made.submit(prompt(1), 7)
            chunks = [chunk async for chunk in stream]
            assert [len(chunk.tokens) for chunk in chunks] == [1, 2, 2, 2]
            assert [token for chunk in chunks for token in chunk.tokens] == greedy(stream.request)

    play(test)


def test_a_deadline_ends_the_stream_with_its_reason(serving):
    async def test():
        made, model = serving(max_running=1)
        write = model.server.write

        def write_late(plan, step):
            if made.scheduler.stats().waiting:
                model.server.now = 6.0
            write(plan, step)

        model.server.write = write_late
        async with made:
            model.open.clear()  # in its first step, until the other one is asked for
            runs = await made.submit(prompt(1), 40)
            asked = asyncio.ensure_future(made.submit(prompt(2), 5, deadline_s=5.0))
            await until(lambda: made._asked or asked.done())
            model.open.set()
            waits = await asked
            assert await waits.whole() == [Chunk(0, [], "deadline")]
            chunks = await runs.whole()
            assert [token for chunk in chunks for token in chunk.tokens] == greedy(runs.request)

    play(test)


@pytest.mark.parametrize("how", ["cancel", "close", "block", "drop"])
def test_a_reader_that_goes_away_aborts_its_request_and_no_other(serving, how):
    async def test():
        made, model = serving()
        async with made:
            stays = await made.submit(prompt(1), 30)
            goes = await made.submit(prompt(2), 200)
            request, first = goes.request, await anext(goes)
            assert first.tokens == greedy(request)[:1]
            if how == "cancel":
                model.open.clear()
                task = asyncio.ensure_future(read(goes))
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                model.open.set()
            elif how == "close":
                await goes.aclose()
                await goes.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(goes)
            elif how == "block":
                with pytest.raises(ValueError, match="reader"):
                    async with goes:
                        raise ValueError("reader")
            else:
                del goes
                gc.collect()
            await until(lambda: request.ended)
            assert request.finish_reason == "aborted"
            (chunk,) = await stays.whole()
            assert chunk.tokens == greedy(stays.request)

    async def read(stream):
        while True:
            await anext(stream)

    play(test)


def test_a_reader_that_has_found_the_end_stops_its_request(serving):
    async def test():
        made, _ = serving()
        async with made:
            stream = await made.submit(prompt(1), 200)
            request, _ = stream.request, await anext(stream)
            for wrong, error in ((None, pk.WrongType), ("length", pk.InvalidArgument)):
                with pytest.raises(error, match="reason"):
                    await stream.aclose(reason=wrong)
            assert not request.ended
            await stream.aclose(reason="stop")
            await stream.aclose()
            await until(lambda: request.ended)
            assert request.finish_reason == "stop"
        assert made.scheduler.stats().ended["stop"] == made.scheduler.stats().finished == 1

    play(test)


def test_a_submission_that_is_cancelled_leaves_no_request(serving):
    async def test():
        made, model = serving()
        async with made:
            first = await made.submit(prompt(1), 100)
            model.open.clear()
            await until(lambda: model.is_held)
            asked = [asyncio.ensure_future(made.submit(prompt(2 + i), 50)) for i in range(5)]
            await asyncio.sleep(0.01)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            model.open.set()
            await first.whole()
        stats = made.scheduler.stats()
        assert (stats.finished, stats.waiting + stats.running) == (1, 0)

    play(test)


def test_a_reader_that_is_too_slow_is_aborted_and_told_why(serving):
    async def test():
        made, _ = serving(runs={"max_unread": 5})
        async with made:
            slow = await made.submit(prompt(1), 200)
            patient = await made.submit(prompt(2), 40, max_unread=1000)
            await until(lambda: slow.request.ended)
            await until(lambda: patient.request.ended)
            with pytest.raises(pk.SlowReader, match="lay unread, and max_unread = 5"):
                await anext(slow)
            with pytest.raises(StopAsyncIteration):
                await anext(slow)
            (chunk,) = await patient.whole()
            assert chunk.tokens == greedy(patient.request)
        assert slow.request.finish_reason == "aborted"

    play(test)


def test_a_step_that_raises_fails_its_requests_and_no_others(serving):
    async def test():
        made, model = serving(max_running=1)
        async with made:
            fails = await made.submit(prompt(1), 200)
            waits = await made.submit(prompt(2), 5)
            model.fails.append(ArithmeticError("not a number"))
            with pytest.raises(pk.StepFailed, match="ArithmeticError: not a number") as told:
                await fails.whole()
            assert isinstance(told.value.__cause__, ArithmeticError)
            (chunk,) = await waits.whole()
            assert chunk.tokens == greedy(waits.request)
            assert made.is_running
        assert made.scheduler.stats().ended["aborted"] == 1

    play(test)


def test_a_prompt_in_chunks_fails_with_the_step_that_computes_its_first_chunk(serving):
    async def test():
        made, model = serving(100)
        async with made:
            model.fails.append(ValueError("chunk"))
            stream = await made.submit(prompt(1, 60), 5)
            with pytest.raises(pk.StepFailed, match="chunk"):
                await stream.whole()

    play(test)


def test_what_a_report_refuses_fails_the_step(serving):
    async def test():
        made, model = serving()
        model.server.choose = lambda branch: -5
        async with made:
            stream = await made.submit(prompt(1), 5)
            with pytest.raises(pk.StepFailed, match="no token"):
                await stream.whole()
            assert made.is_running

    play(test)


def test_two_tasks_cannot_read_one_stream(serving):
    async def test():
        made, model = serving()
        async with made:
            model.open.clear()
            stream = await made.submit(prompt(1), 2)
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.01)
            with pytest.raises(pk.InvalidArgument, match="another task"):
                await anext(stream)
            model.open.set()
            assert (await first).tokens == greedy(stream.request)[:1]

    play(test)


def test_refusals_come_to_the_one_who_submitted(serving):
    async def test():
        made, model = serving(8, max_running=1, max_waiting=2)
        async with made:
            with pytest.raises(pk.RequestTooLarge):
                await made.submit(prompt(1, 100), 5)
            with pytest.raises(pk.WrongType, match="max_new_tokens"):
                await made.submit(prompt(1), "five")
            with pytest.raises(pk.InvalidArgument, match="empty prompt"):
                await made.submit([], 5)
            model.open.clear()
            streams = [await made.submit(prompt(1), 2)]
            await until(lambda: made.scheduler.stats().running == 1)
            asked = [asyncio.ensure_future(made.submit(prompt(2 + i), 2)) for i in range(3)]
            done = await asyncio.gather(*asked[2:], return_exceptions=True)
            assert isinstance(done[0], pk.QueueFull), "told at once, while the step still computes"
            model.open.set()
            streams += await asyncio.gather(*asked[:2])
            for stream in streams:
                await stream.whole()

    play(test)


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_options_are_checked(serving, wrong):
    async def test():
        with pytest.raises((pk.InvalidArgument, pk.WrongType), match="max_unread"):
            serving(runs={"max_unread": wrong})
        made, _ = serving()
        with pytest.raises(pk.WrongType, match=r"pagedkv\.Scheduler is needed"):
            AsyncScheduler(made.scheduler.cache, lambda plan, step: [])
        with pytest.raises(pk.WrongType, match="compute must be a function"):
            AsyncScheduler(made.scheduler, None)

    play(test)
