"""Damaged bytes: a hit is the right bytes.

Whatever is flipped, spliced, replayed, swapped or trashed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from pathlib import Path

import numpy as np

from pagedkv.errors import PagedKVError
from pagedkv.tiers import DiskTier
from tests.reliability import damage
from tests.reliability import group_life as groups
from tests.reliability import small_store as small
from tests.reliability.damage import Damage
from tests.reliability.group_damage import damage_by_groups
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.small_store import ALL, NUM_BLOCKS, SLOT_BYTES, Image, payloads

BYTES = NUM_BLOCKS * SLOT_BYTES + 2 * 4096 + 32  # data, SUPER, KEY
RECORDS = [small.record_of(number) for number in range(NUM_BLOCKS)]
OTHERS = [small.record_of(100 + number) for number in range(NUM_BLOCKS)]
SWAPS, SPLICES, FORGERIES, REPLAYS = 135, 2 * 22, 60, 36
REASONS = ("header", "identity", "misplaced", "payload", "stale", "tokens")
BY_GROUP = 0.5  # share of the random damage: that to caches over groups of layers
STRUCTURED = SWAPS + SPLICES + FORGERIES + REPLAYS


class Bench:
    """The store under test.

    Each slot was written three times: as itself with older bytes, as another, as itself.
    """

    def __init__(self, folder: Path, tally: Tally) -> None:
        self.path, self.tally = folder / "kv", tally
        self.older: list[tuple[str, list[bytes]]] = []
        for label, records, turn in (("itself", RECORDS, 2), ("another", OTHERS, 3), ("", RECORDS, 0)):
            with small.open_store(self.path) as tier:
                assert tier.write(ALL, records, payloads(records, turn), ALL).all()
            image = Image(self.path)
            if label:
                self.older.append((label, [image.slot(slot) for slot in range(NUM_BLOCKS)]))
                image.close()
        self.image = image
        self.right = {turn: payloads(RECORDS, turn) for turn in (0, 2)}

    def replays(self) -> Iterator[Damage]:
        """What lay in a slot before: whole, or only header or payload."""
        for label, slots in self.older:
            for slot, content in enumerate(slots):
                for part in damage.PARTS:
                    known = (OTHERS[slot],) if label == "another" else ()
                    yield damage.placed(f"replay as {label}", slot, content, part, known)

    def structured(self, folder: Path) -> Iterator[Damage]:
        """Everything but flips and trashings."""
        yield from chain(
            damage.swaps(self.image), damage.splices(folder, RECORDS), damage.forgeries(self.image, RECORDS),
            self.replays(),
        )  # fmt: skip

    def run(self, groups: list[list[Damage]], read_path: str, tick: Tick) -> None:
        """Do each group's damage under an open tier and undo it; then to the closed store.

        After each damage to the closed store, open it.
        """
        together = [damage.together(group) for group in groups]
        with small.open_store(self.path, read_path=read_path) as tier:
            self._judge(tier, damage.NOTHING, live=True)
            for one in together:
                if one.spoiled:
                    self._do(one)
                    self._judge(tier, one, live=True)
                    self.image.restore(*one.places)
            for reason, count in tier.stats().misses.items():
                self.tally.add(f"missed: {reason}", count)
        self.image.restore()
        for group, one in zip(groups, together):
            self._do(one)
            self._reopen(one, read_path)
            self.image.restore(*one.places, ("SUPER", 0, len(self.image.files["SUPER"])))
            for slot in one.spoiled:
                name, start = small.file_of(slot)
                self.image.restore((name, start, SLOT_BYTES))  # an opening may write a tombstone
            self.tally.count += len(group)
            tick(len(group))

    def _do(self, one: Damage) -> None:
        for piece in one.pieces:
            self.image.write(*piece)

    def _reopen(self, one: Damage, read_path: str) -> None:
        try:
            with small.open_store(self.path, read_path=read_path) as tier:
                for found in tier.records():
                    if found.record not in (RECORDS[found.block], *one.known):
                        self.tally.fail(f"{one.how}: block {found.block} has a name that was never given to it")
                self._judge(tier, one, live=False)
        except PagedKVError:
            self.tally.add("refused to open")
            if not one.identity:
                self.tally.fail(f"{one.how}: the whole store was refused")
        else:
            if one.files == {"KEY"}:
                self.tally.fail(f"{one.how}: another KEY was not noticed")

    def _judge(self, tier: DiskTier, one: Damage, *, live: bool) -> None:
        """Read everything under its right name.

        What is served must be right; what is not served must have been damaged.
        """
        found = np.empty_like(self.right[0])
        hit = tier.read(ALL, RECORDS, found, ALL)
        turns = (0,) if live else (0, 2)  # before the opening no tier knew which generation is the latest
        right = np.logical_or.reduce([(found == self.right[turn]).all(1) for turn in turns])
        where = "under an open tier" if live else "before opening"
        if (hit & ~right).any():
            self.tally.fail(f"{one.how}, {where}: wrong bytes from slots {np.flatnonzero(hit & ~right).tolist()}")
        lost = set(np.flatnonzero(~hit).tolist()) - one.spoiled
        if lost and not one.identity:
            self.tally.fail(f"{one.how}, {where}: cost the slots {sorted(lost)} as well")
        self.tally.hits += int(hit.sum())


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Run the structured damage, flips of every byte, then trashed sectors.

    Every bit is flipped where `count` allows it.
    """
    tally = Tally()
    with small.quiet(), small.scratch() as folder:
        bench = Bench(folder, tally)
        bits = 8 if count >= STRUCTURED + 8 * BYTES else 1
        by_group = round(BY_GROUP * max(0, count - STRUCTURED - bits * BYTES))
        damage_by_groups(folder, by_group, seed, tally, tick)
        flips = damage.flips(bench.image, bits, seed)
        alone = ([one] for one in bench.structured(folder))
        trashed = ([one] for one in damage.trashings(bench.image, count, seed))
        todo = damage.at_least(count - by_group, chain(alone, flips, trashed))
        paths = cycle(("pread", "mapping"))
        while some := list(islice(todo, 500)):
            bench.run(some, next(paths), tick)
    tally.require(*(f"missed: {reason}" for reason in REASONS), "refused to open")
    if by_group:
        tally.require(groups.HITS, "missed by groups: payload", "damages by groups: earlier")
    return tally


PROOF = Proof(
    claim="bits and bytes flipped in every file of a store, slots spliced, replayed, swapped, sectors trashed, also "
    "under caches over groups of layers: a hit is the right bytes, and damage in a slot costs that slot alone",
    unit="damages",
    quick=STRUCTURED + BYTES + 200,
    full=STRUCTURED + 8 * BYTES + 10_000,
    run=run,
)
