"""Points over a closed tier: copied there while they stay, demoted there, read from there.

Not covered: a store that is opened again (tests/cache/test_points_found.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.test_tails_between_tiers import Core, play, prompt

DEVICE, HOST, DISK = 0, 1, 2


def test_a_tail_is_decided_before_the_last_blocks_of_its_path() -> None:
    core = Core(40, 80, write="all")
    core.run(prompt(1))
    assert core.placement.copy_wanted(100) == 6 + 2
    core.take()
    assert core.moves["lane"].tolist() == [1, 1] + [0] * 6
    assert core.moves["reason"].tolist() == [1] * 8
    assert len(set(core.moves["group"].tolist())) == 1  # they are of use together
    core.settle()
    assert {group for group, _ in core.stored} == {0, 1}
    assert core.placement.copy_wanted(100) == 0


def test_a_long_path_is_copied_from_its_root_on_and_its_tail_with_the_last_piece() -> None:
    core = Core(80, 80, write="all")
    core.run(prompt(1, 41))
    lanes = []
    while core.placement.copy_wanted(8):
        core.take()
        lanes.append(core.moves["lane"].tolist())
        core.settle()
    assert lanes == [[0] * 8, [0] * 8, [1, 1] + [0] * 4]
    tail = sorted(prefix for (group, _), prefix in core.stored.items() if group)
    assert tail == [tuple(prompt(1, 41)[: 2 * k]) for k in (19, 20)]


def test_a_copied_point_is_where_it_was_and_below() -> None:
    core = Core(40, 80, write="all")
    core.run(prompt(1))
    core.placement.copy_wanted(100)
    core.settle()
    assert core.tiers(prompt(1)).tolist() == [DEVICE] * 6
    core.moved = [0, 0]
    assert core.run([*prompt(1)[:12], 9]) == 12
    assert core.moved == [0, 0]
    core.check_events()


def test_a_copy_that_fails_costs_the_point_nothing() -> None:
    core = Core(40, 80, write="all")
    core.run(prompt(1))
    core.placement.copy_wanted(100)
    core.take()
    for number in sorted(set(core.moves["transfer"].tolist())):
        core.end(number, ok=False)
    core.sound()
    assert core.run([*prompt(1)[:12], 9]) == 12
    assert core.stored == {}


@pytest.mark.parametrize("tried", [False, True])
def test_a_copy_that_is_refused_is_not_asked_for_without_end(tried: bool) -> None:
    core = Core(40, 80, write="all")
    core.run(prompt(1))
    core.placement.copy_wanted(100)
    core.settle()
    core.run([*prompt(1)[:8], 7])  # where it parts from the other a point comes to be, whose path is there already
    assert core.placement.copy_wanted(100) == 2
    for _ in range(2):
        core.take()
        assert set(core.moves["lane"].tolist()) <= {1}
        for number in sorted(set(core.moves["transfer"].tolist())):
            core.end(number, ok=False, tried=tried)
        assert core.placement.copy_wanted(100) == 0
    core.run([*prompt(1)[:8], 8, 8, 8])  # it is asked for again with its next use
    assert core.placement.copy_wanted(100) > 0
    core.settle()
    core.sound()


def test_a_tail_is_read_while_a_copy_of_it_goes_down() -> None:
    core = Core(16, 40, 80, write="all")
    core.run(prompt(1))
    while core.tiers(prompt(1)).tolist() != [HOST] * 6:
        core.placement.reserve_pages(np.array([core.pools[DEVICE][0].num_obtainable, 0]))
        core.settle()
    core.placement.copy_wanted(100)
    core.take()
    downward = sorted(set(core.moves["transfer"].tolist()))
    owner, _ = core.placement.acquire(np.array(prompt(1), np.int32), max_blocks=6)
    assert core.placement.cold_pages(owner).tolist() == [6, 2]
    assert core.placement.promote(owner) == 2
    core.take()
    for number in sorted(set(core.moves["transfer"].tolist()) - set(downward)):
        core.end(number)
        core.sound()
    assert core.placement.settle(owner) == 6
    for number in downward:
        core.end(number)
        core.sound()
    core.placement.release(owner)
    assert {group for group, _ in core.stored} == {0, 1}
    core.check_events()


def test_a_quota_that_comes_amid_a_copy_counts_no_pages_of_its_tail() -> None:
    core = Core(40, 80, write="all")
    core.run(prompt(1))
    core.placement.copy_wanted(100)
    core.take()
    core.placement.set_quota(0, 20, 1)
    core.settle()
    core.sound()


def test_nothing_is_copied_while_a_tail_is_read_from_below() -> None:
    core = Core(16, 80, write="all")
    core.run(prompt(1))
    core.placement.copy_wanted(100)
    core.settle()
    core.placement.reserve_pages(core.lacking(1))
    core.settle()
    assert core.tiers(prompt(1)).tolist() == [DEVICE] * 6  # its point has gone alone
    owner, _ = core.placement.acquire(np.array(prompt(1), np.int32), max_blocks=6)
    assert core.placement.cold_pages(owner).tolist() == [0, 2]
    core.placement.promote(owner)
    core.run([7, 7, 7])
    assert core.placement.copy_wanted(100) == 0
    core.settle()
    core.placement.release(owner)
    assert core.placement.copy_wanted(100) == 1 + 1
    core.settle()


def test_a_mirrored_point_goes_to_the_host_all_the_same() -> None:
    core = Core(16, 40, 80, write="all")
    for name in range(1, 4):
        core.run(prompt(name))
        while core.placement.copy_wanted(100):
            core.settle()
    for _ in range(20):
        core.placement.reserve_pages(np.array([core.pools[DEVICE][0].num_obtainable, 0]))
        core.settle()
    for name in range(1, 4):
        assert core.tiers(prompt(name)).tolist() == [HOST] * 6
    assert not sum(core.placement.stats()["dropped"].values())


def test_a_full_closed_tier_loses_its_coldest_points_whole() -> None:
    core = Core(80, 24, write="all")
    for name in range(1, 7):
        core.run(prompt(name))
        while core.placement.copy_wanted(100):
            core.settle()
    kept = {prefix[0] // 100 for (group, _), prefix in core.stored.items() if group}
    assert kept >= {5, 6}
    assert core.placement.stats()["dropped"] == {"device": 0, "host": 0}  # memory has all of them
    core.placement.reserve_pages(np.array([core.pools[1][0].num_available + 1, 0]), 1)  # a tail is enough
    assert core.placement.resumable(1) == core.pools[1][0].counts()["cached"] > 0  # no path without its point
    for name in range(1, 7):
        assert core.run([*prompt(name)[:12], 9]) == 12


def test_a_checkpoint_takes_no_place_of_what_was_used_later() -> None:
    core = Core(200, 26, write="evicted")
    core.run(prompt(1, 31))  # 15 blocks and 2 pages
    core.run(prompt(2, 41))  # 20 and 2: the hottest
    for _ in range(4):
        nodes, _ = core.placement.uncopied(1)
        while len(nodes):
            _, done = core.placement.copy(nodes, 1, 64)
            core.settle()
            nodes = nodes[done:]
        assert core.placement.resumable(1) == 20
        assert tuple(prompt(2, 41)[:40]) in core.stored.values()
    core.sound()


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_random_requests_over_a_closed_tier_read_what_they_stand_for(seed: int, tiers: int) -> None:
    core = play(seed, 500, tiers, closed=True)
    assert all(pool.counts()["live"] == 0 for tier in core.pools for pool in tier), "not free, and without a holder"
