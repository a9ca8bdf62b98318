"""A recording of a cache by groups agrees with the books and the bytes of every group."""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv._core.tier import TIER_NAMES
from pagedkv.errors import RecordingFormatError
from pagedkv.lab.recording import Frame, Recording, read_recording
from pagedkv.lab.recording.recorder import Recorder
from pagedkv.observe.hooks import Span
from tests.cache.test_by_group import SIZE, prompt
from tests.cache.test_by_group import compute as attend
from tests.cache.test_by_group_on_disk import NAMED, SPEC

LOCAL, CHUNKED, FULL = pk.Attention(1, 2, window=9), pk.Attention(1, 2, chunk=12), pk.Attention(1, 2)
LAYERS = {"window": [LOCAL, LOCAL, FULL], "both": [CHUNKED, FULL, pk.SameAs(0), LOCAL, LOCAL]}


def compute(cache: pk.KVCache, *seqs: pk.Sequence) -> None:
    """One step, in which the KV of a token is the token in all layers."""
    with cache.step(seqs) as step:
        kv = np.broadcast_to(step.tokens[:, None, None], (len(step.tokens), 1, 2)).astype(np.float32)
        for own in range(cache.spec.num_layers):
            step.write(cache.spec.model_layer(own), kv, kv)


class Counted:
    """Counts the blocks of group 0 that move, and the pages of others."""

    def __init__(self) -> None:
        self.blocks = self.pages = self.begun = self.ended = self.open = 0
        self.begun_pages = self.ended_pages = 0

    def begin(self, span: Span) -> None:
        if span.name == "moves":
            moves: Any = span.subject
            self.open += 1
            self.blocks += int((moves["lane"] == 0).sum())
            self.pages += int((moves["lane"] > 0).sum())
            self.begun += span.attributes["blocks"]
            self.begun_pages += span.attributes["pages"]

    def end(self, span: Span, state: Any) -> None:
        if span.name == "moves":
            self.open -= 1
            self.ended += span.attributes["moved_blocks"]
            self.ended_pages += span.attributes["moved_pages"]

    def wait(self, cache: pk.KVCache) -> None:
        """Until nothing moves or waits to be written, and hooks that were added later know it."""
        until = time.monotonic() + 60
        while self._has_work(cache.placement.stats()) or self.open:
            assert time.monotonic() < until
            time.sleep(0.001)

    @staticmethod
    def _has_work(counts: dict[str, Any]) -> bool:
        return bool(counts["in_flight"] or counts["wanted"])


def check(cache: pk.KVCache, recording: Recording, rows: dict[str, int]) -> int:
    """The last frame agrees with the books and the bytes; how many pages were compared."""
    frame, compared = recording.frames[-1], 0
    for number, pool in enumerate(cache.placement.pools):
        if pool is None or pool.extents is None:
            continue
        tier = TIER_NAMES[number]
        assert frame.extents[tier] == tuple(pool.extents.owners())
        assert recording.per_extent[tier] == pool.extents.per_extent
        for group, each in enumerate(pool.extents.pools):
            told = each.dump()
            if not group:
                assert {held.block: held.references for held in frame.tiers[tier]} == told["refs"]
                continue
            pages = frame.held_pages(group, tier)
            assert {page.page: page.references for page in pages.values()} == told["refs"]
            cached = [page for page in pages.values() if page.references == page.points]
            assert len(cached) == told["cached"]
            assert all(page.in_tree for page in cached)
            assert all(page.others == page.moves == 0 and not page.moving for page in pages.values())
            compared += len(pages)
    assert len(frame.points) == cache.placement.stats()["points"]
    assert all(point.block in frame.held(point.tier) for point in frame.points)
    for seq in frame.sequences:
        for group, table in enumerate(seq.tables, start=1):
            first, pages_of_row = cache.table.pages(rows[seq.name], group)
            assert (table.first, table.pages) == (first, tuple(pages_of_row.tolist()))
            for logical, page in enumerate(table.pages, start=first):
                held = frame.held_pages(group)[page]
                assert seq.name in held.sequences
                assert held.logical == logical
                tokens = seq.tokens[logical * SIZE : min((logical + 1) * SIZE, seq.computed)]
                assert held.tokens[: len(tokens)] == tokens
    for group, told_group in enumerate(recording.groups[1:], start=1):
        k_view, v_view = cache.layer(told_group.layers[0])
        for page in frame.held_pages(group).values():
            written = np.repeat(np.array(page.tokens, np.float32)[:, None, None], 2, axis=2)
            assert np.array_equal(k_view[page.page, : len(page.tokens)], written), (frame.caption, page)
            assert np.array_equal(v_view[page.page, : len(page.tokens)], written)
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", LAYERS)
def test_after_random_steps_the_pages_are_those_of_the_books_and_the_bytes(
    name: str, seed: int, tmp_path: Path
) -> None:
    rng, counted, compared = random.Random(seed), Counted(), 0
    spec = pk.KVSpec.of(LAYERS[name], dtype="float32", block_size=SIZE, model="its own token")
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(30), admission="all")
    stems = [[100 * i + j for j in range(30)] for i in range(5)]
    with pk.KVCache(spec, pk.Blocks(16), pk.Blocks(8), disk, threads=1, by_group=True) as cache:
        cache.hooks.add(counted)
        live: list[pk.Sequence] = []
        with Recorder(cache, max_frames=100_000) as recorder:
            names: dict[str, int] = {}
            for _ in range(120):
                act = rng.random()
                try:
                    if act < 0.4 and len(live) < 3:
                        stem = rng.choice(stems)[: rng.choice((14, 22, 30))]
                        live.append(cache.sequence([*stem, rng.randint(900, 903)]))
                    elif act < 0.47 and live and len(live) < 3:
                        live += rng.choice(live).fork()
                    elif act < 0.52 and live:
                        seq = rng.choice(live)
                        seq.truncate(rng.randint(1, len(seq)))
                    elif act < 0.7 and live:
                        live.pop(rng.randrange(len(live))).release()
                    elif live:
                        compute(cache, *live)
                        for seq in live:
                            seq.append(rng.randint(900, 902))
                except pk.OutOfBlocks:
                    while live:
                        live.pop().release()
                counted.wait(cache)
                recorder.note("now")
                frame = recorder.recording.frames[-1]
                assert frame.caption == "now"
                rows = {tuple(seq.blocks): seq.row for seq in live}
                names = {state.name: rows[state.blocks] for state in frame.sequences}
                compared += check(cache, recorder.recording, names)
            for seq in live:
                seq.release()
        hits = cache.stats().hit_tokens
        recording = recorder.recording
        cache.check_integrity()
    assert compared > 500
    moved = {(move.source, move.destination) for frame in recording.frames for move in frame.moves if move.group}
    assert {("device", "host")} <= moved
    assert {("host", "disk"), ("device", "disk")} & moved
    assert hits["device"] > 0
    assert hits["host"] + hits["disk"] > 0
    recorder.save(tmp_path / "run.json")
    assert read_recording(tmp_path / "run.json") == recording


def test_moves_of_tails_are_told_beside_those_of_blocks(tmp_path: Path) -> None:
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(200), segment_size="256KiB", write="all", admission="all")
    counted = Counted()
    with pk.KVCache(SPEC, pk.Blocks(16), pk.Blocks(30), disk, by_group=True) as cache:
        cache.hooks.add(counted)
        with Recorder(cache) as recorder:
            for number in range(8):
                with cache.sequence(prompt(number % 4, 30)) as seq:
                    attend(cache, seq)
            cache.checkpoint()
            counted.wait(cache)
    frames = [frame for frame in recorder.recording.frames if frame.what == "moves"]
    ended = [frame for frame in frames if "rrived" in frame.caption]
    for is_page, most in ((False, counted.blocks), (True, counted.pages)):  # frames amid changes are left out
        assert 0 < sum(bool(move.group) is is_page for frame in ended for move in frame.moves) <= most
    assert not [frame.caption for frame in frames if "that were to be copied" in frame.caption]
    assert counted.begun == counted.ended == counted.blocks > 0
    assert counted.begun_pages == counted.ended_pages == counted.pages > 0


def frames_with_moves(recording: Recording) -> list[Frame]:
    return [frame for frame in recording.frames if any(move.group for move in frame.moves)]


def test_a_page_on_the_move_is_told_at_both_ends_with_what_it_holds(demo_of_groups: Recording) -> None:
    flying = [frame for frame in frames_with_moves(demo_of_groups) if "being copied" in frame.caption]
    assert flying
    for frame in flying:
        for move in frame.moves:
            if move.group:
                source = frame.held_pages(move.group, move.source)[move.block]
                target = frame.held_pages(move.group, move.destination)[move.to]
                assert (target.logical, target.tokens) == (source.logical, source.tokens)
                assert target.moving == "in"
                assert source.moves >= 1
                assert source.others >= 0


def test_layers_that_read_another_ones_kv_are_in_its_group() -> None:
    spec = NAMED["shared"]
    with pk.KVCache(spec, pk.Blocks(60), by_group=True) as cache, Recorder(cache) as recorder:
        pass
    labels = [group.label(i) for i, group in enumerate(recorder.recording.groups)]
    assert labels == ["group 0: layers 1 and 3, all tokens", "group 1: layers 0 and 2, window of 9 tokens"]


def test_a_cache_of_all_tokens_has_no_groups_whatever_its_layers_see() -> None:
    with pk.KVCache(SPEC, pk.Blocks(60)) as cache, Recorder(cache) as recorder, cache.sequence([1, 2, 3]) as seq:
        attend(cache, seq)
    recording = recorder.recording
    assert recording.groups == ()
    assert recording.to_dict()["version"] == 1
    assert "pages" not in recording.to_dict()["frames"][0]


# ---- files


@pytest.fixture(scope="module")
def data(demo_of_groups: Recording) -> Any:
    """The built-in run over groups as plain data."""
    return json.loads(json.dumps(demo_of_groups.to_dict()))


def read(tmp_path: Path, data: Any) -> Recording:
    (tmp_path / "run.json").write_text(json.dumps(data))
    return read_recording(tmp_path / "run.json")


def test_a_recording_over_groups_is_read_as_it_was_written(
    data: Any, demo_of_groups: Recording, tmp_path: Path
) -> None:
    assert data["version"] == 2
    assert read(tmp_path, data) == demo_of_groups


def device_page(data: Any, number: int = 0) -> Any:
    return data["frames"][19]["pages"]["device"][number]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(version=1), ""),  # then nothing is read of groups
        (lambda d: d.pop("groups"), "groups: is not there"),
        (lambda d: d["groups"].pop(), "groups: there are 1, and can be 2 to 4"),
        (lambda d: d["groups"][0].update(chunk=4), "group 0: neither a window nor chunks"),
        (lambda d: d["groups"][1].update(windows=[]), "group 1: a window or chunks, one of them"),
        (lambda d: d["groups"][1].update(layers=[1, 0]), "must ascend"),
        (lambda d: d["per_extent"].pop("host"), "per_extent: device, disk, but there are"),
        (lambda d: d["per_extent"].update(host=[5, 1]), "whole extents"),
        (lambda d: d["frames"][19].pop("pages"), "frame 20, pages: is not there"),
        (lambda d: d["frames"][19]["pages"]["device"].reverse(), "the pages do not stand once each"),
        (lambda d: d["frames"][19]["pages"].pop("disk"), "frame 20, pages: device, host, but there are"),
        (lambda d: device_page(d).update(group=2), "group: 2: a whole number from 1 to 1"),
        (lambda d: device_page(d).update(page=12), "page: 12: a whole number from 0 to 11"),
        (lambda d: device_page(d).update(points=2), "1 references are fewer than the owners"),
        (lambda d: device_page(d, 3).update(sequences=[]), "page 3 of group 1: the sequences' tables say"),
        (lambda d: d["frames"][19]["sequences"][0]["tables"].append({}), "one for each short group"),
        (lambda d: d["frames"][19]["sequences"][0]["tables"][0].update(first=-1), "first: -1"),
        (lambda d: d["frames"][19]["extents"]["device"].pop(), "11 are told, and the tier has 12"),
        (lambda d: d["frames"][19]["extents"].update(device=[0] * 12), "device page 0 of group 1: its extent is not"),
        (lambda d: d["frames"][19]["extents"].update(device=[7] * 12), "extents: 7: a whole number from -1 to 1"),
        (lambda d: d["frames"][19]["points"][0].update(block=15), "device block 15 has no owner"),
        (lambda d: d["frames"][19]["points"][0].update(tiers=["disk", "device"]), "in this order"),
        (lambda d: d["frames"][19]["page_copies"].append([0, 1, 2]), "page_copies: 0: a whole number from 1 to 1"),
        (lambda d: d["frames"][19]["page_copies"].append([1, 2]), "a group and a pair of page ids"),
    ],
)  # fmt: skip
def test_books_over_groups_that_contradict_themselves_are_refused_with_the_place(
    data: Any, change: Any, said: str, tmp_path: Path
) -> None:
    data = copy.deepcopy(data)
    change(data)
    if not said:
        assert read(tmp_path, data).groups == ()
        return
    with pytest.raises(RecordingFormatError) as found:
        read(tmp_path, data)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_sequences_have_pages_on_the_device_only_and_moves_a_group(data: Any, tmp_path: Path) -> None:
    changed = copy.deepcopy(data)
    frame = next(frame for frame in changed["frames"] if frame["pages"]["host"])
    frame["pages"]["host"][0].update(sequences=["C"], references=9)
    with pytest.raises(RecordingFormatError, match="sequences have device pages only"):
        read(tmp_path, changed)
    changed = copy.deepcopy(data)
    frame = next(frame for frame in changed["frames"] if frame["moves"])
    frame["moves"][0]["group"] = 2
    with pytest.raises(RecordingFormatError, match="moves, group: 2"):
        read(tmp_path, changed)
