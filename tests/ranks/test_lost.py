"""Ranks that die or stand still: transfers fail, errors name the rank, nothing hangs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pagedkv as pk
from tests.ranks import process
from tests.ranks.conftest import BLOCK, DEVICE, HOST, SPEC, WATCHDOG_S, World, prompt, ranks_at
from tests.stopping import go_on, stop

NEVER_S = 10 * WATCHDOG_S
OTHERS = pk.Namespace(tenant="others")


class Fleet:
    """A cache and three rank processes; the cache's steps write nothing."""

    def __init__(self, address: str, *, silent_s: float = NEVER_S, **options: Any) -> None:
        self.processes = [process.start(address, rank) for rank in range(3)]
        self.cache = pk.KVCache(SPEC, DEVICE, HOST, ranks=ranks_at(address, silent_s=silent_s), **options)
        for number in range(6):
            self.step(prompt(number), None if number < 2 else OTHERS)
        assert self.cache.match(prompt(0)) == {"device": 0, "host": 2 * BLOCK}

    def step(self, tokens: list[int], namespace: pk.Namespace | None = None) -> dict[str, int]:
        with self.cache.sequence(tokens, namespace) as seq:
            with self.cache.step([seq]) as step:
                for layer in range(SPEC.num_layers):
                    step.mark_written(layer)
            return seq.hit_tokens

    def close(self) -> list[str]:
        """What each process has said at its end."""
        for one in self.processes:
            go_on(one)
        self.cache.close()
        said = [one.communicate(timeout=WATCHDOG_S)[0] for one in self.processes]
        self.cache.check_integrity()
        return said


@pytest.fixture
def fleet(address: str) -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def open_it(**options: Any) -> Fleet:
        fleets.append(Fleet(address, **options))
        return fleets[-1]

    yield open_it
    for one in fleets:
        try:
            one.close()
        finally:
            for left in one.processes:
                left.kill()


def kill(victim: subprocess.Popen[str]) -> None:
    victim.kill()
    victim.wait()


def assert_lost(here: Fleet, said: str) -> None:
    """Nothing is found or computed any more, and every error names the rank."""
    with here.cache.sequence(prompt(0)) as seq:
        assert sum(seq.hit_tokens.values()) == 0
        with pytest.raises(pk.RankLost, match=said) as lost, here.cache.step([seq]):
            pass
    assert lost.value.rank == 1
    assert here.cache.stats().failed_moves > 0
    here.cache.check_integrity()


@pytest.mark.slow
def test_a_rank_that_is_killed_between_moves_is_named(fleet: Callable[..., Fleet]) -> None:
    here = fleet()
    kill(here.processes[1])
    assert_lost(here, "rank 1 has closed its connection")


def test_a_rank_that_is_killed_in_the_middle_of_moves_is_named(fleet: Callable[..., Fleet]) -> None:
    here = fleet()
    stop(here.processes[1])
    loads = [here.cache.load(prompt(number)) for number in (0, 1)]
    assert not any(load.done() for load in loads)
    kill(here.processes[1])
    assert [load.wait() for load in loads] == [0, 0]
    assert_lost(here, "rank 1 has closed its connection")


@pytest.mark.slow
def test_a_rank_that_stands_still_is_lost_after_silent_s(fleet: Callable[..., Fleet]) -> None:
    here = fleet(silent_s=30.0)
    stop(here.processes[1])
    assert_lost(here, "rank 1 has not answered for 30 s")
    here.cache.close()  # while it stands still
    said = here.close()
    assert said[1].startswith("the deciding process has closed its connection")


def test_a_deadline_holds_for_a_rank_that_stands_still_and_then_goes_on(fleet: Callable[..., Fleet]) -> None:
    here = fleet(deadline_s=0.05)
    here.cache.purge(OTHERS)  # there is room on the device: nothing has to leave it first
    stop(here.processes[1])
    with here.cache.sequence(prompt(0)) as seq:  # it would take as long as the watchdog waits
        assert sum(seq.hit_tokens.values()) == 0
        assert here.cache.stats().blocks["device"]["live"] > 0, "its blocks are kept while the rank may write them"
    go_on(here.processes[1])
    until = time.monotonic() + WATCHDOG_S
    while here.cache.stats().blocks["device"]["live"]:
        assert time.monotonic() < until
    here.step(prompt(9))


def test_ranks_whose_deciding_process_has_closed_say_so(address: str) -> None:
    here = World(address)
    here.ask(prompt(1))
    assert here.cache is not None
    assert not here.parts[0].wait(0)
    here.cache.close()
    for part in here.parts:
        assert part.wait(WATCHDOG_S)
        with pytest.raises(pk.RankLost, match="the deciding process has closed its connection"):
            part.step([0], [[0]], [1], [0, 1])
        part.close()
        with pytest.raises(pk.ClosedError):
            part.check()
    here.close()


def test_ranks_that_close_first_are_lost(address: str) -> None:
    here = World(address)
    here.ask(prompt(1))
    here.parts[2].close()
    assert here.cache is not None
    with here.cache.sequence(prompt(2)) as seq:
        group = here.cache._storage._group
        until = time.monotonic() + WATCHDOG_S
        while group.lost is None:
            assert time.monotonic() < until
        with pytest.raises(pk.RankLost, match="rank 2"), here.cache.step([seq]):
            pass
    here.cache.check_integrity()
    here.close()
