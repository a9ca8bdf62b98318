"""A scheduler whose requests find their prefixes in a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import pagedkv as pk
from tests.remote.servers import Server, server
from tests.remote.test_sharing import wait_for
from tests.scheduler.conftest import BLOCK, SPEC, greedy
from tests.scheduler.conftest import Server as Toy

SECRET = b"a secret of ours"
LIMITS = {"lookup_s": 30.0, "read_s": 30.0, "write_s": 30.0, "connect_s": 30.0}
PROMPTS = [[number + 1] * 3 + list(range(10, 10 + 40)) for number in range(6)]  # ten whole blocks each


@pytest.fixture
def running() -> Iterator[Server]:
    with server() as found:
        yield found


def toy(running: Server, device: int = 200, **limits: float) -> Toy:
    store = pk.Valkey(running.unix, secret=SECRET, min_blocks=1, **{**LIMITS, **limits})  # type: ignore[arg-type]
    return Toy(pk.KVCache(SPEC, memory=pk.Blocks(device), remote=store), pk.SchedulerOptions(max_running=4))


def serve(served: Toy) -> int:
    """Serve all prompts; tokens that came from the store."""
    before = served.cache.stats().hit_tokens["remote"]
    requests = [served.scheduler.submit(prompt, 8) for prompt in PROMPTS]
    served.run()
    for request in requests:
        assert request.outputs[0].tolist() == greedy(request)
    served.cache.check_integrity()
    return served.cache.stats().hit_tokens["remote"] - before


def filled(running: Server) -> None:
    """Another cache has computed all prompts and published them."""
    first = toy(running)
    assert serve(first) == 0
    for prompt in PROMPTS:
        assert first.cache.publish(prompt) == len(prompt) // BLOCK
    first.cache.close()


def test_requests_begin_with_blocks_that_another_cache_computed(running: Server) -> None:
    filled(running)
    second = toy(running)
    assert serve(second) == sum(len(prompt) // BLOCK * BLOCK for prompt in PROMPTS)
    second.cache.close()


def test_requests_end_where_the_device_has_no_room_for_all_that_the_store_has(running: Server) -> None:
    filled(running)
    small = toy(running, device=20)
    for _ in range(3):
        assert serve(small) > 0
    stats = small.cache.stats
    wait_for(lambda: not any(counts["live"] for counts in stats().blocks.values()), "blocks are held after all sends")
    small.cache.close()


@pytest.mark.parametrize("worth", [True, False])
def test_a_request_waits_for_blocks_that_are_about_to_be_sent(
    running: Server, monkeypatch: pytest.MonkeyPatch, worth: bool
) -> None:
    """The sender owns a path before it knows whether to send it, and lets go of it soon."""
    small, entered, go_on = toy(running, device=14), threading.Event(), threading.Event()

    def slowly(*_: object) -> bool:
        entered.set()
        assert go_on.wait(30.0)
        return worth

    monkeypatch.setattr(small.cache.costs, "worth_writing", slowly)
    small.scheduler.submit(PROMPTS[0], 2)
    small.run()
    assert entered.wait(30.0)
    request = small.scheduler.submit(PROMPTS[1], 2)
    problems: list[BaseException] = []

    def serve_it() -> None:
        try:
            small.run()
        except BaseException as problem:
            problems.append(problem)

    serving = threading.Thread(target=serve_it, daemon=True)
    serving.start()
    serving.join(0.2)  # to find no room meanwhile; on a busy machine it finds it later
    assert not request.ended
    go_on.set()
    serving.join(30.0)
    assert not problems
    assert request.outputs[0].tolist() == greedy(request)
    small.cache.close()


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_requests_end_when_the_store_stops_answering(running: Server, how: str) -> None:
    filled(running)
    second = toy(running, lookup_s=0.05, read_s=0.2, write_s=0.2)
    getattr(running, how)()
    serve(second)
    serve(second)
    if how == "pause":
        running.go_on()
    second.cache.close()


@pytest.mark.parametrize("device", range(12, 18))
def test_a_request_without_room_does_not_ask_the_store_for_ever(running: Server, device: int) -> None:
    """Its questions end, which leaves no room: a request of lower priority has to make way.

    One of these devices lacks a single block, which shows only once the store was asked.
    """
    filled(running)
    small = toy(running, device=device)
    low = small.scheduler.submit(PROMPTS[0][: 8 * BLOCK], 12, priority=0)
    for _ in range(3):
        small.turn()
    high = small.scheduler.submit(PROMPTS[1][: 3 * BLOCK + 1], 4, priority=5)
    ending = threading.Thread(target=small.run, daemon=True)
    ending.start()
    ending.join(30.0)
    assert not ending.is_alive(), "a step is planned for ever"
    for request in (low, high):
        assert request.outputs[0].tolist() == greedy(request)
    small.cache.check_integrity()
    small.cache.close()
