"""Sequences over the cache's model.

They append, compute, commit, fork with copy-on-write, truncate and release.

A sequence's first blocks are the tree's, owned through an :class:`Owner`; the rest are its own. Forks hold the same
own blocks together until one of them writes, and that one then writes into a copy. What a slot must contain follows
from the tokens alone: position ``i`` holds the KV of the sequence's first ``i + 1`` tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tests.oracle.cache_model import CacheModel, Owner
from tests.oracle.tiers_model import DEVICE, NoRoom


class OwnBlock:
    """A device block outside the tree, and how many sequences (and pending copies) hold it."""

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders = 1


class SequenceModel:
    """One running sequence.

    Attributes
    ----------
    tokens : all tokens so far.
    computed : leading tokens whose KV is written.
    owner : its committed prefix; the whole of it lies on the device.
    own : its blocks behind that.
    """

    def __init__(self, cache: CacheModel, owner: Owner, tokens: Sequence[int]) -> None:
        self.cache, self.owner = cache, owner
        self.tokens = list(tokens)
        self.own: list[OwnBlock] = []
        self.computed = len(owner.path) * cache.block_size
        self.forked = False  # since its last write

    @property
    def namespace(self) -> Hashable:
        return self.owner.root.content[0]

    def contents(self) -> list[tuple[int, ...]]:
        """What each computed position must hold: the tokens that its KV depends on."""
        return [tuple(self.tokens[: i + 1]) for i in range(self.computed)]

    def blocks_needed(self) -> int:
        """Free blocks that computing all tokens takes, a copy-on-write included."""
        return self._num_blocks(len(self.tokens)) - len(self.owner.path) - len(self.own) + len(self._to_copy())

    def commit(self) -> None:
        """Full computed blocks become the tree's, or give way to the tree's."""
        size, done = self.cache.block_size, len(self.owner.path)
        full = self.computed // size - done
        if full <= 0:
            return
        mine = [block.holders == 1 for block in self.own[:full]]
        taken = self.cache.insert(self.owner, self.tokens[done * size : (done + full) * size], mine)
        for block in self.own[:taken]:
            block.holders -= 1
        del self.own[:taken]

    def fork(self) -> SequenceModel:
        """A second sequence that goes on from here."""
        self.commit()
        other = SequenceModel(self.cache, self.cache.share(self.owner), self.tokens)
        kept = self._num_blocks(self.computed) - len(self.owner.path)  # unwritten blocks are not shared
        other.computed, other.own = self.computed, self.own[:kept]
        for block in other.own:
            block.holders += 1
        self.forked = other.forked = True
        return other

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens.

        A committed block that is cut is given up whole: its rest is the tree's.
        """
        size = self.cache.block_size
        whole, keep = num_tokens // size, self._num_blocks(num_tokens)
        computed = num_tokens
        if len(self.owner.path) > whole:
            self.cache.shorten(self.owner, whole)
            keep, computed = whole, whole * size
        while len(self.owner.path) + len(self.own) > keep:
            if not self.own:
                break
            self._let_go(self.own.pop())
        del self.tokens[num_tokens:]
        self.computed = min(self.computed, computed)

    def release(self) -> None:
        """Ends it: its own blocks become free, its committed ones stay cached."""
        while self.own:
            self._let_go(self.own.pop())
        self.cache.release(self.owner)

    # ---- inside

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.block_size)

    def _to_copy(self) -> list[int]:
        """Own blocks that the next tokens may fall into and that others hold too."""
        if not self.forked or len(self.tokens) <= self.computed:
            return []
        first = self.computed // self.cache.block_size - len(self.owner.path)
        return [at for at in range(first, len(self.own)) if self.own[at].holders > 1]

    def _let_go(self, block: OwnBlock) -> None:
        block.holders -= 1
        if block.holders == 0:
            self.cache.give_back(1)


def compute(sequences: Sequence[SequenceModel]) -> int:
    """Run one step and return the copies made.

    It makes room for all, writes all uncomputed tokens and commits full blocks.

    Raises
    ------
    NoRoom
        Too few blocks are free; nothing has changed.
    """
    if not sequences:
        return 0
    cache = sequences[0].cache
    needed = sum(sequence.blocks_needed() for sequence in sequences)
    if needed > cache.free(DEVICE):
        raise NoRoom
    replaced = []
    for sequence in sequences:
        for at in sequence._to_copy():  # the source is held until its bytes are copied
            replaced.append((sequence, sequence.own[at]))
            cache.alloc(1)
            sequence.own[at] = OwnBlock()
        if len(sequence.tokens) > sequence.computed:
            sequence.forked = any(block.holders > 1 for block in sequence.own)
        missing = sequence.blocks_needed()
        cache.alloc(missing)
        sequence.own += [OwnBlock() for _ in range(missing)]
    for sequence, block in replaced:
        sequence._let_go(block)
    for sequence in sequences:
        sequence.computed = len(sequence.tokens)
        sequence.commit()
    return len(replaced)
