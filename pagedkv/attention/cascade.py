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

from pagedkv.attention.merge import merge_states
from pagedkv.attention.paged_attention import PagedAttention
from pagedkv.attention.places import Device
from pagedkv.attention.positions import LevelPositions
from pagedkv.errors import ClosedError, InvalidArgument, LayoutMismatch

_POSITIONAL = ("window", "alibi_slopes")  # they need a query's distance to a key: levels are told where queries stand


class CascadeAttention:
    """Attention over KV in two or more levels.

    Parameters
    ----------
    block_sizes : tokens of a block by level, the shared level first; the shared one may have larger blocks.
    max_groups : sequences of each level at most; the last is the number of requests.
    max_q_len : queries of one request at most.
    num_qo_heads, num_kv_heads, head_dim and others : as :class:`PagedAttention`. ``sinks`` and a custom mask belong
        to the last level; ``window`` and ``alibi_slopes`` count from a request's queries back through all levels.

    Raises
    ------
    InvalidArgument
        Fewer than two levels, or lists of different lengths.
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
        if len(block_sizes) < 2 or len(max_groups) != len(block_sizes):
            raise InvalidArgument(
                f"a cascade has at least two levels, each with a block size and max_groups: got block_sizes "
                f"{list(block_sizes)} and max_groups {list(max_groups)}"
            )
        last = len(block_sizes) - 1
        max_tokens = max_groups[last] * max_q_len
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
        self._places = LevelPositions(self.backend, max_groups, max_tokens) if placed else None
        config = self.levels[0].config
        heads = self.levels[0].num_qo_heads
        dtype = {"bfloat16": np.uint16}.get(config.q_dtype, config.q_dtype)
        empty = np.empty if self.backend is None else self.backend.empty
        self._parts = empty((last + 1, max_tokens, heads, config.head_dim_v), dtype)
        self._lses = empty((last + 1, max_tokens, heads), np.float32)
        if self.backend is not None:
            self.backend.synchronize()
        self._planned = False

    def plan(self, levels: Sequence[tuple[Any, Any, Any]], *, stream: Any = None, **mask: Any) -> None:
        """Take a step's batch.

        Parameters
        ----------
        levels : per level ``(block_tables, seq_lens, q_indptr)`` as in :meth:`PagedAttention.plan`. All ``q_indptr``
            end at the same number of queries; a group's queries are those of its requests, one after the other. A
            level's keys stand before those of the next one.
        mask, mask_indptr : of the last level.

        Raises
        ------
        InvalidArgument, LayoutMismatch, WrongType
            The arrays do not fit.
        """
        if len(levels) != len(self.levels):
            raise InvalidArgument(f"this cascade has {len(self.levels)} levels, got {len(levels)}")
        self._planned = False
        self._in_order(stream, self._plan_levels, levels, mask, stream)
        self._planned = True

    def _in_order(self, stream: Any, launch: Callable[..., Any], *arguments: Any) -> Any:
        """Launch after the earlier launches over the levels' results on other streams."""
        return launch(*arguments) if self._in_turn is None else self._in_turn.take(stream, launch, *arguments)

    def _plan_levels(self, levels: Sequence[tuple[Any, Any, Any]], mask: dict[str, Any], stream: Any) -> None:
        placed = [{}] * len(levels) if self._places is None else self._places.update(levels, stream)
        placed[-1] = mask  # its queries stand at its keys
        for attention, arrays, others in zip(self.levels, levels, placed, strict=True):
            attention.plan(*arrays, stream=stream, **others)

    def run(self, q: Any, caches: Any, *, out: Any = None, lse: Any = None, stream: Any = None) -> Any:
        """Attention of one layer for the planned batch.

        Parameters
        ----------
        q : [num_tokens, num_qo_heads, head_dim].
        caches : ``(k_cache, v_cache)`` of all levels, or one such pair per level; v_cache is None with ``v_in_k``.
        out, lse, stream : as :meth:`PagedAttention.run`.

        Raises
        ------
        ClosedError
            Nothing has been planned.
        LayoutMismatch, WrongType, InvalidArgument
            An array does not fit.
        """
        if not self._planned:
            raise ClosedError("nothing is planned: call plan(levels) once per step, before run")
        pairs = [caches] * len(self.levels) if hasattr(caches[0], "shape") else list(caches)
        if len(pairs) != len(self.levels):
            raise InvalidArgument(f"caches must be one pair or {len(self.levels)} pairs, got {len(pairs)}")
        if len(q) > self._parts.shape[1]:
            raise LayoutMismatch(f"q has {len(q)} tokens, but this was made for {self._parts.shape[1]}")
        return self._in_order(stream, self._run_levels, q, pairs, out, lse, stream)

    def _run_levels(self, q: Any, pairs: list[Any], out: Any, lse: Any, stream: Any) -> Any:
        parts, lses = self._parts[:, : len(q)], self._lses[:, : len(q)]
        if parts.dtype != q.dtype:
            parts = parts.view(q.dtype)
        for level, (attention, (k, v)) in enumerate(zip(self.levels, pairs, strict=True)):
            attention.run(q, k, v, out=parts[level], lse=lses[level], stream=stream)
        return merge_states(parts, lses, out=out, lse=lse, stream=stream, device=self.backend or "cpu")
