"""Pictures as text: exactly these, for a run that is small enough to be written down."""

from __future__ import annotations

import dataclasses

import pytest

import pagedkv as pk
from pagedkv.lab.recording import GroupOfLayers, HeldBlock, HeldPage, PageTable, Recorder
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


def test_a_step_over_groups_has_a_lane_for_each_and_nothing_at_a_hole(demo_of_groups):
    assert picture(demo_of_groups, 20).splitlines() == [
        "step 20 of 56  A step over C computes 1 token.",
        "",
        "sequence  tokens  computed  logical block -> device block or page",
        "C             14        13  group 0  0->8   1->9   2->11  3->21",
        "                            group 1         1->1   2->8   3->3",
        "",
        "device: 9 of 12 extents in use, each by a group",
        "  111100.11.0.",
        "  group 0: layer 2, all tokens: 6 blocks",
        "  block  filled  refs  owners  tokens",
        "      8  ####       2  tree C  you are a helpful",
        "      9  ####       2  tree C  bot . be brief",
        "     10  ####       1  tree    tell me of pages",
        "     11  ####       2  tree C  tell me of forks",
        "     20  ####       1  tree    tell me of trees",
        "     21  #...       1  C       .",
        "  group 1: layers 0-1, window of 9 tokens: 6 pages",
        "   page  filled  refs  of block  tree  holders     tokens",
        "      0  ####       1         0  yes   point       you are a helpful",
        "      1  ####       5         1  yes   4 points C  bot . be brief",
        "      2  ####       1         2  yes   point       tell me of pages",
        "      3  #...       1         3        C           .",
        "      7  ####       1         2  yes   point       tell me of trees",
        "      8  ####       2         2  yes   point C     tell me of forks",
        "",
        "host: 0 of 7 extents in use",
        "",
        "disk: 0 of 6 extents in use",
        "",
        "points: 4",
        "  after 2 blocks, the last of which is device block 9; pages on the device",
        "  after 3 blocks, the last of which is device block 10; pages on the device",
        "  after 3 blocks, the last of which is device block 11; pages on the device",
        "  after 3 blocks, the last of which is device block 20; pages on the device",
    ]


def test_long_tables_of_groups_go_over_several_lines_and_leave_lanes_out_where_they_have_holes(demo_of_groups):
    frame = demo_of_groups.frames[19]
    blocks = tuple(HeldBlock(i, 1, False, ("C",), "", ()) for i in range(40))
    pages = tuple(HeldPage(1, i, 1, False, ("C",), 0, 0, "", -1, ()) for i in range(2))
    seq = dataclasses.replace(frame.sequences[0], blocks=tuple(range(40)), tables=(PageTable(38, (0, 1)),))
    frame = dataclasses.replace(
        frame, sequences=(seq,), tiers={**frame.tiers, "device": blocks}, pages={**frame.pages, "device": pages}
    )
    drawn = picture(dataclasses.replace(demo_of_groups, frames=(frame,))).splitlines()
    assert max(map(len, drawn)) <= 100
    lanes = [line.strip().removeprefix("C             14        13  ") for line in drawn[3 : drawn.index("", 3)]]
    assert [lane[:7] for lane in lanes] == ["group 0"] * (len(lanes) - 1) + ["group 1"]
    assert len(lanes) > 4
    assert lanes[-1].split()[2:] == ["38->0", "39->1"]
    assert lanes[-1].index("38->0") == lanes[-2].index("38->38")
    assert "      0  ....       1         ?        C" in drawn


@pytest.mark.parametrize(
    ("group", "label"),
    [
        (GroupOfLayers((5,), (), None), "group 2: layer 5, all tokens"),
        (GroupOfLayers((0, 1, 2, 3, 4), (512,), None), "group 2: layers 0-4, window of 512 tokens"),
        (GroupOfLayers((0, 2, 3), (8, 9), None), "group 2: layers 0 and 2-3, windows of 8 and 9 tokens"),
        (GroupOfLayers((0, 2, 4), (), 8192), "group 2: layers 0, 2 and 4, chunks of 8192 tokens"),
        (GroupOfLayers((0, 1, 3, 5, 7), (9,), None), "group 2: 5 layers (0-1, 3 and so on), window of 9 tokens"),
    ],
)
def test_a_group_has_a_label_that_says_its_layers_and_how_far_they_see(group, label):
    assert group.label(2) == label


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


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({1: "You", 2: "are"}, "You are 7"),
        ({1: "You", 2: " are"}, "You are7"),
        ({1: "Y", 2: "o", 7: "u", 8: " "}, "You"),
        ({}, "1 2 7"),
    ],
)
def test_pieces_that_bring_their_own_blanks_are_joined_without_more(demo, texts, said):
    assert dataclasses.replace(demo, texts=texts).words([1, 2, 7]) == said
