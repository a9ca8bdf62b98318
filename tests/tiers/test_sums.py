"""Our sums are those of the xxhash package, at every length.

And on every kind of processor that this one can play.
"""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from pagedkv.errors import InvalidArgument
from pagedkv.tiers.disk import _io

LENGTHS = [
    241,
    255,
    256,
    257,
    320,
    511,
    1023,
    1024,
    1025,
    1087,
    1088,
    1089,
    2048,
    4088,
    65535,
    65536,
    100_001,
]


@pytest.mark.parametrize("level", range(_io.SUM_LEVEL + 1))
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF])
def test_sums_equal_those_of_the_xxhash_package(level, seed):
    data = np.random.default_rng(0).integers(0, 256, max(LENGTHS) + 3, np.uint8)
    for length in LENGTHS:
        for start in (0, 3):
            part = data[start : start + length]
            assert _io.sum_bytes(part, seed, level) == xxhash.xxh3_64_intdigest(part, seed=seed), length


def test_short_inputs_and_unknown_levels_are_refused():
    with pytest.raises(InvalidArgument):
        _io.sum_bytes(np.zeros(_io.MIN_SUMMED, np.uint8), 0, 0)
    for level in (-1, _io.SUM_LEVEL + 1):
        with pytest.raises(InvalidArgument):
            _io.sum_bytes(np.zeros(1000, np.uint8), 0, level)


def test_sums_taken_along_a_transfer_are_those_of_the_shards(tmp_path):
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (5, 3 << 20), np.uint8)
    indices = np.array([4, 0, 2], np.int32)
    seeds = rng.integers(0, 2**63, 3).astype(np.uint64)
    with open(tmp_path / "file", "w+b") as file:
        fds = np.full(3, file.fileno(), np.int32)
        offsets = np.array([0, 4 << 20, 8 << 20], np.int64)
        for shards in (1, 3, 4, 48):
            width = rows.shape[1] // shards
            expected = [
                [xxhash.xxh3_64_intdigest(rows[r, i * width : (i + 1) * width], seed=int(s) ^ i) for i in range(shards)]
                for r, s in zip(indices, seeds)
            ]
            outcomes, sums = np.zeros(3, np.int64), np.zeros((3, shards), np.uint64)
            _io.file_write(fds, offsets + 100, rows, indices, outcomes, seeds, sums)
            assert (outcomes == rows.shape[1]).all()
            assert sums.tolist() == expected
            back, headers = np.zeros_like(rows), np.zeros((3, 100), np.uint8)
            sums[:] = 0
            _io.file_read(fds, offsets, headers, back, indices, outcomes, seeds, sums)
            assert (outcomes == rows.shape[1] + 100).all()
            assert sums.tolist() == expected
            np.testing.assert_array_equal(back[indices], rows[indices])


def test_sums_that_do_not_fit_the_blocks_are_refused():
    ids, long, rows = np.zeros(2, np.int32), np.zeros(2, np.int64), np.zeros((2, 1000), np.uint8)
    for seeds, shape in ((2, (2, 3)), (2, (2, 8)), (1, (2, 1)), (2, (1, 1))):
        with pytest.raises(InvalidArgument):
            _io.file_write(ids, long, rows, ids, long, np.zeros(seeds, np.uint64), np.zeros(shape, np.uint64))
