"""Flush and purge of the disk tier.

Flush writes what is cached to the disk before a planned restart; purge deletes a namespace for good.
"""

from __future__ import annotations

import logging
import shutil
import threading
from functools import partial

import pytest

import pagedkv as pk
from pagedkv.tiers import DiskTier

from .conftest import BLOCK, SPEC, Toy, all_free, prompt, where

A, B = pk.Namespace(tenant="a"), pk.Namespace(tenant="b")


@pytest.fixture
def open_cache(open_cache):
    """Opens caches that keep whole blocks alone: these tests count blocks."""
    return partial(open_cache, partial_hits=False)


def disk_blocks(cache):
    """Blocks with a copy on the disk."""
    counts = cache.stats().blocks["disk"]
    return counts["cached"] + counts["live"]


@pytest.mark.parametrize("demotion", ["leaf_first", "oldest_first"])
@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "hazard"])
@pytest.mark.parametrize("host", [None, 3, 40])
def test_what_was_flushed_is_found_after_a_restart(open_cache, host, policy, demotion):
    cache = open_cache(16, host=host, disk=80, policy=policy, demotion=demotion)
    toy = Toy(cache)
    for start in range(1, 8):
        toy.use(prompt(start))
    assert cache.flush() == 7 * 3 == disk_blocks(cache)
    assert all_free(cache)
    assert cache.stats().blocks["device"]["cached"] == 0
    cache.close()
    toy = Toy(open_cache(16, host=host, disk=80, policy=policy, demotion=demotion))
    for start in range(1, 8):
        assert toy.use(prompt(start)) == {"disk": 3 * BLOCK}


def test_flushed_twice_nothing_is_written_twice(open_cache):
    cache = open_cache(16, disk=40)
    toy = Toy(cache)
    toy.use(prompt(1))
    assert cache.flush() == 3
    written = cache.stats().disk["blocks_written"]
    assert cache.flush() == 3
    toy.use(prompt(1))
    assert cache.flush() == 3
    assert cache.stats().disk["blocks_written"] == written, "the disk kept its copy when the block came up"


def test_what_somebody_holds_stays_where_it_is(open_cache):
    cache = open_cache(16, disk=40, pin_budget=3)
    toy = Toy(cache)
    toy.use(prompt(1))
    toy.use(prompt(2))
    pinned = cache.pin(prompt(2))
    seq = cache.sequence(prompt(3))
    toy.run(seq)
    assert cache.flush() == 9, "it is copied"
    assert where(cache, prompt(1)) == [("disk", 3)]
    assert where(cache, prompt(2)) == [("device", 3)]
    toy.check(seq)
    seq.release()
    pinned.release()
    assert cache.flush() == 9


def test_more_than_the_disk_holds_keeps_the_hottest(open_cache):
    cache = open_cache(24, disk=6)
    toy = Toy(cache)
    for start in range(1, 8):
        toy.use(prompt(start))
    assert cache.flush() == 6
    assert [where(cache, prompt(start)) for start in (1, 6, 7)] == [[], [("disk", 3)], [("disk", 3)]]


def test_without_a_disk_there_is_nothing_to_flush(open_cache):
    cache = open_cache(8, host=8)
    Toy(cache).use(prompt(1))
    assert cache.flush() == 0
    assert where(cache, prompt(1)) == [("device", 3)]
    cache.close()
    with pytest.raises(pk.ClosedError):
        cache.flush()


class Unwell(DiskTier):
    """Falls ill after some writes; may refuse to confirm or to purge."""

    writes_left = 10**9
    confirms = durable = True

    def write(self, blocks, records, arena, src_blocks):
        self.writes_left -= len(records)
        if self.writes_left < 0:
            return super().write(blocks[:0], records[:0], arena, src_blocks[:0]) if not len(blocks) else blocks < 0
        return super().write(blocks, records, arena, src_blocks)

    @property
    def state(self):
        return "ok" if self.writes_left >= 0 else "read_only"

    def flush(self):
        return super().flush() and self.confirms

    def purge(self, namespace):
        super().purge(namespace)
        if not self.durable:
            raise pk.TierError("the superblock could not be written: disk full")


@pytest.fixture
def unwell(open_cache, monkeypatch):
    monkeypatch.setattr(pk.cache.tiered, "DiskTier", Unwell)
    toy = Toy(open_cache(400, disk=400))
    for start in range(1, 100):
        toy.use(prompt(start))
    return toy


def test_a_disk_that_fails_while_it_is_flushed_costs_nothing(unwell):
    unwell.cache._storage.store.writes_left = 100
    unwell.cache.flush()
    left = sum(unwell.cache.explain(prompt(start)).cached_tokens for start in range(1, 100)) // BLOCK
    assert left == 297, "what was to be copied is still where it was"
    unwell.cache.check_integrity()
    assert unwell.cache.stats().blocks["device"]["cached"] == 297
    assert 0 < disk_blocks(unwell.cache) <= 100


def test_a_disk_that_is_ill_already_costs_nothing(unwell):
    unwell.cache._storage.store.writes_left = -1
    unwell.cache.flush()
    assert unwell.cache.stats().blocks["device"]["cached"] == 297


def test_what_the_device_does_not_confirm_does_not_count(unwell):
    unwell.cache._storage.store.confirms = False
    assert unwell.cache.flush() == 0
    unwell.cache._storage.store.confirms = True
    assert unwell.cache.flush() == 297


# ---- purges


def crashed(path, into):
    """What a crash leaves: the files as they are, without a close."""
    shutil.copytree(path, into, ignore=shutil.ignore_patterns("LOCK"))
    (into / "LOCK").touch(0o600)
    into.chmod(0o700)
    return pk.Disk(str(into), pk.Blocks(60))


@pytest.mark.parametrize("hold", [None, "pin", "sequence", "fork"])
def test_a_purge_outlives_a_crash(open_cache, tmp_path, hold):
    cache = open_cache(8, disk=60, pin_budget=3)
    toys = [Toy(cache, salt) for salt in range(2)]
    for toy, name in zip(toys, (A, B), strict=True):
        toy.use(prompt(1), name)
    cache.flush()
    held = None
    if hold == "pin":
        held = cache.pin(prompt(1), A)
    elif hold is not None:
        held = cache.sequence(prompt(1), A)
        if hold == "fork":
            (held,) = held.fork()
    cache.purge(A)
    disk = crashed(tmp_path / "kv", tmp_path / "after")
    cache.close()
    again = open_cache(8, disk=disk)
    assert where(again, prompt(1), A) == []
    assert Toy(again, 1).use(prompt(1), B) == {"disk": 3 * BLOCK}
    del held


def test_a_purge_catches_what_is_on_its_way_to_the_disk(open_cache, monkeypatch, tmp_path):
    """Its write begins only after everything else that a purge does: it must be waited for."""
    dropped, written = threading.Event(), threading.Event()

    class Slow(DiskTier):
        def write(self, blocks, records, arena, src_blocks):
            assert dropped.wait(60)
            ok = super().write(blocks, records, arena, src_blocks)
            written.set()
            return ok

    monkeypatch.setattr(pk.cache.tiered, "DiskTier", Slow)
    cache = open_cache(8, disk=60)
    toy = Toy(cache)
    toy.use(prompt(1, 7 * BLOCK), A)
    demoting = threading.Thread(target=cache.moves.make_room, args=(8,))
    demoting.start()
    while not cache.placement.num_in_flight:
        pass
    drain = cache.moves.drain_namespace
    monkeypatch.setattr(cache.moves, "drain_namespace", lambda root: (dropped.set(), drain(root)))
    try:
        cache.purge(A)
        assert written.is_set(), "it waits for what is on its way"
    finally:
        dropped.set()
        demoting.join()
    disk = crashed(tmp_path / "kv", tmp_path / "after")
    cache.check_integrity()
    assert cache.stats().disk["blocks_written"] > 0
    assert cache.explain(prompt(1, 7 * BLOCK), A).cached_tokens == 0
    again = open_cache(8, disk=disk)
    assert again.explain(prompt(1, 7 * BLOCK), A).cached_tokens == 0


def test_a_purge_that_is_not_durable_says_so_and_purges_memory_all_the_same(unwell):
    unwell.use(prompt(1), A)
    unwell.cache._storage.store.durable = False
    with pytest.raises(pk.TierError, match=r"forgotten in memory .* after a restart.*disk full"):
        unwell.cache.purge(A)
    assert where(unwell.cache, prompt(1), A) == []
    unwell.cache._storage.store.durable = True
    assert unwell.cache.purge(A) == 0
    assert unwell.use(prompt(1), A) == {}
    assert unwell.use(prompt(1), A) == {"device": 3 * BLOCK}


def test_what_is_stored_after_a_purge_is_found_after_a_crash(open_cache, tmp_path):
    cache = open_cache(8, disk=60)
    Toy(cache, 1).use(prompt(1), A)
    cache.flush()
    cache.purge(A)
    Toy(cache, 2).use(prompt(1), A)
    assert cache.flush() == 3
    disk = crashed(tmp_path / "kv", tmp_path / "after")
    assert Toy(open_cache(8, disk=disk), 2).use(prompt(1), A) == {"disk": 3 * BLOCK}


def test_purges_and_requests_of_many_threads_leave_the_namespace_usable(open_cache):
    cache = open_cache(40, disk=80, threads=1)
    problems = []

    def ask(start):
        try:
            for turn in range(20):
                with cache.sequence(prompt(start + turn % 3), A) as seq:
                    Toy(cache).run(seq)
        except BaseException as problem:  # shown by the test's own thread
            problems.append(problem)

    threads = [threading.Thread(target=ask, args=(10 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        cache.purge(A)
    for thread in threads:
        thread.join()
    assert not problems
    cache.check_integrity()
    Toy(cache).use(prompt(1), A)
    assert Toy(cache).use(prompt(1), A) == {"device": 3 * BLOCK}, "a dead root belongs to no namespace"


# ---- a disk that cannot be opened


@pytest.fixture
def unusable(tmp_path):
    path = tmp_path / "kv"
    path.mkdir(mode=0o755)
    path.chmod(0o755)  # open to others
    return str(path)


def test_a_disk_that_is_not_required_is_left_out_with_a_line_in_the_log(open_cache, unusable, caplog):
    with caplog.at_level(logging.WARNING, "pagedkv.cache"):
        cache = open_cache(8, host=8, disk=pk.Disk(unusable, pk.Blocks(20), required=False))
    assert len([record for record in caplog.records if "is left out" in record.getMessage()]) == 1
    toy = Toy(cache)
    for start in range(1, 8):
        toy.use(prompt(start))
    assert toy.use(prompt(7)) == {"device": 3 * BLOCK}
    stats = cache.stats()
    assert stats.disk["state"] == "left_out"
    assert "disk left_out" in str(stats)
    with pytest.raises(pk.TierError, match="left out when the cache was opened"):
        cache.purge(None)
    assert where(cache, prompt(7)) == []
    assert set(stats.blocks) == {"device", "host"}
    assert cache.flush() == 0
    assert where(cache, prompt(7)) == []


def test_a_disk_that_is_required_is_an_error(open_cache, unusable):
    with pytest.raises(pk.TierError):
        open_cache(8, disk=pk.Disk(unusable, pk.Blocks(20)))


def test_another_model_is_an_error_although_the_disk_is_not_required(open_cache, tmp_path):
    open_cache(8, disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(20))).close()
    other = pk.KVSpec(2, 2, 4, "float32", 4, layout="HND", model="toy")
    with pytest.raises(pk.LayoutMismatch):
        open_cache(8, other, disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(20), required=False))


def test_a_store_of_another_layout_is_reset_where_that_is_asked_for(open_cache, tmp_path):
    first = open_cache(8, disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(20)))
    Toy(first).use(prompt(1))
    first.flush()
    first.close()
    seen = []
    again = open_cache(8, disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(20), on_progress=lambda *at: seen.append(at)))
    assert where(again, prompt(1)) == [("disk", 3)]
    assert seen[-1] == (20, 20)
    again.close()
    fresh = open_cache(8, disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(10), on_mismatch="reset"))
    assert where(fresh, prompt(1)) == []


def test_a_healthy_disk_says_so_and_a_cache_without_one_says_nothing(open_cache):
    cache = open_cache(8, disk=20)
    toy = Toy(cache)
    hits = [toy.use(prompt(start)).get("disk", 0) for start in (1, 2, 3, 1)]
    disk = cache.stats().to_dict()["disk"]
    assert disk["state"] == "ok"
    assert disk["blocks_read"] * BLOCK == sum(hits) > 0
    assert disk["blocks_written"] * SPEC.block_bytes == cache.stats().moved_bytes["device_to_disk"]
    assert not any([*disk["misses"].values(), *disk["write_errors"].values(), disk["disk_hits_declined"]])
    assert str(cache.stats()).endswith("disk ok")
    assert open_cache(8).stats().disk is None
