"""The device arena as K and V where it lies on a GPU.

The same verbs as device_kv.py, computed by the kernels.

Everything is ordered by the caller's stream and nothing waits for the device. The steps of a cache share device
buffers, so a thread waits for another's call, and work on a stream for the launches here on another (``before_work``).
Before a tier move touches the arena it waits, on its own stream, for the launches here (``on_work``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention import PagedAttention
from pagedkv.attention.option_checks import option_key
from pagedkv.attention.places import check_may_wait
from pagedkv.attention.planned import Launch
from pagedkv.cache.gpu_layers import as_kernels_take, layer_kv, scales_of, with_v
from pagedkv.cache.storage import StepTables
from pagedkv.errors import InvalidArgument, UnsupportedVariant, WrongType
from pagedkv.kernels.autotune import is_due
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.block_ops import copy_blocks, fill_blocks
from pagedkv.kernels.dtypes import kernel_dtype
from pagedkv.kernels.gather_kv import gather_kv
from pagedkv.kernels.layer_kv import LayerKv
from pagedkv.kernels.recipe import MAX_RECIPES, place, signature
from pagedkv.kernels.select import FEW_ROWS, kernel_on
from pagedkv.kernels.tuning import REFERENCE
from pagedkv.kernels.write_kv import write_kv
from pagedkv.spec.block_layout import check_outputs, gathered_shapes, in_token_order, layer_view
from pagedkv.spec.dtypes import BYTES
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import whole_number

_STEP_ARRAYS = ("block_tables", "seq_lens", "q_indptr", "slot_mapping")


class GpuKV:
    """Reads and writes KV in a device tier's arena on a GPU.

    Steps of several threads share its buffers: each call uploads and launches under `lock`, and where another step's
    call came between it uploads again. A call within a call of the same thread, as of a finalizer or a signal's
    handler, would take the buffers from under it: InvalidArgument.

    Parameters
    ----------
    spec : KVSpec
    arena : uint8 [num_blocks, block_bytes] on the backend's device.
    backend : launches the kernels.
    on_work : called with the stream after kernels were launched on it, so that moves can wait for them.
    before_work : called with the stream before that: work launched on other streams comes first. Returns the stream, or
        for None the current one.
    row_bytes : of the arena's rows, where unused bytes follow each block.
    lock : one for all that share `before_work` and `on_work`; default one of its own.
    """

    decode = None
    is_synchronous = False

    def __init__(
        self,
        spec: KVSpec,
        arena: Any,
        backend: Backend,
        on_work: Callable[[Any], object],
        before_work: Callable[[Any], Any] = lambda stream: stream,
        row_bytes: int | None = None,
        lock: Any = None,
    ) -> None:
        self.spec, self.backend, self.on_work, self.before_work = spec, backend, on_work, before_work
        self.lock = lock or new_lock()  # held from `before_work` to `on_work`
        self.is_mine: Callable[[], bool] = self.lock._is_owned  # by this thread
        self._views = [layer_view(arena, layer, spec, row_bytes) for layer in range(spec.num_layers)]
        self._scales = [scales_of(arena, spec, layer, backend, row_bytes) for layer in range(spec.num_layers)]
        self._arena = arena[:, : spec.block_bytes]
        self._layers = [layer_kv(spec, backend, *given) for given in zip(self._views, self._scales, strict=True)]
        self._attended = self._layers
        if spec.v_in_k:
            parts = [(k, k[..., : spec.output_dim]) for k, _ in self._views]
            self._attended = [layer_kv(spec, backend, *given) for given in zip(parts, self._scales, strict=True)]
        self._buffers: dict[str, Any] = {}
        self._attentions: dict[tuple[Any, ...], PagedAttention] = {}
        self._asked_at: dict[tuple[Any, ...], float] = {}  # when a better kernel was last looked for
        self._outgrown: list[Any] = []  # buffers and attentions: kernels and graphs may still use their memory
        self.uploaded: dict[int, GpuStepKV] = {}  # by part: whose arrays lie in its buffers

    def layer(self, layer: int) -> tuple[Any, Any]:
        """K and V of a layer, [num_blocks, block_size, num_kv_heads, head_dim] views on the device."""
        return self._views[whole_number(layer, "layer", 0, self.spec.num_layers - 1)]

    def layer_scales(self, layer: int) -> tuple[Any, Any] | None:
        """Scales of K and V of a layer, as :meth:`pagedkv.cache.device_kv.DeviceKV.layer_scales`."""
        found = self.scales(whole_number(layer, "layer", 0, self.spec.num_layers - 1))
        return (found["k_scale"], found["v_scale"]) if found else None

    def scales(self, layer: int) -> dict[str, Any]:
        """Keywords that give a kernel a layer's scales."""
        return self._scales[layer]

    def cache(self, layer: int) -> LayerKv:
        """A layer as the kernels take it."""
        if type(layer) is int and 0 <= layer < len(self._layers):
            return self._layers[layer]
        return self._layers[whole_number(layer, "layer", 0, self.spec.num_layers - 1)]

    def attended(self, layer: int) -> LayerKv:
        """A layer as attention reads it: V may be a part of K."""
        found = self._attended
        if type(layer) is int and 0 <= layer < len(found):
            return found[layer]
        return found[whole_number(layer, "layer", 0, self.spec.num_layers - 1)]

    def bind(self, arrays: StepTables, part: int = 0) -> GpuStepKV:
        """What one step writes and reads."""
        return GpuStepKV(self, arrays, part)

    def copy_blocks(self, pairs: NDArray[np.int32], stream: Any = None) -> None:
        """Copy whole blocks, (source, destination) int32 [n, 2]; no block is both."""
        with self.working(stream) as stream:
            copy_blocks(self.backend, self._arena, self.device_copy("pairs", pairs, stream), stream=stream)

    def zero_blocks(self, blocks: NDArray[np.int32], stream: Any = None) -> None:
        """Fill whole blocks with zeros, int32 [n]."""
        with self.working(stream) as stream:
            fill_blocks(self.backend, self._arena, self.device_copy("zeroed", blocks, stream), stream=stream)

    def gather(
        self,
        blocks: NDArray[np.int32],
        start: int,
        stop: int,
        out: tuple[Any, Any] | None,
        layout: str = "NHD",
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """K and V of tokens `start` to `stop` - 1 of a sequence with these blocks.

        Shapes and errors as :meth:`pagedkv.cache.device_kv.DeviceKV.gather`.
        """
        spec, shapes = self.spec, gathered_shapes(self.spec, start, stop, layout)
        if out is None:
            k_out, v_out = (self.backend.empty(shape, spec.value_dtype, stream=stream) for shape in shapes)
            out = (k_out, v_out)
        check_outputs(out, shapes, spec.value_dtype)
        if stop > start:
            self.gather_layers(blocks, start, stop, out, range(spec.num_layers), layout, stream)
        return out

    def gather_layers(
        self,
        blocks: NDArray[np.int32],
        start: int,
        stop: int,
        out: tuple[Any, Any],
        places: Iterable[int],
        layout: str,
        stream: Any = None,
    ) -> None:
        """As :meth:`gather`, into arrays of more layers: each goes to its place of `places`."""
        with self.working(stream) as stream:
            tables = self.device_copy("gather_tables", blocks[None], stream)
            indptr = self.device_copy("gather_indptr", np.array([0, stop - start], np.int32), stream)
            first = self.device_copy("gather_first", np.array([start], np.int32), stream)
            k, v = (in_token_order(as_kernels_take(array), layout) for array in out)
            for index, cache in zip(places, self._layers, strict=True):
                outputs = with_v((k[index], v[index]))
                gather_kv(cache, tables, indptr, *outputs, first_positions=first, stream=stream)

    @contextmanager
    def working(self, stream: Any) -> Iterator[Any]:
        """Order the launches within after earlier ones; moves wait for them. Yields their stream.

        A step's calls do the same without this generator, which costs the host half a microsecond.
        """
        if self.is_mine():
            raise nested()
        with self.lock:
            stream = self.before_work(stream)
            try:
                yield stream
            finally:
                self.on_work(stream)

    def device_copy(self, name: str, array: NDArray[Any], stream: Any) -> Any:
        """The array in a device buffer of that name, which is kept and grows by doubling."""
        flat = np.ascontiguousarray(array).reshape(-1)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < flat.size:
            check_may_wait(self.backend, stream)
            room = max(64, 1 << max(0, flat.size - 1).bit_length())
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = self._buffers[name] = self.backend.zeros((room,), flat.dtype)
        view = buffer[: flat.size]
        if flat.size:
            self.backend.upload(view, flat, stream)
        return view.reshape(array.shape)

    def attention(
        self, part: int, dtype: str, num_qo_heads: int, num_seqs: int, max_q_len: int, num_tokens: int, stream: Any,
        **variant: Any,
    ) -> PagedAttention:
        """Workspaces and kernels for a part of steps, a variant, and queries of a dtype.

        Made anew, twice as large, when a batch outgrows them, unless `stream` is being captured: InvalidArgument. Also
        once kernels can be tried for which there was no memory before.
        """
        slopes, decode = variant.pop("alibi_slopes", None), max_q_len == 1
        few = _room(max_q_len) * num_qo_heads <= FEW_ROWS * self.spec.num_kv_heads  # a draft's queries, say
        key = (part, dtype, num_qo_heads, decode, few, *sorted(variant.items()), place(slopes))
        found = self._attentions.get(key)
        if (
            found is None
            or found.max_sequences < num_seqs
            or found.max_tokens < num_tokens
            or found.max_q_len < max_q_len
            or (variant.get("kernel", "auto") == "auto" and self._has_better(key, found, stream))
        ):
            spec = self.spec
            check_may_wait(self.backend, stream)
            sizes = [_room(num_seqs), _room(max_q_len), _room(num_tokens)]
            if found is not None:  # no size shrinks: else two kinds of batches in turn made one anew each time
                self._outgrown.append(found)
                sizes = list(map(max, sizes, (found.max_sequences, found.max_q_len, found.max_tokens)))
            found = self._attentions[key] = PagedAttention(
                num_qo_heads=num_qo_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
                head_dim_v=spec.output_dim, v_in_k=spec.v_in_k, dtype=dtype, kv_dtype=spec.dtype,
                scale_mode=spec.scale_mode,  # type: ignore[arg-type]
                block_size=spec.block_size, max_sequences=sizes[0], max_q_len=sizes[1], max_tokens=sizes[2],
                device=self.backend, alibi_slopes=slopes, **variant,
            )  # fmt: skip
        return found

    def _has_better(self, key: tuple[Any, ...], found: PagedAttention, stream: Any) -> bool:
        """Whether another kernel is taken now, as the trial that was put off could be made."""
        if not is_due(self._asked_at.get(key, 0.0)) or found.kernel != REFERENCE or self.backend.is_capturing(stream):
            return False
        self._asked_at[key] = time.monotonic()
        return kernel_on(self.backend, found.config, found.max_q_len).name != found.kernel


class GpuStepKV:
    """The KV of one step on a GPU.

    The step's arrays go to the device with the first write or attention, and again after another step's.

    Parameters
    ----------
    kv : GpuKV
    arrays : StepTables
    part : as :meth:`pagedkv.cache.storage.KV.bind`; each has buffers and plans of its own.
    """

    def __init__(self, kv: GpuKV, arrays: StepTables, part: int) -> None:
        self._kv, self._arrays, self._part = kv, arrays, part
        self._on_device: dict[str, Any] = {}
        # by the forms of a call's arrays and its variant: the attention, and its launch with these masks
        self._launches: dict[Hashable, tuple[PagedAttention, Launch, Any, Any]] = {}
        self._planned: dict[PagedAttention, tuple[Any, Any]] = {}  # for this step, with these masks

    def write(self, layer: int, k: Any, v: Any, stream: Any = None) -> None:
        """Put the new tokens' K and V [num_tokens, num_kv_heads, head_dim] into the step's slots.

        Raises
        ------
        LayoutMismatch, WrongType
            Shape, dtype or device does not fit. Nothing was written.
        """
        if self._kv.spec.dtype == BYTES:
            raise UnsupportedVariant(
                "no kernel writes rows of bytes on a GPU: write the views of KVCache.layer() with your own, and say "
                "mark_written"
            )
        kv = self._kv
        if kv.is_mine():
            raise nested()
        with kv.lock:
            stream = kv.before_work(stream)
            try:
                slots, cache = self._upload(stream)["slot_mapping"], kv.cache(layer)
                k, v = with_v((k, v)) if cache.v is None else (k, v)
                write_kv(cache, slots, k, v, stream=stream)
            finally:  # also of an upload before a refusal
                kv.on_work(stream)

    def attend(
        self,
        layer: int,
        q: Any,
        *,
        mask: Any = None,
        mask_indptr: Any = None,
        return_lse: bool = False,
        out: Any = None,
        sinks: Any = None,
        stream: Any = None,
        **variant: Any,
    ) -> Any:
        """Attention of the new tokens: ``o``, or ``(o, lse)``."""
        kv = self._kv
        if kv.is_mine():
            raise nested()
        if sinks is not None:
            variant["sinks"] = True  # each layer has its own: they are no part of the attention
        with kv.lock:
            stream = kv.before_work(stream)
            try:
                self._upload(stream)
                cache = kv.attended(layer)
                form: tuple[Hashable, ...] = (cache.signature, signature(q), signature(out), return_lse, mask is None)
                if variant:
                    form += (signature(sinks), tuple(variant), *map(option_key, variant, variant.values()))
                launch: Launch | None = None
                known = self._launches.get(form)
                if known is not None and known[2] is mask and known[3] is mask_indptr:
                    attention, launch = known[:2]
                else:
                    attention = self._planned_for(q, mask, mask_indptr, variant, stream)
                if out is None:
                    out = attention.new_output(q, stream)
                lse = kv.backend.empty(q.shape[:2], np.float32, stream=stream) if return_lse else None
                arrays = (q, out, lse, cache.k, cache.v, cache.k_scale, cache.v_scale, sinks)
                if launch is None:
                    launch = attention.launch_of(cache, arrays)
                    if len(self._launches) >= MAX_RECIPES:
                        self._launches.clear()
                    self._launches[form] = (attention, launch, mask, mask_indptr)
                attention.start(launch, arrays, stream)
            finally:
                kv.on_work(stream)
        return (out, lse) if return_lse else out

    def _planned_for(
        self, q: Any, mask: Any, mask_indptr: Any, variant: dict[str, Any], stream: Any
    ) -> PagedAttention:
        """The attention for queries and a variant, with this step planned."""
        arrays, attention = self._on_device, self._attention(q, mask is not None, variant, stream)
        masks = self._planned.get(attention)
        # once per step: every layer with this variant has the same batch, but need not have the same mask
        if masks is None or masks[0] is not mask or masks[1] is not mask_indptr:
            self._planned.pop(attention, None)  # an interrupt within may leave either plan, or a part of one
            self._launches.clear()
            attention.plan(
                arrays["block_tables"], arrays["seq_lens"], arrays["q_indptr"],
                mask=mask, mask_indptr=mask_indptr, stream=stream,
            )  # fmt: skip
            self._planned[attention] = (mask, mask_indptr)
        return attention

    def _attention(self, q: Any, masked: bool, variant: dict[str, Any], stream: Any) -> PagedAttention:
        """The workspaces and kernels for queries of a form and a variant."""
        spec = self._kv.spec
        spec.check_can_attend()
        dtype = kernel_dtype("q", q)
        if spec.scales is None and dtype != spec.dtype:
            raise WrongType(f"q is {dtype}, and kernels over this cache take queries of {spec.dtype} alone")
        q_lens = np.diff(self._arrays.q_indptr)
        return self._kv.attention(
            self._part, dtype, q.shape[1], len(q_lens), int(q_lens.max(initial=1)), len(q), stream,
            custom_mask=masked, **variant,
        )  # fmt: skip

    def _upload(self, stream: Any) -> dict[str, Any]:
        """The step's arrays on the device; the caller holds the lock."""
        part = self._part
        if self._kv.uploaded.get(part) is not self:  # the first time, or another step came between
            self._kv.uploaded.pop(part, None)
            self._launches, self._planned = {}, {}
            self._on_device = {
                name: self._kv.device_copy(f"{name} {part}", getattr(self._arrays, name), stream)
                for name in _STEP_ARRAYS
            }
            self._kv.uploaded[part] = self
        return self._on_device


def new_lock() -> Any:
    """A lock that tells whether this thread holds it."""
    return threading.RLock()


def nested() -> InvalidArgument:
    """The refusal of a call within a call of the same thread."""
    return InvalidArgument(
        "this thread is within a call on the cache's GPU memory already: a finalizer, a handler of a signal or a hook "
        "that runs meanwhile cannot make another; let the call return first"
    )


def _room(count: int) -> int:
    """At least `count`, a power of two: so that growth is rare."""
    return 1 << max(0, count - 1).bit_length()
