"""A recording of a cache by groups shows the group that sees everything alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pagedkv as pk
from pagedkv.lab.recording.recorder import Recorder
from pagedkv.observe.hooks import Span
from tests.cache.test_by_group import compute, prompt
from tests.cache.test_by_group_on_disk import SPEC


class Counted:
    """Counts the blocks of group 0 that move, and all pages."""

    def __init__(self) -> None:
        self.blocks = self.pages = self.begun = self.ended = 0

    def begin(self, span: Span) -> None:
        if span.name == "moves":
            moves: Any = span.subject
            self.blocks += int((moves["lane"] == 0).sum())
            self.pages += len(moves)
            self.begun += span.attributes["blocks"]

    def end(self, span: Span, state: Any) -> None:
        if span.name == "moves":
            self.ended += span.attributes["moved_blocks"]


def test_moves_of_tails_are_no_moves_of_blocks(tmp_path: Path) -> None:
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(200), segment_size="256KiB", write="all", admission="all")
    counted = Counted()
    with pk.KVCache(SPEC, pk.Blocks(16), pk.Blocks(30), disk, by_group=True) as cache:
        cache.hooks.add(counted)
        with Recorder(cache) as recorder:
            for number in range(8):
                with cache.sequence(prompt(number % 4, 30)) as seq:
                    compute(cache, seq)
            cache.checkpoint()
    frames = [frame for frame in recorder.recording.frames if frame.what == "moves"]
    ended = [frame for frame in frames if "rrived" in frame.caption]
    assert sum(len(frame.moves) for frame in ended) <= counted.blocks  # frames amid changes are left out
    assert 0 < counted.blocks < counted.pages
    assert not [frame.caption for frame in frames if "that were to be copied" in frame.caption]
    assert all(frame.moves for frame in frames)
    assert counted.begun == counted.ended == counted.blocks
