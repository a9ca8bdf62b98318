"""CascadeAttention: attends a shared prefix once for all requests that share it.

The result is merged with attention over each request's own KV.

Level 0 holds what most requests share, the last level what each has alone; a level's sequences are groups of
requests. Every level but the last sees all queries of a group as the queries of one sequence, so K and V of the
shared part are read once per group (Hydragen, Juravsky et al. 2024; FlashInfer's cascade). The levels' outputs are
merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pagedkv.attention.cascade_checks import Level, check_lengths, check_levels, level_arrays, level_caches
from pagedkv.attention.checks import check_shape
from pagedkv.attention.layer_checks import check_outputs, check_places
from pagedkv.attention.merge import merge_states
from pagedkv.attention.option_checks import check_options
from pagedkv.attention.paged_attention import PagedAttention
from pagedkv.attention.places import Device
from pagedkv.attention.positions import LevelPositions
from pagedkv.errors import ClosedError, LayoutMismatch
from pagedkv.kernels.batch import Batch
from pagedkv.kernels.dtypes import kernel_dtype

_POSITIONAL = ("window", "alibi_slopes")  # they need a query's distance to a key: levels are told where queries stand


class CascadeAttention:
    """Attention over KV in two or more levels.

    Parameters
    ----------
    block_sizes : tokens of a block by level, the shared level first; the shared one may have larger blocks.
    max_groups : sequences of each level at most; the last is the number of requests.
    max_q_len : queries of one request at most.
    num_qo_heads, num_kv_heads, head_dim and others : as :class:`PagedAttention`, but for ``scale_mode``. ``sinks`` and
        a custom mask belong to the last level; ``window`` and ``alibi_slopes`` count from a request's queries back
        through all levels.

    Raises
    ------
    InvalidArgument, WrongType
        Fewer than two levels, lists of different lengths, or a number or name that makes no sense.
    UnsupportedVariant, KernelsUnavailable
        As :class:`PagedAttention`.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        *,
        max_groups: Sequence[int],
        max_q_len: int = 1,
        device: Device = "cuda",
        causal: bool = True,
        sinks: Any = None,
        custom_mask: bool = False,
        kernel: str = "auto",
        **options: Any,
    ) -> None:
        check_levels(block_sizes, max_groups, max_q_len, options)
        check_options(causal=causal, custom_mask=custom_mask)
        last = len(block_sizes) - 1
        self._max_groups, self._max_tokens = tuple(map(int, max_groups)), int(max_groups[last]) * int(max_q_len)
        max_tokens = self._max_tokens
        placed = any(options.get(name) is not None for name in _POSITIONAL)
        self.levels = tuple(
            PagedAttention(
                block_size=block_size, max_sequences=groups, max_tokens=max_tokens,
                max_q_len=max_q_len if level == last else max_tokens, causal=causal and level == last,
                sinks=sinks if level == last else None, custom_mask=custom_mask and level == last,
                positions=placed and level != last, device=device, kernel=kernel, **options,
            )
            for level, (block_size, groups) in enumerate(zip(block_sizes, max_groups, strict=True))
        )  # fmt: skip
        self.backend = self.levels[0].backend
        self._in_turn = None if self.backend is None else self.backend.in_turn()
        self._places = LevelPositions(self.backend, self._max_groups, max_tokens) if placed else None
        config = self.levels[0].config
        heads = self.levels[0].num_qo_heads
        dtype = {"bfloat16": np.uint16}.get(config.q_dtype, config.q_dtype)
        empty = np.empty if self.backend is None else self.backend.empty
        self._parts = empty((last + 1, max_tokens, heads, config.head_dim_v), dtype)
        self._lses = empty((last + 1, max_tokens, heads), np.float32)
        if self.backend is not None:
            self.backend.synchronize()
        self._planned = False

    def plan(
        self, levels: Sequence[Level], *, mask: Any = None, mask_indptr: Any = None, stream: Any = None
    ) -> None:
        """Take a step's batch.

        Parameters
        ----------
        levels : per level ``(block_tables, seq_lens, q_indptr)`` as in :meth:`PagedAttention.plan`. All ``q_indptr``
            end at the same number of queries; a group's queries are those of its requests, one after the other. A
            level's keys stand before those of the next one. If the cascade is causal, a request has at most one query
            more than keys in the last level: of lengths on the host this is checked.
        mask, mask_indptr : of the last level.

        Raises
        ------
        InvalidArgument, LayoutMismatch, WrongType
            The arrays do not fit. Nothing was launched, and the batch planned before stays.
        """
        batch = level_arrays(levels, len(self.levels))
        check_lengths(batch, self._max_groups, self._max_tokens, self.levels[-1].config.causal, self.backend)
        self._in_order(stream, self._plan_levels, batch, mask, mask_indptr, stream)

    def _in_order(self, stream: Any, launch: Callable[..., Any], *arguments: Any) -> Any:
        """Launch after the earlier launches over the levels' results on other streams."""
        return launch(*arguments) if self._in_turn is None else self._in_turn.take(stream, launch, *arguments)

    def _plan_levels(self, levels: list[Level], mask: Any, mask_indptr: Any, stream: Any) -> None:
        """Check all levels before the first of them takes its part."""
        placed = [(None, None)] * len(levels) if self._places is None else self._places.arrays(levels)
        placed[-1] = None, None  # its queries stand at its keys
        batches = [
            Batch(lens, tables, None, q_indptr, None, None, *positions)
            for (tables, lens, q_indptr), positions in zip(levels, placed, strict=True)
        ]
        batches[-1].mask, batches[-1].mask_indptr = mask, mask_indptr
        planned = [attention.check_forms(batch) for attention, batch in zip(self.levels, batches, strict=True)]
        if self._places is not None and self.backend is not None:
            self._planned = False  # the positions of the batch before are gone
            self._places.launch(levels, stream)
        for attention, batch in zip(self.levels, batches, strict=True):
            attention.check_values(batch)
        self._planned = False
        for attention, checked in zip(self.levels, planned, strict=True):
            attention.take(checked, stream)
        self._planned = True

    def reset(self, *, stream: Any = None) -> None:
        """Put all workspaces into order after a kernel was killed midway, and forget the batch."""
        self._planned = False
        for attention in self.levels:
            attention.reset(stream=stream)

    def run(
        self, q: Any, caches: Any, *, out: Any = None, lse: Any = None, sinks: Any = None, stream: Any = None
    ) -> Any:
        """Attention of one layer for the planned batch.

        Parameters
        ----------
        q : [num_tokens, num_qo_heads, head_dim].
        caches : ``(k_cache, v_cache)`` of all levels, or one such pair per level; v_cache is None with ``v_in_k``.
        out, lse, sinks, stream : as :meth:`PagedAttention.run`.

        Raises
        ------
        ClosedError
            Nothing has been planned.
        LayoutMismatch, WrongType, InvalidArgument
            An array does not fit. Nothing was launched.
        """
        if not self._planned:
            raise ClosedError("nothing is planned: call plan(levels) once per step, before run")
        pairs = level_caches(caches, len(self.levels))
        config, heads = self.levels[0].config, self.levels[0].num_qo_heads
        check_places(self.backend, q=q, out=out, lse=lse)
        check_shape("q", q, ("num_tokens", heads, config.head_dim))
        kernel_dtype("q", q, config.q_dtype)
        if len(q) > self._max_tokens:
            raise LayoutMismatch(f"q has {len(q)} tokens, but this was made for {self._max_tokens}")
        check_outputs(config, (len(q), heads, config.head_dim_v), out, lse)
        return self._in_order(stream, self._run_levels, q, pairs, out, lse, sinks, stream)

    def _run_levels(self, q: Any, pairs: list[tuple[Any, Any]], out: Any, lse: Any, sinks: Any, stream: Any) -> Any:
        """Check all levels before the first of them is launched."""
        parts, lses = self._parts[:, : len(q)], self._lses[:, : len(q)]
        if parts.dtype != q.dtype:
            parts = parts.view(q.dtype)
        launches = [
            attention.ready(q, k, v, part, lse_of, None, None, sinks if attention is self.levels[-1] else None, stream)
            for attention, (k, v), part, lse_of in zip(self.levels, pairs, parts, lses, strict=True)
        ]
        for attention, launch in zip(self.levels, launches, strict=True):
            attention.start(*launch, stream)
        return merge_states(parts, lses, out=out, lse=lse, stream=stream, device=self.backend or "cpu")
