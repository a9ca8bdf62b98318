"""Ways to damage the small store.

Single flips, slots of other stores, older generations, swaps, trashed sectors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.tiers import Record
from pagedkv.tiers.disk.format import IDENTITY, IDENTITY_FIELDS, PAGE, Geometry, SlotFormat, sum_of
from tests.reliability import small_store as small
from tests.reliability.small_store import HEADER_BYTES, NUM_BLOCKS, SLOT_BYTES, Image, file_of, payload_of

PARTS = {"slot": (0, SLOT_BYTES), "header": (0, HEADER_BYTES), "payload": (HEADER_BYTES, SLOT_BYTES)}
SECTOR = 512
GEOMETRY = Geometry(NUM_BLOCKS, small.BLOCK_BYTES, small.BLOCK_TOKENS, small.SHARDS, small.SEGMENT_SLOTS)


@dataclass(frozen=True)
class Damage:
    """Bytes to be put into files of a closed or open store.

    Attributes
    ----------
    how : to find it again.
    pieces : (file, start, bytes).
    known : records that may lie in a slot because of it, besides the store's own.
    """

    how: str
    pieces: tuple[tuple[str, int, bytes], ...]
    known: tuple[Record, ...] = ()

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """(file, start, length) of each piece."""
        return [(name, start, len(data)) for name, start, data in self.pieces]

    @property
    def files(self) -> set[str]:
        """Files that it touches."""
        return {name for name, _, _ in self.places}

    @property
    def spoiled(self) -> set[int]:
        """Slots that it may cost."""
        return {slot for place in self.places for slot in small.slots_of(*place)}

    @property
    def identity(self) -> bool:
        """Whether it may cost the whole store: the KEY, or both copies of the superblock."""
        touched = [(start, start + length - 1) for name, start, length in self.places if name == "SUPER"]
        return "KEY" in self.files or {at // PAGE for ends in touched for at in ends} == {0, 1}


NOTHING = Damage("no damage", ())


def together(group: list[Damage]) -> Damage:
    """Several damages as one."""
    pieces = tuple(piece for one in group for piece in one.pieces)
    known = tuple(record for one in group for record in one.known)
    return Damage(" and ".join(one.how for one in group), pieces, known)


def at_least(count: int, groups: Iterable[list[Damage]]) -> Iterator[list[Damage]]:
    """Groups until `count` damages are reached."""
    for group in groups:
        if count <= 0:
            return
        yield group
        count -= len(group)


def flips(image: Image, bits: int, seed: int) -> Iterator[list[Damage]]:
    """Flip bits in every byte of every file.

    One seeded flip each (``bits=1``), or each of its eight bits.

    Flips in five slots come together: the sixth, each in turn, shows whether its neighbours are spared. So does one in
    the superblock, which has another copy.
    """
    choose = random.Random(seed)

    def flip(name: str, at: int, bit: int) -> Damage:
        mask = 1 << bit if bits == 8 else choose.choice((1 << choose.randrange(8), choose.randrange(1, 256)))
        return Damage(f"{name}[{at}] ^= {mask:#x}", ((name, at, bytes([image.files[name][at] ^ mask])),))

    slots = [file_of(slot) for slot in range(NUM_BLOCKS)]
    cells = ((name, start + at, bit) for bit in range(bits) for at in range(SLOT_BYTES) for name, start in slots)
    supers = (("SUPER", at, bit) for bit in range(bits) for at in range(len(image.files["SUPER"])))
    while some := list(islice(cells, NUM_BLOCKS - 1)):
        yield [flip(*cell) for cell in (*some, *islice(supers, 1))]
    for bit in range(bits):
        for at in range(len(image.files["KEY"])):
            yield [flip("KEY", at, bit)]


def placed(how: str, slot: int, content: bytes, part: str, known: tuple[Record, ...] = ()) -> Damage:
    """A slot's content, or only its header or payload, put into a slot."""
    name, start = file_of(slot)
    begin, end = PARTS[part]
    return Damage(f"{how}, {part} into slot {slot}", ((name, start + begin, content[begin:end]),), known)


def swaps(image: Image) -> Iterator[Damage]:
    """Swap slots, headers or payloads, or copy one over another.

    Within and between segments.
    """
    for first in range(NUM_BLOCKS):
        for second in range(NUM_BLOCKS):
            for part in PARTS if first != second else ():
                here = placed(f"slot {first} copied", second, image.slot(first), part)
                yield here
                if first < second:
                    there = placed("", first, image.slot(second), part)
                    yield Damage(f"slots {first} and {second} swapped, {part}", here.pieces + there.pieces)


def splices(folder: Path, records: list[Record]) -> Iterator[Damage]:
    """Put slots of two other stores in place.

    They hold other bytes under the same records, generations and places.
    """
    for name, changes in (("another store", {}), ("another fingerprint", {"fingerprint": bytes(32)})):
        path = folder / name
        for turn in (2, 3, 1):  # as often as the store under test
            with small.open_store(path, **changes) as tier:
                assert tier.write(small.ALL, records, small.payloads(records, turn), small.ALL).all()
        image = Image(path)
        for slot in range(NUM_BLOCKS):
            for part in PARTS:
                yield placed(f"slot {slot} of {name}", slot, image.slot(slot), part)
        for segment in ("data.0000", "data.0001"):
            yield Damage(f"{segment} of {name}", ((segment, 0, image.files[segment]),))
        yield Damage(f"SUPER of {name}", (("SUPER", 0, image.files["SUPER"]),))
        identity = (("SUPER", 0, image.files["SUPER"]), ("KEY", 0, image.files["KEY"]))
        yield Damage(f"SUPER and KEY of {name}", identity)
        image.close()


def forgeries(image: Image, records: list[Record]) -> Iterator[Damage]:
    """Forge slots that differ from the real one in one field of the header.

    Their sums are right, and they hold other bytes.
    """
    for slot, record in enumerate(records):
        found = identity_of(image.slot(slot))
        generation, epoch, uuid = (found[name] for name in ("generation", "epoch", "uuid"))
        form = SlotFormat(GEOMETRY, uuid, small.FINGERPRINT, epoch)
        content = payload_of(record, 1)
        forms = {
            "uuid": replace(form, uuid=bytes(16)),
            "fingerprint": replace(form, fingerprint=bytes(32)),
            "epoch": replace(form, epoch=epoch + 1),
            "earlier epoch": replace(form, epoch=epoch - 1),
        }
        for field, other in forms.items():
            yield placed(f"other {field}", slot, forged(other, slot, generation, record, content), "slot")
        elsewhere = (slot + 1) % NUM_BLOCKS
        yield placed("other slot number", slot, forged(form, elsewhere, generation, record, content), "slot")
        names: dict[str, Any] = {name: bytes(32) for name in ("key", "parent", "namespace", "extra")}
        for field, value in {**names, "tokens": record.tokens ^ 1}.items():
            other_name = replace(record, **{field: value})
            data = forged(form, slot, generation, other_name, content)
            yield placed(f"other {field}", slot, data, "slot", (other_name,))


def identity_of(slot: bytes) -> dict[str, Any]:
    """The fields of a slot's header by name."""
    return dict(zip(IDENTITY_FIELDS, IDENTITY.unpack_from(slot)))


def forged(form: SlotFormat, slot: int, generation: int, record: Record, content: Any) -> bytes:
    """A slot's bytes as the store would have written them."""
    seed = form.seed(generation, record)
    parts = enumerate(content.reshape(form.geometry.shards, -1))
    sums = np.array([sum_of(part, seed ^ shard) for shard, part in parts], np.uint64)
    header = form.header(slot, generation, record, sums, 0)
    return header.ljust(HEADER_BYTES, b"\0") + content.tobytes().ljust(SLOT_BYTES - HEADER_BYTES, b"\0")


def trashings(image: Image, count: int, seed: int) -> Iterator[Damage]:
    """1 to 8 random sectors of random files: noise, zeros, ones, or a sector from elsewhere."""
    choose = random.Random(seed)
    files = [name for name, data in image.files.items() if name != "KEY" for _ in range(len(data) // SECTOR)]
    for number in range(count):
        pieces = []
        for _ in range(choose.randint(1, 8)):
            name, source = choose.choice(files), choose.choice(files)
            at, other = (SECTOR * choose.randrange(len(image.files[file]) // SECTOR) for file in (name, source))
            noise = (choose.randbytes(SECTOR), bytes(SECTOR), b"\xff" * SECTOR)
            pieces.append((name, at, choose.choice((*noise, image.files[source][other : other + SECTOR]))))
        yield Damage(f"trashing {number} of seed {seed}", tuple(pieces))
