"""Scrub: a device block shows nothing of the namespace whose KV it held before.

Decides which blocks are zeroed.

A block is written token by token by the sequence it was given to; the rest still holds its old content. Blocks
that are copied whole (promotions, copy on write, a partial hit) show only the copy, so they are only remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.block_table import GroupArrays, StepArrays

Mode: TypeAlias = Literal["across_namespaces", "always", "never"]
MODES: tuple[Mode, ...] = ("across_namespaces", "always", "never")

FOREIGN = -2  # the block holds the rubbish of a failed read, no namespace's KV


class Scrub:
    """Remembers whose KV each device block held last.

    Costs nothing while all of it is one namespace's.

    Parameters
    ----------
    mode : ``"across_namespaces"``, ``"always"`` (every block is zeroed before a sequence fills it) or ``"never"``.
    num_blocks : of the device.
    block_size : tokens of a block.
    """

    def __init__(self, mode: Mode, num_blocks: int, block_size: int) -> None:
        self._mode, self._num_blocks, self._block_size = mode, num_blocks, block_size
        self._only: int | None = None  # the first namespace (root): until there is another, all blocks are its
        self._last: NDArray[np.int64] | None = None  # whose each block's KV is; None while there is one namespace
        self._starting = threading.Lock()

    @property
    def active(self) -> bool:
        """Whether steps must call `clear`."""
        return self._last is not None or self._mode == "always"

    def saw(self, root: int) -> None:
        """A namespace is about to be used."""
        if self._mode == "across_namespaces" and self._last is None:
            with self._starting:
                if self._only is None:
                    self._only = root
            if root != self._only:
                self._remember()

    def clear(
        self,
        arrays: StepArrays,
        lookahead: int,
        roots: Callable[[], NDArray[np.int64]],
        zero: Callable[[NDArray[np.int32]], None],
    ) -> None:
        """Zero the blocks allocated to a step's sequences, before anything is written there.

        Parameters
        ----------
        arrays, lookahead : of the step.
        roots : gives int64 [num_seqs], the namespace of each sequence. No other namespace ever gets the same number.
        zero : fills blocks with zeros.
        """
        starts = np.flatnonzero(arrays.slot_mapping % self._block_size == 0)  # a block's first token is computed now
        if len(starts) or lookahead:
            self._clear_given(*self._given(arrays, starts, lookahead, roots()), zero)

    def _clear_given(
        self, blocks: NDArray[np.int32], owners: NDArray[np.int64], zero: Callable[[NDArray[np.int32]], None]
    ) -> None:
        if self._mode == "across_namespaces":
            assert self._last is not None
            foreign = self._last[blocks] != owners
            blocks, owners = blocks[foreign], owners[foreign]
        if len(blocks):
            zero(blocks)
            self._note(blocks, owners)

    def copied(self, pairs: NDArray[np.int32]) -> None:
        """Note whole blocks copied within their namespaces, (source, destination) int32 [n, 2].

        Not before: a copy that is interrupted leaves in its destination what stood there.
        """
        if self._last is not None:
            self._last[pairs[:, 1]] = self._last[pairs[:, 0]]

    def holds(self, blocks: NDArray[np.int32] | int, root: int) -> None:
        """Note that blocks are wholly overwritten with KV of this namespace.

        They are owned, so that no other sequence can be given them meanwhile.
        """
        self._note(blocks, root)

    def spoilt(self, blocks: NDArray[np.int32]) -> None:
        """A promotion has failed: whatever was read stands in these blocks."""
        if self._mode == "across_namespaces" and len(blocks):
            self._remember()
            self._note(blocks, FOREIGN)

    def _remember(self) -> None:
        with self._starting:
            if self._last is None:
                self._last = np.full(self._num_blocks, FOREIGN if self._only is None else self._only, np.int64)

    def _note(self, blocks: NDArray[np.int32] | int, roots: NDArray[np.int64] | int) -> None:
        if self._last is not None:
            self._last[blocks] = roots

    def _given(
        self, arrays: StepArrays | GroupArrays, starts: NDArray[np.intp], lookahead: int, roots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The step's blocks that hold no computed token yet, and the namespace of each."""
        blocks = (arrays.slot_mapping[starts] // self._block_size).astype(np.int32)
        owners = roots[np.searchsorted(arrays.q_indptr, starts, side="right") - 1]
        if lookahead:
            tables = arrays.block_tables
            columns = np.arange(tables.shape[1], dtype=np.int32)
            ahead = (columns >= -(-arrays.seq_lens[:, None] // self._block_size)) & (tables >= 0)
            rows, _ = np.nonzero(ahead)
            blocks, owners = np.concatenate((blocks, tables[ahead])), np.concatenate((owners, roots[rows]))
        return blocks, owners


class PageScrub(Scrub):
    """The same where groups of layers share memory: pages of one show another's old bytes.

    From a second namespace on, every page is zeroed before a sequence fills it.
    """

    def __init__(self, mode: Mode, block_size: int) -> None:
        super().__init__(mode, 0, block_size)

    def clear(
        self,
        arrays: StepArrays,
        lookahead: int,
        roots: Callable[[], NDArray[np.int64]],
        zero: Callable[..., None],
    ) -> None:
        """As :meth:`Scrub.clear`; `zero` is given a group's number and its pages."""
        starts = np.flatnonzero(arrays.slot_mapping % self._block_size == 0)
        if len(starts) or lookahead:
            none = np.zeros(len(arrays.seq_lens), np.int64)
            parts: tuple[StepArrays | GroupArrays, ...] = (arrays, *arrays.groups)
            for group, part in enumerate(parts):
                zero(group, self._given(part, starts, lookahead, none)[0])

    def copied(self, pairs: NDArray[np.int32]) -> None:
        """Note nothing: copies are whole."""

    def _note(self, blocks: NDArray[np.int32] | int, roots: NDArray[np.int64] | int) -> None:
        pass
