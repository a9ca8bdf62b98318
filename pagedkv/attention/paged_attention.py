"""PagedAttention: plan once per step, run once per layer.

Workspaces are sized when the object is made.

The idea of plan and run is FlashInfer's (Ye et al. 2025, MLSys). Here the plan is computed on the device from
``seq_lens``, so a captured CUDA graph of plan and runs replays with other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from pagedkv.attention.batch_checks import check_batch, check_queries
from pagedkv.attention.checks import MAX_INT32, check_values
from pagedkv.attention.layer_checks import (
    check_inputs,
    check_outputs,
    check_per_head,
    check_places,
    check_values_given,
    sinks_of,
    with_values,
)
from pagedkv.attention.numpy_attention import attend_on_cpu, kernel_on_cpu
from pagedkv.attention.option_checks import alignment_of, check_options, float32_number, scale_of
from pagedkv.attention.places import Device, backend_of, check_may_wait
from pagedkv.attention.planned import NAMES, Arrays, Launch, Planned, no_launch
from pagedkv.errors import ClosedError, InvalidArgument
from pagedkv.kernels.attention import Batch, Options
from pagedkv.kernels.config import AttentionConfig, ScaleMode
from pagedkv.kernels.layer_kv import LayerKv
from pagedkv.kernels.recipe import MAX_RECIPES, place, signature
from pagedkv.kernels.select import make_plan
from pagedkv.spec.sizes import whole_number

MAX_WINDOW = 1 << 30  # a wider one is the same: kernels subtract it from positions in int32, which may be negative


class PagedAttention:
    """Attention of batches of sequences over paged (or contiguous) KV.

    One object serves one stream at a time, because its runs share a workspace: a call on another stream, from whatever
    thread, waits there for the earlier ones. Launches of captured graphs are not seen: graphs of one object must not
    run at once, nor beside its eager runs. Make one object for each stream or graph that runs at once.

    Parameters
    ----------
    num_qo_heads, num_kv_heads, head_dim : the model's; num_qo_heads is a multiple of num_kv_heads.
    head_dim_v : of V and of the output; default head_dim.
    dtype : of Q and the output: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    kv_dtype : of K and V; default ``dtype``. ``"float8_e4m3"``, ``"float8_e5m2"`` and ``"int8"`` usually have scales:
        give `scale_mode`, or their numbers are taken as they are.
    block_size : tokens of a block, 1..256; 0: KV is contiguous, ``[num_kv_tokens, num_kv_heads, head_dim]``.
    max_sequences : sequences of the largest batch.
    max_q_len : queries of one sequence at most; 1 is decode.
    max_tokens : queries of the largest batch; default max_sequences * max_q_len.
    max_seq_len : keys of one sequence at most; only the ``"partitioned"`` schedule needs it.
    max_workspace_bytes : device memory that the object may hold (``workspace_bytes``); 0: all that the schedule uses.
        With less, prefill divides fewer long row tiles among multiprocessors.
    softmax_scale : default ``head_dim ** -0.5``; with `v_in_k` it must be given, the model's own.
    causal, window, soft_cap, alibi_slopes, sinks
        As in :func:`pagedkv.reference.paged_attention`; slopes and sinks are float32 [num_qo_heads] on the attention's
        device. ``sinks=True``: :meth:`run` takes those of each layer.
    custom_mask : whether :meth:`plan` is given a packed mask (speculative trees).
    scale_mode : ``"none"``, ``"tensor"``, ``"head"`` or ``"token_head"``: the granularity of quantised KV's scales.
    kernel : ``"auto"`` or a kernel's name (:mod:`pagedkv.kernels.select`); on the CPU ``"cpu"`` (as ``"auto"``: C in
        float32 arithmetic, :mod:`pagedkv.cpu`) or ``"reference"`` (NumPy in float64).
    schedule : ``"auto"``, ``"even"``, ``"whole"`` (V1) or ``"partitioned"`` (V2).
    kv_alignment : bytes at a multiple of which each token's K and V begin; default the most that head_dim allows, up
        to 16.
    device : ``"cpu"``, ``"cuda"``, ``"cuda:<number>"`` or a kernel backend.
    debug : block ids are checked on the device; a bad one traps the launch.
    v_in_k : V is the first head_dim_v numbers of K, as in latents (MLA, 576 and 512): :meth:`run` takes K alone.
    positions : whether :meth:`plan` is told where queries stand, for keys that are only some of those they see.

    Raises
    ------
    InvalidArgument, WrongType
        A number or name that makes no sense, a workspace larger than ``max_workspace_bytes``, or a graph is being
        captured on the device. Only a capture of the current stream outlives the attempt, and one that another thread
        begins meanwhile is not seen.
    UnsupportedVariant
        No kernel computes this combination.
    KernelsUnavailable
        A GPU was named and something that the kernels need is missing.
    """

    def __init__(
        self,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: str = "float16",
        kv_dtype: str | None = None,
        block_size: int = 16,
        max_sequences: int,
        max_q_len: int = 1,
        max_tokens: int | None = None,
        max_seq_len: int = 0,
        max_workspace_bytes: int = 0,
        softmax_scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        custom_mask: bool = False,
        scale_mode: ScaleMode = "none",
        kernel: str = "auto",
        schedule: str = "auto",
        kv_alignment: int | None = None,
        device: Device = "cuda",
        debug: bool = False,
        v_in_k: bool = False,
        positions: bool = False,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        check_options(
            num_kv_heads=num_kv_heads, num_qo_heads=num_qo_heads, head_dim=head_dim, head_dim_v=head_dim_v,
            block_size=block_size, max_sequences=max_sequences, max_q_len=max_q_len, max_tokens=max_tokens,
            max_seq_len=max_seq_len, max_workspace_bytes=max_workspace_bytes, window=window, kv_alignment=kv_alignment,
            causal=causal, custom_mask=custom_mask, debug=debug, v_in_k=v_in_k, positions=positions, dtype=dtype,
            kv_dtype=kv_dtype, scale_mode=scale_mode, schedule=schedule, kernel=kernel,
        )  # fmt: skip
        if v_in_k and head_dim_v > head_dim:
            raise InvalidArgument(f"v_in_k: head_dim_v = {head_dim_v} is more than head_dim = {head_dim}")
        if num_qo_heads % num_kv_heads:
            raise InvalidArgument(f"num_qo_heads = {num_qo_heads} is no multiple of num_kv_heads = {num_kv_heads}")
        scale = scale_of(softmax_scale, head_dim, v_in_k)
        cap = 0.0 if soft_cap is None else float32_number(soft_cap, "soft_cap")
        if soft_cap is not None and not np.float32(cap) > 0:
            raise InvalidArgument(f"soft_cap must be positive in float32, got {soft_cap}")
        alignment = alignment_of(kv_alignment, kv_dtype, head_dim, head_dim_v)
        has_sinks = sinks is not None and sinks is not False
        self.config = AttentionConfig(
            int(head_dim), int(head_dim_v), int(num_qo_heads // num_kv_heads), dtype, kv_dtype, int(block_size), causal,
            window is not None, soft_cap is not None, alibi_slopes is not None, has_sinks, custom_mask,
            scale_mode, alignment, debug, v_in_k, positions,
        )  # fmt: skip
        self.num_qo_heads, self.num_kv_heads = int(num_qo_heads), int(num_kv_heads)
        self.max_sequences, self.max_q_len = int(max_sequences), int(max_q_len)
        self.backend = backend_of(device)
        sinks = None if isinstance(sinks, bool) else sinks
        check_places(self.backend, alibi_slopes=alibi_slopes, sinks=sinks)
        check_per_head(self.num_qo_heads, alibi_slopes=alibi_slopes, sinks=sinks)
        reach = min(int(window or 0), MAX_WINDOW)
        self._options = Options(scale, reach, cap, alibi_slopes, sinks)
        self.max_tokens = int(max_tokens if max_tokens is not None else max_sequences * max_q_len)
        self._plan, self._in_turn = None, None  # on a GPU
        self._kernel_on_cpu = kernel_on_cpu(kernel) if self.backend is None else ""
        if self.backend is not None:
            check_may_wait(self.backend)
            self.backend.synchronize()  # refused within any capture, before kernels are tried
            self._plan = make_plan(
                self.backend, self.config, kernel=kernel, schedule=schedule, num_kv_heads=self.num_kv_heads,
                max_sequences=self.max_sequences, max_q_len=self.max_q_len, max_tokens=self.max_tokens,
                max_seq_len=int(max_seq_len), max_workspace_bytes=int(max_workspace_bytes),
            )  # fmt: skip
            self._in_turn = self.backend.in_turn()
            self.backend.synchronize()  # workspaces may be memory that another stream's work has just let go of
        self._planned: Planned | None = None

    @property
    def kernel(self) -> str:
        """Name of the kernel in use; on the CPU ``"cpu_<instruction set>"`` or ``"reference"``."""
        return self._kernel_on_cpu if self._plan is None else self._plan.tiling.kernel

    @property
    def workspace_bytes(self) -> int:
        """Device memory held for partial results and the plan."""
        return 0 if self._plan is None else self._plan.workspace_bytes

    def prepare(self) -> None:
        """Compile and load the kernels now, not at the first run.

        Call it before a graph is captured.
        """
        if self.backend is not None and self._plan is not None:
            self.backend.prepare(self._plan.variants())

    def reset(self, *, stream: Any = None) -> None:
        """Put the workspace into order after a kernel was killed midway, and forget the batch.

        Raises InvalidArgument while the stream is being captured.
        """
        self._in_order(stream, self._forget, stream)

    def _forget(self, stream: Any) -> None:
        if self._plan is not None:
            self._plan.reset(stream)
        self._planned = None

    def plan(
        self,
        block_tables: Any,
        seq_lens: Any,
        q_indptr: Any = None,
        *,
        kv_indptr: Any = None,
        mask: Any = None,
        mask_indptr: Any = None,
        q_positions: Any = None,
        position_spans: Any = None,
        num_blocks: int | None = None,
        stream: Any = None,
    ) -> None:
        """Take a step's batch.

        Every :meth:`run` reads the arrays again: the caller must not change them until the last one.

        Parameters
        ----------
        block_tables : int32 [num_seqs, max_blocks], -1 where there is no block, as there need not be for keys before
            the windows of all the sequence's queries; None with contiguous KV.
        seq_lens : int32 [num_seqs], keys of each sequence, this step's included.
        q_indptr : int32 [num_seqs + 1], first query of each sequence; default one query each.
        kv_indptr : int32 [num_seqs + 1], first token of each sequence in contiguous KV.
        mask, mask_indptr : uint8 bits and int64 [num_seqs + 1] byte offsets (:func:`pagedkv.attention.pack_mask`).
        q_positions : int32 [num_tokens or more], where each query stands, counted from its sequence's first key;
            default a sequence's last query at its last key.
        position_spans : int32 [num_seqs, 2], with q_positions: the least and the greatest of each sequence.
        num_blocks : blocks of the pool; when given and the arrays are on the host, ids are checked against it.
        stream : where the plan is computed.

        Raises
        ------
        WrongType, LayoutMismatch, InvalidArgument
            An array does not fit. The batch planned before stays.
        """
        if num_blocks is not None:
            whole_number(num_blocks, "num_blocks", 0, MAX_INT32)
        batch = Batch(seq_lens, block_tables, kv_indptr, q_indptr, mask, mask_indptr, q_positions, position_spans)
        planned = self.check_forms(batch)
        self.check_values(batch, num_blocks)
        self.take(planned, stream)

    def check_forms(self, batch: Batch) -> Planned:
        """First part of :meth:`plan`: check the arrays but for the values, for :meth:`take`."""
        arrays = (batch.seq_lens, batch.block_tables, batch.kv_indptr, batch.q_indptr)
        others = (batch.mask, batch.mask_indptr, batch.q_positions, batch.position_spans)
        places, before = tuple(map(place, arrays + others)), self._planned
        if before is not None and places == before.places:
            return Planned(batch, places, before.launches)
        check_batch(batch, self.config, self.backend, self.max_sequences)
        return Planned(batch, places, {})

    def check_values(self, batch: Batch, num_blocks: int | None = None) -> None:
        """Second part of :meth:`plan`: check the values, where the arrays are on the host."""
        if isinstance(batch.seq_lens, np.ndarray):
            check_values(batch, self.config, self.max_q_len, self._options.window, num_blocks)

    def take(self, planned: Planned, stream: Any) -> None:
        """Last part of :meth:`plan`: divide the work of a batch that has been checked."""
        self._in_order(stream, self._replace, planned, stream)

    def _replace(self, planned: Planned, stream: Any) -> None:
        if self._plan is not None:
            self._plan.update(planned.batch, self._options.window, stream)
        self._planned = planned

    def _in_order(self, stream: Any, launch: Callable[..., None], *arguments: Any) -> None:
        """Launch after the workspace's earlier launches on other streams."""
        if self._in_turn is None:
            launch(*arguments)
        else:
            self._in_turn.take(stream, launch, *arguments)

    def run(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any = None,
        *,
        out: Any = None,
        lse: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        sinks: Any = None,
        stream: Any = None,
    ) -> Any:
        """Attention of one layer for the planned batch.

        Parameters
        ----------
        q : [num_tokens, num_qo_heads, head_dim]; the last axis contiguous.
        k_cache, v_cache : [num_blocks, block_size, num_kv_heads, head_dim (head_dim_v)], any strides but the last;
            contiguous KV: [num_kv_tokens, num_kv_heads, ...]. v_cache is None with ``v_in_k``, and only then; latents
            of one KV head may lack its axis, [num_blocks, block_size, head_dim].
        out : [num_tokens, num_qo_heads, head_dim_v] in q's dtype, written and returned; default a new array.
        lse : float32 [num_tokens, num_qo_heads], contiguous: also write the natural log-sum-exp; -inf where no key
            was seen.
        k_scale, v_scale : float32 [1], [num_kv_heads] or [num_blocks, block_size, num_kv_heads] by scale_mode, alike
            in strides. With ``v_in_k`` k_scale alone: it is that of the latents.
        sinks : float32 [num_qo_heads], this layer's; default those that the attention was made with.
        stream : where the kernel runs. The host does not wait for it.

        Raises
        ------
        ClosedError
            Nothing has been planned.
        WrongType, LayoutMismatch, InvalidArgument
            An array does not fit, or the launches before are being captured on another stream. Nothing was written.
        """
        return self.start(*self.ready(q, k_cache, v_cache, out, lse, k_scale, v_scale, sinks, stream), stream)

    def ready(
        self, q: Any, k_cache: Any, v_cache: Any, out: Any, lse: Any, k_scale: Any, v_scale: Any, sinks: Any,
        stream: Any,
    ) -> tuple[Launch, Arrays]:
        """First part of :meth:`run`: check a layer's arrays. Returns what :meth:`start` takes."""
        planned = self._planned
        if planned is None:
            raise ClosedError("nothing is planned: call plan(block_tables, seq_lens, ...) once per step, before run")
        check_values_given(self.config, v_cache, v_scale)
        if self.config.v_in_k:
            v_cache, v_scale = k_cache, k_scale  # where V begins; its view is made once per form
        arrays = (q, out, lse, k_cache, v_cache, k_scale, v_scale, sinks_of(self.config, self._options, sinks))
        if self._plan is None:
            return self._ready_on_cpu(planned.batch, self._with_views(arrays))
        return self._ready(planned, tuple(map(signature, arrays[3:7])), arrays, stream)

    def start(self, launch: Launch, arrays: Arrays, stream: Any) -> Any:
        """Last part of :meth:`run`: launch over arrays that have been checked. Returns the output."""
        if self._in_turn is None:
            launch(arrays, stream)
        else:
            self._in_turn.take(stream, launch, arrays, stream)
        return arrays[1]

    def new_output(self, q: Any, stream: Any) -> Any:
        """An array for the output of these queries, on the GPU."""
        assert self.backend is not None
        return self.backend.empty((q.shape[0], self.num_qo_heads, self.config.head_dim_v), q.dtype, stream=stream)

    def launch_of(self, cache: LayerKv, arrays: Arrays) -> Launch:
        """What :meth:`start` takes for arrays of these forms on a GPU, until the next plan.

        The arrays are those of ``NAMES``, the layer's among them, and checked as :meth:`run` does.
        """
        assert self._planned is not None
        sinks_of(self.config, self._options, arrays[7])
        return self._ready(self._planned, cache.signature, arrays, None)[0]

    def _ready_on_cpu(self, batch: Batch, arrays: Arrays) -> tuple[Launch, Arrays]:
        q, out, lse, *kv = arrays
        check_places(None, **dict(zip(NAMES, arrays, strict=True)))
        check_inputs(self.config, self.num_kv_heads, batch, self.max_tokens, q, *kv)
        check_queries(batch, q)
        shape = (len(q), self.num_qo_heads, self.config.head_dim_v)
        out = np.empty(shape, q.dtype) if out is None else out
        check_outputs(self.config, shape, out, lse)

        def compute(arrays: Arrays, stream: Any) -> None:
            attend_on_cpu(arrays, batch, self._options, self.config, exact=self._kernel_on_cpu == "reference")

        return compute, (q, out, lse, *kv)

    def _ready(self, planned: Planned, kv_form: Hashable, arrays: Arrays, stream: Any) -> tuple[Launch, Arrays]:
        """The launch over LAYER_ARRAYS; checks those whose form this batch has not had."""
        batch = planned.batch
        q, out, lse, _, _, _, _, sinks = arrays
        form = (kv_form, signature(q), signature(out), signature(lse), None if sinks is None else signature(sinks))
        launch = planned.launches.get(form)
        if launch is None:
            arrays = self._with_views(arrays)
            check_inputs(self.config, self.num_kv_heads, batch, self.max_tokens, q, *arrays[3:])
        if launch is None or isinstance(batch.q_indptr, np.ndarray):  # whose last value is no part of the form
            check_queries(batch, q)
        if out is None:
            arrays = (q, self.new_output(q, stream), *arrays[2:])
        if launch is None:
            launch = self._new_launch(planned, form, arrays)
        return launch, arrays

    def _with_views(self, arrays: Arrays) -> Arrays:
        """The arrays with a view of V, where the latents stand in its place."""
        stands_in = self.config.v_in_k and arrays[4] is arrays[3]
        return with_values(self.config, self.num_kv_heads, arrays) if stands_in else arrays

    def _new_launch(self, planned: Planned, form: Hashable, arrays: Arrays) -> Launch:
        """Check the outputs and places, and keep the launch for layers of this form."""
        q, out, lse, k, v, k_scale, v_scale, _ = arrays
        assert self.backend is not None
        assert self._plan is not None
        check_outputs(self.config, (len(q), self.num_qo_heads, self.config.head_dim_v), out, lse)
        check_places(self.backend, **dict(zip(NAMES, arrays, strict=True)))
        batch, options = planned.batch, self._options
        made = self._plan.layer_launch(q, k, v, out, batch, options, lse=lse, k_scale=k_scale, v_scale=v_scale)
        if len(planned.launches) >= MAX_RECIPES:
            planned.launches.clear()
        launch = planned.launches[form] = no_launch if made is None else made
        return launch
