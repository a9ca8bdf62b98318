"""Forms of frames: they come out as they went in; cut, longer or damaged ones are refused."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

from pagedkv.tiers import Record, StoredBlock
from pagedkv.tiers.ranks.frames import (
    MOVE,
    pack_answer,
    pack_ids,
    pack_moves,
    pack_stored,
    unpack_answer,
    unpack_ids,
    unpack_moves,
    unpack_stored,
)
from pagedkv.tiers.ranks.handshake import Hello, Opened
from pagedkv.tiers.ranks.wire import Broken

DRAW = np.random.default_rng(0)


def record() -> Record:
    names = [DRAW.bytes(32) for _ in range(4)]
    return Record(*names[:3], DRAW.integers(-(2**31), 2**31, 4).astype(np.int32), names[3])


MOVES = np.array([(1 << 40, 2, 0, 5, 2**31 - 1), (7, 0, 1, 0, 3)], MOVE)
RECORDS = [record()]
STORED = [StoredBlock(block, record(), 1 << 50) for block in (0, 9)]
HELLO = Hello(1, 3, b"s" * 32, (8, 16, 64), b"d" * 32, "KVSpec(...)")
OPENED = Opened((8, 16, 0), False, 5, b"k" * 32)
FLAGS, OTHERS = np.array([True, False, True]), np.array([False, False, True])
FORMS = {
    "moves": (pack_moves(MOVES, 0.5, RECORDS), unpack_moves),
    "answer": (pack_answer("read_only", FLAGS, OTHERS, np.array([4, 1]), b"rest"), unpack_answer),
    "stored": (pack_stored(STORED), unpack_stored),
    "opened": (OPENED.pack(), Opened.unpack),
}


def test_forms_come_out_as_they_went_in() -> None:
    order = unpack_moves(FORMS["moves"][0])
    np.testing.assert_array_equal(order.moves, MOVES)
    assert (order.deadline_s, order.records) == (0.5, RECORDS)
    assert unpack_moves(pack_moves(MOVES, None, [])).deadline_s is None
    answer = unpack_answer(FORMS["answer"][0])
    assert (answer.state, answer.rest) == ("read_only", b"rest")
    assert [array.tolist() for array in answer[1:4]] == [FLAGS.tolist(), OTHERS.tolist(), [4, 1]]
    for found, wanted in zip(unpack_stored(FORMS["stored"][0]), STORED, strict=True):
        assert (found.block, found.record, found.generation) == (wanted.block, wanted.record, wanted.generation)
    assert unpack_stored(pack_stored([])) == []
    assert unpack_ids(pack_ids(np.array([[1, 2], [3, 4]], np.int32))).tolist() == [1, 2, 3, 4]
    assert Hello.unpack(HELLO.pack()) == HELLO
    assert Opened.unpack(OPENED.pack()) == OPENED


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_is_cut_or_longer_is_refused(name: str) -> None:
    payload, unpack = FORMS[name]
    for size in range(len(payload)):
        with pytest.raises(Broken):
            unpack(payload[:size])
    with pytest.raises(Broken):
        unpack(payload + b"x")


@pytest.mark.parametrize("name", FORMS)
def test_a_damaged_form_raises_nothing_but_broken(name: str) -> None:
    payload, unpack = FORMS[name]
    draw = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(payload)
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with contextlib.suppress(Broken):
            unpack(bytes(damaged))


def test_cut_ids_and_greetings_are_refused() -> None:
    with pytest.raises(Broken):
        unpack_ids(b"12345")
    with pytest.raises(Broken):
        Hello.unpack(b"short")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": 2}, "one of 2 ranks, and the cache has 3"),
        ({"spec": b"x" * 32}, "it has KVSpec"),
        ({"blocks": (8, 16, 63)}, "blocks"),
        ({"disk": b"x" * 32}, "other options"),
        ({"rank": 3}, "there is no rank 3 among 3"),
        ({"rank": 0, "text": "another wording"}, ""),
    ],
)
def test_a_greeting_says_in_what_it_differs(changes: dict[str, object], said: str) -> None:
    import dataclasses

    other = dataclasses.replace(HELLO, **changes)  # type: ignore[arg-type]
    assert said in HELLO.difference(other)
    assert bool(HELLO.difference(other)) == bool(said)
