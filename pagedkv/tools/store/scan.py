"""Reads every header of a store in batches, classifies it, and finds reachable blocks.

A slot is live if a tier that opens the directory would take it for a block. The other states come from ordinary work
(`ORDINARY`) or are damage (`DAMAGED`): bytes that no tier wrote there. In a store for groups of layers, `settle` says
which group has an extent, as it does when a tier opens the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.chain_key import ROOT_PARENT, chain_key
from pagedkv.tiers.base import Record
from pagedkv.tiers.disk.format import RECORD_VERSION, SLOT_MAGIC, SUM, TOMBSTONE, fields_of, sealed, written_at
from pagedkv.tiers.disk.lane import lane_fingerprint
from pagedkv.tiers.disk.settle import NO_LANE, Settlement, settle
from pagedkv.tools.store.reader import StoreReader

BATCH_BYTES = 8 << 20  # of headers read by one call

EMPTY = "empty"  # never written, or another group of layers has its pages there
TAKEN, TORN = "taken", "torn"  # in stores for groups: the header, or a part of the page, is of a former owner's write
USELESS = ("purged", "stale", TAKEN)
ORDINARY = ("live", "tombstone", EMPTY, *USELESS)
LOST = "lost"  # behind the end of a file, or in one that cannot be read; never looked at one by one
DAMAGED = ("header", "misplaced", "generation", "short", "io_error", TORN)  # generation: one that was never given

Tick = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive slots.

    Attributes
    ----------
    slots : int32 [n]
    states : n of `ORDINARY` and `DAMAGED`
    headers : uint8 [n, header_bytes]
    generations, written : uint64 [n], from the headers; of live slots they are true.
    records : by index into the batch, of the live slots.
    """

    slots: NDArray[np.int32]
    states: list[str]
    headers: NDArray[np.uint8]
    generations: NDArray[np.uint64]
    written: NDArray[np.uint64]
    records: dict[int, Record]


def settled(reader: StoreReader, tick: Tick) -> Settlement | None:
    """Which group has each extent, from all headers; None in a store whose slots are all alike.

    `tick` is called with the bytes read.
    """
    if not reader.superblock.lanes:
        return None
    slots, generations, sizes = [], [], []
    for view in reader.lanes():
        own, given = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        for some in _parts(view):
            headers, outcomes, sums = view.headers(some)
            live = view.form.live(some.astype(np.int64), headers, sums) & (outcomes == headers.shape[1])
            own.append(some[live].astype(np.int64))
            given.append(fields_of(headers[live])["generation"].astype(np.uint64))
            tick(headers.nbytes)
        slots.append(np.concatenate(own))
        generations.append(np.concatenate(given))
        sizes.append(view.form.geometry)
    return settle(slots, generations, sizes, reader.superblock.next_generation)


def batches(reader: StoreReader, extents: Settlement | None, slots_each: int = 0) -> Iterator[Batch]:
    """All slots that are not lost, in order, `slots_each` at a time.

    0 means as many as suits reading headers alone. `extents` is what `settled` returned.
    """
    return (look_at(reader, extents, slots) for slots in _parts(reader, slots_each))


def _parts(reader: StoreReader, slots_each: int = 0) -> Iterator[NDArray[np.int32]]:
    g = reader.form.geometry
    step = slots_each or max(1, BATCH_BYTES // g.header_bytes)
    for segment, readable in enumerate(reader.readable.tolist()):
        begin = segment * g.segment_slots
        for first in range(begin, begin + readable, step):
            yield np.arange(first, min(first + step, begin + readable), dtype=np.int32)


def look_at(reader: StoreReader, extents: Settlement | None, slots: NDArray[np.int32]) -> Batch:
    """The headers of some slots, read now."""
    form, barriers = reader.form, dict(reader.superblock.purges)
    headers, outcomes, sums = reader.headers(slots)
    generations = fields_of(headers)["generation"].astype(np.uint64)
    whole = outcomes == headers.shape[1]
    live = form.live(slots.astype(np.int64), headers, sums) & whole
    records = {int(i): form.record(headers[i]) for i in np.flatnonzero(live)}
    is_others, is_torn, is_new = _places(reader, extents, slots, generations)
    states = ["live"] * slots.size
    for i in np.flatnonzero(~live).tolist():
        if not whole[i]:
            states[i] = "io_error" if outcomes[i] < 0 else "short"
        else:
            states[i] = _not_live(reader, int(slots[i]), headers[i], int(sums[i]))
        if is_others[i] and states[i] != "tombstone":
            states[i] = EMPTY
    for i, record in list(records.items()):
        if generations[i] >= reader.superblock.next_generation:
            states[i] = "generation"
        elif generations[i] < barriers.get(record.namespace, 0):
            states[i] = "purged"
        elif is_others[i] and not is_new[i]:
            states[i] = TAKEN
        elif is_torn[i] and not is_new[i]:
            states[i] = TORN
        else:
            continue
        del records[i]
    return Batch(slots, states, headers, generations, written_at(headers, form.geometry), records)


def _places(
    reader: StoreReader, extents: Settlement | None, slots: NDArray[np.int32], generations: NDArray[np.uint64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Which of n slots lie in another group's extent, have a broken page, or are new.

    A live header newer than all in its extent was written since `settled` looked, by the group that has the extent now.
    """
    none = np.zeros(slots.size, np.bool_)
    if extents is None:
        return none, none, none
    where = slots // reader.form.geometry.extent_slots
    is_others = (extents.owners[where] != reader.lane) & (extents.owners[where] != NO_LANE)
    return is_others, np.isin(slots, extents.torn[reader.lane]), generations > extents.latest[where]


def _not_live(reader: StoreReader, slot: int, header: NDArray[np.uint8], header_sum: int) -> str:
    """State of a header that was read whole and is not a live one."""
    found, form = fields_of(header[None])[0], reader.form
    if not header.any() or (form.geometry.extent_slots and not _is_of_group(reader, found)):
        return EMPTY
    own_slot = int(found["slot"])
    (stored,) = SUM.unpack(header[-SUM.size :].tobytes())
    if stored != header_sum and form.geometry.extent_slots and not any(found["key"].tobytes()):
        return "tombstone"  # the rest of one, since another group has had the extent
    if stored != header_sum:
        elsewhere = own_slot != slot and sealed(header.tobytes(), own_slot)
        return "misplaced" if elsewhere else "header"
    if found["magic"].tobytes() != SLOT_MAGIC or found["version"] != RECORD_VERSION:
        return "header"
    if own_slot != slot or found["uuid"].tobytes() != form.uuid or found["fingerprint"].tobytes() != form.fingerprint:
        return "misplaced"
    if found["state"] == TOMBSTONE:
        return "tombstone"
    return "stale" if found["epoch"] != form.epoch else "header"


def _is_of_group(reader: StoreReader, header: np.void) -> bool:
    """Whether this was a header of the reader's group, not another group's page or header."""
    fingerprint, form, state = header["fingerprint"].tobytes(), reader.form, reader.superblock
    if fingerprint == form.fingerprint:
        return True
    sizes = int(header["payload_bytes"]), int(header["shards"])
    if header["magic"].tobytes() != SLOT_MAGIC or sizes != (form.geometry.block_bytes, form.geometry.shards):
        return False
    return fingerprint not in {lane_fingerprint(state.fingerprint, lane) for lane in range(len(state.lanes))}


@dataclass
class Chains:
    """The live blocks as prefixes: each names the block before it by its key.

    Attributes
    ----------
    whole : blocks whose prefix is there from its beginning.
    leaves : whole blocks that no other whole block follows: as many as prefixes.
    orphans : slots that never match anything, because a block before them is not there.
    doubled : slots with the same key as a later one, which is the one that counts.
    wrong_key : slots whose key is not that of their content.
    keys : of the whole blocks.
    """

    whole: int = 0
    leaves: int = 0
    orphans: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    wrong_key: list[int] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)


class ChainBuilder:
    """Sorts live blocks into prefixes, as a cache that opens the store does.

    Needs the store's secret.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._found = Chains()
        self._slots: dict[bytes, tuple[int, int]] = {}  # key -> generation and slot of its latest copy
        self._before: dict[bytes, tuple[bytes, bytes]] = {}  # key -> parent and namespace

    def add(self, slot: int, generation: int, record: Record) -> None:
        """One live block."""
        if record.key != chain_key(self._secret, record.namespace, record.parent, record.tokens):
            self._found.wrong_key.append(slot)
            return
        this, other = (generation, slot), self._slots.get(record.key, (0, -1))
        self._slots[record.key] = max(this, other)
        self._before[record.key] = record.parent, record.namespace
        if other[1] >= 0:
            self._found.doubled.append(min(this, other)[1])

    def result(self) -> Chains:
        """What became of all blocks added."""
        found = self._found
        reached = {ROOT_PARENT: True, b"": False}
        for start in self._before:
            path, key = [], start
            while key not in reached:
                path.append(key)
                reached[key] = False  # until known; also ends a circle
                key = self._parent(key)
            reached.update(dict.fromkeys(path, reached[key]))
        followed = {self._parent(key) for key in self._before if reached[key]}
        found.keys = {key for key in self._before if reached[key]}
        found.whole = len(found.keys)
        found.leaves = sum(reached[key] and key not in followed for key in self._before)
        found.orphans = sorted(slot for key, (_, slot) in self._slots.items() if not reached[key])
        found.doubled.sort()
        return found

    def pages(self, spine: Chains) -> Chains:
        """The same of a short group's pages: whole are those of whole blocks of group 0."""
        found = self._found
        found.keys = self._slots.keys() & spine.keys
        found.whole = len(found.keys)
        found.orphans = sorted(slot for key, (_, slot) in self._slots.items() if key not in found.keys)
        found.doubled.sort()
        return found

    def _parent(self, key: bytes) -> bytes:
        """Key of the block before, or ``b""`` if that is not there, or another namespace's."""
        parent, namespace = self._before[key]
        known = parent == ROOT_PARENT or self._before.get(parent, (b"", b""))[1] == namespace
        return parent if known else b""
