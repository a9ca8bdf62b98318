"""Block contents of the real engine.

They follow from the whole prefix, and any wrong byte is counted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv.lab.replay import Trace, load_trace
from pagedkv.lab.replay.payload import Payload, chains

BYTES = 4096


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("synthetic:agent:0:40")


def test_no_two_blocks_have_the_same_chain(trace: Trace) -> None:
    found = chains(trace)
    assert len(np.unique(found)) == trace.num_unique
    assert (found & np.uint64(1)).all()


def test_a_chain_depends_on_the_parent(make_trace: Callable[..., Trace]) -> None:
    a, b = make_trace([[1, 2, 3]]), make_trace([[1], [2, 3]])  # renumbered 0, 1, 2 in both
    assert chains(a)[0] == chains(b)[0]
    assert chains(a)[1] != chains(b)[1]
    assert chains(a)[2] != chains(b)[2]


def test_what_was_filled_is_right_and_another_block_is_not(trace: Trace) -> None:
    payload = Payload(trace, BYTES)
    arena = np.zeros((4, BYTES), np.uint8)
    path, rows = np.array([5, 9, 2], np.int32), np.array([3, 0, 1], np.int32)
    payload.fill_path(path, arena, rows)
    assert payload.wrong_in_path(path, arena, rows) == 0
    assert payload.wrong_in_path(path[::-1], arena, rows) > 1.9 * BYTES * 0.98
    assert payload.wrong_bytes(5, arena[2]) > BYTES * 0.98


@pytest.mark.parametrize("at", [0, 1, 7, 8, 2049, BYTES - 1])
def test_one_wrong_byte_is_one_wrong_byte(at: int, trace: Trace) -> None:
    payload = Payload(trace, BYTES)
    row = np.empty(BYTES, np.uint8)
    payload.fill(7, row)
    row[at] ^= 1
    assert payload.wrong_bytes(7, row) == 1
