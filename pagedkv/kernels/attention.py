"""One attention call on one backend: its schedule and launches.

`pagedkv.attention` has checked the arrays.

``AttentionPlan`` holds what one step's layers share. :meth:`AttentionPlan.update` computes the division of the work
from ``seq_lens`` on the device, once per step; :meth:`AttentionPlan.run` is called per layer. Neither allocates device
memory nor waits for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.batch import Batch, Options
from pagedkv.kernels.config import AttentionConfig, Schedule, Tiling
from pagedkv.kernels.layer_launch import LAYER_ARRAYS, LayerLaunch
from pagedkv.kernels.params import fill
from pagedkv.kernels.recipe import Recipe
from pagedkv.kernels.schedules import DIVISIONS, Limits, Whole
from pagedkv.kernels.tensor_map import TENSOR_MAP_BYTES
from pagedkv.kernels.variant import Variant

__all__ = ["AttentionPlan", "Batch", "Options"]


class AttentionPlan:
    """Launches of one kernel with one config for batches up to a size.

    Parameters
    ----------
    backend, config, tiling, schedule
    num_kv_heads : KV heads.
    max_sequences : sequences of the largest batch.
    max_q_len : queries of one sequence at most. "whole" and "partitioned" size their grids by it.
    max_tokens : queries of the largest batch; 0: max_sequences * max_q_len. "listed" sizes its list by it.
    max_seq_len : keys of one sequence at most; "partitioned" sizes its grid and workspace by it.
    max_workspace_bytes : device memory that the plan may hold; 0: no limit. "listed" divides fewer
        row tiles where it is short.
    """

    def __init__(
        self,
        backend: Backend,
        config: AttentionConfig,
        tiling: Tiling,
        schedule: Schedule,
        *,
        num_kv_heads: int,
        max_sequences: int,
        max_q_len: int = 1,
        max_tokens: int = 0,
        max_seq_len: int = 0,
        max_workspace_bytes: int = 0,
    ) -> None:
        self.backend, self.config, self.tiling, self.schedule = backend, config, tiling, schedule
        max_tokens = max_tokens or max_sequences * max_q_len
        self.limits = Limits(num_kv_heads, max_sequences, max_q_len, max_tokens, max_seq_len, max_workspace_bytes)
        self.division = DIVISIONS[schedule](backend, config, tiling, self.limits)
        self._main = tiling.variant(config, schedule)

    @property
    def workspace_bytes(self) -> int:
        """Device memory the plan holds."""
        return self.division.workspace_bytes

    def variants(self) -> list[Variant]:
        """Everything that running launches."""
        return [self._main, *self.division.helpers()]

    def reset(self, stream: Any = None) -> None:
        """Zero the counters that a kernel which was killed midway may have left behind."""
        for counters in self.division.counters:
            self.backend.upload(counters, np.zeros(counters.shape, counters.dtype), stream)

    def update(self, batch: Batch, window: int = 0, stream: Any = None) -> None:
        """Divide the work by the lengths as they are on the device now; again whenever they change."""
        self.division.update(batch, window, stream)

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        batch: Batch,
        options: Options,
        *,
        lse: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        stream: Any = None,
    ) -> None:
        """Attention of one layer, after :meth:`update` for these lengths.

        Parameters
        ----------
        q, out : [num_tokens, num_qo_heads, head_dim], [num_tokens, num_qo_heads, head_dim_v].
        k, v : [num_blocks, block_size, num_kv_heads, head_dim or head_dim_v]; contiguous: [num_kv_tokens, num_kv_heads,
            head_dim or head_dim_v].
        lse : float32 [num_tokens, num_qo_heads], contiguous.
        k_scale, v_scale : float32, of the same strides, by ``config.scale_mode``.

        Raises
        ------
        InvalidArgument
            The batch is larger than the plan was made for, or than its schedule can number.
        """
        launch = self.layer_launch(q, k, v, out, batch, options, lse=lse, k_scale=k_scale, v_scale=v_scale)
        if launch is not None:
            launch((q, out, lse, k, v, k_scale, v_scale, options.sinks), stream)

    def layer_launch(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        batch: Batch,
        options: Options,
        *,
        lse: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> LayerLaunch | None:
        """The launches of :meth:`run` for arrays of these forms; None if there are no queries.

        Parameters and errors as :meth:`run`, but that each launch is given its sinks. It is good for this batch, whose
        arrays it holds.
        """
        num_seqs = len(batch.seq_lens)
        if not num_seqs or not len(q):
            return None
        if num_seqs > self.limits.max_sequences or len(q) > self.limits.max_tokens:
            raise InvalidArgument(
                f"{num_seqs} sequences with {len(q)} queries, but the plan was made for "
                f"{self.limits.max_sequences} with {self.limits.max_tokens}"
            )
        keys = batch.block_tables.shape[1] * self.config.block_size if self.config.block_size else len(k)
        self.division.check(num_seqs, len(q), keys)
        fields = {
            "kv": self._kv(k, v, batch, k_scale),
            "schedule": self.division.fields(),
            "q": None,
            "o": None,
            "lse": None,
            "seq_lens": batch.seq_lens,
            "q_indptr": batch.q_indptr,
            "q_positions": batch.q_positions,
            "position_spans": batch.position_spans,
            "alibi_slopes": options.alibi_slopes,
            "sinks": None,
            "mask": batch.mask,
            "mask_indptr": batch.mask_indptr,
            "q_token_stride": _stride(q, 0),
            "q_head_stride": _stride(q, 1),
            "o_token_stride": _stride(out, 0),
            "o_head_stride": _stride(out, 1),
            "num_seqs": num_seqs,
            "num_kv_heads": self.limits.num_kv_heads,
            "window": options.window,
            "softmax_scale": options.softmax_scale,
            "soft_cap": options.soft_cap,
        }
        box_tokens = self.tiling.box_tokens
        names: tuple[str, ...] = LAYER_ARRAYS
        if box_tokens:
            no_map = {"o": np.zeros(TENSOR_MAP_BYTES // 8, np.uint64)}
            params = fill("TmaAttentionParams", attention=fields, k_map=no_map, v_map=no_map)
            names = tuple(f"attention.{name}" for name in names)
        else:
            params = fill("AttentionParams", **fields)
        grid, block = self.division.grid(num_seqs, len(q)), (self.tiling.threads, 1, 1)
        recipe = Recipe(self._main, grid, block, params.record, names, self.tiling.shared_bytes)
        followed = type(self.division).finish is not Whole.finish
        finish = self.division.finish if followed else None
        return LayerLaunch(self.backend, recipe, params.arrays, num_seqs, finish=finish, box_tokens=box_tokens)

    def _kv(self, k: Any, v: Any, batch: Batch, k_scale: Any) -> dict[str, Any]:
        """KvParams but for the layer's addresses."""
        paged = self.config.block_size > 0
        token, head = (1, 2) if paged else (0, 1)
        scale = k_scale if k_scale is not None and k_scale.ndim > 1 else None
        return {
            "k": None,
            "v": None,
            "k_scale": None,
            "v_scale": None,
            "block_tables": batch.block_tables,
            "kv_indptr": batch.kv_indptr,
            "k_block_stride": _stride(k, 0) if paged else 0,
            "k_token_stride": _stride(k, token),
            "k_head_stride": _stride(k, head),
            "v_block_stride": _stride(v, 0) if paged else 0,
            "v_token_stride": _stride(v, token),
            "v_head_stride": _stride(v, head),
            "scale_block_stride": _stride(scale, 0) if scale is not None and paged else 0,
            "scale_token_stride": _stride(scale, token) if scale is not None else 0,
            "scale_head_stride": _stride(k_scale, -1) if k_scale is not None else 0,
            "table_stride": _stride(batch.block_tables, 0) if paged else 0,
            "block_size": self.config.block_size,
            "num_blocks": k.shape[0] if paged else 1,
        }


def _stride(array: Any, axis: int) -> int:
    """Elements from one index of an axis to the next."""
    return int(array.strides[axis]) // int(array.dtype.itemsize)
