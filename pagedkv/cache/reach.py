"""A step as each layer reads it: its window, its chunk, the layer whose KV it shares.

With chunks a query sees the tokens since the last multiple of the chunk. A sequence whose new tokens lie in several
chunks becomes several sequences, one for each: its queries, and the blocks of its chunk as a table of its own. The
kernels then attend to short sequences and know of no chunks. K has its positions already, so where a sequence begins
does not matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.group_kv import GroupStep
from pagedkv.cache.storage import KV, BoundStep, StepTables
from pagedkv.errors import InvalidArgument, LayoutMismatch, UnsupportedVariant
from pagedkv.spec.kv_spec import KVSpec


def bind_step(kv: KV, tables: StepTables, spec: KVSpec) -> BoundStep:
    """Writes and attention of one step, by the model's layers."""
    bound = kv.bind(tables)
    if spec.windows is spec.chunks is spec.reads is None:
        return bound
    return LayeredStep(kv, tables, spec, bound)


def written_layer(spec: KVSpec, layer: int) -> int:
    """Of the layers with KV of their own, the one that the model's layer is.

    Raises
    ------
    WrongType, InvalidArgument
        No such layer, or one that shares the KV of another.
    """
    own = spec.own_layer(layer)
    if spec.model_layer(own) != layer:
        raise InvalidArgument(f"layer {layer} shares the KV of layer {spec.model_layer(own)}: write that alone")
    return own


class LayeredStep:
    """The KV of one step, read by each layer as far as the spec says.

    Parameters
    ----------
    kv, tables, spec : the device's KV; the step; the shape of both.
    whole : the step as `kv` binds it.
    """

    def __init__(self, kv: KV, tables: StepTables, spec: KVSpec, whole: BoundStep) -> None:
        self._kv, self._tables, self._spec, self._whole = kv, tables, spec, whole
        self._in_chunks: dict[int, BoundStep] = {}

    def write(self, layer: int, k: Any, v: Any, stream: Any = None) -> None:
        """Put the new tokens' K and V into the step's slots, as :meth:`BoundStep.write`.

        Raises
        ------
        InvalidArgument
            The layer shares the KV of another.
        """
        self._whole.write(written_layer(self._spec, layer), k, v, stream)

    def attend(self, layer: int, q: Any, *, window: int | None = None, **options: Any) -> Any:
        """Attention of the new tokens, as :meth:`BoundStep.attend`.

        Raises
        ------
        InvalidArgument
            A window that is not the layer's.
        UnsupportedVariant
            The layer has a chunk, and the queries a mask or are not causal.
        """
        spec = self._spec
        read = spec.own_layer(layer)
        own = None if spec.windows is None else spec.windows[read]
        chunk = None if spec.chunks is None else spec.chunks[read]
        has_limits = spec.windows is not None or spec.chunks is not None
        if has_limits and window is not None and window != own:
            known = f"a window of {own} tokens" if own else f"chunks of {chunk} tokens" if chunk else "no window"
            raise InvalidArgument(
                f"window = {window}, but layer {layer} has {known} in the cache's spec: leave window out"
            )
        if (seen := own if has_limits else window) is not None:
            options["window"] = seen
        bound = self._whole
        if chunk is not None:
            if options.get("mask") is not None or not options.get("causal", True):
                raise UnsupportedVariant(f"layer {layer} has chunks of {chunk} tokens: causal and without mask")
            bound = self._chunked(chunk, read)
        return bound.attend(read, q, **options)

    def tables_of(self, own: int) -> StepTables:
        """The step's arrays for one of the layers with KV of their own."""
        return self._whole.tables_of(own) if isinstance(self._whole, GroupStep) else self._tables

    def _chunked(self, chunk: int, read: int) -> BoundStep:
        bound = self._in_chunks.get(chunk)
        if bound is None:
            size, whole = self._spec.block_size, self._whole
            if isinstance(whole, GroupStep):  # whose tables begin at a chunk, so that lengths count from there
                tables = whole.tables_of(read)
                cut = in_chunks(tables, chunk, size)
                bound = whole if cut is tables else whole.bound_over(read, cut, chunk)
            else:
                tables = in_chunks(self._tables, chunk, size)
                bound = whole if tables is self._tables else self._kv.bind(tables, chunk)
            self._in_chunks[chunk] = bound
        return bound


class ChunkedTables(NamedTuple):
    """Tables of a step in chunks, fields as :class:`StepTables`.

    A sequence has a row for each chunk that it computes tokens of.
    """

    block_tables: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    q_indptr: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]


def in_chunks(step: StepTables, chunk: int, block_size: int) -> StepTables:
    """The step's tables for layers with chunks of so many tokens, a multiple of `block_size`.

    The queries stay in their order. The step itself is returned where no sequence is longer than a chunk.

    Raises
    ------
    LayoutMismatch
        A sequence has more new tokens than tokens, or less than none.
    """
    ends = step.seq_lens.astype(np.int64)
    if not len(ends) or ends.max() <= chunk:
        return step
    begins = ends - np.diff(step.q_indptr)  # of the new tokens
    if (begins < 0).any() or (begins > ends).any():
        raise LayoutMismatch("seq_lens and q_indptr are not those of one step")
    first, last = begins // chunk, np.maximum(ends - 1, begins) // chunk
    count = last - first + 1  # rows of each sequence
    of = np.repeat(np.arange(len(ends)), count)
    number = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + first[of]
    start = number * chunk
    stop = np.minimum(ends[of], start + chunk)
    q_lens = stop - np.maximum(begins[of], start)
    columns = start[:, None] // block_size + np.arange(min(chunk // block_size, step.block_tables.shape[1]))
    tables = step.block_tables
    inside = columns < tables.shape[1]
    cut = np.where(inside, tables[of[:, None], np.where(inside, columns, 0)], np.int32(-1))
    return ChunkedTables(
        cut.astype(np.int32), (stop - start).astype(np.int32),
        np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32), step.slot_mapping,
    )  # fmt: skip
