"""``pagedkv verify --repair``: tombstones over damaged or useless blocks.

Runs under the store's own lock.

A cache does without any of this: a wrong block is a counted miss. A repair gives the slots back and makes the next
check clean. It never changes a block that is right, and never makes one out of bytes that are not.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np

from pagedkv.errors import TierError
from pagedkv.tiers.disk.store import Store
from pagedkv.tools.store.reader import StoreReader
from pagedkv.tools.store.scan import DAMAGED, Tick, look_at
from pagedkv.tools.store.verify import Verdict, verify

SLOTS_AT_ONCE = 1024
UNKNOWN = 0  # generation of what lay in a slot whose header cannot be trusted


def repair(path: str, tick: Tick) -> Verdict:
    """Check a store that no other process has open, and write tombstones over damaged blocks.

    Returns
    -------
    The mistakes from before; `Verdict.repaired` lists the repairs.

    Raises
    ------
    TierError, LayoutMismatch
        The directory cannot be opened for writing as a tier would (locked, on a read-only mount, a file missing):
        nothing was changed.
    """
    with StoreReader(path) as reader:
        state, problems = reader.superblock, reader.problems
    if state.lanes:
        raise TierError(
            f"{path} is a store for groups of layers, which is not repaired yet: a cache over it frees bad blocks"
        )
    g = state.geometry
    store = Store(
        path, g.num_blocks, g.block_bytes, fingerprint=state.fingerprint, block_tokens=g.block_tokens, shards=g.shards,
        segment_bytes=g.segment_slots * g.slot_bytes, read_path="pread", page_cache="keep", on_mismatch="refuse",
        network_fs=True,
    )  # fmt: skip
    try:
        if store.never_writes:
            raise TierError(f"{path} cannot be repaired: {store.never_writes}")
        with StoreReader(path) as reader:
            verdict = verify(reader, tick)
            verdict.problems = problems  # opening the store has rewritten both copies of its superblock
            done = [f"rewrote {problem.detail.removesuffix(' is damaged')}" for problem in problems]
            verdict.repaired = [*done, *_bury(store, reader, verdict)]
        store.files.sync()
        store.update(clean=store.was_clean, next_generation=store.first_generation)
    except OSError as problem:
        raise TierError(f"{path} could not be repaired to the end: {problem.strerror}") from problem
    finally:
        store.close()
    return verdict


def _bury(store: Store, reader: StoreReader, verdict: Verdict) -> list[str]:
    """Write tombstones over every slot that the verdict names; return the repairs, in words."""
    reasons = {
        slot: reason for found in (verdict.wrong, verdict.useless) for reason, slots in found.items() for slot in slots
    }
    buried: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    slots = np.array(sorted(reasons), np.int32)
    for first in range(0, slots.size, SLOTS_AT_ONCE):
        some = slots[first : first + SLOTS_AT_ONCE]
        seen = look_at(reader, some)
        stones = [
            reader.form.tombstone(int(slot), int(generation) if state not in DAMAGED else UNKNOWN)
            for slot, generation, state in zip(some, seen.generations, seen.states)
        ]
        headers = np.frombuffer(b"".join(stones), np.uint8).reshape(some.size, -1)
        for slot, outcome in zip(some.tolist(), store.segments[0].write_headers(some, headers).tolist()):
            if outcome < 0:
                failed[os.strerror(-outcome)] += 1
            else:
                buried[reasons[slot]] += 1
    done = [f"buried {count:,} of {reason}" for reason, count in buried.items()]
    return done + [f"could not bury {count:,}: {why}" for why, count in failed.items()]
