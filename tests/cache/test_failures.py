"""A disk whose reads and writes fail, come late or raise.

Each costs a counted miss; content stays right and nothing else is lost.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import pagedkv as pk
import pagedkv.cache.tiered
from pagedkv.spec.sizes import parse_size
from pagedkv.tiers import DiskTier
from tests.in_blocks import in_blocks

from .conftest import BLOCK, QueueClock, Toy, all_free, prompt, where

SPEC = pk.KVSpec(2, 2, 4, "float32", 4, model="toy")

TIMEOUT_S = 60


class Flaky(DiskTier):
    """A disk tier whose failures the test chooses.

    ``fail_reads(blocks) -> bool [n]`` returns True for each block that is lost; the other hooks work alike.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.fail_reads = self.fail_writes = lambda blocks: np.zeros(len(blocks), bool)

    def read(self, blocks, expected, arena, dst_blocks):
        lost = self.fail_reads(blocks)
        ok = super().read(blocks, expected, arena, dst_blocks)
        arena[dst_blocks[lost]] = 0xAB  # what a failed read leaves behind
        return ok & ~lost

    def write(self, blocks, records, arena, src_blocks):
        lost = self.fail_writes(blocks)
        ok = super().write(blocks, records, arena, src_blocks)
        if lost.any():
            self.invalidate(blocks[lost])
        return ok & ~lost


def always(blocks):
    return np.ones(len(blocks), bool)


def never(blocks):
    return np.zeros(len(blocks), bool)


def raising(blocks):
    raise OSError(5, "the disk is gone")


def nonsense(blocks):
    raise KeyError("not even an OSError")


@pytest.fixture
def toy(open_cache, monkeypatch):
    """Prompts 1 and 2 are on a flaky disk, prompt 3 on the device."""
    monkeypatch.setattr(pagedkv.cache.tiered, "DiskTier", Flaky)
    toy = Toy(open_cache(4, disk=40))
    for start in (1, 2, 3):
        toy.use(prompt(start))
    assert where(toy.cache, prompt(1)) == [("disk", 3)]
    toy.disk = toy.cache._storage.tiers[2]
    return toy


@pytest.mark.parametrize("failure", [always, raising, nonsense])
def test_a_failed_promotion_is_a_counted_miss_and_the_content_is_computed(toy, failure):
    toy.disk.fail_reads = failure
    assert toy.use(prompt(1)) == {}
    stats = toy.cache.stats()
    assert (stats.missed_promotions, stats.hit_tokens["disk"]) == (3, 0)
    assert stats.failed_moves == 3
    toy.cache.check_integrity()
    toy.disk.fail_reads = never
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}, "what was computed anew replaces what was lost"
    toy.use(prompt(2))
    assert sum(toy.use(prompt(1)).values()) == 3 * BLOCK, "and can be demoted and promoted"


def test_one_lost_block_costs_what_lies_behind_it_and_nothing_before(toy):
    runs = toy.cache.explain(prompt(1)).runs
    lost = runs[0].block_ids[1]
    toy.disk.fail_reads = lambda blocks: blocks == lost
    hits = toy.use(prompt(1))
    assert hits.get("disk", 0) <= BLOCK
    toy.disk.fail_reads = never
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}


def test_a_failed_block_is_not_offered_again(toy):
    toy.disk.fail_reads = always
    with toy.cache.sequence(prompt(1)):
        assert toy.cache.explain(prompt(1)).cached_tokens == 0
    toy.disk.fail_reads = never
    assert toy.use(prompt(1)) == {}


@pytest.mark.slow
def test_failed_reads_under_traffic_never_give_wrong_content(open_cache, monkeypatch):
    monkeypatch.setattr(pagedkv.cache.tiered, "DiskTier", Flaky)
    choose = np.random.default_rng(5)
    for demotion in ("leaf_first", "oldest_first"):
        toy = Toy(open_cache(12, host=6, disk=30, demotion=demotion))
        disk = toy.cache._storage.tiers[2]
        disk.fail_reads = lambda blocks: choose.random(len(blocks)) < 0.2
        disk.fail_writes = lambda blocks: choose.random(len(blocks)) < 0.1
        for turn in range(300):
            toy.use(choose.integers(0, 2, choose.integers(1, 30)))
            if turn % 50 == 0:
                toy.cache.check_integrity()
        stats = toy.cache.stats()
        assert stats.missed_promotions > 0
        assert stats.placement["failed_demotions"] > 0
        assert stats.hit_tokens["disk"] > 0
        assert all_free(toy.cache)
        toy.cache.close()


@pytest.mark.parametrize("failure", [always, raising, nonsense])
def test_a_disk_that_takes_nothing_loses_only_what_was_to_go_there(open_cache, monkeypatch, failure):
    monkeypatch.setattr(pagedkv.cache.tiered, "DiskTier", Flaky)
    toy = Toy(open_cache(8, host=4, disk=40))
    toy.cache._storage.tiers[2].fail_writes = failure
    for start in range(12):
        toy.use(prompt(start))
    stats = toy.cache.stats()
    assert stats.placement["failed_demotions"] > 0
    assert stats.blocks["disk"]["free"] == 40, "destinations of failed writes are free again"
    cached = sum(toy.cache.explain(prompt(start)).cached_tokens for start in range(12))
    assert cached > 6 * BLOCK, "what is on the device and the host is still there"
    for start in range(11, 8, -1):
        assert sum(toy.use(prompt(start)).values()) > 0 or start < 10


def test_live_sequences_lose_nothing_whatever_the_disk_does(open_cache, monkeypatch):
    monkeypatch.setattr(pagedkv.cache.tiered, "DiskTier", Flaky)
    toy = Toy(open_cache(16, disk=20))
    disk = toy.cache._storage.tiers[2]
    disk.fail_reads = disk.fail_writes = raising
    held = [toy.cache.sequence(prompt(start)) for start in (1, 2)]
    toy.run(*held)
    for start in range(3, 12):
        toy.use(prompt(start))
        for seq in held:
            seq.append(start)
        toy.run(*held)
        toy.check(*held)
    for seq in held:
        seq.release()


def test_a_full_filesystem_is_refused_when_the_cache_opens(tmp_path):
    spec = pk.KVSpec(32, 32, 128, "float32", 256, model="toy")
    with pytest.raises((pk.TierError, pk.InvalidArgument)):
        pk.KVCache(spec, pk.Blocks(1), disk=pk.Disk(str(tmp_path / "kv"), "8000TiB"))
    assert not list(tmp_path.glob("kv/data*"))


def test_files_cut_under_a_running_cache_are_misses(open_cache, tmp_path):
    toy = Toy(open_cache(4, disk=40))
    for start in range(1, 6):
        toy.use(prompt(start))
    for file in (tmp_path / "kv").glob("data*"):
        with open(file, "r+b") as opened:
            opened.truncate(0)
    for start in range(1, 6):
        toy.use(prompt(start))
    assert toy.cache.stats().missed_promotions > 0


def test_bytes_changed_under_a_running_cache_are_misses(open_cache, tmp_path):
    toy = Toy(open_cache(4, disk=40))
    for start in range(1, 8):
        toy.use(prompt(start))
    for file in (tmp_path / "kv").glob("data*"):
        content = bytearray(file.read_bytes())
        content[4096::64] = bytes(byte ^ 1 for byte in content[4096::64])
        with open(file, "r+b") as opened:
            opened.write(content)
    for start in range(1, 8):
        toy.use(prompt(start))
    assert toy.cache.stats().missed_promotions > 0


DEADLINE_S = 1000.0  # on a clock that the test turns


@pytest.fixture
def slow(open_cache, monkeypatch):
    """As `toy`, with one thread, a deadline, and reads that wait until `go` is set."""
    monkeypatch.setattr(pagedkv.cache.tiered, "DiskTier", Flaky)
    toy = Toy(open_cache(8, disk=40, threads=1, deadline_s=DEADLINE_S))
    for start in (1, 2, 3, 4):
        toy.use(prompt(start))
    toy.disk, toy.go, toy.started = toy.cache._storage.tiers[2], threading.Event(), threading.Event()
    toy.clock = QueueClock(toy.cache)

    def wait(blocks):
        toy.started.set()
        assert toy.go.wait(TIMEOUT_S)
        return never(blocks)

    toy.wait = wait
    yield toy
    toy.go.set()


def test_a_promotion_that_comes_late_is_a_counted_miss(slow):
    slow.disk.fail_reads = slow.wait
    first = threading.Thread(target=lambda: slow.cache.prefetch(prompt(1)).wait(TIMEOUT_S))
    first.start()
    assert slow.started.wait(TIMEOUT_S)  # the only thread is busy; what is queued behind it will be late
    opened = []
    second = threading.Thread(target=lambda: opened.append(slow.cache.sequence(prompt(2))))
    second.start()
    while not slow.cache._storage.carrier.queued_blocks:
        time.sleep(0.001)
    slow.clock.turn(DEADLINE_S)  # what is queued is late now
    slow.go.set()
    first.join()
    second.join()
    (seq,) = opened
    slow.check(seq)
    slow.run(seq)
    slow.check(seq)
    seq.release()
    assert slow.cache.stats().missed_promotions == 3
    slow.cache.check_integrity()
    for start in (1, 2, 3, 4):
        slow.use(prompt(start))


def test_a_deadline_for_promotions_does_not_lose_what_is_demoted(open_cache):
    toy = Toy(open_cache(8, host=40, deadline_s=0.0))
    toy.use(prompt(1))
    toy.use(prompt(2))
    toy.use(prompt(3))  # demotes the first, by a step
    assert "host" not in toy.use(prompt(1)), "with no time at all, what is not on the device is a miss"
    for start in (2, 3):
        toy.use(prompt(start))
    assert toy.cache.stats().placement["failed_demotions"] == 0


def test_a_request_that_waits_for_moves_of_a_cache_that_closes_fails_and_holds_nothing(toy):
    toy.cache._dispatcher.close()
    with pytest.raises(pk.ClosedError):
        toy.cache.sequence(prompt(1))
    toy.cache.check_integrity()
    assert all_free(toy.cache)


def test_a_step_that_cannot_make_room_as_the_cache_closes_changes_nothing(toy):
    seq = toy.cache.sequence(prompt(9))
    toy.cache._dispatcher.close()
    with pytest.raises(pk.ClosedError):
        toy.run(seq)
    assert seq.num_computed == 0
    toy.cache.check_integrity()
    seq.release()


def test_a_description_that_fails_costs_the_move_and_nothing_else(toy, monkeypatch):
    describe = toy.cache._storage.carrier._describe

    def broken(moves):
        raise MemoryError("no room for records")

    toy.cache._storage.carrier._describe = broken
    with toy.cache.sequence(prompt(1)) as seq:
        assert seq.num_computed == 0
    toy.cache.check_integrity()
    assert all_free(toy.cache)
    toy.cache._storage.carrier._describe = describe
    toy.use(prompt(1))
    toy.use(prompt(2))


def test_opening_fails_whole_and_leaves_the_directory_to_others(tmp_path, open_cache):
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(10))
    for options in ({"threads": 0}, {"threads": "two"}):
        with pytest.raises((pk.InvalidArgument, pk.WrongType)):
            pk.KVCache(SPEC, pk.Blocks(4), disk=disk, **options)
    toy = Toy(open_cache(4, disk=10))
    toy.use(prompt(1))


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_disk_without_a_usable_path_is_refused(path):
    with pytest.raises(pk.InvalidArgument):
        pk.Disk(path, pk.Blocks(10))


def test_a_disk_whose_path_is_a_file_is_refused(tmp_path):
    (tmp_path / "kv").write_text("mine")
    with pytest.raises(pk.TierError):
        pk.KVCache(SPEC, pk.Blocks(4), disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(10)))
    assert (tmp_path / "kv").read_text() == "mine"


def test_every_option_of_a_disk_reaches_the_tier(tmp_path, open_cache):
    disk = pk.Disk(str(tmp_path / "other"), pk.Blocks(10), segment_size="8KiB", shards=4)
    cache = open_cache(4, disk=disk)
    geometry = cache._storage.tiers[2]._store.geometry
    assert geometry.shards == 4
    assert geometry.num_segments > 1


@pytest.mark.parametrize("size", ["100KiB", "1MiB", "3MB"])
def test_a_disk_size_in_bytes_is_for_the_whole_directory(tmp_path, size):
    path = tmp_path / "kv"
    with pk.KVCache(SPEC, device_memory=pk.Blocks(4), disk=pk.Disk(str(path), in_blocks(size))):
        used = sum(file.stat().st_blocks * 512 for file in [path, *path.iterdir()])
    slot = 4096 + -(-SPEC.block_bytes // 4096) * 4096
    assert used <= parse_size(size) < used + 2 * slot + 5 * 4096


def test_a_disk_too_small_for_a_block_and_its_header_is_refused(tmp_path):
    with pytest.raises(pk.InvalidArgument, match="one block with its header"):
        pk.KVCache(SPEC, device_memory=pk.Blocks(4), disk=pk.Disk(str(tmp_path / "kv"), "5KiB"))
    assert not (tmp_path / "kv").exists()


def test_each_layer_has_a_checksum_of_its_own_unless_the_caller_says_otherwise(tmp_path):
    spec = pk.KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype="float32", block_size=16, model="toy")
    with pk.KVCache(spec, device_memory=pk.Blocks(4), disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(4))) as cache:
        assert cache._storage.tiers[2]._store.geometry.shards == 3


def test_a_disk_for_a_model_without_a_name_is_refused_unless_that_is_said_aloud(tmp_path):
    spec = pk.KVSpec(2, 2, 4, "float32", 4)
    with pytest.raises(pk.InvalidArgument, match="unnamed_model=True"):
        pk.KVCache(spec, pk.Blocks(4), disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(10)))
    assert not (tmp_path / "kv").exists()
    pk.KVCache(spec, pk.Blocks(4), disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(10), unnamed_model=True)).close()
    with pytest.raises(pk.WrongType, match="unnamed_model"):
        pk.Disk(str(tmp_path / "kv"), pk.Blocks(10), unnamed_model=1)  # type: ignore[arg-type]
