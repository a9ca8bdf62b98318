"""A disk whose calls hang.

Requests go on by computing, and bytes that arrive late land in no block that has an owner.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tiers.disk.segments import Segments

from .conftest import BLOCK, Toy, all_free, prompt, where

TIMEOUT_S = 60
DEADLINE_S = 1.0  # of a promotion; whether its read has begun by then makes no difference
DEVICE = 8  # blocks; a prompt takes four, three of which are cached


class Gate:
    """Holds every transfer of a store until the test lets it through.

    A transfer waits before it touches any memory.
    """

    def __init__(self, monkeypatch, name):
        self.shut, self.go, self.inside = False, threading.Event(), threading.Event()
        self.calls = 0
        transfer = getattr(Segments, name)

        def gated(*arguments):
            self.calls += 1
            if self.shut:
                self.inside.set()
                assert self.go.wait(TIMEOUT_S)
            return transfer(*arguments)

        monkeypatch.setattr(Segments, name, gated)


@pytest.fixture
def reads(monkeypatch):
    gate = Gate(monkeypatch, "read")
    yield gate
    gate.go.set()


@pytest.fixture
def writes(monkeypatch):
    gate = Gate(monkeypatch, "write_payloads")
    yield gate
    gate.go.set()


def filled(open_cache, **options):
    """A toy whose prompts 1 and 2 lie on the disk, and 3 perhaps on the device."""
    toy = Toy(open_cache(DEVICE, disk=40, **options))
    for start in (1, 2, 3, 4):
        toy.use(prompt(start))
    assert where(toy.cache, prompt(1)) == [("disk", 3)]
    return toy


def hang_inside(cache, gate):
    """Let time pass for the mover once a transfer waits in `gate`, and not before."""
    queue = cache._storage.carrier._queue
    queue.hang_s = 0.5
    queue.clock = lambda: 1e9 if gate.inside.is_set() else 0.0


def all_back(cache):
    """Wait until no call has memory of its own any more."""
    end = time.monotonic() + TIMEOUT_S
    while not all_free(cache) and time.monotonic() < end:
        time.sleep(0.001)
    return all_free(cache)


def live(cache, tier="device"):
    return cache.stats().blocks[tier]["live"]


def test_a_request_goes_on_after_its_deadline_and_a_late_read_lands_in_nobodys_block(open_cache, reads):
    toy = filled(open_cache, deadline_s=DEADLINE_S)
    cache, reads.shut = toy.cache, True
    seq = cache.sequence(prompt(1))
    assert reads.inside.is_set()
    assert not any(seq.hit_tokens.values())
    stats = cache.stats()
    assert (stats.missed_promotions, stats.placement["late_promotions"]) == (3, 3)
    assert cache._storage.carrier.stats()[2, 0].left == 3
    assert live(cache) == 3, "the read may still fill them"
    toy.run(seq)  # in whatever blocks are free
    others = cache.device_arena.copy()
    reads.go.set()
    assert live(cache) >= 4
    reads.shut = False
    end = time.monotonic() + TIMEOUT_S
    while live(cache) > 4 and time.monotonic() < end:
        time.sleep(0.001)
    changed = np.flatnonzero((cache.device_arena != others).any(axis=1))
    assert len(changed) == 3, "it came back, and filled what was kept for it"
    toy.check(seq)
    cache.check_integrity()
    seq.release()
    assert all_free(cache)
    for start in (2, 1, 4, 3, 1):
        toy.use(prompt(start))
    cache.check_integrity()


def test_a_disk_that_hangs_is_off_and_costs_no_request_any_time(open_cache, reads):
    toy = filled(open_cache)
    cache, reads.shut = toy.cache, True
    hang_inside(cache, reads)
    assert toy.use(prompt(1)) == {}
    calls = reads.calls
    assert cache.stats().disk["state"] == "off"
    assert cache.stats().disk["hung"] == 3
    assert toy.use(prompt(2)) == {}
    assert reads.calls == calls, "no further read is sent after it"
    assert cache.flush() == 0
    reads.go.set()
    assert all_back(cache)
    assert cache.stats().disk["state"] == "off", "for a rest"
    for start in (1, 2, 3, 4, 1):
        toy.use(prompt(start))
    cache.check_integrity()
    assert all_free(cache)


def test_a_step_goes_on_when_its_demotion_hangs_and_nothing_wrong_is_found_after_a_restart(open_cache, writes):
    toy = filled(open_cache)
    cache, writes.shut = toy.cache, True
    hang_inside(cache, writes)
    seq = cache.sequence(prompt(5))
    toy.run(seq)  # needs room: waits for a demotion until that hangs
    assert writes.inside.is_set()
    assert cache.stats().placement["failed_demotions"] > 0
    assert cache.stats().disk["state"] == "off"
    kept = live(cache, "disk")
    assert kept > 0, "the write may still fill them"
    toy.check(seq)
    seq.release()
    for start in (6, 7):  # the blocks of what was to be written are others' now
        toy.use(prompt(start))
    writes.go.set()
    assert all_back(cache)
    cache.check_integrity()
    cache.close()
    again = Toy(open_cache(DEVICE, disk=40))
    for start in range(1, 8):
        again.use(prompt(start))


def test_a_purge_while_the_disk_hangs_holds_at_once_and_says_that_it_is_not_in_writing(open_cache, reads):
    toy = filled(open_cache)
    cache, reads.shut = toy.cache, True
    hang_inside(cache, reads)
    assert toy.use(prompt(1)) == {}
    with pytest.raises(pk.TierError, match="may be served from disk again after a restart"):
        cache.purge(None)
    assert where(cache, prompt(2)) == []
    reads.go.set()
    assert all_back(cache)
    for start in (1, 2, 3):
        assert toy.use(prompt(start)) == {}
    cache.check_integrity()


def test_what_is_asked_for_in_the_rest_after_a_hang_stays_on_the_disk(open_cache, reads):
    toy = filled(open_cache)
    cache, reads.shut = toy.cache, True
    hang_inside(cache, reads)
    assert toy.use(prompt(1)) == {}
    reads.go.set()
    assert all_back(cache)
    for start in (5, 6, 7, 8):  # nothing else keeps prompt 1
        toy.use(prompt(start))
    assert where(cache, prompt(1)) == [("disk", 3)]
    assert toy.use(prompt(1)) == {}
    stats = cache.stats()
    assert stats.disk["state"] == "off"
    assert (stats.placement["late_promotions"], stats.placement["failed_promotions"]) == (6, 0)


def test_a_prefetch_that_hangs_ends_at_its_deadline(open_cache, reads):
    toy = filled(open_cache, deadline_s=DEADLINE_S)
    reads.shut = True
    assert toy.cache.prefetch(prompt(1)).wait(TIMEOUT_S) == 0
    assert not reads.go.is_set()
    reads.go.set()
    assert all_back(toy.cache)
    assert toy.use(prompt(1)) in ({}, {"disk": 3 * BLOCK})


def test_a_cache_closes_while_a_call_hangs_and_its_directory_is_free_when_that_is_back(open_cache, reads, caplog):
    toy = filled(open_cache, deadline_s=DEADLINE_S)
    cache, reads.shut = toy.cache, True
    hang_inside(cache, reads)
    assert toy.use(prompt(1)) == {}
    cache.close()
    assert not reads.go.is_set(), "closed, and the call is still inside"
    lines = [record.getMessage() for record in caplog.records]
    assert sum("are left there" in text for text in lines) == 1
    assert sum("does not answer: it is left as it is" in text for text in lines) == 1
    reads.shut = False
    reads.go.set()
    shared = cache._storage.carrier._queue
    with shared.changed:
        assert shared.changed.wait_for(lambda: not shared.busy, TIMEOUT_S)
    again = Toy(open_cache(DEVICE, disk=40))
    for start in (1, 2, 3, 4):
        again.use(prompt(start))


def test_who_lacks_the_blocks_of_a_late_read_waits_for_them(open_cache, reads):
    toy = filled(open_cache, deadline_s=DEADLINE_S)
    cache, reads.shut = toy.cache, True
    seq = cache.sequence(prompt(1))
    assert live(cache) == 3, "the read may still fill them"
    threading.Timer(0.05, reads.go.set).start()
    other = cache.sequence(prompt(70, (DEVICE - 2) * BLOCK))
    toy.run(other)
    other.release()
    toy.run(seq)
    toy.check(seq)
    seq.release()
    assert all_back(cache)


def test_a_scheduler_plans_nothing_while_its_own_late_reads_hold_the_room(open_cache, reads):
    toy = filled(open_cache, deadline_s=DEADLINE_S)
    cache, reads.shut = toy.cache, True
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=1, max_batch_tokens=64, watermark=0.0))
    request = scheduler.submit([*prompt(1), *prompt(60, (DEVICE - 4) * BLOCK - 1)], 1)
    late = 0
    while not request.ended:
        plan = scheduler.schedule()
        if not plan:
            late += cache.stats().missed_promotions > 0
            if late == 3:
                reads.go.set()
            scheduler.wait(0.01)
            continue
        with scheduler.step(plan) as step:
            toy.write(step, *plan.sequences)
        scheduler.report(plan, [5] * len(plan.lanes))
    assert late >= 3
    assert request.state == "finished"
    assert all_back(cache)
