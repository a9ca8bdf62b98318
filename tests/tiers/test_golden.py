"""This version opens stores written by released versions, block for block.

It refuses what it cannot know.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import LayoutMismatch
from pagedkv.tiers import DiskTier
from pagedkv.tiers.disk.format import PAGE, sum_of
from pagedkv.tiers.disk.superblock import parse_super

from .golden.make import GOLDEN, Golden, unpack

MAJOR, MINOR, ENDIAN, INCOMPAT, COMPAT = (8, "H"), (10, "H"), (16, "I"), (20, "Q"), (28, "Q")  # in a superblock
HEADER_BYTES, SLOT_BYTES, TOKEN_BYTES, KEY_HASH, SUM_KIND = (116, "Q"), (124, "Q"), (148, "B"), (149, "B"), (150, "B")


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def patch(kv: Path, place: tuple[int, str], value: int) -> None:
    """Write a number into both copies of the superblock, and repair their sums."""
    at, code = place
    data = bytearray((kv / "SUPER").read_bytes())
    for start in (0, PAGE):
        struct.pack_into("<" + code, data, start + at, value)
        struct.pack_into("<Q", data, start + PAGE - 8, sum_of(bytes(data[start : start + PAGE - 8]), 0))
    (kv / "SUPER").write_bytes(data)


def serves_everything(golden: Golden, tier: DiskTier) -> None:
    """Each block that was stored is found and served, and nothing else is there."""
    assert {stored.block: stored.record for stored in tier.records()} == {
        slot: golden.record(number) for slot, number in golden.blocks.items()
    }
    for slot in range(tier.num_blocks):
        for number in {slot, 20 + slot, *golden.blocks.values()}:
            found = np.zeros((1, tier.block_bytes), np.uint8)
            hit = tier.read([slot], [golden.record(number)], found, [0])[0]
            assert hit == (golden.blocks.get(slot) == number)
            assert not hit or (found[0] == golden.payload(number)).all()


@pytest.mark.parametrize("read_path", ["pread", "mapping"])
@pytest.mark.parametrize("name", GOLDEN)
def test_every_block_of_a_golden_store_is_served(kv, name, read_path):
    golden = GOLDEN[name]
    unpack(name, kv)
    with golden.open(kv, read_path=read_path) as tier:
        assert tier.was_clean == golden.was_clean
        serves_everything(golden, tier)
    with golden.open(kv, read_path=read_path) as tier:  # as this version left it
        assert tier.was_clean
        serves_everything(golden, tier)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_store_goes_on(kv, name):
    golden = GOLDEN[name]
    unpack(name, kv)
    with golden.open(kv) as tier:
        golden.put(tier, {0: 9})
    with golden.open(kv) as tier:
        found = np.zeros((1, tier.block_bytes), np.uint8)
        assert tier.read([0], [golden.record(9)], found, [0]).all()
        np.testing.assert_array_equal(found[0], golden.payload(9))
        assert {stored.block for stored in tier.records()} == {0, *golden.blocks}


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (MAJOR, 0, "format 0"), (MAJOR, 2, "format 2"), (MAJOR, 0x0100, "format 256"),
        (INCOMPAT, 1, "feature bits 0x1"), (INCOMPAT, 1 << 63, "feature bits 0x8000000000000000"),
        (ENDIAN, 0x04030201, "format version 1"), (HEADER_BYTES, 16384, "format version 1"),
        (SLOT_BYTES, 16384, "format version 1"), (SLOT_BYTES, 4096, "format version 1"),
        (TOKEN_BYTES, 8, "format version 1"), (KEY_HASH, 2, "format version 1"), (SUM_KIND, 2, "format version 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", GOLDEN)
def test_what_this_version_cannot_know_is_refused_and_left_alone(kv, name, place, value, says):
    unpack(name, kv)
    patch(kv, place, value)
    before = {file.name: file.read_bytes() for file in kv.iterdir()}
    with pytest.raises(LayoutMismatch, match=says):
        GOLDEN[name].open(kv)
    assert {name: (kv / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(("place", "value"), [(MINOR, 1), (MINOR, 65535), (COMPAT, 1), (COMPAT, 1 << 63)])
@pytest.mark.parametrize("name", GOLDEN)
def test_what_a_later_minor_version_may_add_is_accepted(kv, name, place, value):
    golden = GOLDEN[name]
    unpack(name, kv)
    patch(kv, place, value)
    with golden.open(kv) as tier:
        serves_everything(golden, tier)


def test_the_golden_stores_are_what_their_names_say(kv):
    for name in GOLDEN:
        unpack(name, kv.with_name(name))
    supers = {name: parse_super((kv.with_name(name) / "SUPER").read_bytes()[:PAGE]) for name in GOLDEN}
    assert all(found is not None and found.major == 1 for found in supers.values())
    assert [len(found.purges) for found in supers.values() if found] == [0, 0, 0, 1]
    assert supers["v1_long_headers"].geometry.header_bytes == 2 * PAGE


@pytest.mark.parametrize("name", GOLDEN)
def test_a_store_that_is_written_today_has_the_same_bytes(name, kv, tmp_path, monkeypatch):
    """Beside the golden one, with its random numbers and its moment."""
    unpack(name, tmp_path / "golden")
    files = {file.name: file.read_bytes() for file in (tmp_path / "golden").iterdir()}
    super_ = parse_super(files["SUPER"][:PAGE])
    random = {16: super_.uuid, len(files["KEY"]): files["KEY"]}
    monkeypatch.setattr("os.urandom", lambda size: random[size])
    monkeypatch.setattr("time.time", lambda: float(super_.created_at))
    tier = GOLDEN[name].open(kv)
    try:
        GOLDEN[name].play(GOLDEN[name], tier)
        written = {file.name: file.read_bytes() for file in kv.iterdir() if file.name != "LOCK"}
    finally:
        tier.close()
    assert written == files
