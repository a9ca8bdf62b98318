"""Pictures as text: exactly these, for a run that is small enough to be written down."""

from __future__ import annotations

import dataclasses

import pytest

import pagedkv as pk
from pagedkv.lab.recording import HeldBlock, Recorder
from pagedkv.lab.show import picture, steps

from .conftest import compute


@pytest.fixture
def fork(open_cache):
    """A fork, and the step in which it is copied."""
    cache = open_cache(4, host=2)
    with Recorder(cache, text=lambda token: f"w{token}") as recorder:
        seq = cache.sequence(range(6))
        compute(cache, seq)
        (other,) = seq.fork()
        seq.append(50)
        compute(cache, seq)
        other.release()
        seq.release()
    return recorder.recording


def test_a_step_with_a_copy_on_write_is_drawn_like_this(fork):
    assert picture(fork, 6) == "\n".join([
        "step 6 of 9  A step over A computes 1 token. Block 1 is shared, so A will write to a copy of it,",
        "             block 2.",
        "",
        "sequence  tokens  computed  logical block -> device block",
        "A              7         6  0->0* 1->2+",
        "B (of A)       6         6  0->0* 1->1",
        "",
        "device: 3 of 4 blocks owned",
        "  block  filled  refs  owners    tokens",
        "      0  ####       3  tree A B  w0 w1 w2 w3",
        "      1  ##..       1  B         w4 w5",
        "      2  ##..       1  A         w4 w5  (copy of 1)",
        "",
        "host: 0 of 2 blocks owned",
        "",
        "* shared by several sequences   + copied on write, just now",
    ])  # fmt: skip


def test_the_last_step_is_drawn_by_default_and_an_empty_pool_is_a_picture(fork):
    assert picture(fork) == picture(fork, 9)
    assert picture(fork, 1).splitlines() == [
        "step 1 of 9  The recording begins. Blocks of 4 tokens: 4 on the device, 2 on the host.",
        "", "device: 0 of 4 blocks owned", "", "host: 0 of 2 blocks owned",
    ]  # fmt: skip


def test_the_steps_are_listed_with_their_numbers(fork):
    lines = steps(fork).splitlines()
    assert len(lines) == 9
    assert lines[0].startswith("1  The recording begins.")
    assert lines[8] == "9  A is released. Its full blocks stay cached."
    assert steps(dataclasses.replace(fork, left_out=7)).endswith("(7 more were not recorded)")


@pytest.mark.parametrize("step", [0, 10, -1])
def test_a_step_that_is_not_there_is_refused(fork, step):
    with pytest.raises(pk.InvalidArgument, match="it has steps 1 to 9"):
        picture(fork, step)
    with pytest.raises(pk.WrongType):
        picture(fork, "3")  # type: ignore[arg-type]


def with_device(recording, blocks, **changes):
    """The recording with one frame, of these device blocks."""
    frame = dataclasses.replace(recording.frames[0], tiers={"device": tuple(blocks), "host": ()})
    return dataclasses.replace(recording, frames=(frame,), tiers={"device": 5000, "host": 2}, **changes)


def test_blocks_on_the_move_and_owned_by_others_say_so(fork):
    blocks = [
        HeldBlock(0, 2, True, (), "out", (1, 2, 3, 4)), HeldBlock(1, 1, False, (), "in", ()),
        HeldBlock(2, 4, True, (), "", (5,)),
    ]  # fmt: skip
    drawn = picture(with_device(fork, blocks)).splitlines()
    assert drawn[4:7] == [
        "      0  ####       2  tree leaving  w1 w2 w3 w4",
        "      1  ....       1  arriving",
        "      2  #...       4  tree 3 other  w5",
    ]


def test_large_pools_large_blocks_and_long_texts_are_cut(fork):
    blocks = [HeldBlock(i, 1, True, (), "", tuple(range(64))) for i in range(100)]
    texts = {0: "one\ntwo\x1b[31m"}
    drawn = picture(with_device(fork, blocks, block_size=128, texts=texts)).splitlines()
    assert drawn[-3] == "  ... and 36 more"
    assert "####....  " in drawn[4]
    assert "one?two?[31m 1 2" in drawn[4]
    assert drawn[4].endswith("...")
    assert max(map(len, drawn)) <= 100


def test_a_long_block_table_goes_over_several_lines(open_cache):
    cache = open_cache(64)
    with Recorder(cache) as recorder, cache.sequence(range(200)) as seq:
        compute(cache, seq)
        drawn = picture(recorder.recording).splitlines()
    assert max(map(len, drawn)) <= 100
    table = " ".join(line.strip() for line in drawn[2 : drawn.index("", 2)])
    assert [cell for cell in table.split() if "->" in cell and cell != "->"] == [f"{i}->{i}" for i in range(50)]
