"""A cache that keeps each layer's reach alone, over a disk that outlives it.

Not covered: remote stores, which such a cache does not have; damage to a store's files (tests/tiers/test_lanes.py); the
boundaries that are found again after a crash at any moment (test_points_found.py).
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import InvalidArgument, LayoutMismatch
from pagedkv.tiers import DiskTier
from tests.cache.test_by_group import FULL, SIZE, SPECS, compute, prompt
from tests.slices import one_in

LENGTH, NUM_PROMPTS = 50, 8
NAMED = {name: dataclasses.replace(spec, model="test@1") for name, spec in SPECS.items()}
SPEC = NAMED["windows"]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., pk.KVCache]]:
    caches: list[pk.KVCache] = []

    def open_cache(
        spec: pk.KVSpec = SPEC, device: int = 60, host: int = 0, disk: int = 1000, write: str = "all", **options: Any
    ) -> pk.KVCache:
        below = pk.Disk(
            tmp_path / "kv", pk.Blocks(disk), write=write, admission="all", segment_size="256KiB", **options
        )  # type: ignore[arg-type]
        caches.append(pk.KVCache(spec, pk.Blocks(device), pk.Blocks(host) if host else None, below, by_group=True))
        return caches[-1]

    yield open_cache
    for cache in caches:
        cache.close()


def serve(cache: pk.KVCache, number: int, turn: int = 0, length: int = LENGTH) -> dict[str, int]:
    """Compute a prompt as if every layer kept all of it; where its tokens came from."""
    tokens = np.append(prompt(number, length), prompt(100 + turn, 5))
    with pk.KVCache(cache.spec, pk.Blocks(60)) as whole, cache.sequence(tokens) as seq, whole.sequence(tokens) as other:
        got, wanted = compute(cache, seq), compute(whole, other)
        both = min(got.shape[1], wanted.shape[1])
        np.testing.assert_allclose(got[:, -both:], wanted[:, -both:], atol=2e-5)
        hits = dict(seq.hit_tokens)
    cache.check_integrity()
    return hits


@pytest.mark.parametrize("host", [0, 100])
@pytest.mark.parametrize("name", one_in(3, NAMED))
def test_all_prompts_are_found_after_a_restart_and_attend_as_if_they_had_stayed(
    name: str, host: int, opened: Callable[..., pk.KVCache]
) -> None:
    cache = opened(NAMED[name], host=host)
    for number in range(NUM_PROMPTS):
        serve(cache, number)
    cache.close()
    cache = opened(NAMED[name], host=host)
    assert cache.stats().orphans == 0
    cache.check_integrity()
    whole = (LENGTH + 5 - 1) // SIZE * SIZE
    for number in range(NUM_PROMPTS):
        assert serve(cache, number)["disk"] == whole


@pytest.mark.parametrize("write", ["evicted", "reused", "all"])
def test_what_memory_cannot_hold_comes_from_the_disk(write: str, opened: Callable[..., pk.KVCache]) -> None:
    cache, whole = opened(device=24, write=write), (LENGTH + 5 - 1) // SIZE * SIZE
    for turn in range(3 * NUM_PROMPTS):
        hits = serve(cache, turn % NUM_PROMPTS)
        assert sum(hits.values()) == (whole if turn >= NUM_PROMPTS else 0)
    assert cache.stats().hit_tokens["disk"] > NUM_PROMPTS * whole
    assert cache.stats().placement["dropped"] == {"device": 0, "host": 0, "disk": 0}


@pytest.mark.parametrize(("blocks", "rule"), [(479, "evicted"), (480, "reused")])
def test_the_default_of_write_counts_blocks_and_not_extents(
    blocks: int, rule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Extents on disk are longer than those in memory: they have room for headers."""
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(blocks), segment_size="256KiB")  # type: ignore[arg-type]
    with caplog.at_level("INFO", "pagedkv.cache"), pk.KVCache(SPEC, pk.Blocks(60), pk.Blocks(60), disk, by_group=True):
        pass
    assert f"write={rule!r}" in caplog.text


def test_a_killed_process_leaves_what_it_had_written(tmp_path: Path, opened: Callable[..., pk.KVCache]) -> None:
    """With ``write="all"`` and a checkpoint: everything."""
    program = textwrap.dedent(f"""
        import os, signal, sys
        import pagedkv as pk
        from tests.cache.test_by_group import compute, prompt
        from tests.cache.test_by_group_on_disk import SPEC
        disk = pk.Disk({str(tmp_path / "kv")!r}, pk.Blocks(1000), write="all", admission="all", segment_size="256KiB")
        cache = pk.KVCache(SPEC, pk.Blocks(60), disk=disk, by_group=True)
        for number in range({NUM_PROMPTS}):
            with cache.sequence(prompt(number, {LENGTH + 1})) as seq:
                compute(cache, seq)
            cache.checkpoint() if number % 2 else None
        print("ready", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()[-2000:]
    cache = opened()
    for number in range(NUM_PROMPTS):
        assert serve(cache, number)["disk"] == LENGTH // SIZE * SIZE


def test_a_checkpoint_writes_the_points_of_memory(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(write="evicted")
    for number in range(4):
        serve(cache, number)
    assert cache.stats().placement["copied"]["disk"] == 0
    spine = 4 * ((LENGTH + 5) // SIZE)
    assert cache.checkpoint() == spine
    written = cache.stats().disk["blocks_written"]  # type: ignore[index]
    assert written > spine
    assert cache.checkpoint() == spine
    assert cache.stats().disk["blocks_written"] == written  # type: ignore[index]
    store = cache._storage.store
    assert isinstance(store, DiskTier)
    store._store.close()  # as a killed process lets go of its files
    again = opened()
    assert [serve(again, number)["disk"] for number in range(4)] == [(LENGTH + 4) // SIZE * SIZE] * 4


def test_a_flush_leaves_nothing_in_memory_and_all_on_disk(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(host=100, write="evicted")
    for number in range(4):
        serve(cache, number)
    assert cache.flush() == 4 * ((LENGTH + 5) // SIZE)
    counts = cache.stats().blocks
    assert (counts["device"]["cached"], counts["host"]["cached"]) == (0, 0)
    assert all(pool.counts()["cached"] == 0 for pool in cache.placement.short_pools[:2])
    assert [serve(cache, number)["disk"] for number in range(4)] == [(LENGTH + 4) // SIZE * SIZE] * 4


def test_a_prefetch_brings_the_spine_and_the_tail(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened()
    serve(cache, 1)
    cache.close()
    cache = opened()
    tokens = np.append(prompt(1, LENGTH), prompt(100, 5))
    assert cache.prefetch(tokens).wait() == (LENGTH + 4) // SIZE * SIZE
    read = cache.stats().disk["blocks_read"]  # type: ignore[index]
    assert read == (LENGTH + 4) // SIZE + 2
    assert serve(cache, 1)["device"] == (LENGTH + 4) // SIZE * SIZE
    assert cache.stats().disk["blocks_read"] == read  # type: ignore[index]


def test_a_full_disk_loses_its_coldest_prompts_whole(opened: Callable[..., pk.KVCache]) -> None:
    cache, whole = opened(disk=40), (LENGTH + 4) // SIZE * SIZE
    for number in range(3 * NUM_PROMPTS):
        serve(cache, number)
    cache.close()
    cache = opened(disk=40)
    hits = [serve(cache, number)["disk"] for number in reversed(range(3 * NUM_PROMPTS))]
    assert set(hits) <= {0, whole}
    assert hits[0] == whole
    assert 0 < sum(hits) < 3 * NUM_PROMPTS * whole
    assert hits == sorted(hits, reverse=True)


def test_a_shared_beginning_lies_there_once(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened()
    for turn in range(NUM_PROMPTS):
        serve(cache, 1, turn)
    cache.close()
    cache = opened()
    spine = LENGTH // SIZE + NUM_PROMPTS * ((LENGTH + 5) // SIZE - LENGTH // SIZE)
    assert cache._found is not None
    assert cache._found.blocks == spine
    for turn in range(NUM_PROMPTS):
        assert sum(serve(cache, 1, turn).values()) == (LENGTH + 4) // SIZE * SIZE
    assert serve(cache, 1, 99)["partial"] == 0


def test_a_page_that_was_damaged_costs_its_points_and_nothing_else(
    opened: Callable[..., pk.KVCache], tmp_path: Path
) -> None:
    cache = opened()
    for number in range(NUM_PROMPTS):
        serve(cache, number)
    cache.close()
    for name in sorted((tmp_path / "kv").glob("data.*")):
        data = bytearray(name.read_bytes())
        for place in range(8192 + 100, len(data), 8192 * 5):
            data[place] ^= 0xFF
        name.write_bytes(data)
    cache = opened()
    whole = (LENGTH + 4) // SIZE * SIZE
    first = [sum(serve(cache, number).values()) for number in range(NUM_PROMPTS)]
    assert min(first) < whole
    assert [sum(serve(cache, number).values()) for number in range(NUM_PROMPTS)] == [whole] * NUM_PROMPTS
    cache.close()
    cache = opened()  # and on the disk, too
    assert [serve(cache, number)["disk"] for number in range(NUM_PROMPTS)] == [whole] * NUM_PROMPTS


def test_the_log_counts_extents_and_what_was_found(
    opened: Callable[..., pk.KVCache], caplog: pytest.LogCaptureFixture
) -> None:
    cache = opened()
    serve(cache, 1)
    cache.close()
    with caplog.at_level("INFO", "pagedkv.cache"):
        cache = opened()
    pools = cache.placement.pools
    assert pools[0] is not None
    assert pools[0].extents is not None
    assert f"device {pools[0].extents.num_extents} extents (180 KiB) of 2 groups of layers" in caplog.text
    assert "13 blocks found in 1 prefix, none freed" in caplog.text


def test_a_purged_namespace_stays_away(opened: Callable[..., pk.KVCache]) -> None:
    cache, tenant = opened(), pk.Namespace(tenant="a")
    for namespace in (tenant, None):
        with cache.sequence(prompt(1, LENGTH + 1), namespace) as seq:
            compute(cache, seq)
    cache.checkpoint()
    cache.purge(tenant)
    cache.close()
    cache = opened()
    for namespace, found in ((tenant, 0), (None, LENGTH // SIZE * SIZE)):
        with cache.sequence(prompt(1, LENGTH + 1), namespace) as seq:
            assert sum(seq.hit_tokens.values()) == found
            compute(cache, seq)


def test_a_directory_of_another_grouping_is_refused_with_the_group(opened: Callable[..., pk.KVCache]) -> None:
    opened().close()
    wider = [pk.Attention(2, 8, window=17), pk.Attention(2, 8, window=17), FULL]
    spec = dataclasses.replace(pk.KVSpec.of(wider * 2, dtype="float32", block_size=SIZE), model="test@1")
    with pytest.raises(LayoutMismatch, match=r"group 1 of layers: 4 layers with a window of 2 blocks.*of 4 blocks"):
        opened(spec)
    assert opened(spec, on_mismatch="reset").stats().blocks["disk"]["cached"] == 0


def test_a_directory_with_other_checksums_is_refused_by_their_number(tmp_path: Path) -> None:
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(200))
    pk.KVCache(SPEC, pk.Blocks(60), disk=disk, by_group=True).close()
    with pytest.raises(LayoutMismatch, match=r"group 0 of layers: .* 2 checksums each.*asked was: .* 1 checksums each"):
        pk.KVCache(SPEC, pk.Blocks(60), disk=dataclasses.replace(disk, shards=1), by_group=True)


def test_a_directory_that_keeps_all_tokens_is_not_taken_for_one_by_groups(tmp_path: Path) -> None:
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(100))
    pk.KVCache(SPEC, pk.Blocks(60), disk=disk).close()
    with pytest.raises(LayoutMismatch, match="keeps all tokens of every layer"):
        pk.KVCache(SPEC, pk.Blocks(60), disk=disk, by_group=True)


def test_a_disk_too_small_for_the_groups_is_refused_with_what_it_takes(opened: Callable[..., pk.KVCache]) -> None:
    with pytest.raises(InvalidArgument, match=r"give the disk .* or more"):
        opened(disk=1)


def test_memory_may_change_between_two_openings(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(device=60)
    serve(cache, 1)
    cache.close()
    assert serve(opened(device=333, host=90), 1)["disk"] == (LENGTH + 4) // SIZE * SIZE


def test_loading_that_takes_longer_than_computing_is_declined(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened()
    serve(cache, 1)
    cache.close()
    cache = opened()
    cache.observe_prefill(10_000_000, 0.001)
    cache._costs.observe_load(int(pk.Tier.DISK), 1 << 20, 10.0)
    assert sum(serve(cache, 1).values()) == 0
    disk = cache.stats().disk
    assert disk is not None
    assert disk["disk_hits_declined"] == (LENGTH + 4) // SIZE * SIZE
    assert serve(cache, 1)["device"] == (LENGTH + 4) // SIZE * SIZE


def test_bytes_per_day_count_the_pages_of_all_groups(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(write_budget="24KiB")  # an hour's share is one KiB: the first run only, and the debt comes first
    for number in range(NUM_PROMPTS):
        serve(cache, number)
    cache.close()
    disk = cache.stats().disk
    assert disk is not None
    assert disk["refused_by_write_budget"] > 0
    assert disk["blocks_written"] < NUM_PROMPTS * LENGTH // SIZE
