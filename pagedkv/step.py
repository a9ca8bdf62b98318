"""A step: the batch's new tokens, written and attended layer by layer, committed as a whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core.block_table import StepArrays
from pagedkv.engine import Engine
from pagedkv.errors import ClosedError, InvalidArgument, LayoutMismatch, PagedKVError, StaleHandle
from pagedkv.reference import paged_attention
from pagedkv.sequence import Sequence
from pagedkv.sizes import whole_number


class Step:
    """One forward pass over a batch of sequences. Made by :meth:`KVCache.step`; use it with ``with``.

    At a clean end all layers must have been written; then the tokens count as computed and full blocks join the prefix
    tree. If the body raises, nothing is committed.

    Attributes
    ----------
    tokens, positions : int32 [num_tokens]
    q_indptr : int32 [num_seqs + 1]
    seq_lens : int32 [num_seqs]
    block_tables : int32 [num_seqs, max_blocks], padded with -1
    slot_mapping : int64 [num_tokens]
    """

    def __init__(self, engine: Engine, seqs: Seq[Sequence], q_lens: ArrayLike | None, lookahead: int) -> None:
        self._engine, self._seqs = engine, list(seqs)
        self._rows = np.array([seq.row for seq in self._seqs], np.int64)
        self._q_lens, self._lookahead = q_lens, lookahead
        self._arrays: StepArrays | None = None
        self._written: set[int] = set()
        self._epochs: NDArray[np.int64] = np.empty(0, np.int64)

    def __enter__(self) -> Step:
        if self._arrays is not None:
            raise InvalidArgument("this step is under way already")
        self._written = set()
        self._arrays = self._engine.begin(self._rows, self._q_lens, self._lookahead)
        self._epochs = self._engine.table.epochs(self._rows)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        arrays, self._arrays = self._arrays, None
        if arrays is None:
            return
        missing = sorted(set(range(self._engine.spec.num_layers)) - self._written)
        if kind is not None or (missing and len(arrays.tokens)):
            self._engine.table.cancel(self._rows)
        else:
            try:
                self._check_rows()
                self._engine.commit(self._rows, len(arrays.tokens))
            except BaseException:
                self._engine.table.cancel(self._rows)
                raise
            return
        if kind is None:
            raise InvalidArgument(
                f"the step ended with layers {missing[:8]} unwritten, so nothing was committed: write every layer, "
                f"or call mark_written(layer) if your own kernel wrote them"
            )

    @property
    def arrays(self) -> StepArrays:
        """All arrays of the step.

        Raises
        ------
        ClosedError
            The step has not begun or is over.
        """
        if self._arrays is None:
            raise ClosedError("this step is not under way: use it inside `with cache.step(...) as step:`")
        return self._arrays

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens to compute, of all sequences one after the other."""
        return self.arrays.tokens

    @property
    def positions(self) -> NDArray[np.int32]:
        """Their positions."""
        return self.arrays.positions

    @property
    def q_indptr(self) -> NDArray[np.int32]:
        """Where each sequence's tokens begin."""
        return self.arrays.q_indptr

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """KV tokens of each sequence, this step's included."""
        return self.arrays.seq_lens

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """Block ids, a row per sequence."""
        return self.arrays.block_tables

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """Where each new token's K and V go: block * block_size + offset."""
        return self.arrays.slot_mapping

    def to_csr(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """``kv_indptr``, ``kv_indices``, ``kv_last_block_len`` of the tables."""
        return self.arrays.to_csr(self._engine.spec.block_size)

    def write(self, layer: int, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Put the new tokens' K and V of one layer into their slots.

        Parameters
        ----------
        layer : int
        k, v : [num_tokens, num_kv_heads, head_dim]
            In the cache's dtype, or float32/float64/float16, which are converted (bfloat16: to nearest even).

        Raises
        ------
        LayoutMismatch
            Another shape or a dtype that cannot be converted. Nothing was written.
        """
        arrays = self.arrays
        self._check_rows()
        self._engine.kv.write(layer, arrays.slot_mapping, k, v)
        self._written.add(int(layer))

    def mark_written(self, layer: int) -> None:
        """Say that a kernel of the caller's own has written this layer's slots."""
        self._written.add(whole_number(layer, "layer", 0, self._engine.spec.num_layers - 1))

    def _check_rows(self) -> None:
        """The slots are this step's only while its rows are as they were when it began."""
        if not np.array_equal(self._engine.table.epochs(self._rows), self._epochs):
            raise StaleHandle("a sequence of this step was cut back or stepped again: its slots may be others' now")

    def attend(
        self,
        layer: int,
        q: NDArray[Any],
        *,
        softmax_scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        return_lse: bool = False,
        out: NDArray[Any] | None = None,
    ) -> Any:
        """Attention of the new tokens over their sequences' KV, this layer's writes included.

        Parameters
        ----------
        layer : int
        q : [num_tokens, num_qo_heads, head_dim]
            num_qo_heads is a multiple of num_kv_heads.
        softmax_scale, causal, window, soft_cap, return_lse, out
            As :func:`pagedkv.reference.paged_attention`, which computes this (float64 inside).

        Returns
        -------
        o : [num_tokens, num_qo_heads, head_dim], and ``lse`` float32 [num_tokens, num_qo_heads] if asked for
        """
        arrays, spec = self.arrays, self._engine.spec
        shape = getattr(q, "shape", None)
        if not isinstance(q, np.ndarray) or q.ndim != 3 or shape != (len(arrays.tokens), q.shape[1], spec.head_dim):
            shape = type(q).__name__ if shape is None else shape
            raise LayoutMismatch(f"q must be [{len(arrays.tokens)}, num_qo_heads, {spec.head_dim}], got {shape}")
        if q.shape[1] % spec.num_kv_heads:
            raise LayoutMismatch(f"{q.shape[1]} query heads are no multiple of {spec.num_kv_heads} KV heads")
        if out is not None and not isinstance(out, np.ndarray):
            raise LayoutMismatch(f"out must be an array, got {type(out).__name__}")
        if window is not None:
            window = whole_number(window, "window", 1, 2**31 - 1)
        self._check_rows()
        k_cache, v_cache = self._engine.kv.layer(layer)
        try:
            result = paged_attention(
                q, k_cache, v_cache, arrays.block_tables, arrays.seq_lens, arrays.q_indptr,
                softmax_scale=softmax_scale, causal=causal, window=window, soft_cap=soft_cap,
                decode=self._engine.kv.decode, return_lse=return_lse, out=out,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            if isinstance(error, PagedKVError):
                raise
            raise LayoutMismatch(str(error)) from error
        self._check_rows()  # whoever released a sequence meanwhile may have let others write what was read
        return result
