"""``pagedkv verify --repair`` on damaged stores for groups of layers.

Power failures, random damage. The tools and a tier that opens the store agree on the live slots; a repair buries only
useless ones.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv._core.chain_key import ROOT_PARENT
from pagedkv.tiers import DiskTier, Record
from pagedkv.tiers.disk.format import PAGE
from pagedkv.tiers.disk.lane import Lane, extent_bytes_of
from pagedkv.tiers.disk.segments import Segments
from pagedkv.tools.store import verify as verify_module
from pagedkv.tools.store.reader import StoreReader
from pagedkv.tools.store.scan import batches, settled
from tests.slices import one_in
from tests.tools.conftest import BLOCK_TOKENS, FINGERPRINT, TENANTS, Run, chain

# slots of 3, 4, 2 and 3 pages; the second has headers of two pages, the last three bytes of payload in its last page
LANES = (
    Lane(2 * PAGE, 2, 4, layers=3), Lane(4500, 500, 3, layers=4, window=2), Lane(1000, 1, 6, layers=5, window=5),
    Lane(PAGE + 3, 1, 4, layers=1, chunk=4),
)  # fmt: skip
EXTENTS, IN_FILE, LENGTH = 10, 4, 6
EXTENT_BYTES = extent_bytes_of(LANES, BLOCK_TOKENS)
STEPS, MOMENTS = 40, 4
FUTURE = 1 << 50
Key = tuple[int, bytes]  # lane and chain key


def content(lane: int, record: Record, version: int) -> NDArray[np.uint8]:
    seed = [lane, version, int.from_bytes(record.key[:8], "little")]
    return np.random.default_rng(seed).integers(0, 256, LANES[lane].page_bytes, np.uint8)


def open_tier(path: Path) -> DiskTier:
    return DiskTier(
        path, EXTENTS, LANES[0].page_bytes, fingerprint=FINGERPRINT, block_tokens=BLOCK_TOKENS, lanes=LANES,
        segment_bytes=IN_FILE * EXTENT_BYTES,
    )  # fmt: skip


@dataclass
class History:
    """A store in use, and copies of its files from some moments since it was opened."""

    path: Path
    rng: np.random.Generator
    versions: dict[bytes, int] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    moments: list[dict[str, bytes]] = field(default_factory=list)

    def use(self) -> None:
        """Write pages of all lanes into random extents, purge sometimes, end as if killed."""
        tier = open_tier(self.path)
        self.records = [record for name in TENANTS for record in chain(tier.secret, name, LENGTH)]
        self.moments.clear()
        for step in range(STEPS):
            extent, lane = int(self.rng.integers(EXTENTS)), int(self.rng.integers(len(LANES)))
            size = LANES[lane].per_extent
            slots = extent * size + self.rng.permutation(size)[: int(self.rng.integers(1, size + 1))]
            some = [self.records[i] for i in self.rng.permutation(len(self.records))[: slots.size]]
            pages = np.stack([content(lane, one, self.version(one)) for one in some])
            assert tier.write(slots, some, pages, np.arange(slots.size), lane=lane).all()
            if self.rng.random() < 0.05:
                namespace = self.records[0 if self.rng.random() < 0.5 else -1].namespace
                self.versions[namespace] = self.versions.get(namespace, 0) + 1
                tier.purge(namespace)
            if step % (STEPS // MOMENTS) == 0:
                self.moments.append(files_of(self.path))
        tier._store.close()

    def version(self, record: Record) -> int:
        return self.versions.get(record.namespace, 0)

    def lose_power(self) -> None:
        """Some pages of the files are those of an earlier moment."""
        share, earlier = self.rng.choice([0.0, 0.1, 0.5]), self.moments[int(self.rng.integers(MOMENTS))]
        for name, data in files_of(self.path).items():
            mixed = bytearray(data)
            for place in range(0, len(data), PAGE):
                if self.rng.random() < share:
                    mixed[place : place + PAGE] = earlier[name][place : place + PAGE]
            (self.path / name).write_bytes(mixed)

    def damage(self) -> None:
        """Bits, zeros, noise, pages in other places, headers of earlier moments and of none."""
        for _ in range(int(self.rng.integers(12))):
            lane = int(self.rng.integers(len(LANES)))
            name, place, slot = self.header(lane)
            file, kind = self.path / name, int(self.rng.integers(7))
            data = bytearray(file.read_bytes())
            if kind == 0:  # in a header
                data[place + int(self.rng.integers(280))] ^= 1 << int(self.rng.integers(8))
            elif kind == 1:  # anywhere
                data[int(self.rng.integers(len(data)))] ^= 1 << int(self.rng.integers(8))
            elif kind == 2:
                data[place : place + PAGE] = bytes(PAGE)
            elif kind == 3:
                size = int(self.rng.choice([512, PAGE]))
                data[place : place + size] = self.rng.bytes(size)
            elif kind == 4:  # over a page anywhere
                other, whence, _ = self.header(int(self.rng.integers(len(LANES))))
                there = (self.path / other).read_bytes()[whence : whence + PAGE]
                to = place if self.rng.random() < 0.5 else int(self.rng.integers(len(data) // PAGE)) * PAGE
                data[to : to + PAGE] = there
            elif kind == 5:
                header = self.from_the_future(lane, slot)
                data[place : place + len(header)] = header
            else:
                size = 2 * PAGE if lane == 1 else PAGE
                data[place : place + size] = self.moments[int(self.rng.integers(MOMENTS))][name][place : place + size]
            file.write_bytes(data)
        if self.rng.random() < 0.1:
            data = bytearray((self.path / "SUPER").read_bytes())
            data[int(self.rng.integers(2)) * PAGE + 100] ^= 1
            (self.path / "SUPER").write_bytes(data)

    def header(self, lane: int) -> tuple[str, int, int]:
        """The file and place of a slot, and the slot."""
        slot = int(self.rng.integers(EXTENTS * LANES[lane].per_extent))
        return *place_of(lane, slot), slot

    def from_the_future(self, lane: int, slot: int) -> bytes:
        """A header with a generation that no write has had."""
        record, sums = self.records[int(self.rng.integers(len(self.records)))], np.zeros(LANES[lane].shards, np.uint64)
        with StoreReader(self.path) as reader:
            return list(reader.lanes())[lane].form.header(slot, FUTURE + slot, record, sums, 0)

    def served(self) -> dict[Key, int]:
        """Slots that a tier serves which opens a copy of the store; their bytes are right."""
        found: dict[Key, int] = {}
        shutil.copytree(self.path, self.path.parent / "copy")
        with open_tier(self.path.parent / "copy") as tier:
            self.listed = [{each.block: each.record.key for each in tier.records(lane=i)} for i in range(len(LANES))]
            for lane in range(len(LANES)):
                stored = list(tier.records(lane=lane))
                rows = np.zeros((len(stored), LANES[lane].page_bytes), np.uint8)
                slots, records = [each.block for each in stored], [each.record for each in stored]
                hit = tier.read(slots, records, rows, np.arange(len(stored)), lane=lane)
                for i in np.flatnonzero(hit).tolist():
                    wanted = content(lane, records[i], self.version(records[i]))
                    assert (rows[i] == wanted).all(), "a hit with other bytes, or purged ones"
                    found[lane, records[i].key] = slots[i]
        shutil.rmtree(self.path.parent / "copy")
        return found

    def of_use(self, served: dict[Key, int]) -> dict[Key, int]:
        """Blocks of whole prefixes, and the pages of such blocks."""
        whole: set[bytes] = {ROOT_PARENT}
        for record in self.records:  # each behind its parent
            if record.parent in whole and (0, record.key) in served:
                whole.add(record.key)
        return {key: slot for key, slot in served.items() if key[1] in whole}


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.glob("data.*"))}


def place_of(lane: int, slot: int) -> tuple[str, int]:
    with_header = EXTENT_BYTES // LANES[lane].per_extent // PAGE * PAGE
    extent, index = divmod(slot, LANES[lane].per_extent)
    return f"data.{extent // IN_FILE:04d}", extent % IN_FILE * EXTENT_BYTES + index * with_header


def listed_by_tools(path: Path) -> list[dict[int, bytes]]:
    """By group, the slots that the tools call live; of several with one key the latest."""
    found = []
    with StoreReader(path) as reader:
        extents = settled(reader, lambda _: None)
        for view in reader.lanes():
            latest: dict[bytes, tuple[int, int]] = {}
            for batch in batches(view, extents):
                for i, record in batch.records.items():
                    this = int(batch.generations[i]), int(batch.slots[i])
                    latest[record.key] = max(this, latest.get(record.key, (0, -1)))
            found.append({slot: key for key, (_, slot) in sorted(latest.items(), key=lambda item: item[1][1])})
    return found


# Pages of an extent: lane 0 has slots at 0, 3, 6, 9; lane 1 at 0, 4, 8, and a header of slot 2 lies in 8 and 9.


def write(tier: DiskTier, lane: int, slots: list[int]) -> None:
    """Store the pages of a prefix, or of its first block where lane 0 has it."""
    records = chain(tier.secret, "a", len(slots))
    pages = np.stack([content(lane, one, 0) for one in records])
    assert tier.write(slots, records, pages, np.arange(len(slots)), lane=lane).all()


def pages_at(path: Path, first: int, count: int) -> bytes:
    with open(path / "data.0000", "rb") as file:
        file.seek(first * PAGE)
        return file.read(count * PAGE)


def put_back(path: Path, first: int, data: bytes) -> None:
    with open(path / "data.0000", "r+b") as file:
        file.seek(first * PAGE)
        file.write(data)


def test_the_sizes_are_those_that_the_test_says() -> None:
    assert [EXTENT_BYTES // lane.per_extent // PAGE for lane in LANES] == [3, 4, 2, 3]
    assert EXTENT_BYTES == 12 * PAGE


@pytest.mark.parametrize("seed", one_in(40, range(200)))
def test_a_repair_keeps_all_that_is_of_use_and_leaves_nothing_wrong(seed: int, tmp_path: Path, run: Run) -> None:
    history = History(tmp_path / "kv", np.random.default_rng(seed))
    for _ in range(2):
        history.use()
        history.lose_power()
        history.damage()
        before = history.served()
        assert listed_by_tools(history.path) == history.listed
        useful = history.of_use(before)
        was = files_of(history.path)
        ran = run("verify", history.path, "--repair", "--json")
        assert ran.code in (0, 1), ran.err
        found = run("verify", history.path, "--json").json
        assert found["ok"], (ran.json, found)
        assert not found["useless"], (ran.json, found)
        now = files_of(history.path)
        for (lane, _), slot in useful.items():
            name, place = place_of(lane, slot)
            end = place + place_of(lane, 1)[1]
            assert now[name][place:end] == was[name][place:end]
        after = history.served()
        assert useful.items() <= after.items()
        assert history.of_use(after) == after
        assert listed_by_tools(history.path) == history.listed


@pytest.mark.parametrize("seed", one_in(4, range(20)))
def test_use_and_crashes_alone_leave_nothing_wrong(seed: int, tmp_path: Path, run: Run) -> None:
    """Pages may begin amid a former owner's header, whose rest it finds later."""
    history = History(tmp_path / "kv", np.random.default_rng(seed))
    for _ in range(2):
        history.use()
        assert run("verify", history.path, "--json").json["wrong"] == {}


def test_headers_that_a_power_failure_brought_back_count_for_no_tool(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 1, [2])
        header = pages_at(path, 8, 2)
        write(tier, 0, [0, 1, 2, 3])
    put_back(path, 8, header)  # amid slot 2, and over the header of slot 3
    found = run("inspect", path, "--json").json
    assert found["slots"] | {"live": 2, "torn": 1, "empty": 37} == found["slots"]
    assert found["pages"] == [0, 0, 0]
    found = run("verify", path, "--json").json
    assert (found["wrong"], found["useless"]) == ({"torn": [2]}, {"taken of group 1": [2]})
    shutil.copytree(path, tmp_path / "copy")
    with open_tier(tmp_path / "copy") as tier:
        assert [[each.block for each in tier.records(lane=lane)] for lane in (0, 1)] == [[0, 1], []]
    assert run("verify", path, "--repair").code == 1
    with open_tier(path) as tier:
        assert [[each.block for each in tier.records(lane=lane)] for lane in (0, 1)] == [[0, 1], []]


def test_taken_pages_of_group_0_are_counted_by_inspect(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 0, [3])
        header = pages_at(path, 9, 1)
        write(tier, 1, [0])
    put_back(path, 9, header)
    found = run("inspect", path, "--json").json
    assert found["slots"] | {"live": 0, "taken": 1} == found["slots"]
    assert found["pages"] == [1, 0, 0]


def test_a_part_of_a_header_beside_a_good_page_of_another_group_stays(tmp_path: Path, run: Run) -> None:
    """A tombstone over all of it would lie in the page."""
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 1, [2])
        half = pages_at(path, 8, 1)
        write(tier, 0, [3])
    put_back(path, 8, half)
    whole = pages_at(path, 8, 4)
    for option in ([], ["--repair"]):
        assert run("verify", path, *option, "--json").json["wrong"] == {}
    assert pages_at(path, 8, 4) == whole


def test_damaged_headers_over_each_other_leave_no_doubt_after_a_repair(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 1, [2])
        half = pages_at(path, 8, 1)
        write(tier, 0, [3])
    put_back(path, 8, half)
    damaged = bytearray(pages_at(path, 9, 1))
    damaged[100] ^= 1
    put_back(path, 9, bytes(damaged))
    assert run("verify", path, "--repair", "--json").json["wrong"] == {"header": [3], "header of group 1": [2]}
    with open_tier(path) as tier:
        assert not any(slots._doubtful for slots in tier._lanes.slots)


def test_a_repair_looks_again_where_it_has_buried_the_last_page_of_an_extent(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 1, [2])
        half = pages_at(path, 8, 1)
        write(tier, 0, [3])
    put_back(path, 8, half)
    put_back(path, 11, bytes(PAGE))  # of the page's bytes
    found = run("verify", path, "--repair", "--json").json
    assert (found["wrong"], found["repaired"]) == (
        {"payload": [3]}, ["buried 1 of payload", "buried 1 of header of group 1"],
    )  # fmt: skip
    assert run("verify", path).code == 0


def test_an_extent_that_changes_hands_while_it_is_checked_is_not_wrong(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, look = tmp_path / "kv", verify_module.settled
    with open_tier(path) as tier:
        write(tier, 0, [0, 5])

        def meanwhile(*arguments: Any) -> Any:
            found = look(*arguments)
            write(tier, 2, [0])
            return found

        monkeypatch.setattr(verify_module, "settled", meanwhile)
        found = run("verify", path, "--json").json
    assert (found["wrong"], found["blocks"]) == ({}, 2)
    assert "taken of group 2" not in found["useless"]


def test_a_full_disk_is_said_once(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 0, [0])
    damaged = bytearray(pages_at(path, 0, 1))
    damaged[100] ^= 1
    put_back(path, 0, bytes(damaged))
    monkeypatch.setattr(Segments, "write_headers", lambda self, slots, headers: np.full(slots.size, -28, np.int64))
    found = run("verify", path, "--repair", "--json").json
    assert found["repaired"] == ["could not bury 1: No space left on device"]


def test_every_damaged_byte_of_a_header_is_found(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 1, [0])
    header = pages_at(path, 0, 2)
    for place in (*range(0, 320, 7), 4000, 5000, 2 * PAGE - 1):
        damaged = bytearray(header)
        damaged[place] ^= 4
        put_back(path, 0, bytes(damaged))
        found = run("verify", path, "--json").json["wrong"]
        assert list(found.values()) == [[0]], place
        assert set(found) <= {"header of group 1", "misplaced of group 1"}


def test_pages_of_no_use_are_named_with_their_group(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 0, [0])
        write(tier, 2, [6, 7])  # the second is of a block that group 0 lacks
        write(tier, 3, [8])
        forged = Record(bytes(32), ROOT_PARENT, bytes(32), np.zeros(BLOCK_TOKENS, np.int32))
        assert tier.write([9], [forged], np.zeros((1, LANES[3].page_bytes), np.uint8), [0], lane=3).all()
        old = pages_at(path, 24, 1)
        tier.invalidate([8], lane=3)
        write(tier, 3, [10])
    put_back(path, 24, old)  # its tombstone never reached the disk
    found = run("verify", path, "--repair", "--json").json
    assert found["wrong"] == {"wrong_key of group 3": [9]}
    assert found["useless"] == {"orphan of group 2": [7], "doubled of group 3": [8]}
    with open_tier(path) as tier:
        listed = [[each.block for each in tier.records(lane=lane)] for lane in range(4)]
    assert listed == [[0], [], [6], [10]]
