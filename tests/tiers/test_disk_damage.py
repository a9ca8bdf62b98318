"""Whatever happens to the files, a read gives the stored bytes or a counted miss.

The process lives.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from pagedkv.tiers.disk.format import IDENTITY_FIELDS

from .conftest import BLOCK_BYTES, NUM_BLOCKS, name_of

ALL = np.arange(NUM_BLOCKS, dtype=np.int32)
NAMES = [name_of(number) for number in range(NUM_BLOCKS)]
SLOT, HEADER, SEGMENT_SLOTS = 8192, 4096, 5
OFFSETS = (0, 4, 6, 8, 16, 24, 32, 48, 80, 112, 144, 176, 208, 212, 216)  # of IDENTITY_FIELDS


@pytest.fixture
def filled(open_tier, arena, read_path):
    tier = open_tier(read_path=read_path)
    assert tier.write(ALL, NAMES, arena, ALL).all()
    return tier


def segment(tmp_path, slot):
    number, index = divmod(slot, SEGMENT_SLOTS)
    return tmp_path / "kv" / f"data.{number:04d}", index * SLOT


def poke(tmp_path, slot, offset, flip):
    path, start = segment(tmp_path, slot)
    with open(path, "r+b") as file:
        file.seek(start + offset)
        old = file.read(1)
        file.seek(start + offset)
        file.write(bytes([old[0] ^ flip]))


def hits(tier, arena):
    """Which blocks are served; served bytes must be right."""
    out = np.zeros_like(arena)
    ok = tier.read(ALL, NAMES, out, ALL)
    np.testing.assert_array_equal(out[ok], arena[ok])
    return ok.tolist()


def test_a_flip_in_any_header_field_is_a_miss_before_and_after_reopening(filled, open_tier, arena, tmp_path):
    places = [*OFFSETS, *range(224, 224 + 16, 3), 240, 248, 280, 288, 311, 312, 2000, 4087, 4088, 4095]
    assert len(OFFSETS) == len(IDENTITY_FIELDS)
    for number, offset in enumerate(places):
        slot = number % NUM_BLOCKS
        flip = 1 << number % 8
        poke(tmp_path, slot, offset, flip)
        assert hits(filled, arena) == [i != slot for i in range(NUM_BLOCKS)], offset
        poke(tmp_path, slot, offset, flip)
    assert all(hits(filled, arena))
    assert filled.stats().misses["header"] == len(places)
    poke(tmp_path, 3, 100, 255)
    filled.close()
    assert [stored.block for stored in open_tier().records()] == [i for i in range(NUM_BLOCKS) if i != 3]


def test_a_flip_anywhere_in_the_payload_is_a_miss(filled, arena, tmp_path):
    places = [0, 1, 249, 250, 499, 500, 750, BLOCK_BYTES - 1, *range(3, BLOCK_BYTES, 61)]
    for number, offset in enumerate(places):
        poke(tmp_path, 4, HEADER + offset, 1 << number % 8)
        assert hits(filled, arena) == [i != 4 for i in range(NUM_BLOCKS)], offset
        poke(tmp_path, 4, HEADER + offset, 1 << number % 8)
    assert filled.stats().misses["payload"] == len(places)


def test_padding_behind_the_payload_does_not_matter(filled, arena, tmp_path):
    poke(tmp_path, 4, HEADER + BLOCK_BYTES, 255)
    assert all(hits(filled, arena))


def swap(tmp_path, first, second, start, size):
    found = []
    for slot in (first, second):
        path, at = segment(tmp_path, slot)
        with open(path, "rb") as file:
            file.seek(at + start)
            found.append(file.read(size))
    for slot, data in zip((second, first), found):
        path, at = segment(tmp_path, slot)
        with open(path, "r+b") as file:
            file.seek(at + start)
            file.write(data)


@pytest.mark.parametrize(
    ("start", "size", "reason"),
    [(0, SLOT, "misplaced"), (0, HEADER, "misplaced"), (HEADER, HEADER, "payload")],
)
def test_swapped_slots_headers_or_payloads_are_misses(filled, open_tier, arena, tmp_path, start, size, reason):
    swap(tmp_path, 2, 8, start, size)
    out = np.zeros_like(arena)
    for blocks in ([2, 8], [8, 2]):
        assert not filled.read(blocks, [NAMES[2], NAMES[8]], out, [0, 1]).any()
    assert hits(filled, arena) == [i not in (2, 8) for i in range(NUM_BLOCKS)]
    assert filled.stats().misses[reason] >= 2
    filled.close()
    again = open_tier()
    if start == 0:
        assert not {2, 8} & {stored.block for stored in again.records()}
    assert hits(again, arena) == [i not in (2, 8) for i in range(NUM_BLOCKS)]


def test_swapped_shards_inside_one_payload_are_a_miss(filled, open_tier, arena, tmp_path):
    same = np.tile(arena[:1, :250], (1, 4))
    filled.write([0], [NAMES[0]], same, [0])
    path, at = segment(tmp_path, 0)
    with open(path, "rb") as file:
        file.seek(at)
        header = bytearray(file.read(HEADER))
    sums = [bytes(header[280 + 8 * i : 288 + 8 * i]) for i in range(4)]
    assert len(set(sums)) == 4  # equal shards, different sums: the seed holds the shard's number


def test_a_slot_from_before_it_was_overwritten_is_a_miss(filled, arena, tmp_path):
    path, at = segment(tmp_path, 6)
    old = path.read_bytes()[at : at + SLOT]
    filled.write([6], [NAMES[6]], arena, [6])  # same name, same bytes, a later generation
    assert all(hits(filled, arena))
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(old)
    assert hits(filled, arena) == [i != 6 for i in range(NUM_BLOCKS)]
    assert filled.stats().misses["stale"] == 1


def test_a_slot_of_another_store_is_a_miss(filled, open_tier, arena, tmp_path):
    other = open_tier(path=tmp_path / "other")
    other.write(ALL, NAMES, arena, ALL)
    path, at = segment(tmp_path, 6)
    theirs = (tmp_path / "other" / path.name).read_bytes()[at : at + SLOT]
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(theirs)
    assert hits(filled, arena) == [i != 6 for i in range(NUM_BLOCKS)]
    assert filled.stats().misses["misplaced"] == 1


def test_zeros_and_noise_over_whole_slots_are_misses(filled, open_tier, arena, tmp_path):
    for slot, data in ((1, bytes(SLOT)), (9, np.random.default_rng(5).bytes(SLOT))):
        path, at = segment(tmp_path, slot)
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(data)
    expected = [i not in (1, 9) for i in range(NUM_BLOCKS)]
    assert hits(filled, arena) == expected
    filled.close()
    assert hits(open_tier(), arena) == expected


@pytest.mark.parametrize("path_kind", ["pread", "mapping"])
def test_a_file_cut_under_the_tier_gives_misses_and_no_signal(tmp_path, path_kind):
    script = f"""
        import os, numpy as np
        from pagedkv.tiers import DiskTier, Record
        where, now = {str(tmp_path / "kv")!r}, [0.0]
        tier = DiskTier(where, 8, 65536, fingerprint=bytes(32), block_tokens=1, read_path={path_kind!r},
                        clock=lambda: now[0])
        names = [Record(bytes([i]) * 32, bytes(32), bytes(32), np.zeros(1, np.int32)) for i in range(8)]
        data = np.arange(8 * 65536, dtype=np.uint64).astype(np.uint8).reshape(8, 65536)
        every = np.arange(8)
        assert tier.write(every, names, data, every).all()
        assert tier.read(every, names, data.copy(), every).all()
        slot = 65536 + 4096
        for slots, cut in ((5, 5 * slot), (3, 3 * slot + 10_000), (2, 2 * slot + 4096), (1, slot), (0, 100), (0, 0)):
            os.truncate(where + "/data.0000", cut)
            out = np.zeros_like(data)
            ok = tier.read(every, names, out, every)
            assert ok.tolist() == [i < slots for i in range(8)], (cut, ok)
            assert (out[ok] == data[ok]).all()
        os.unlink(where + "/data.0000")
        assert not tier.read(every, names, out, every).any()
        assert sum(tier.stats().misses.values()) > 0 and tier.state == "off"
        assert not tier.write([7], [names[7]], data, [7]).any()
        now[0] += 3600  # rested
        assert tier.write([7], [names[7]], data, [7]).all()  # grows the file again: sparse, and still checked
        assert tier.read([7, 6], [names[7], names[6]], out, [7, 6]).tolist() == [True, False]
        print("alive")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
