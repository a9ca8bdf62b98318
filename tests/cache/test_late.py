"""A promotion that is late is a miss now and a hit later; wrong bytes are never hit again."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.core import MOVE_DTYPE
from pagedkv.tiers import DiskTier, HostTier, Mover

from .conftest import BLOCK, QueueClock, Toy, all_free, prompt, where

DEADLINE_S = 1000.0  # on a clock that the test turns


@pytest.mark.parametrize("below", ["host", "disk"])
def test_a_late_promotion_keeps_its_colder_copy(open_cache, below):
    cache = open_cache(4, deadline_s=0, **{below: 40})
    toy = Toy(cache)
    for start in (1, 2):
        toy.use(prompt(start))
    assert where(cache, prompt(1)) == [(below, 3)]
    with cache.sequence(prompt(1)) as seq:
        assert not any(seq.hit_tokens.values())
    stats = cache.stats()
    assert (stats.missed_promotions, stats.failed_moves) == (3, 3)
    assert (stats.placement["late_promotions"], stats.placement["failed_promotions"]) == (3, 0)
    assert where(cache, prompt(1)) == [(below, 3)]
    cache._matcher.deadline_s = None
    assert toy.use(prompt(1)) == {below: 3 * BLOCK}
    assert all_free(cache)


def test_computed_after_a_late_promotion_it_is_on_the_device_and_the_copy_is_still_good(open_cache):
    cache = open_cache(4, deadline_s=0, disk=40)
    toy = Toy(cache)
    for start in (1, 2, 1):
        toy.use(prompt(start))
    assert where(cache, prompt(1)) == [("device", 3)]
    written = cache.stats().disk["blocks_written"]
    toy.use(prompt(3))
    assert where(cache, prompt(1)) == [("disk", 3)]
    assert cache.stats().disk["blocks_written"] == written, "prompts 1 and 2 were there"


def test_wrong_bytes_are_forgotten(open_cache, tmp_path):
    cache = open_cache(4, disk=40)
    toy = Toy(cache)
    for start in (1, 2):
        toy.use(prompt(start))
    for path in (tmp_path / "kv").glob("data.*"):
        path.write_bytes(bytes(path.stat().st_size))
    with cache.sequence(prompt(1)) as seq:
        assert not any(seq.hit_tokens.values())
    assert where(cache, prompt(1)) == []
    assert cache.stats().placement["failed_promotions"] == 3
    assert sum(cache.stats().disk["misses"].values()) == 3


class Stuck(DiskTier):
    """Reads nothing until it is let go."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.go, self.stuck = threading.Event(), threading.Event()

    def read(self, *arguments):
        self.stuck.set()
        assert self.go.wait(60)
        return super().read(*arguments)


def test_a_read_that_takes_longer_than_the_deadline_and_what_waits_behind_it_are_late(open_cache, monkeypatch):
    monkeypatch.setattr(pk.cache.tiered, "DiskTier", Stuck)
    cache = open_cache(8, disk=40, threads=1, deadline_s=DEADLINE_S)
    toy, clock = Toy(cache), QueueClock(cache)
    for start in range(1, 6):
        toy.use(prompt(start))
    first = cache.prefetch(prompt(1))
    assert cache._storage.store.stuck.wait(60)
    opened = threading.Thread(target=toy.use, args=(prompt(2),))
    opened.start()
    while not cache._storage.carrier.queued_blocks:
        time.sleep(0.001)
    clock.turn(DEADLINE_S)  # what is queued is late now
    cache._storage.store.go.set()
    opened.join()
    assert first.wait(60) == 0
    stats = cache.stats()
    assert stats.placement["late_promotions"] == 6
    assert stats.placement["failed_promotions"] == 0


def ticket_of(mover, transfers, **options):
    moves = np.zeros(len(transfers), MOVE_DTYPE)
    moves["src_tier"], moves["transfer"] = 1, transfers
    moves["src_block"] = moves["dst_block"] = np.arange(len(transfers))
    return mover.submit(moves, **options)


def test_a_ticket_tells_what_was_not_tried_from_what_failed():
    device, host = HostTier(8, 64), HostTier(8, 64)
    with Mover({0: device, 1: host}, threads=1) as mover:
        ticket = ticket_of(mover, [7, 7, 3])
        assert [array.tolist() for array in ticket.results()] == [[3, 7], [True, True]]
        assert ticket.tried().tolist() == [True, True]
        assert ticket.seconds > 0
        late = ticket_of(mover, [7, 7, 3], deadline_s=0)
        assert not late.results()[1].any()
        assert late.tried().tolist() == [False, False]


def test_a_transfer_of_which_one_part_failed_and_one_was_late_was_tried():
    from pagedkv.tiers import Ticket

    ticket = Ticket(np.array([5, 5, 6, 6, 7, 7]), 3)
    ticket.part_done(np.array([0]), np.array([False]))
    ticket.part_done(np.array([2, 4, 5]), np.array([True, True, True]))
    ticket.not_tried(np.array([1, 3]))
    ticket.part_done(np.array([1, 3]), None)
    assert [array.tolist() for array in ticket.results()] == [[5, 6, 7], [False, False, True]]
    assert ticket.tried().tolist() == [True, False, True]
