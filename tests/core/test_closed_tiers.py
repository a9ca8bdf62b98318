"""A closed tier has a block only behind those before it, whatever happens."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pagedkv.core import BlockPool, Placement, RadixTree
from pagedkv.errors import InvalidArgument, WrongType

DISK = 1
WATCHDOG_S = 60.0


def opened(memory=8, disk=16, *, write="evicted", max_run=256, inclusive=(False, False), **options):
    """A device over a closed tier, one token a block."""
    pools = [BlockPool(memory), BlockPool(disk)]
    tree = RadixTree(1, num_tiers=2, max_run=max_run)
    return Placement(tree, pools, inclusive=inclusive, closed=(False, True), write=write, **options)


def use(core, path):
    """Serve a path; what is in a colder tier is promoted."""
    owner, found = core.acquire(path)
    cold = int(np.count_nonzero(core.tiers_of(owner)))
    while core.reserve(len(path) - found + cold):
        carry_out(core)
    core.promote(owner)
    carry_out(core)
    if found < len(path):
        core.insert(owner, np.array(path[found:], np.int32), core.allocate(len(path) - found))
    core.release(owner)
    return found


def carry_out(core, ok=True, most=None):
    """Complete what is decided: all of it, or the first moves alone; the transfers left."""
    moves = core.take_moves()
    order = list(dict.fromkeys(moves["transfer"].tolist()))
    core.complete(order[:most], [ok] * len(order[:most]))
    core.check_integrity()
    return order[len(order[:most]) :]


def tiers(core, path):
    return core.match(path)[0].tolist()


def test_a_demotion_takes_the_beginning_along_and_leaves_it_on_the_device():
    core = opened(memory=6)
    use(core, [1, 2, 3, 4])
    assert core.reserve(3) == 1
    moves = core.take_moves()
    assert moves["depth"].tolist() == [0, 1, 2, 3], "its beginning first"
    assert len(set(moves["group"].tolist())) == 1, "all of use together"
    core.complete(np.unique(moves["transfer"]), [True] * len(np.unique(moves["transfer"])))
    assert tiers(core, [1, 2, 3, 4]) == [0, 0, 0, DISK]
    assert core.pools[DISK].counts()["cached"] == 4
    core.check_integrity()


def test_without_its_beginning_a_demoted_block_is_not_kept():
    core = opened(memory=6)
    use(core, [1, 2, 3, 4])
    core.reserve(3)
    order = list(dict.fromkeys(core.take_moves()["transfer"].tolist()))
    core.complete([order[0]], [False])
    core.complete(order[1:], [True] * len(order[1:]))
    assert tiers(core, [1, 2, 3, 4]) == [0, 0, 0]
    assert core.pools[DISK].counts()["free"] == 16
    core.check_integrity()


def test_a_failed_copy_drops_the_copies_queued_behind_it():
    core = opened(write="all", max_run=1)
    use(core, [1, 2, 3])
    assert core.copy_wanted(64) == 3
    order = list(dict.fromkeys(core.take_moves()["transfer"].tolist()))
    core.complete(order, [True, False, True])
    assert core.pools[DISK].counts()["cached"] == 1
    assert core.stats()["failed_copies"] == 2
    assert tiers(core, [1, 2, 3]) == [0, 0, 0], "memory has all of it"
    core.check_integrity()


def test_a_promotion_leaves_the_copy_that_others_hang_on():
    core = opened(memory=8, inclusive=(False, False))
    use(core, [1, 2, 3])
    use(core, [1, 2, 4])
    use(core, [9] * 8)
    assert tiers(core, [1, 2, 3]) == [DISK] * 3
    use(core, [1, 2])
    core.check_integrity()
    owner, _ = core.acquire([1, 2])
    assert core.tiers_of(owner).tolist() == [0, 0]
    core.release(owner)
    assert tiers(core, [1, 2, 4])[2:] == [DISK], "found behind it, as after a restart"


def test_room_behind_a_run_that_could_not_be_read_is_looked_for_once():
    """The run counts as kept meanwhile. Its continuation is dropped, and nothing else can go."""
    core = opened(disk=2, write="all")
    use(core, [1])
    core.copy_wanted(1 << 30)
    carry_out(core)
    core.reserve(8)
    assert tiers(core, [1]) == [DISK]
    owner, _ = core.acquire([1, 2, 3])
    core.promote(owner)
    read = core.take_moves()["transfer"]
    core.insert(owner, np.array([2, 3], np.int32), core.allocate(2))
    core.release(owner)
    core.complete(read, [False], [True])
    started = []
    asking = threading.Thread(target=lambda: started.append(core.copy_wanted(1 << 30)), daemon=True)
    asking.start()
    asking.join(WATCHDOG_S)
    assert started == [0], "both are wanted there, and there is room for one; no answer: it looks for room for ever"
    core.check_integrity()
    assert [pool.counts()["cached"] for pool in core.pools] == [0, 1]
    assert use(core, [1, 2, 3]) == 0
    assert tiers(core, [1, 2, 3]) == [0, 0, 0]


def test_a_copy_leaves_after_those_behind_it():
    core = opened(memory=16, disk=4, write="all", max_run=1)
    use(core, [1, 2, 3, 4])
    core.copy_wanted(64)
    carry_out(core)
    use(core, [5, 6])
    core.copy_wanted(64)
    carry_out(core)
    left = core.pools[DISK].counts()["cached"]
    assert left == 4
    uncopied = {core.path_tokens(int(node))[-1] for node in core.uncopied(DISK)[0]}
    assert uncopied == {3, 4}, "the ends of what was used before went, not its beginning"


@pytest.mark.parametrize("write", ["never", "evicted", "reused", "all"])
def test_what_is_copied_and_when(write):
    core = opened(memory=16, write=write)
    use(core, [1, 2])
    wanted = core.copy_wanted(64)
    carry_out(core)
    use(core, [1, 2])
    again = core.copy_wanted(64)
    carry_out(core)
    assert (wanted, again) == {"all": (2, 0), "reused": (0, 2)}.get(write, (0, 0))
    core.reserve(16)
    carry_out(core)
    assert core.pools[DISK].counts()["cached"] == (0 if write == "never" else 2)


def test_what_is_being_copied_may_be_matched_owned_and_cut():
    core = opened(memory=16, write="all")
    use(core, [1, 2, 3, 4])
    core.copy_wanted(64)
    moves = core.take_moves()
    core.check_integrity()
    owner, found = core.acquire([1, 2, 7])
    assert found == 2
    assert core.stats()["blocked_matches"] == 0
    assert core.reserve(16) > 0, "and is not evicted"
    core.complete(np.unique(moves["transfer"]), [True])
    core.release(owner)
    core.check_integrity()
    assert core.pools[DISK].counts()["cached"] == 4


def test_copies_wait_for_reads_and_for_each_other():
    core = opened(memory=8, disk=16, write="reused")
    use(core, [1, 2, 3])
    use(core, [4, 5, 6, 7])
    use(core, [8, 9, 10, 11])
    assert tiers(core, [1, 2, 3]) == [DISK] * 3
    use(core, [8, 9])
    owner, _ = core.acquire([1, 2, 3])
    while core.reserve(3):
        carry_out(core)
    core.promote(owner)
    reading = core.take_moves()
    assert core.stats()["wanted"] > 0
    assert core.copy_wanted(64) == 0, "a request waits for what is read"
    core.complete(np.unique(reading["transfer"]), [True] * len(np.unique(reading["transfer"])))
    assert core.copy_wanted(64) == 2
    core.release(owner)
    core.check_integrity()


def test_a_block_that_the_next_tier_lacks_goes_there_although_a_colder_one_has_it():
    pools = [BlockPool(4), BlockPool(8), BlockPool(16)]
    core = Placement(RadixTree(1, num_tiers=3), pools, closed=(False, False, True), write="all")
    use(core, [1, 2, 3])
    core.copy_wanted(64)
    carry_out(core)
    core.reserve(4)
    carry_out(core)
    assert tiers(core, [1, 2, 3]) == [1, 1, 1], "from the host it comes back sooner"
    assert pools[2].counts()["cached"] == 3
    assert core.stats()["demoted"]["device"] == 3


def test_restored_blocks_behind_one_that_is_missing_there_are_not_taken():
    core = opened(disk=4)
    use(core, [1])
    ids = core.pools[DISK].alloc(1)
    assert core.restore([1, 2], np.concatenate([ids, core.pools[DISK].alloc(1)]), tier=DISK) <= 2
    core.check_integrity()


@pytest.mark.parametrize("closed", [(True, True), (False,), (False, True, True)])
def test_odd_closed_tiers_are_refused(closed):
    with pytest.raises(InvalidArgument, match="closed"):
        Placement(RadixTree(1, num_tiers=2), [BlockPool(2), BlockPool(2)], closed=closed)


def test_copies_are_for_closed_tiers():
    core = opened()
    use(core, [1, 2])
    open_ = Placement(RadixTree(1, num_tiers=2), [BlockPool(4), BlockPool(4)], closed=(False, False))
    for tier in (0, DISK):
        with pytest.raises(InvalidArgument, match="tier"):
            open_.copy(core.uncopied(DISK)[0], tier)
    assert core.copy(core.uncopied(DISK)[0], DISK) == (2, 1)


@pytest.mark.parametrize("wrong", ["", "reuse", 2, None])
def test_an_odd_rule_is_refused(wrong):
    with pytest.raises((InvalidArgument, WrongType), match="write"):
        opened(write=wrong)


@pytest.mark.parametrize("write", ["all", "reused"])
def test_a_path_that_is_refused_or_fails_is_copied_no_more_before_its_next_use(write):
    core = opened(memory=300, disk=300, write=write)
    path = range(200)
    use(core, path)
    for outcomes, on_disk in (([True, False], 64), ([False], 64), ([True, True, True], 200)):
        use(core, path)
        for ok in outcomes:
            assert core.copy_wanted(64) > 0
            carry_out(core, ok=ok)
        assert core.copy_wanted(64) == 0, "and not again and again"
        assert core.stats()["wanted"] == 0
        assert core.pools[DISK].counts()["cached"] == on_disk
