"""The built-in run: three tiers of a few blocks, and everything that can happen to a block."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pagedkv.cache.cache import KVCache
from pagedkv.cache.sequence import Sequence
from pagedkv.lab.recording import Recorder, Recording
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import Blocks

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4, model="demo")
SYSTEM = "you are a helpful bot . be brief"
PAGE, TREE = f"{SYSTEM} what is a page ?", f"{SYSTEM} what is a tree ?"
STORY = "once upon a time there was a very small cache that never forgot anything at all"
RECIPE = "take two eggs and a cup of flour then stir until nobody can see any lumps"


class Words:
    """Tokens for words, numbered as they come."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def tokens(self, text: str) -> list[int]:
        """A token for each word."""
        for word in text.split():
            if word not in self._words:
                self._words.append(word)
        return [self._words.index(word) for word in text.split()]

    def text(self, token: int) -> str:
        """The word of a token."""
        return self._words[token]


def record() -> Recording:
    """Run the demo, and return its recording.

    Needs a few KiB of temporary files for the disk tier.
    """
    words = Words()
    with tempfile.TemporaryDirectory(prefix="pagedkv-show-") as folder:
        disk = Disk(str(Path(folder, "kv")), size=Blocks(4))
        with KVCache(SPEC, device_memory=Blocks(8), host_memory=Blocks(4), disk=disk, threads=1) as cache:
            with Recorder(cache, text=words.text) as recorder:
                _run(cache, words, recorder)
            return recorder.recording


def _run(cache: KVCache, words: Words, recorder: Recorder) -> None:
    a = cache.sequence(words.tokens(PAGE))
    _decode(cache, words, [(a, "a fixed")])
    recorder.note("Another prompt with the same beginning arrives.")
    b = cache.sequence(words.tokens(TREE))
    _decode(cache, words, [(a, "block"), (b, "a branching")])
    recorder.note("Two answers to B are wanted: it is forked, and each writes something else next.")
    (c,) = b.fork()
    _decode(cache, words, [(b, "plant"), (c, "index")])
    for seq in (a, b, c):
        seq.release()
    recorder.note("Prompts without a common beginning need room. Blocks not held move down, the coldest first.")
    for text in (STORY, RECIPE):
        with cache.sequence(words.tokens(text)) as seq:
            _decode(cache, words, [(seq, "and")])
    recorder.note("The first prompt is asked for again: it comes back from where it went.")
    with cache.sequence(words.tokens(f"{PAGE} a fixed block")) as seq:
        _decode(cache, words, [(seq, "of")])


def _decode(cache: KVCache, words: Words, answers: Iterable[tuple[Sequence, str]]) -> None:
    """Compute the tokens not computed yet, then append each sequence's words, one in a step."""
    rows = [(seq, words.tokens(answer)) for seq, answer in answers]
    while rows:
        with cache.step([seq for seq, _ in rows]) as step:
            kv = np.broadcast_to(step.tokens[:, None, None], (len(step.tokens), 1, 2)).astype(np.float32)
            step.write(0, kv, kv)
        for seq, rest in rows:
            seq.append(rest.pop(0))
        rows = [(seq, rest) for seq, rest in rows if rest]
