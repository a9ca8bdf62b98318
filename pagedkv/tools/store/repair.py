"""``pagedkv verify --repair``: tombstones over damaged or useless blocks.

Runs under the store's own lock.

A cache does without any of this: a wrong block is a counted miss. A repair gives the slots back and makes the next
check clean. It never changes a block that is right, and never makes one out of bytes that are not.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.tiers.disk.store import Store
from pagedkv.tools.store.reader import StoreReader
from pagedkv.tools.store.scan import DAMAGED, USELESS, Tick, batches, look_at, settled
from pagedkv.tools.store.verify import Verdict, named, verify

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
    g = state.geometry
    slots, size = (g.extent_slots, g.extent_bytes) if state.lanes else (1, g.slot_bytes)  # of one that the store counts
    store = Store(
        path, g.num_blocks // slots, g.block_bytes, fingerprint=state.fingerprint, block_tokens=g.block_tokens,
        shards=g.shards, segment_bytes=g.segment_slots // slots * size, read_path="pread", page_cache="keep",
        on_mismatch="refuse", network_fs=True, lanes=state.lanes,
    )  # fmt: skip
    try:
        if store.never_writes:
            raise TierError(f"{path} cannot be repaired: {store.never_writes}")
        with StoreReader(path) as reader:
            verdict = verify(reader, tick)
            verdict.problems = problems  # opening the store has rewritten both copies of its superblock
            done = [f"rewrote {problem.detail.removesuffix(' is damaged')}" for problem in problems]
            views = list(reader.lanes())
            reasons = [verdict.reasons_of(view.lane) for view in views]
            done += _bury(store, views, reasons)
            if state.lanes:
                done += _bury(store, views, _left_over(reader, reasons))
            verdict.repaired = done
        store.files.sync()
        store.update(clean=store.was_clean, next_generation=store.first_generation)
    except OSError as problem:
        raise TierError(f"{path} could not be repaired to the end: {problem.strerror}") from problem
    finally:
        store.close()
    return verdict


def _left_over(reader: StoreReader, known: list[dict[int, str]]) -> list[dict[int, str]]:
    """Why further headers are useless after a repair emptied their extents, by group and slot."""
    extents = settled(reader, lambda _: None)
    return [
        {
            int(slot): named(state, view.lane)
            for batch in batches(view, extents)
            for slot, state in zip(batch.slots, batch.states)
            if state in DAMAGED + USELESS and int(slot) not in known[view.lane]
        }
        for view in reader.lanes()
    ]


def _bury(store: Store, views: list[StoreReader], reasons: list[dict[int, str]]) -> list[str]:
    """Write tombstones over slots, given by group with their reasons; return the repairs.

    Headers of several groups may lie over each other. They are written from the last place to the first, so that a
    tombstone lies whole where its slot begins, or else there is none of its group.
    """
    places = []
    for view, known in zip(views, reasons):
        found = np.array(sorted(known), np.int32)
        segments, offsets = view.form.geometry.places(found)
        places += list(zip(segments.tolist(), offsets.tolist(), [view.lane] * found.size, found.tolist(), strict=True))
    outcomes: dict[tuple[int, int], int] = {}
    for lane, group in itertools.groupby(sorted(places, reverse=True), key=lambda place: place[2]):
        slots = np.array([slot for *_, slot in group], np.int32)
        for first in range(0, slots.size, SLOTS_AT_ONCE):
            some = slots[first : first + SLOTS_AT_ONCE]
            written = store.segments[lane].write_headers(some, _tombstones(views[lane], some))
            outcomes.update(((lane, slot), done) for slot, done in zip(some.tolist(), written.tolist()))
    buried: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for (lane, slot), outcome in sorted(outcomes.items()):
        if outcome < 0:
            failed[os.strerror(-outcome)] += 1
        else:
            buried[reasons[lane][slot]] += 1
    done = [f"buried {count:,} of {reason}" for reason, count in buried.items()]
    return done + [f"could not bury {count:,}: {why}" for why, count in failed.items()]


def _tombstones(view: StoreReader, slots: NDArray[np.int32]) -> NDArray[np.uint8]:
    seen = look_at(view, None, slots)
    stones = [
        view.form.tombstone(int(slot), int(generation) if state not in DAMAGED else UNKNOWN)
        for slot, generation, state in zip(slots, seen.generations, seen.states)
    ]
    return np.frombuffer(b"".join(stones), np.uint8).reshape(slots.size, -1)
