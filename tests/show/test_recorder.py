"""A recording is what happened.

Every frame agrees with the books and with the bytes, and recording changes nothing.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.lab.recording import Move, Recorder, read_recording
from pagedkv.lab.recording.captions import of_moves_ended

from .conftest import BLOCK, compute, serve


class Comparing:
    """A hook beside a recorder.

    Each new frame says what the cache's books and bytes say.
    """

    def __init__(self, cache, recorder):
        self.cache, self.recorder, self.seen, self.blocks = cache, recorder, 0, 0

    def begin(self, span):
        pass

    def end(self, span, state):  # after the recorder's begin, before its end
        self.compare()

    def compare(self):
        frames = self.recorder.recording.frames
        if len(frames) == self.seen:
            return
        frame, self.seen = frames[-1], len(frames)
        pools = self.cache.placement.pools
        for number, blocks in enumerate(frame.tiers.values()):
            refs = pools[number].dump()["refs"]
            for block in blocks:
                if not block.moving:
                    assert refs[block.block] == block.references, (frame.caption, block)
                assert block.others >= 0
        k_view, v_view = self.cache.layer(0)
        for block in frame.tiers["device"]:
            if block.moving != "in":
                written = np.repeat(np.array(block.tokens, np.float32)[:, None, None], 2, axis=2)
                assert np.array_equal(k_view[block.block, : len(block.tokens)], written), (frame.caption, block)
                assert np.array_equal(v_view[block.block, : len(block.tokens)], written)
                self.blocks += 1


def draw_run(cache, rng, steps, after=lambda: None):
    """Random requests, forks, cuts and releases over a few common beginnings."""
    live = []
    stems = [[100 * i + j for j in range(9)] for i in range(3)]
    for _ in range(steps):
        act = rng.random()
        try:
            if act < 0.3 and len(live) < 3:
                stem = rng.choice(stems)[: rng.randint(1, 9)]
                live.append(cache.sequence([*stem, *rng.choices(range(900, 903), k=rng.randint(0, 6))]))
            elif act < 0.4 and live and len(live) < 3:
                live += rng.choice(live).fork()
            elif act < 0.5 and live:
                seq = rng.choice(live)
                seq.truncate(rng.randint(1, len(seq)))
            elif act < 0.65 and live:
                live.pop(rng.randrange(len(live))).release()
            elif live:
                compute(cache, *live)
                for seq in live:
                    seq.append(rng.randint(900, 902))
        except pk.OutOfBlocks:
            for seq in live:
                seq.release()
            live = []
        after()
    for seq in live:
        seq.release()
    after()


@pytest.mark.parametrize("seed", range(6))
def test_every_frame_agrees_with_the_books_and_with_the_bytes(open_cache, tmp_path, seed):
    cache = open_cache(12, host=5, disk=6 if seed % 2 else None, threads=1)
    with Recorder(cache) as recorder:
        comparing = Comparing(cache, recorder)
        draw_run(cache, random.Random(seed), 80, comparing.compare)
    assert comparing.blocks > 100
    recording = recorder.recording
    assert recording.left_out == 0
    last = recording.frames[-1]
    assert not last.sequences
    assert all(block.references == 1 and block.in_tree for blocks in last.tiers.values() for block in blocks)
    recorder.save(tmp_path / "run.json")
    assert read_recording(tmp_path / "run.json") == recording


@pytest.mark.parametrize("seed", range(3))
def test_frames_in_the_middle_of_moves_agree_with_the_books(open_cache, seed):
    cache = open_cache(7, host=3, disk=4, threads=1, partial_hits=False)  # a second use would copy blocks, which stay
    recorder = Recorder(cache)
    comparing = Comparing(cache, recorder)
    cache.hooks.add(comparing)  # before the recorder: its ends come after the recorder's
    with recorder:
        for start in (0, 1, 2, 0, 3, 1, seed):
            serve(cache, [100 * start + i for i in range(14)])
    flying = [frame for frame in recorder.recording.frames if any(b.moving for t in frame.tiers.values() for b in t)]
    assert flying
    for frame in flying:
        out = {(t, b.block) for t, blocks in frame.tiers.items() for b in blocks if b.moving == "out"}
        into = {(t, b.block) for t, blocks in frame.tiers.items() for b in blocks if b.moving == "in"}
        assert out == {(move.source, move.block) for move in frame.moves}
        assert into == {(move.destination, move.to) for move in frame.moves}
        for move in frame.moves:
            source = frame.held(move.source)[move.block]
            assert frame.held(move.destination)[move.to].tokens == source.tokens
            assert len(source.tokens) == BLOCK


@pytest.mark.parametrize("seed", range(3))
def test_recording_changes_nothing(open_cache, seed):
    plain, recorded = open_cache(12, host=5, threads=1), open_cache(12, host=5, threads=1)
    draw_run(plain, random.Random(seed), 60)
    with Recorder(recorded):
        draw_run(recorded, random.Random(seed), 60)
    assert plain.stats() == recorded.stats()
    assert plain.placement.dump() == recorded.placement.dump()


def captions(recorder):
    return [frame.caption for frame in recorder.recording.frames]


def test_the_captions_tell_the_story_of_a_fork(open_cache):
    cache = open_cache()
    with Recorder(cache) as recorder:
        seq = cache.sequence(range(6))
        compute(cache, seq)
        (other,) = seq.fork()
        seq.append(50)
        other.append(51)
        compute(cache, seq)
        compute(cache, other)
        other.truncate(5)
        other.release()
        seq.release()
    assert captions(recorder) == [
        "The recording begins. Blocks of 4 tokens: 8 on the device.",
        "A opens with a prompt of 6 tokens. None of it is cached.",
        "A step over A computes 6 tokens. Blocks 0 and 1 are new.",
        "The step is committed. Block 0 is full and joins the prefix tree.",
        "A is forked: B shares its 2 blocks, and nothing is copied.",
        "A step over A computes 1 token. Block 1 is shared, so A will write to a copy of it, block 2.",
        "The step is committed.",
        "A step over B computes 1 token.",  # the last owner writes in place
        "The step is committed.",
        "B is cut back to 5 tokens.",
        "B is released. Its full blocks stay cached.",
        "A is released. Its full blocks stay cached.",
    ]
    fork, copied = recorder.recording.frames[4], recorder.recording.frames[5]
    assert [(s.name, s.parent, s.blocks) for s in fork.sequences] == [("A", "", (0, 1)), ("B", "A", (0, 1))]
    assert [(b.block, b.references, b.sequences, b.shared) for b in fork.tiers["device"]] == [
        (0, 3, ("A", "B"), True), (1, 2, ("A", "B"), True),
    ]  # fmt: skip
    assert copied.copies == ((1, 2),)
    assert copied.held()[1].sequences == ("B",)
    assert copied.held()[2].sequences == ("A",)


def test_the_captions_tell_of_hits_moves_drops_and_adoption(open_cache):
    cache = open_cache(4, host=2, threads=1)
    with Recorder(cache) as recorder:
        serve(cache, list(range(14)))
        serve(cache, list(range(100, 114)))
        one, two = cache.sequence(range(200, 205)), cache.sequence(range(200, 205))
        compute(cache, one, two)
    told = captions(recorder)
    assert any("Device blocks 2 and 1 are being copied to host blocks" in text for text in told), told
    assert any("Arrived: 2 blocks on the host." in text for text in told)
    assert any("Dropped: " in text for text in told)
    assert any("The tree has the tokens of block" in text for text in told)
    moves = next(frame.moves for frame in recorder.recording.frames if frame.moves)
    assert {(move.source, move.destination) for move in moves} == {("device", "host")}
    assert isinstance(moves[0], Move)


def test_copies_that_do_not_arrive_are_counted():
    blocks = [Move("device", i, "host", i) for i in range(3)]
    pages = [Move("device", i, "host", i, group=1) for i in range(2)]
    assert of_moves_ended(blocks, 1, 0) == "Of 3 blocks that were to be copied, 1 arrived."
    assert of_moves_ended(blocks, 3, 0) == "Arrived: 3 blocks on the host."
    assert of_moves_ended([*blocks, *pages], 3, 2) == "Arrived: 3 blocks and 2 pages on the host."
    told = "Of 3 blocks and 2 pages that were to be copied, 3 blocks and 1 page arrived."
    assert of_moves_ended([*blocks, *pages], 3, 1) == told
    assert of_moves_ended(pages, 0, 0) == "Of 2 pages that were to be copied, none arrived."


def test_a_step_that_raised_is_told_as_such(open_cache):
    cache = open_cache()
    with Recorder(cache) as recorder, cache.sequence(range(6)) as seq:
        with pytest.raises(ZeroDivisionError), cache.step([seq]):
            raise ZeroDivisionError
        assert captions(recorder)[-1] == "The step raised ZeroDivisionError: nothing is committed."
        assert recorder.recording.frames[-1].sequences[0].computed == 0


def test_purges_are_told(open_cache):
    cache = open_cache()
    serve(cache, list(range(9)))
    with Recorder(cache) as recorder:
        cache.purge(None)
    assert captions(recorder)[-1] == "A namespace is purged. Dropped: device blocks 0 and 1."


def test_sequences_from_before_are_others(open_cache):
    cache = open_cache()
    with cache.sequence(range(6)) as seq:
        compute(cache, seq)
        with Recorder(cache) as recorder:
            fork = seq.fork()
            (first, last) = recorder.recording.frames
        assert [(block.block, block.others) for block in first.tiers["device"]] == [(0, 1), (1, 1)]
        assert [(s.name, s.parent) for s in last.sequences] == [("A", "a sequence")]
        assert [(block.block, block.others) for block in last.tiers["device"]] == [(0, 1), (1, 1)]
        fork[0].release()


def test_a_sequence_that_was_collected_is_gone_from_the_next_frame(open_cache):
    cache = open_cache()
    with Recorder(cache) as recorder:
        seq = cache.sequence(range(6))
        del seq
        recorder.note("now")
    assert [len(frame.sequences) for frame in recorder.recording.frames] == [0, 1, 0]


def test_names_go_on_after_z(open_cache):
    cache = open_cache(4)
    with Recorder(cache) as recorder:
        for _ in range(54):
            cache.sequence([1]).release()
    names = [frame.sequences[0].name for frame in recorder.recording.frames if frame.what == "sequence"]
    assert names[:2] == ["A", "B"]
    assert names[24:29] == ["Y", "Z", "AA", "AB", "AC"]
    assert names[51:54] == ["AZ", "BA", "BB"]
    assert len(set(names)) == 54


def test_only_so_many_frames_are_kept_and_the_rest_is_counted(open_cache):
    cache = open_cache()
    with Recorder(cache, max_frames=5) as recorder:
        serve(cache, list(range(6)))
        serve(cache, list(range(6)))
    assert len(recorder.recording.frames) == 5
    assert recorder.recording.left_out == 4


def test_a_recorder_can_be_left_and_entered_again(open_cache):
    cache = open_cache()
    recorder = Recorder(cache)
    with recorder:
        serve(cache, list(range(6)))
    count = len(recorder.recording.frames)
    serve(cache, list(range(6)))
    assert len(recorder.recording.frames) == count
    assert not cache.hooks
    with recorder:
        recorder.note("again")
    assert captions(recorder)[count:] == ["again"]


def test_tokens_have_the_texts_that_were_asked_for(open_cache):
    cache = open_cache()
    with Recorder(cache, text=lambda token: f"<{token}>") as recorder, cache.sequence(range(3, 8)) as seq:
        compute(cache, seq)
    assert recorder.recording.texts == {i: f"<{i}>" for i in range(3, 8)}
    with Recorder(cache, text=lambda token: token) as recorder, cache.sequence([9]):  # type: ignore[arg-type,return-value]
        pass
    with pytest.raises(pk.WrongType, match="must be a str, and was int"):
        _ = recorder.recording


def test_what_cannot_be_recorded_is_refused(open_cache):
    cache = open_cache()
    with pytest.raises(pk.WrongType, match="records a KVCache, not a str"):
        Recorder("cache")  # type: ignore[arg-type]
    with pytest.raises(pk.WrongType, match="cannot be called"):
        Recorder(cache, text="words")  # type: ignore[arg-type]
    with pytest.raises(pk.InvalidArgument, match="max_frames"):
        Recorder(cache, max_frames=0)
    with Recorder(cache) as recorder, pytest.raises(pk.WrongType, match="a note is text"):
        recorder.note(3)  # type: ignore[arg-type]


def test_a_run_of_several_threads_is_recorded_soundly(open_cache, tmp_path):
    cache = open_cache(40, host=10)
    with Recorder(cache) as recorder:
        prompts = [[list(range(100 * i + 7 * j, 100 * i + 7 * j + 14)) for j in range(6)] for i in range(3)]
        threads = [threading.Thread(target=lambda some=some: [serve(cache, p) for p in some]) for some in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.note("the end")
    recorder.save(tmp_path / "run.json")
    recording = read_recording(tmp_path / "run.json")
    assert recording.frames[-1].caption == "the end"
    assert len(recording.frames) + recording.left_out > 60


def test_what_a_scheduler_runs_is_recorded(open_cache):
    cache = open_cache(8, host=8, threads=1)
    scheduler = pk.Scheduler(cache)
    with Recorder(cache) as recorder:
        for start in (0, 100, 200):
            scheduler.submit(list(range(start, start + 9)), max_new_tokens=6)
        while scheduler.has_work:
            plan = scheduler.schedule()
            with scheduler.step(plan) as step:
                kv = np.broadcast_to(step.tokens[:, None, None], (len(step.tokens), 1, 2)).astype(np.float32)
                step.write(0, kv, kv)
            scheduler.report(plan, np.full(len(plan.last_tokens), 7))
    recording = recorder.recording
    assert {"A", "B", "C"} <= {sequence.name for frame in recording.frames for sequence in frame.sequences}
    assert max(len(frame.sequences) for frame in recording.frames) >= 2
    assert not recording.frames[-1].sequences
    assert any(frame.what == "step" for frame in recording.frames)
