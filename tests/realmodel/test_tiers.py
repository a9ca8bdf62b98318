"""KV that left the device and returns the same.

Preempted, swapped, recomputed, on disk, and in another process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from examples.gemma_numpy.model import Gemma
from tests.realmodel.bed import COLD_TOLERANCE, STEPS, Bed, fill_device, kv_of

Open = Callable[..., pk.KVCache]
ROOT = Path(__file__).parents[2]
NAME, DONE = "shared_a", 3  # tokens generated when it is preempted
ROOM = 256  # tokens on the device: one request and a bit


def run_and_preempt(bed: Bed, cache: pk.KVCache) -> bytes:
    """A request is let go of in the middle of its generation; the KV it had."""
    with cache.sequence(bed.so_far(NAME)) as seq:
        bed.decode(cache, seq, NAME, count=DONE)
        return kv_of(seq, bed.whole(seq.num_computed))


def resume(bed: Bed, cache: pk.KVCache, before: bytes, tiers: set[str]) -> None:
    """Resume, and check that the KV comes from these tiers, bit for bit.

    Tokens and logits are as if the sequence never stopped.
    """
    with cache.sequence(bed.so_far(NAME, DONE)) as seq:
        found = {tier for tier, count in seq.hit_tokens.items() if count} - {"partial"}
        assert found == tiers
        assert sum(seq.hit_tokens[tier] for tier in tiers) == bed.whole(len(seq) - 1)
        assert kv_of(seq, bed.whole(len(seq) - 1)) == before
        bed.decode(cache, seq, NAME, start=DONE)


def test_preempted_and_swapped(bed: Bed, opened: Open) -> None:
    cache = opened(bed, ROOM, host=bed.blocks(4 * ROOM))
    before = run_and_preempt(bed, cache)
    fill_device(cache)
    resume(bed, cache, before, {"host"})
    assert cache.stats().moved_bytes["device_to_host"] >= len(before)


def test_preempted_and_still_there(bed: Bed, opened: Open) -> None:
    cache = opened(bed, ROOM)
    resume(bed, cache, run_and_preempt(bed, cache), {"device"})


def test_preempted_and_recomputed(bed: Bed, opened: Open) -> None:
    cache = opened(bed, ROOM)
    before = run_and_preempt(bed, cache)
    fill_device(cache)
    with cache.sequence(bed.so_far(NAME, DONE)) as seq:
        assert seq.num_computed == 0
        bed.decode(cache, seq, NAME, start=DONE)
        again = kv_of(seq, bed.whole(len(bed.so_far(NAME, DONE)) - 1))
    np.testing.assert_allclose(
        np.frombuffer(again, bed.spec.np_dtype), np.frombuffer(before, bed.spec.np_dtype), rtol=0, atol=COLD_TOLERANCE
    )


def disk(tmp_path: Path, bed: Bed, **options: Any) -> pk.Disk:
    return pk.Disk(str(tmp_path / "kv"), pk.Blocks(bed.blocks(4 * ROOM)), admission="all", **options)


def test_evicted_to_disk_and_reloaded(bed: Bed, opened: Open, tmp_path: Path) -> None:
    cache = opened(bed, ROOM, disk=disk(tmp_path, bed))
    before = run_and_preempt(bed, cache)
    fill_device(cache)
    resume(bed, cache, before, {"disk"})


def test_partly_in_host_memory_and_partly_on_disk(bed: Bed, opened: Open, tmp_path: Path) -> None:
    half = bed.whole(len(bed.so_far(NAME))) // bed.block_size // 2
    cache = opened(bed, ROOM, host=half, disk=disk(tmp_path, bed, write="reused"))
    before = run_and_preempt(bed, cache)
    fill_device(cache)
    resume(bed, cache, before, {"host", "disk"})


def test_a_process_that_is_killed_leaves_its_kv_to_the_next(bed: Bed, opened: Open, tmp_path: Path) -> None:
    order = {
        "gguf": str(bed.path), "model": bed.spec.model, "block_size": bed.block_size, "folder": str(tmp_path),
        "device": bed.blocks(ROOM), "disk": bed.blocks(4 * ROOM), "prompt": bed.so_far(NAME),
        "follow": bed.goldens[NAME].greedy[:DONE], "is_gemma": isinstance(bed.model, Gemma),
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.realmodel.first_life", json.dumps(order)],
        cwd=ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    before = (tmp_path / "kv.bin").read_bytes()
    resume(bed, opened(bed, ROOM, disk=disk(tmp_path, bed)), before, {"disk"})


def test_two_requests_that_do_not_fit_together_take_turns(bed: Bed, opened: Open) -> None:
    cache = opened(bed, ROOM, host=bed.blocks(4 * ROOM))
    first = cache.sequence(bed.so_far("shared_a"))
    bed.decode(cache, first, "shared_a", count=1)
    other = cache.sequence(bed.so_far("table")[: ROOM - 60])
    with pytest.raises(pk.OutOfBlocks), cache.step([other]) as step:
        bed.model.forward(step)
    first.release()
    with cache.step([other]) as step:
        bed.model.forward(step)
    other.release()
    with cache.sequence(bed.so_far("shared_a", 1)) as again:
        assert again.hit_tokens["host"] > 0
        bed.decode(cache, again, "shared_a", start=1, count=STEPS - 1)
