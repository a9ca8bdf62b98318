"""Each bug planted in the toy kernel is caught, by the right kind of error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ptxsim.cuda import run
from tests.ptxsim.errors import BarrierError, DataRace, DivergentWarp, OutOfBounds, UninitialisedRead

SOURCE = (Path(__file__).parent / "toy_decode.cu").read_text()
LENGTHS = (100, 1, 21, 64)
PAGE, DIM, SPLITS = 8, 32, 3


def decode(*macros: str) -> tuple[np.ndarray, np.ndarray]:
    """Run the kernel; return its output and what it should be.

    What no sequence owns is NaN, and the table's rest is -1.
    """
    rng = np.random.default_rng(0)
    max_pages = -(-max(LENGTHS) // PAGE)
    q = rng.standard_normal((len(LENGTHS), DIM)).astype(np.float32)
    key, value = (np.full((len(LENGTHS) * max_pages, PAGE, DIM), np.nan, np.float32) for _ in range(2))
    table = np.full((len(LENGTHS), max_pages), -1, np.int32)
    blocks = iter(rng.permutation(len(key)).tolist())
    expected = np.zeros((len(LENGTHS), SPLITS, DIM))
    for seq, length in enumerate(LENGTHS):
        pages = -(-length // PAGE)
        per_split = -(-pages // SPLITS)
        for token in range(length):
            page, row = divmod(token, PAGE)
            if row == 0:
                table[seq, page] = next(blocks)
            k, v = rng.standard_normal((2, DIM)).astype(np.float32)
            key[table[seq, page], row], value[table[seq, page], row] = k, v
            expected[seq, page // per_split] += (q[seq] @ k) * v
    lengths, out = np.array(LENGTHS, np.int32), np.full(expected.shape, np.nan, np.float32)
    for array in (q, key, value, table, lengths):
        array.flags.writeable = False
    run(SOURCE, (SPLITS, len(LENGTHS)), 128, q, key, value, table, lengths, out, np.int32(max_pages), macros=macros)
    return out, expected


def test_without_a_bug() -> None:
    out, expected = decode()
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bug", "error", "message"),
    [
        ("TABLE", OutOfBounds, "out of bounds.*toy|test.cu"),
        ("NO_SYNC", DataRace, "reads shared byte .* unsynchronised write"),
        ("NO_SYNC_BEFORE_REUSE", DataRace, "writes shared byte .* unsynchronised (read|write)"),
        ("SYNC_IN_BRANCH", DataRace, "reads shared byte .* unsynchronised write"),
        ("EARLY_EXIT", BarrierError, "exited before a barrier"),
        ("SHUFFLE", DivergentWarp, "shfl .* names lanes 0xffffffff"),
        ("NO_WAIT", UninitialisedRead, "bytes in flight"),
        ("NO_SYNCWARP_BEFORE", DataRace, "writes shared byte .* unsynchronised read"),
        ("NO_SYNCWARP_AFTER", DataRace, "reads shared byte .* unsynchronised write"),
        ("SAME_OUTPUT", DataRace, "data race in global memory.*CTA .* and .*CTA"),
    ],
)  # fmt: skip
def test_a_planted_bug_is_caught(bug: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}") as raised:
        decode(f"BUG_{bug}")
    assert "test.cu:" in str(raised.value)


def test_a_tail_that_is_not_zeroed_shows_in_the_output() -> None:
    assert np.isnan(decode("BUG_TAIL")[0]).any()
