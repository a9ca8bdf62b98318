"""The device arena as K and V.

Layer views, writes into slots, attention, block copies, gathers. Knows arrays, not sequences.

``DeviceKV`` and ``StepKV`` compute on the CPU; gpu_kv.py has the same on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv import cpu
from pagedkv.cache.layer_scales import LayerScales
from pagedkv.cache.storage import StepTables
from pagedkv.errors import LayoutMismatch, PagedKVError, WrongType
from pagedkv.interop import as_array, exchanges
from pagedkv.observe.callbacks import Log
from pagedkv.reference import paged_attention
from pagedkv.spec.block_layout import check_outputs, gathered_shapes, in_token_order, plane_view
from pagedkv.spec.dtypes import BYTES, bfloat16_to_float32, stored_to_float32
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import whole_number

log = Log(logging.getLogger("pagedkv.cache"))

_CONVERTIBLE = ("float16", "float32", "float64")
_FAST = ("float32", "float16", "bfloat16")  # of queries
_USUAL = {np.dtype(np.float32).num, np.dtype(np.float16).num}  # asking a dtype for its name takes a microsecond
_WORDS: dict[Any, np.dtype[Any]] = {  # of rows of bytes
    np.dtype(np.uint16): np.dtype(np.float16),
    np.dtype(np.uint32): np.dtype(np.float32),
}
_ARRAYS = {"alibi_slopes": ("f", np.float32), "sinks": ("f", np.float32), "mask_indptr": ("iu", np.int64)}


class DeviceKV:
    """Reads and writes KV in a device tier's arena.

    Parameters
    ----------
    spec : KVSpec
    arena : uint8 [num_blocks, block_bytes]
        CPU memory. Views share it; a method that copies says so.

    Attributes
    ----------
    overflowing_writes : calls of `write` that stored a finite number as infinity.
    """

    is_synchronous = True

    def __init__(self, spec: KVSpec, arena: NDArray[np.uint8]) -> None:
        self.spec, self._arena = spec, arena
        self._k, self._v = plane_view(arena, spec, "k"), plane_view(arena, spec, "v")
        self._layers = [(self._k[:, layer], self._v[:, layer]) for layer in range(spec.num_layers)]
        self._scales = LayerScales(arena, spec) if spec.scales is not None else None
        self._dtype, self._rows = spec.np_dtype, (spec.num_kv_heads, spec.head_dim, spec.width_of_v)
        self._sources = _sources(spec)
        self._bits = "bfloat16" if spec.dtype == "bfloat16" and spec.np_dtype == np.uint16 else ""
        self.overflowing_writes = 0
        self.decode: Callable[[NDArray[Any]], NDArray[Any]] | None = bfloat16_to_float32 if self._bits else None

    def layer(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a layer, [num_blocks, block_size, num_kv_heads, head_dim] views."""
        if type(layer) is not int or not 0 <= layer < len(self._layers):  # raises
            layer = whole_number(layer, "layer", 0, self.spec.num_layers - 1)
        return self._layers[layer]

    def attended(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a layer as attention reads them: V may be a part of K."""
        k, v = self.layer(layer)
        return (k, k[..., : self.spec.output_dim]) if self.spec.v_in_k else (k, v)

    def layer_scales(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """Scales of K and V of a layer; None where the dtype has none.

        [num_blocks, block_size, num_kv_heads] views, or the fixed ones, [1] or [num_kv_heads].
        """
        layer = whole_number(layer, "layer", 0, self.spec.num_layers - 1)
        return None if self._scales is None else self._scales.of(layer)

    def scales(self, layer: int) -> dict[str, Any]:
        """Keywords that give a kernel a layer's scales."""
        if self._scales is None:
            return {}
        k_scale, v_scale = self._scales.of(layer)
        return {"k_scale": k_scale, "v_scale": v_scale}

    def exact(self, layer: int, tables: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int32]]:
        """A layer's K and V as the reference reads them, and the tables of their blocks.

        Where numbers have scales, float64 copies of the blocks that the tables name.
        """
        k, v = self.attended(layer)
        if self._scales is None:
            return k, v, tables
        used, columns = np.unique(tables[tables >= 0], return_inverse=True)
        found = np.full(tables.shape, -1, np.int32)
        found[tables >= 0] = columns.reshape(-1)
        values = []
        for side, scale in zip((k, v), self._scales.of(layer), strict=True):
            factors = scale[used] if scale.ndim == 3 else scale
            with np.errstate(all="ignore"):
                values.append(stored_to_float32(side[used], self.spec.dtype).astype(np.float64) * factors[..., None])
        return values[0], values[1], found

    def bind(self, arrays: StepTables, part: int = 0) -> StepKV:
        """What one step writes and reads."""
        return StepKV(self, arrays)

    def write(self, layer: int, slots: NDArray[np.int64], k: NDArray[Any], v: NDArray[Any] | None) -> None:
        """Put K and V [num_tokens, num_kv_heads, head_dim] into slots int64 [num_tokens].

        -1 skips a token. V is None, or has no width, where a block holds none. The first call that stores a finite
        number as infinity logs a warning.

        Raises
        ------
        LayoutMismatch
            Shape or dtype does not fit, or V is given or missing against the spec. Nothing was written.
        """
        k_view, v_view = self.layer(layer)
        if v is None or self.spec.v_in_k:
            self._check_is_v(v)
        if self.spec.dtype == BYTES and getattr(k, "dtype", None) in _WORDS:
            self._write_words(k_view, v_view, slots, k, k[..., :0] if v is None else v)
            return
        spec, (heads, k_width, v_width) = self.spec, self._rows
        k = self._checked("k", k, (len(slots), heads, k_width))
        v = k[..., :0] if v is None else self._checked("v", v, (len(slots), heads, v_width))
        scaled = {} if self._scales is None else self.scales(layer) | {"scale_mode": spec.scale_mode}
        if cpu.write_kv(k, v, k_view, v_view, slots, k_dtype=self._bits, kv_dtype=spec.dtype, **scaled):
            self._overflowed(layer)

    def _check_is_v(self, v: Any) -> None:
        """Raise LayoutMismatch where V is missing, or given though blocks hold none."""
        if v is None and self.spec.width_of_v:
            raise LayoutMismatch("v is missing, and the cache has a V")
        if v is not None and getattr(v, "shape", ())[-1:] != (0,):
            raise LayoutMismatch("v is given, and the cache has no V")

    def _write_words(
        self, k_view: NDArray[Any], v_view: NDArray[Any], slots: NDArray[np.int64], k: NDArray[Any], v: NDArray[Any]
    ) -> None:
        """As :meth:`write`, of rows of bytes given as words.

        The kernel copies numbers of the cache's own dtype bit for bit, so the words pass for floats of their size.
        """
        heads, k_bytes, v_bytes = self._rows
        size, kind = k.itemsize, _WORDS[k.dtype]
        for name, values, width in (("k", k, k_bytes), ("v", v, v_bytes)):
            if width % size or values.shape != (len(slots), heads, width // size) or values.dtype != k.dtype:
                raise LayoutMismatch(
                    f"{name} must hold {width} bytes of each token as {k.dtype}, got {values.dtype} {values.shape}"
                )
        cpu.write_kv(k.view(kind), v.view(kind), k_view.view(kind), v_view.view(kind), slots, kv_dtype=kind.name)

    def _overflowed(self, layer: int) -> None:
        """Count a write that stored a finite number as infinity."""
        self.overflowing_writes += 1
        if self.overflowing_writes == 1:
            log_overflow(self.spec, layer)

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks, (source, destination) int32 [n, 2], one after the other."""
        for src, dst in pairs.tolist():
            self._arena[dst] = self._arena[src]

    def zero_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Fill whole blocks with zeros, int32 [n]."""
        self._arena[blocks] = 0

    def gather(
        self, blocks: NDArray[np.int32], start: int, stop: int, out: tuple[Any, Any] | None, layout: str = "NHD"
    ) -> tuple[Any, Any]:
        """K and V of tokens `start` to `stop` - 1 of a sequence with these blocks.

        Each [num_layers, stop - start, num_kv_heads, head_dim] with layout NHD, [num_layers, num_kv_heads,
        stop - start, head_dim] with HND.

        Raises
        ------
        LayoutMismatch
            An array of `out` has another shape or dtype, is read-only or shares the arena's memory.
        """
        spec, shapes = self.spec, gathered_shapes(self.spec, start, stop, layout)
        if spec.dtype == BYTES and isinstance(out, tuple) and getattr(out[0], "dtype", None) in _WORDS:
            dtype = out[0].dtype
            if spec.head_dim % dtype.itemsize or spec.width_of_v % dtype.itemsize:
                raise LayoutMismatch(f"rows of {spec.head_dim} and {spec.width_of_v} bytes are not whole {dtype}")
            check_outputs(out, tuple((*shape[:3], shape[3] // dtype.itemsize) for shape in shapes), dtype, np.ndarray)
            k_words, v_words = (in_token_order(array, layout) for array in out)
            cpu.gather(self._k.view(dtype), self._v.view(dtype), blocks, start, stop, k_words, v_words)
            return out
        if out is None:
            out = (np.empty(shapes[0], spec.value_dtype), np.empty(shapes[1], spec.value_dtype))
        check_outputs(out, shapes, spec.value_dtype, np.ndarray)
        k_out, v_out = (in_token_order(array, layout) for array in out)
        if self._scales is None:
            cpu.gather(self._k, self._v, blocks, start, stop, k_out, v_out)
            return out
        for array in (k_out, v_out):
            if not array.flags.writeable:
                raise LayoutMismatch("out is read-only")
            if np.may_share_memory(array, self._arena):
                raise LayoutMismatch("out shares memory with the arena; give arrays of your own")
        stored = [np.empty(array.shape, spec.np_dtype) for array in (k_out, v_out)]
        cpu.gather(self._k, self._v, blocks, start, stop, *stored)
        for array, side, scale in zip((k_out, v_out), stored, self._scales.gathered(blocks, start, stop), strict=True):
            with np.errstate(all="ignore"):  # a row with an infinite scale is NaN
                np.multiply(stored_to_float32(side, spec.dtype), scale, out=array)
        return out

    def _checked(self, name: str, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        if not isinstance(values, np.ndarray):
            try:
                values = as_array(values) if exchanges(values) else np.asarray(values)
            except (TypeError, ValueError, BufferError, RuntimeError) as error:
                raise LayoutMismatch(f"{name} cannot be read as an array: {error}") from None
        if values.shape != shape:
            width = "head_dim" if name == "k" or self.spec.head_dim_v is None else "head_dim_v"
            raise LayoutMismatch(f"{name} must be [num_tokens, num_kv_heads, {width}] = {shape}, got {values.shape}")
        if (values.dtype != self._dtype or self._scales is not None) and values.dtype.name not in self._sources:
            wanted = ", ".join(dict.fromkeys((*([] if self._scales else [self.spec.dtype]), *self._sources)))
            raise LayoutMismatch(f"{name} has dtype {values.dtype}: one of {wanted} is needed")
        return values


def log_overflow(spec: KVSpec, layer: int) -> None:
    """Warn that a write to one of the spec's own layers stored a finite number as infinity."""
    log.warning(
        "layer %d: K or V was larger than any number of %s and is stored as infinity, which makes "
        "attention NaN; said once, stats().overflowing_writes counts all",
        spec.model_layer(layer), spec.dtype,
    )  # fmt: skip


def _sources(spec: KVSpec) -> tuple[str, ...]:
    """Dtypes that `write` converts, beside the spec's own."""
    if spec.dtype == BYTES:
        return ()
    return _CONVERTIBLE if spec.scales is None else (*_CONVERTIBLE, "bfloat16")


class StepKV:
    """The KV of one step: its slots to write, its sequences to attend to.

    Parameters
    ----------
    kv : DeviceKV
    arrays : StepTables
    """

    def __init__(self, kv: DeviceKV, arrays: StepTables) -> None:
        self._kv, self._arrays = kv, arrays

    def write(self, layer: int, k: Any, v: Any, stream: Any = None) -> None:
        """Put the new tokens' K and V [num_tokens, num_kv_heads, head_dim] into the step's slots.

        Raises
        ------
        LayoutMismatch
            Shape or dtype does not fit. Nothing was written.
        WrongType
            A stream was given: there is none on a CPU.
        """
        if stream is not None:
            _refuse(stream)
        self._kv.write(layer, self._arrays.slot_mapping, k, v)

    def attend(
        self, layer: int, q: Any, *, return_lse: bool = False, out: Any = None, stream: Any = None, **variant: Any
    ) -> Any:
        """Attention of the new tokens: ``o``, or ``(o, lse)``. `variant` as in
        :func:`pagedkv.reference.paged_attention`, which computes where `q` is float64 or `out` has another dtype than
        `q`; the kernels of :mod:`pagedkv.cpu` do otherwise.

        Raises
        ------
        LayoutMismatch
            The arrays do not fit together. Nothing was written.
        """
        if stream is not None:
            _refuse(stream)
        if not isinstance(q, np.ndarray) or not (out is None or isinstance(out, np.ndarray)):
            name, array = ("out", out) if isinstance(q, np.ndarray) else ("q", q)
            raise LayoutMismatch(f"{name} must be a NumPy array, got {type(array).__name__}")
        arrays, spec = self._arrays, self._kv.spec
        spec.check_can_attend()
        if (q.dtype.num in _USUAL or q.dtype.name in _FAST) and (out is None or out.dtype == q.dtype):
            lse = np.empty(q.shape[:2], np.float32) if return_lse else None
            k, v = self._kv.attended(layer)
            o = cpu.attend(
                q if q.flags.c_contiguous else np.ascontiguousarray(q), k, v, arrays.seq_lens,
                block_tables=arrays.block_tables, q_indptr=arrays.q_indptr, kv_dtype=spec.dtype, out=out, lse=lse,
                **self._kv.scales(layer), **(_as_arrays(variant) if variant else variant),
            )  # fmt: skip
            return (o, lse) if return_lse else o
        k, v, tables = self._kv.exact(layer, arrays.block_tables)
        try:
            return paged_attention(
                q, k, v, tables, arrays.seq_lens, arrays.q_indptr,
                decode=self._kv.decode, return_lse=return_lse, out=out, **variant,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            if isinstance(error, PagedKVError):
                raise
            raise LayoutMismatch(str(error)) from error


def _as_arrays(variant: dict[str, Any]) -> dict[str, Any]:
    """Slopes, sinks and masks as the kernels take them.

    Other kinds of numbers are left for the kernels to refuse.
    """
    for name, (kinds, dtype) in _ARRAYS.items():
        given = variant.get(name)
        if given is not None:
            array = _read(name, given)
            variant[name] = np.ascontiguousarray(array, dtype) if array.dtype.kind in kinds else array
    if variant.get("mask") is not None:
        variant["mask"] = np.ascontiguousarray(_read("mask", variant["mask"]))
    return variant


def _read(name: str, given: Any) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as problem:
        raise LayoutMismatch(f"{name} cannot be read as an array: {problem}") from None


def _refuse(stream: Any) -> None:
    raise WrongType("stream is for a cache whose device tier is on a GPU; this one's is in CPU memory")
