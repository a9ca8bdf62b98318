"""One step as an SVG: well-formed, no scripts, every block; and the picture of the docs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pagedkv.cli import main
from pagedkv.errors import InvalidArgument
from pagedkv.lab.show.demo import record
from pagedkv.lab.show.svg import svg

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "prefix_on_tiers.svg"
NAME = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recording():
    return record("prefix")


def drawn(text):
    root = ElementTree.fromstring(text)
    shapes = {kind: root.findall(f".//{NAME}{kind}") for kind in ("rect", "path", "text", "script")}
    return root, shapes


def test_the_last_step_shows_a_shared_prefix_and_every_tier(recording):
    frame = recording.frames[-1]
    _, shapes = drawn(svg(recording))
    assert len(frame.sequences) == 2
    assert all(frame.tiers.values())
    blocks = sum(recording.tiers.values()) + sum(len(seq.blocks) for seq in frame.sequences)
    assert len(shapes["rect"]) == blocks + 1  # and the paper
    assert len(shapes["path"]) == sum(len(seq.blocks) for seq in frame.sequences)
    thick = [rect for rect in shapes["rect"] if "shared" in rect.get("class")]
    assert len(thick) == 2 + 2 * 2  # two device blocks, and in both sequences
    assert shapes["script"] == []


def test_a_copy_on_write_and_free_blocks_are_drawn(recording):
    demo = record("tiers")
    step = next(i for i, frame in enumerate(demo.frames, 1) if frame.copies)
    kinds = [rect.get("class") for rect in drawn(svg(demo, step))[1]["rect"]]
    assert sum("copied" in kind for kind in kinds) == len(demo.frames[step - 1].copies)
    assert kinds.count("free") > 0


def test_texts_of_a_stranger_stay_text(recording):
    frame = dataclasses.replace(recording.frames[-1], caption='<script>alert("&")</script>\x00')
    odd = dataclasses.replace(recording, frames=(*recording.frames[:-1], frame))
    root, shapes = drawn(svg(odd))
    assert shapes["script"] == []
    assert root.find(f"{NAME}title").text == '<script>alert("&")</script>?'


def test_what_no_picture_can_show_is_refused_with_the_way_out(recording):
    with pytest.raises(InvalidArgument, match="--html"):
        svg(record("groups"))
    with pytest.raises(InvalidArgument, match="a row of 40 blocks is too long"):
        svg(dataclasses.replace(recording, tiers={**recording.tiers, "host": 40}))
    with pytest.raises(InvalidArgument, match="step"):
        svg(recording, 1000)


def test_the_command_writes_it(tmp_path, capsys):
    out = tmp_path / "a.svg"
    assert main(["show", "--demo", "prefix", "--step", "2", "--svg", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: step 2 of ")
    drawn(out.read_text(encoding="utf-8"))


@pytest.mark.checkout
def test_the_picture_of_the_docs_is_that_of_the_command(tmp_path, capsys):
    assert main(["show", "--demo", "prefix", "--svg", str(tmp_path / "new.svg")]) == 0
    assert (tmp_path / "new.svg").read_text() == PICTURE.read_text(), (
        "made by: pagedkv show --demo prefix --svg docs/images/prefix_on_tiers.svg"
    )
