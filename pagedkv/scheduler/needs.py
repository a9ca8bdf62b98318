"""Counts the blocks that requests need, and asks whether the device can give them.

An amount is a number of blocks where all layers keep every block. Over groups of layers (``KVCache(by_group=True)``) it
is :class:`Pages`, a number for each group. Amounts are added, subtracted, and compared by a :class:`Needs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.cache.cache import KVCache
from pagedkv.scheduler.limits import blocks_at_most, pages_at_most
from pagedkv.scheduler.options import SchedulerOptions

Amount: TypeAlias = Any  # int, or Pages


class Needs(Protocol):
    """Counts the blocks that a scheduler's requests need of one cache.

    Attributes
    ----------
    nothing : Amount
    capacity : blocks that the device has, or would have if it held no pages.
    watermark : Amount that admission leaves free.
    can_share : whether a prompt can go on from blocks that another one computes in the same step.
    may_scatter : whether blocks that lie apart can take more of the memory than as many that lie together.
    """

    nothing: Amount
    capacity: int
    watermark: Amount
    can_share: bool
    may_scatter: bool

    def of_lanes(self, num_rows: int) -> Amount:
        """The most that a step of so many rows without drafts can need.

        Where there is room for that, the caller need not look closer.
        """

    def of_step(self, rows: ArrayLike, q_lens: ArrayLike | None = None, follow: ArrayLike | None = None) -> Amount:
        """The blocks that the table's `step` with these arguments would allocate."""

    def to_finish(self, rows: ArrayLike) -> Amount:
        """The blocks that rows still need, until all their tokens and the lookahead have slots."""

    def at_least(self, num_tokens: int) -> Amount:
        """The fewest that so many tokens of a prompt need if none of them is cached."""

    def beside(self, row: int, num_tokens: int, num_shared: int) -> Amount:
        """The blocks that a row with so many tokens needs beside its own.

        It is to take its first `num_shared` blocks from others.
        """

    def at_most(self, prompt_tokens: int, max_new_tokens: int, width: int) -> Amount:
        """The most that a request of `width` branches needs when it runs alone."""

    def held(self, rows: list[int], others: Iterable[NDArray[np.int32]] = ()) -> Amount:
        """Blocks of these rows, shared ones once.

        `others` are further blocks of the group that sees everything.
        """

    def live(self) -> Amount:
        """Blocks that any sequence, pin or move holds."""

    def lacks(self, amount: Amount, room: int) -> bool:
        """Whether the device lacks so much more even if all cached blocks are evicted.

        Parameters
        ----------
        amount
        room : blocks that the device's pool says it could have.
        """

    def exceeds(self, amount: Amount, other: Amount) -> bool:
        """Whether an amount is larger than another one anywhere."""

    def as_blocks(self, amount: Amount) -> int:
        """The blocks of all memory that it takes, to be compared with `capacity`."""


def needs_of(cache: KVCache, options: SchedulerOptions) -> Needs:
    """The way to count for this cache."""
    return BlockNeeds(cache, options) if cache.table.num_groups == 1 else PageNeeds(cache, options)


class BlockNeeds:
    """Where all layers keep every block: an amount is a number of blocks."""

    nothing: Amount = 0
    can_share = True
    may_scatter = False

    def __init__(self, cache: KVCache, options: SchedulerOptions) -> None:
        pool = cache.placement.pools[0]
        assert pool is not None
        self._pool, self._table = pool, cache.table
        self._size, self._lookahead = cache.spec.block_size, options.lookahead
        self._each = 1 + -(-(1 + options.lookahead) // self._size)  # of a lane: new ones, and a copy
        self.capacity = pool.max_blocks
        self.watermark: Amount = int(options.watermark * self.capacity)

    def of_lanes(self, num_rows: int) -> Amount:
        return num_rows * self._each

    def of_step(self, rows: ArrayLike, q_lens: ArrayLike | None = None, follow: ArrayLike | None = None) -> Amount:
        return self._table.blocks_needed(rows, q_lens, self._lookahead, follow)

    def to_finish(self, rows: ArrayLike) -> Amount:
        return self._table.blocks_needed(rows, None, self._lookahead)

    def at_least(self, num_tokens: int) -> Amount:
        return num_tokens // self._size

    def beside(self, row: int, num_tokens: int, num_shared: int) -> Amount:
        return -(-(num_tokens + self._lookahead) // self._size) - max(self._table.info(row).num_blocks, num_shared)

    def at_most(self, prompt_tokens: int, max_new_tokens: int, width: int) -> Amount:
        return blocks_at_most(prompt_tokens, max_new_tokens, width, self._size, self._lookahead)

    def held(self, rows: list[int], others: Iterable[NDArray[np.int32]] = ()) -> Amount:
        return _distinct([*(self._table.blocks(row) for row in rows), *others])

    def live(self) -> Amount:
        return self._pool.counts()["live"]

    def lacks(self, amount: Amount, room: int) -> bool:
        return bool(amount > room)

    def exceeds(self, amount: Amount, other: Amount) -> bool:
        return bool(amount > other)

    def as_blocks(self, amount: Amount) -> int:
        return int(amount)


class Pages:
    """Blocks of each group of layers, the one that sees everything first. Immutable.

    Parameters
    ----------
    counts : int64 [num_groups]
    """

    __slots__ = ("counts",)

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self.counts = counts

    def __add__(self, other: Pages | int) -> Pages:
        return Pages(self.counts + _counts(other))

    __radd__ = __add__

    def __sub__(self, other: Pages | int) -> Pages:
        return Pages(self.counts - _counts(other))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pages) and bool((self.counts == other.counts).all())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Pages({self.counts.tolist()})"


class PageNeeds:
    """Over groups of layers: an amount is :class:`Pages`.

    No row follows another one there, and no request loads from slower tiers beside a step.
    """

    can_share = False
    may_scatter = True

    def __init__(self, cache: KVCache, options: SchedulerOptions) -> None:
        placement = cache.placement
        pool = placement.pools[0]
        assert pool is not None
        assert pool.extents is not None
        self._placement, self._table, self._pools = placement, cache.table, pool.extents.pools
        self._size, self._lookahead, self._most = cache.spec.block_size, options.lookahead, options.max_batch_tokens
        self._per_extent = np.array(pool.extents.per_extent, np.int64)
        self.capacity = pool.extents.num_extents * int(self._per_extent[0])
        self._num = cache.table.num_groups
        self.nothing: Amount = Pages(np.zeros(self._num, np.int64))
        self.watermark: Amount = self._spine(int(options.watermark * self.capacity))

    def of_lanes(self, num_rows: int) -> Amount:
        each = 1 + -(-(1 + self._lookahead) // self._size)
        return Pages(np.full(self._num, num_rows * each, np.int64))

    def of_step(self, rows: ArrayLike, q_lens: ArrayLike | None = None, follow: ArrayLike | None = None) -> Amount:
        return Pages(self._table.pages_needed(rows, q_lens, self._lookahead))

    def to_finish(self, rows: ArrayLike) -> Amount:
        return Pages(self._table.pages_to_finish(rows, self._most, self._lookahead))

    def at_least(self, num_tokens: int) -> Amount:
        return self._spine(num_tokens // self._size)

    def beside(self, row: int, num_tokens: int, num_shared: int) -> Amount:
        return self.to_finish([row])

    def at_most(self, prompt_tokens: int, max_new_tokens: int, width: int) -> Amount:
        spine = blocks_at_most(prompt_tokens, max_new_tokens, width, self._size, self._lookahead)
        longest = prompt_tokens + max_new_tokens - 1
        short = (
            pages_at_most(longest, width, reach, self._most, self._size, self._lookahead)
            for reach in self._placement.reaches
            if reach is not None
        )
        return Pages(np.array([spine, *short], np.int64))

    def held(self, rows: list[int], others: Iterable[NDArray[np.int32]] = ()) -> Amount:
        table = self._table
        spine = _distinct([*(table.blocks(row) for row in rows), *others])
        short = (_distinct([table.pages(row, group)[1] for row in rows]) for group in range(1, self._num))
        return Pages(np.array([spine, *short], np.int64))

    def live(self) -> Amount:
        return Pages(np.array([pool.counts()["live"] for pool in self._pools], np.int64))

    def lacks(self, amount: Amount, room: int) -> bool:
        return not self._placement.could_have(amount.counts)

    def exceeds(self, amount: Amount, other: Amount) -> bool:
        return bool((amount.counts > other.counts).any())

    def as_blocks(self, amount: Amount) -> int:
        return int((-(-amount.counts // self._per_extent)).sum() * self._per_extent[0])

    def _spine(self, num_blocks: int) -> Pages:
        counts = np.zeros(self._num, np.int64)
        counts[0] = num_blocks
        return Pages(counts)


def _distinct(blocks: list[NDArray[np.int32]]) -> int:
    return len(np.unique(np.concatenate(blocks))) if blocks else 0


def _counts(amount: Pages | int) -> NDArray[np.int64] | int:
    return amount.counts if isinstance(amount, Pages) else amount
