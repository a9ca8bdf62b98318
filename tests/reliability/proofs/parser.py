"""The parsers of superblocks and slot headers, against crafted bytes.

Accepted means equal.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument, PagedKVError
from pagedkv.tiers import Record
from pagedkv.tiers.disk.format import Geometry, SlotFormat
from pagedkv.tiers.disk.lane import Lane, first_geometry, pack_lanes
from pagedkv.tiers.disk.superblock import MAX_PURGES, Superblock, key_check, pack_super, parse_super
from tests.reliability import small_store as small
from tests.reliability.header_mutator import PAGE, SLOT_FIELDS, SUPER_FIELDS, Mutator, field, page_sum, same, spans
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.small_store import ALL, NUM_BLOCKS, Image

BATCH = 100  # headers parsed together, as a scan does
ONE_IN = 500  # pages are put into a directory that is opened
MEMORY, MEMORY_TO_OPEN = 256 << 10, 4 << 20  # bytes that a parse and an opening may take
UUID, EPOCH, GENERATION = b"u" * 16, 3, 77
RECORDS = [small.record_of(number) for number in range(NUM_BLOCKS)]
GEOMETRY = Geometry(NUM_BLOCKS, small.BLOCK_BYTES, small.BLOCK_TOKENS, small.SHARDS, small.SEGMENT_SLOTS)
LANES = (Lane(3 * PAGE, 2, 2, layers=3), Lane(1000, 1, 4, layers=5, window=2))
FORM = SlotFormat(GEOMETRY, UUID, small.FINGERPRINT, EPOCH)
SUMS = np.array([11, 22], np.uint64)
OURS = ("magic", "version", "state", "slot", "epoch", "uuid", "fingerprint", "n_tokens", "shards", "payload_bytes")
NAMES = ("generation", "key", "parent", "namespace", "extra", "tokens")
MAGIC = spans(SUPER_FIELDS, ("magic",))
ARE_OURS = spans(SLOT_FIELDS, OURS)
ARE_NAMED = spans(SLOT_FIELDS, (*OURS, *NAMES, "padding", "sums"))
REASONS = {None, "header", "misplaced", "stale", "identity", "tokens", "payload"}


def bounded(call: Callable[..., Any], limit: int, tally: Tally, how: str) -> Any:
    """The result of a call that must not take more memory than that."""
    tracemalloc.start()
    try:
        return call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak > limit:
            tally.fail(f"{how}: took {peak} bytes")


class Slots:
    """Headers of slots, parsed alone and together."""

    def __init__(self) -> None:
        self.valid = [FORM.header(slot, GENERATION, RECORDS[slot], SUMS, 0) for slot in range(NUM_BLOCKS)]
        assert all(FORM.parse(slot, page) for slot, page in enumerate(self.valid)), (
            "not even the real headers are taken"
        )
        self.mutators = [Mutator(page, SLOT_FIELDS) for page in self.valid]

    def check(self, choose: random.Random, count: int, tally: Tally) -> None:
        """Parse `count` mutated headers."""
        slots = [choose.randrange(NUM_BLOCKS) for _ in range(count)]
        made = [self.mutators[slot].mutate(choose, self._seed(choose, slot)) for slot in slots]
        sums = np.array([page_sum(page, slot) for slot, (page, _) in zip(slots, made)], np.uint64)
        headers = np.frombuffer(b"".join(page for page, _ in made), np.uint8).reshape(count, PAGE)
        live = FORM.live(np.array(slots, np.int64), headers, sums)
        for i, (slot, (page, how)) in enumerate(zip(slots, made)):
            valid, intact = self.valid[slot], field(page, SLOT_FIELDS, "sum") == sums[i]
            ours = intact and same(page, valid, ARE_OURS)
            if live[i] != ours:
                tally.fail(f"slot {slot}, {how}: taken as live {live[i]}, is {ours}")
            if live[i] and not _says(FORM.record(headers[i]), page):
                tally.fail(f"slot {slot}, {how}: read as {FORM.record(headers[i])}")
            if i % 8 == 0 and not _alike(FORM.parse(slot, page), live[i], page):
                tally.fail(f"slot {slot}, {how}: alone it is read as {FORM.parse(slot, page)}")
            reason = FORM.mismatch(slot, GENERATION, RECORDS[slot], memoryview(page), SUMS)
            right = intact and same(page, valid, ARE_NAMED)
            if (reason is None) != right or reason not in REASONS:
                tally.fail(f"slot {slot}, {how}: {reason}, although all is as expected: {right}")
            tally.add(f"header: {reason or 'accepted'}")
        for length in (0, 4, 223, PAGE - 1, PAGE + 1, 2 * PAGE):
            if FORM.parse(0, (self.valid[0] * 2)[:length]) is not None:
                tally.fail(f"{length} bytes are taken as a header")
        slot, (page, how) = slots[0], made[0]
        bounded(lambda: FORM.parse(slot, page), MEMORY, tally, how)

    @staticmethod
    def _seed(choose: random.Random, slot: int) -> int:
        return slot if choose.random() < 0.9 else choose.randrange(NUM_BLOCKS)


def _says(record: Record, page: bytes) -> bool:
    found = (record.key, record.parent, record.namespace, record.extra, record.tokens.tobytes())
    return found == tuple(field(page, SLOT_FIELDS, name) for name in NAMES[1:])


def _alike(parsed: tuple[int, Record] | None, live: bool, page: bytes) -> bool:
    if parsed is None:
        return not live
    return live and parsed[0] == field(page, SLOT_FIELDS, "generation") and _says(parsed[1], page)


class Supers:
    """Superblocks, parsed alone."""

    def __init__(self) -> None:
        state = Superblock(
            GEOMETRY, small.FINGERPRINT, UUID, seqno=5, epoch=EPOCH, clean=True, next_generation=1000, created_at=1,
            key_check=key_check(UUID, bytes(32)), purges=((b"p" * 32, 10),),
        )  # fmt: skip
        self.valid = pack_super(state)
        assert parse_super(self.valid) == state, "the real superblock is read as another"
        grouped = replace(state, geometry=first_geometry(6, LANES, 4, 1 << 20), major=2, lanes=LANES)
        assert parse_super(pack_super(grouped)) == grouped, "a superblock of groups of layers is read as another"
        self.mutators = [Mutator(self.valid, SUPER_FIELDS), Mutator(pack_super(grouped), SUPER_FIELDS)]

    def check(self, choose: random.Random, count: int, tally: Tally) -> None:
        """Parse `count` mutated superblocks."""
        for number in range(count):
            page, how = self.mutators[number % 4 == 3].mutate(choose, 0)
            cut = choose.randrange(2 * PAGE) if number % 16 == 0 else PAGE
            page = (page * 2)[:cut]
            whole = len(page) == PAGE
            intact = whole and field(page, SUPER_FIELDS, "sum") == page_sum(page, 0)
            intact = intact and same(page, self.valid, MAGIC)
            try:
                if number % BATCH:
                    found = parse_super(page)
                else:
                    found = bounded(lambda page=page: parse_super(page), MEMORY, tally, how)
            except InvalidArgument:
                if not intact or (_fits(page) and not _may_have_lanes(page)):
                    tally.fail(f"superblock, {how}: refused as contradictory, and is not")
                tally.add("superblock: contradictory")
                continue
            if (found is not None) != intact or (found is not None and not _stands_for(found, page)):
                tally.fail(f"superblock, {how}: read as {found}")
            tally.add("superblock: " + ("damaged" if found is None else "accepted"))


def _get(page: bytes, *names: str) -> list[Any]:
    return [field(page, SUPER_FIELDS, name) for name in names]


def _may_have_lanes(page: bytes) -> bool:
    """Whether it is of format 2. That its lanes contradict each other is left to the product."""
    return _get(page, "major", "incompat") == [2, 0]


def _known(page: bytes) -> bool:
    return _get(page, "major", "incompat") == [1, 0]


def _fits(page: bytes) -> bool:
    """Whether the counters, sizes, kinds and purges of a page agree with each other.

    The page is intact and of a known format.
    """
    if max(_get(page, "seqno", "epoch", "next_generation")) >= 2**62:
        return False
    if not _known(page):
        return True
    blocks, size, tokens, shards, slots = _get(
        page, "num_blocks", "block_bytes", "block_tokens", "shards", "segment_slots"
    )
    if min(blocks, size, tokens, shards, slots) < 1 or size % shards or blocks >= 2**31:
        return False
    header = -(-(224 + 4 * tokens + 40 + 8 * (shards + 1)) // PAGE) * PAGE
    slot = header + -(-size // PAGE) * PAGE
    kinds = _get(page, "endian", "token_bytes", "key_hash", "sum_kind")
    if _get(page, "header_bytes", "slot_bytes") != [header, slot] or kinds != [0x01020304, 4, 1, 1]:
        return False
    purges = _purges(page)
    return (
        slots * slot < 2**62
        and purges is not None
        and len(dict(purges)) == len(purges)
        and all(barrier <= _get(page, "next_generation")[0] for _, barrier in purges)
    )


def _purges(page: bytes) -> list[tuple[bytes, int]] | None:
    (count,) = _get(page, "num_purges")
    if count > MAX_PURGES:
        return None
    starts = range(188, 188 + 40 * count, 40)
    return [(page[at : at + 32], int.from_bytes(page[at + 32 : at + 40], "little")) for at in starts]


def _stands_for(found: Superblock, page: bytes) -> bool:
    names = ("fingerprint", "uuid", "seqno", "epoch", "next_generation", "created_at", "key_check", "major", "incompat")
    right = [getattr(found, name) for name in names] == _get(page, *names)
    if _known(page):
        sizes = ("num_blocks", "block_bytes", "block_tokens", "shards", "segment_slots")
        right = right and [getattr(found.geometry, name) for name in sizes] == _get(page, *sizes)
        right = right and _fits(page) and list(found.purges) == _purges(page)
    if _may_have_lanes(page):
        right = right and bool(found.lanes) and page[188:].startswith(pack_lanes(found.lanes))
        sizes = ("num_blocks", "block_bytes", "block_tokens", "shards", "segment_slots")
        right = right and [getattr(found.geometry, name) for name in sizes] == _get(page, *sizes)
    return right and bool(found.lanes) == _may_have_lanes(page)


class Directories:
    """A whole store with a mutated superblock or slot header in it.

    The proof opens, reads, writes and closes it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kv"
        small.fill(self.path, RECORDS)
        self.image = Image(self.path)
        self.right = small.payloads(RECORDS)

    def check(self, choose: random.Random, tally: Tally) -> None:
        """One opening."""
        if choose.random() < 0.5:
            source = self.image.files["SUPER"]
            copies = [Mutator(source[at : at + PAGE], SUPER_FIELDS) for at in (0, PAGE)]
            page, how = max(copies, key=lambda one: field(one.page, SUPER_FIELDS, "seqno")).mutate(choose, 0, 1.0)
            self.image.write("SUPER", 0, page * 2)
        else:
            slot = choose.randrange(NUM_BLOCKS)
            page, how = Mutator(self.image.slot(slot)[:PAGE], SLOT_FIELDS).mutate(choose, slot, 1.0)
            self.image.write(small.file_of(slot)[0], small.file_of(slot)[1], page)
        try:
            bounded(lambda: self._use(how, tally), MEMORY_TO_OPEN, tally, how)
        except PagedKVError:
            tally.add("directory: refused")
        except Exception as problem:
            tally.fail(f"a directory with {how}: {problem!r}")
        self.image.restore()

    def _use(self, how: str, tally: Tally) -> None:
        found = np.empty_like(self.right)
        with small.open_store(self.path) as tier:
            tally.add("directory: opened")
            for stored in tier.records():
                tier.read([stored.block], [stored.record], found, [0])
            for written in (False, True):
                hit = tier.read(ALL, RECORDS, found, ALL)
                if (found[hit] != self.right[hit]).any():
                    tally.fail(f"a directory with {how}: wrong bytes served")
                tally.hits += int(hit.sum())
                if not written and not tier.write(ALL, RECORDS, self.right, ALL).all():
                    tally.add("directory: takes no writes")


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Run pages: two of three are slot headers, the others superblocks.

    A directory holds one in `ONE_IN`.
    """
    tally, choose = Tally(), random.Random(seed)
    slots, supers = Slots(), Supers()
    with small.quiet(), small.scratch() as folder:
        directories = Directories(folder)
        while tally.count < count:
            slots.check(choose, 2 * BATCH, tally)
            supers.check(choose, BATCH, tally)
            for _ in range(max(3 * BATCH // ONE_IN, 1)):
                directories.check(choose, tally)
            tally.count += 3 * BATCH + 1
            tick(3 * BATCH + 1)
    return tally


PROOF = Proof(
    claim="superblocks and slot headers with fields set to anything and their sums repaired: accepted only if every "
    "identity field is the expected one, nothing but documented errors, bounded memory",
    unit="parses",
    quick=200_000,
    full=5_000_000,
    run=run,
)
