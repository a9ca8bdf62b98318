"""A layer's K and V as compact pages, for runtimes that take paged caches without strides.

A block holds the pages of all layers: K and V of layer 0, K and V of layer 1, ... With P = 2 * num_layers pages in a
block, page ``block * P`` counted from layer l's K is that layer's K of the block, and counted from its V the V. So the
arena is, for every layer, two compact caches ``[pages, block_size, num_kv_heads, head_dim]``, and one table, block ids
times P, names the pages of all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch
from pagedkv.interop.memory import compact_strides
from pagedkv.interop.view import View


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's K and V as compact paged caches.

    Attributes
    ----------
    k, v : views [num_pages, block_size, num_kv_heads, head_dim] (layout HND: [num_pages, num_kv_heads, block_size,
        head_dim]), of the same shape for all layers. Pages between those of :meth:`tables` are other layers'.
    pages_per_block : page ids from one block to the next.
    block_size : tokens of a page.
    """

    k: View
    v: View
    pages_per_block: int
    block_size: int

    def tables(self, block_tables: NDArray[np.int32], *, padding: int = -1) -> NDArray[np.int32]:
        """Page ids for block ids, int32 of the same shape; entries below 0 become `padding`.

        Raises
        ------
        InvalidArgument
            A block that is not there.
        """
        blocks = np.asarray(block_tables)
        if blocks.size and int(blocks.max()) * self.pages_per_block >= self.k.shape[0]:
            raise InvalidArgument(f"block {int(blocks.max())} is beyond the cache's {self.k.shape[0]} pages")
        return np.where(blocks < 0, padding, blocks * self.pages_per_block).astype(np.int32)

    def slots(self, slot_mapping: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert slots ``block * block_size + offset`` to ``page * block_size + offset``.

        Negative slots become -1.
        """
        blocks, offsets = np.divmod(np.asarray(slot_mapping, np.int64), self.block_size)
        return np.where(blocks < 0, np.int64(-1), blocks * self.pages_per_block * self.block_size + offsets)


def pages_of(k: View, v: View, block_shape: tuple[int, ...], block_size: int) -> Pages:
    """Pages of a layer, from views of its K and V over all blocks.

    Parameters
    ----------
    k, v : [num_blocks, ...] views whose first axis goes from block to block.
    block_shape : [num_layers, 2, block_size, num_kv_heads, head_dim] of a block, or with the layout's order of axes.
    block_size : tokens in a block.

    Raises
    ------
    LayoutMismatch
        The arena's blocks are apart: pages could not be counted through.
    """
    page = tuple(block_shape[2:])
    per_block = block_shape[0] * block_shape[1]
    block_bytes = math.prod(block_shape) * k.itemsize
    if k.shape[0] > 1 and k.strides[0] != block_bytes:
        raise LayoutMismatch(f"blocks of {block_bytes} bytes lie {k.strides[0]} bytes apart, not side by side")
    shape = ((k.shape[0] - 1) * per_block + 1, *page)
    strides = compact_strides(shape, k.itemsize)
    first, second = (replace(view, shape=shape, strides=strides) for view in (k, v))
    return Pages(first, second, per_block, block_size)


def block_views(k: View, blocks: Any, block_shape: tuple[int, ...], owner: Any) -> list[View]:
    """Whole blocks, each a compact read-only view of `block_shape`, that keep `owner`.

    Parameters
    ----------
    k : layer 0's K over all blocks: a block begins with it.
    blocks : ids.
    """
    strides = compact_strides(block_shape, k.itemsize)
    return [
        replace(k, ptr=k.ptr + int(block) * k.strides[0], shape=block_shape, strides=strides, read_only=True,
                owner=(k.owner, owner))
        for block in blocks
    ]  # fmt: skip
