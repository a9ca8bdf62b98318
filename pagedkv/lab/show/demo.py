"""The built-in runs: three tiers of a few blocks, all that can happen to a block.

One is of a cache whose layers all see everything, one of a cache by groups of layers, and a short one ends with a
prefix that two sequences share, and blocks on every tier.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pagedkv.cache.cache import KVCache
from pagedkv.cache.sequence import Sequence
from pagedkv.errors import InvalidArgument
from pagedkv.lab.recording import Recorder, Recording
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.layers import Attention
from pagedkv.spec.sizes import Blocks

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4, model="demo")
LOCAL, FULL = Attention(1, 2, window=9), Attention(1, 2)
SPEC_OF_GROUPS = KVSpec.of([LOCAL, LOCAL, FULL], dtype="float32", block_size=4, model="demo of groups")
DEMOS = ("tiers", "groups", "prefix")
SYSTEM = "you are a helpful bot . be brief"
PAGES, TREES, FORKS = (f"{SYSTEM} tell me of {things} ." for things in ("pages", "trees", "forks"))
PAGE, TREE = f"{SYSTEM} what is a page ?", f"{SYSTEM} what is a tree ?"
STORY = "once upon a time there was a very small cache that never forgot anything at all"
SONG = "row row row your boat gently down the stream"
RIDDLE = "a thing with keys but no locks and space but no room"
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


def record(demo: str = DEMOS[0]) -> Recording:
    """Run a demo, and return its recording.

    Needs a few KiB of temporary files for the disk tier.

    Parameters
    ----------
    demo : "tiers"; "groups": of a cache by groups of layers; or "prefix", whose last step is a picture by itself.

    Raises
    ------
    InvalidArgument
        There is no such demo.
    """
    if demo not in DEMOS:
        raise InvalidArgument(f"there is no built-in run {demo!r}: {', '.join(DEMOS)} are")
    by_group, words = demo == "groups", Words()
    spec = SPEC_OF_GROUPS if by_group else SPEC
    run = {"tiers": _run, "groups": _run_by_group, "prefix": _run_with_a_prefix}[demo]
    num_host, num_disk = (5, 12) if by_group else (4, 4)
    with tempfile.TemporaryDirectory(prefix="pagedkv-show-") as folder:
        disk = Disk(str(Path(folder, "kv")), size=Blocks(num_disk))
        with KVCache(spec, Blocks(8), Blocks(num_host), disk, threads=1, by_group=by_group) as cache:
            with Recorder(cache, text=words.text) as recorder:
                run(cache, words, recorder)
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


def _run_with_a_prefix(cache: KVCache, words: Words, recorder: Recorder) -> None:
    recorder.note("Four prompts without a common beginning need more blocks than the device has: old ones move down.")
    for text in (SONG, STORY, RECIPE, RIDDLE):
        with cache.sequence(words.tokens(text)) as seq:
            _decode(cache, words, [(seq, "and")])
    a = cache.sequence(words.tokens(PAGE))
    _decode(cache, words, [(a, "a fixed")])
    b = cache.sequence(words.tokens(TREE))
    _decode(cache, words, [(a, "block"), (b, "a branching")])
    recorder.note("Two prompts begin alike and share two blocks; older ones lie on the host and on the disk.")


def _run_by_group(cache: KVCache, words: Words, recorder: Recorder) -> None:
    a = cache.sequence(words.tokens(PAGES))
    _decode(cache, words, [(a, "a fixed")])
    recorder.note("A holds all blocks of group 0, and of group 1 the last pages alone: its window reaches no further.")
    b = cache.sequence(words.tokens(TREES))
    recorder.note(
        "B begins like A, but group 1 has a hole where they part. So B computes all of it, and leaves a point."
    )
    _decode(cache, words, [(a, "block"), (b, "a branching")])
    for seq in (a, b):
        seq.release()
    c = cache.sequence(words.tokens(FORKS))
    recorder.note("C goes on from that point. It is forked, and each writes something else next.")
    _decode(cache, words, [(c, "a copy")])
    (d,) = c.fork()
    _decode(cache, words, [(c, "of"), (d, "that")])
    for seq in (c, d):
        seq.release()
    recorder.note("Prompts without a common beginning need room. Points and blocks move down, the coldest first.")
    for text in (STORY, RECIPE):
        with cache.sequence(words.tokens(text)) as seq:
            _decode(cache, words, [(seq, "and")])
    recorder.note(
        "The first prompt is asked for again: the blocks of group 0 come back, and of group 1 one tail alone."
    )
    with cache.sequence(words.tokens(f"{PAGES} a fixed block")) as seq:
        _decode(cache, words, [(seq, "of")])


def _decode(cache: KVCache, words: Words, answers: Iterable[tuple[Sequence, str]]) -> None:
    """Compute the tokens not computed yet, then append each sequence's words, one in a step."""
    rows = [(seq, words.tokens(answer)) for seq, answer in answers]
    while rows:
        with cache.step([seq for seq, _ in rows]) as step:
            kv = np.broadcast_to(step.tokens[:, None, None], (len(step.tokens), 1, 2)).astype(np.float32)
            for layer in range(cache.spec.num_model_layers):
                step.write(layer, kv, kv)
        for seq, rest in rows:
            seq.append(rest.pop(0))
        rows = [(seq, rest) for seq, rest in rows if rest]
