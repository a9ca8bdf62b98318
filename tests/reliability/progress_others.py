"""Callers beside the scheduler in the proof *progress*.

They pin, hold, prefetch, purge and set quotas.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from random import Random

import numpy as np

import pagedkv as pk
from tests.in_blocks import in_blocks
from tests.reliability.history_model import SIZE, number
from tests.reliability.proof import Tally

NAMESPACES = (None, pk.Namespace(tenant="a"), pk.Namespace(tenant="b"))
QUOTAS = (1, 2, 5, None)
MOST_HELD = 2  # sequences
VISITOR_BLOCKS = 4  # that the other thread holds at most


def some_prompt(r: Random, lengths: Sequence[int] = (0, 0, 4, 9, 16, 21)) -> tuple[list[int], int]:
    """Return tokens and the number of a namespace.

    Often they begin with a prefix of one of these lengths that others have too.
    """
    shared, first = r.choice(lengths), r.randint(0, 2)
    return [*([first] * shared), *(r.randrange(4) for _ in range(r.randint(1, 9)))], r.choice([0, 0, 1, 1, 2])


class Others:
    """What they hold, and what they do next.

    Parameters
    ----------
    cache : KVCache
    random : says what they do.
    tally : counts it.
    has_visitor : whether a thread of its own opens short sequences all the time.
    is_narrow : whether every namespace but the first begins with the smallest quota.
    """

    def __init__(self, cache: pk.KVCache, random: Random, tally: Tally, has_visitor: bool, is_narrow: bool) -> None:
        self._cache, self._random, self._tally, self.has_visitor = cache, random, tally, has_visitor
        self.sequences: list[pk.Sequence] = []
        self.pins: dict[int, int] = {}  # blocks at most, by handle
        self._prefetches: list[pk.Prefetch] = []
        self._is_eager = random.random() < 0.1  # prefetches at every step
        for namespace in range(1, len(NAMESPACES)):
            if is_narrow:
                cache.set_quota(NAMESPACES[namespace], pk.Blocks(min(QUOTAS[:-1])))
            elif random.random() < 0.5:
                self.set_quota(namespace)
        self._stopping = threading.Event()
        self.num_visits = 0
        self._visitor = threading.Thread(target=self._visit, args=(random.random(),), daemon=True)
        if has_visitor:
            self._visitor.start()

    def act(self) -> None:
        """One thing, or none."""
        r = self._random
        if self._is_eager:
            self.prefetch()
        what = r.random()
        if what < 0.12:
            self.prefetch()
        elif what < 0.13:
            self._cache.purge(r.choice(NAMESPACES))
            self._tally.add("purges")
        elif what < 0.15:
            self.set_quota(r.randint(1, len(NAMESPACES) - 1))
        elif what < 0.18:
            self.pin()
        elif what < 0.22:
            self.hold()
        elif what < 0.28:
            self.let_go()

    def prefetch(self) -> None:
        """Have something brought up, and do not wait for it."""
        tokens, namespace = some_prompt(self._random)
        self._prefetches.append(self._cache.prefetch(tokens, NAMESPACES[namespace]))
        self._tally.add("prefetches")

    def set_quota(self, namespace: int) -> None:
        """So many blocks on the device, or as many as it likes."""
        self._cache.set_quota(NAMESPACES[namespace], in_blocks(self._random.choice(QUOTAS)))
        self._tally.add("quotas")

    def pin(self) -> None:
        """Keep a prefix, within the budget."""
        tokens, namespace = some_prompt(self._random)
        try:
            self.pins[self._cache.pin(tokens, NAMESPACES[namespace])] = len(tokens) // SIZE
            self._tally.add("pins")
        except pk.PinBudgetExceeded:
            self._tally.add("pins beyond the budget")

    def hold(self) -> None:
        """A sequence that stays."""
        if len(self.sequences) < MOST_HELD and self._cache.table.num_rows < self._cache.max_sequences:
            tokens, namespace = some_prompt(self._random)
            try:
                self.sequences.append(self._cache.sequence(tokens, NAMESPACES[namespace]))
                _compute(self.sequences[-1], tokens, namespace)
                self._tally.add("sequences of others")
            except (pk.OutOfBlocks, pk.InvalidArgument):
                self._tally.add("sequences of others without room")

    def let_go(self) -> None:
        """All that is held."""
        while self.sequences:
            self.sequences.pop().release()
        while self.pins:
            self.pins.popitem()[0].release()

    def leave(self) -> None:
        """Let go of everything, and come back no more."""
        self.let_go()
        self._stopping.set()
        if self.has_visitor:
            self._visitor.join()
            self._tally.add("sequences of the other thread", self.num_visits)
        for prefetch in self._prefetches:
            prefetch.wait()

    def _visit(self, seed: float) -> None:
        r = Random(seed)
        while not self._stopping.wait(r.choice([0.0, 0.0005])):
            namespace = r.randint(0, len(NAMESPACES) - 1)
            tokens = [r.randint(0, 2)] * (r.randint(1, VISITOR_BLOCKS) * SIZE)
            try:
                with self._cache.sequence(tokens, NAMESPACES[namespace]) as seq:
                    _compute(seq, tokens, namespace)
                    self.num_visits += 1
            except (pk.OutOfBlocks, pk.InvalidArgument):
                continue


def _compute(seq: pk.Sequence, tokens: list[int], salt: int) -> None:
    values = np.array([number(token, salt) for token in tokens[seq.num_computed :]], np.float32).reshape(1, -1, 1, 1)
    seq.scatter(values, -values)
