"""A recording that was written is read as it was.

Anything else is refused in one sentence that names the place.
"""

from __future__ import annotations

import copy
import json
import pickle
import random

import pytest

from pagedkv.errors import PagedKVError, RecordingFormatError
from pagedkv.lab.recording import Frame, HeldBlock, Move, Recording, SequenceState, read_recording
from pagedkv.lab.recording.file import write_recording


@pytest.fixture(scope="module")
def data(demo):
    """The built-in run as plain data."""
    return json.loads(json.dumps(demo.to_dict()))


@pytest.fixture
def read(tmp_path):
    """Reads whatever is given, as a file."""

    def read_it(content):
        path = tmp_path / "run.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return read_recording(path)

    return read_it


def test_what_was_written_is_read_as_it_was(demo, tmp_path):
    write_recording(demo, tmp_path / "run.json")
    assert read_recording(tmp_path / "run.json") == demo
    assert read_recording(str(tmp_path / "run.json")).to_dict() == demo.to_dict()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"format": NaN}', "NaN is no number of JSON"),
        (b"[]", "no recording"),
        (b"null", "no recording"),
        (b'{"format": "pagedkv trace"}', "no recording"),
        (b'{"format": "pagedkv recording"}', "version: None is not known"),
        (b'{"format": "pagedkv recording", "version": 3}', "version: 3 is not known to this pagedkv: 1 and 2 are"),
        (b'{"format": "pagedkv recording", "version": true}', "version: True is not known"),
    ],
)
def test_files_that_are_no_recordings_are_refused(read, content, said):
    with pytest.raises(RecordingFormatError, match=r"run\.json: ") as found:
        read(content)
    assert said in str(found.value)


def test_a_cache_without_groups_is_written_as_version_1_byte_for_byte(tmp_path):
    block, move = HeldBlock(1, 2, True, ("A",), "out", (7, 8)), Move("device", 1, "host", 0)
    seq = SequenceState("A", "", (7, 8), 2, (1,))
    frame = Frame("moves", "One.", (seq,), {"device": (block,), "host": ()}, ((0, 1),), (move,))
    write_recording(Recording(2, "lru", {"device": 4, "host": 2}, (frame,), 3, {7: "x"}), tmp_path / "run.json")
    assert (tmp_path / "run.json").read_text() == (
        '{"format":"pagedkv recording","version":1,"block_size":2,"policy":"lru","tiers":{"device":4,"host":2},'
        '"frames":[{"what":"moves","caption":"One.","sequences":[{"name":"A","parent":"","tokens":[7,8],"computed":2,'
        '"blocks":[1]}],'
        '"tiers":{"device":[{"block":1,"references":2,"in_tree":true,"sequences":["A"],"moving":"out","tokens":[7,8]}],'
        '"host":[]},"copies":[[0,1]],"moves":[{"source":"device","block":1,"destination":"host","to":0}]}],"left_out":3,'
        '"texts":{"7":"x"}}\n'
    )


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_recording(tmp_path / "none.json")


def frame_with(data, what):
    """A copy, and its first frame with something in that field."""
    data = copy.deepcopy(data)
    return data, next(frame for frame in data["frames"] if frame[what])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("block_size"), "block_size: is not there"),
        (lambda d: d.update(block_size=0), "block_size: 0: a whole number from 1 to 65536 is needed"),
        (lambda d: d.update(block_size=4.0), "block_size: 4.0: a whole number"),
        (lambda d: d.update(block_size=True), "block_size: True: a whole number"),
        (lambda d: d.update(policy=None), "policy: None: text is needed"),
        (lambda d: d.update(left_out=-1), "left_out: -1"),
        (lambda d: d.update(tiers={"host": 4}), "tiers: host: the device and others of device, host, disk, remote"),
        (lambda d: d.update(tiers={"host": 4, "device": 4}), "tiers: "),
        (lambda d: d.update(tiers={"device": 4, "moon": 4}), "tiers: "),
        (lambda d: d.update(tiers=[8]), "tiers: a list: an object is needed"),
        (lambda d: d.update(texts={"x": "y"}), "texts: 'x': a token's number and its text are needed"),
        (lambda d: d.update(texts={"1": 2}), "texts: '1'"),
        (lambda d: d.update(frames=[]), "frames: there are none"),
        (lambda d: d.update(frames={}), "frames: a dict: a list is needed"),
        (lambda d: d["frames"].append(3), "frame 47: 3: an object is needed"),
        (lambda d: d["frames"][2].pop("caption"), "frame 3, caption: is not there"),
        (lambda d: d["frames"][2]["tiers"].pop("host"), "frame 3, tiers: device, disk, but there are device,"),
        (lambda d: d["frames"][2]["tiers"]["device"].reverse(), "frame 3, device: the blocks do not stand once each"),
        (lambda d: d["frames"][2]["tiers"]["device"][0].update(block=8), "frame 3, device block 0, block: 8: a whole"),
        (lambda d: d["frames"][2]["tiers"]["device"][0].update(references=0), "references: 0"),
        (lambda d: d["frames"][2]["tiers"]["device"][0].update(in_tree=True), "1 references are fewer than the owners"),
        (lambda d: d["frames"][2]["tiers"]["device"][0].update(in_tree=1), "in_tree: 1: true or false is needed"),
        (lambda d: d["frames"][2]["tiers"]["device"][0].update(moving="up"), "moving = 'up': one of '', 'out', 'in'"),
        (lambda d: d["frames"][2]["tiers"]["device"][0].update(tokens=[1] * 5), "5 tokens do not fit into a block"),
        (lambda d: d["frames"][2]["tiers"]["device"][0].update(tokens=[2**31]), "tokens"),
        (lambda d: d["frames"][2]["tiers"]["device"][0].update(sequences=["B"]), "block tables say otherwise"),
        (lambda d: d["frames"][2]["tiers"]["device"][0].update(sequences=[["A"]]), "a list: text is needed"),
        (lambda d: d["frames"][2]["sequences"][0]["blocks"].pop(), "device block 3: the sequences' block tables say"),
        (lambda d: d["frames"][2]["sequences"][0].update(computed=14), "computed: 14: a whole number from 0 to 13"),
        (lambda d: d["frames"][2]["sequences"].append(d["frames"][2]["sequences"][0]), "have the same name"),
        (lambda d: d["frames"][3]["sequences"][0].update(blocks=[]), "13 computed tokens do not fit into 0 blocks"),
    ],
)  # fmt: skip
def test_what_could_not_have_happened_is_refused_with_its_place(read, data, change, said):
    data = copy.deepcopy(data)
    change(data)
    with pytest.raises(RecordingFormatError) as found:
        read(data)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("what", "change", "said"),
    [
        ("moves", lambda moves: moves[0].update(source="moon"), "'moon' is none of the tiers"),
        ("moves", lambda moves: moves[0].update(to=99), "to: 99"),
        ("moves", lambda moves: moves.append([1]), "a list: an object is needed"),
        ("copies", lambda copies: copies.append([1]), "a pair of block ids is needed"),
        ("copies", lambda copies: copies.append([1, 8]), "8: a whole number from 0 to 7"),
    ],
)
def test_moves_and_copies_are_checked(read, data, what, change, said):
    data, frame = frame_with(data, what)
    change(frame[what])
    with pytest.raises(RecordingFormatError) as found:
        read(data)
    assert said in str(found.value)


def test_sequences_are_on_the_device_only(read, data):
    data = copy.deepcopy(data)
    block = next(frame["tiers"]["host"][0] for frame in data["frames"] if frame["tiers"]["host"])
    block.update(sequences=["A"], references=9)
    with pytest.raises(RecordingFormatError, match="sequences have device blocks only"):
        read(data)


def places(value, path=()):
    """Every place in plain data."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*path, key))


def test_whatever_is_changed_is_read_or_refused_and_never_anything_else(read, data):
    small = {**data, "frames": data["frames"][24:28]}
    every = list(places(small))[1:]
    odd = [None, True, -1, 0, 7, 2**40, 1.5, "", "x", [], {}, [[]], {"a": 1}]
    rng = random.Random(1)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(600):
        changed = copy.deepcopy(small)
        path = rng.choice(every)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        if rng.random() < 0.3:
            del inner[path[-1]]
        else:
            inner[path[-1]] = rng.choice(odd)
        said = ""
        try:
            read(changed)
        except RecordingFormatError as problem:
            said = str(problem)
        outcomes["refused" if said else "read"] += 1
        assert "\n" not in said
    assert min(outcomes.values()) > 30, outcomes


def test_the_error_is_one_of_ours_and_travels():
    problem = RecordingFormatError("a.json", "frame 3", "is wrong")
    assert isinstance(problem, PagedKVError)
    assert isinstance(problem, ValueError)
    again = pickle.loads(pickle.dumps(problem))
    assert (again.path, again.where, again.problem, str(again)) == ("a.json", "frame 3", "is wrong", str(problem))
    assert type(again) is RecordingFormatError
