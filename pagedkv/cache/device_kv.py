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
from pagedkv._core.block_table import StepArrays
from pagedkv.errors import LayoutMismatch, PagedKVError, WrongType
from pagedkv.interop import as_array, exchanges
from pagedkv.observe.callbacks import Log
from pagedkv.reference import paged_attention
from pagedkv.spec.dtypes import bfloat16_to_float32
from pagedkv.spec.kv_spec import KVSpec, gathered_shape, in_token_order, layer_view
from pagedkv.spec.sizes import whole_number

log = Log(logging.getLogger("pagedkv.cache"))

_CONVERTIBLE = ("float16", "float32", "float64")
_FAST = ("float32", "float16", "bfloat16")  # of queries
_USUAL = {np.dtype(np.float32).num, np.dtype(np.float16).num}  # asking a dtype for its name takes a microsecond
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
        self._layers = [layer_view(arena, layer, spec) for layer in range(spec.num_layers)]
        whole = arena.view(spec.np_dtype).reshape(len(arena), *spec.block_shape)
        sides = (whole[:, :, 0], whole[:, :, 1])
        self._k, self._v = (side.swapaxes(2, 3) if spec.layout == "HND" else side for side in sides)
        self._dtype, self._row = spec.np_dtype, (spec.num_kv_heads, spec.head_dim)
        self._bits = "bfloat16" if spec.dtype == "bfloat16" and spec.np_dtype == np.uint16 else ""
        self.overflowing_writes = 0
        self.decode: Callable[[NDArray[Any]], NDArray[Any]] | None = bfloat16_to_float32 if self._bits else None

    def layer(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a layer, [num_blocks, block_size, num_kv_heads, head_dim] views."""
        if type(layer) is not int or not 0 <= layer < len(self._layers):  # raises
            layer = whole_number(layer, "layer", 0, self.spec.num_layers - 1)
        return self._layers[layer]

    def bind(self, arrays: StepArrays) -> StepKV:
        """What one step writes and reads."""
        return StepKV(self, arrays)

    def write(self, layer: int, slots: NDArray[np.int64], k: NDArray[Any], v: NDArray[Any]) -> None:
        """Put K and V [num_tokens, num_kv_heads, head_dim] into slots int64 [num_tokens].

        -1 skips a token. The first call that stores a finite number as infinity logs a warning.

        Raises
        ------
        LayoutMismatch
            Shape or dtype does not fit. Nothing was written.
        """
        k_view, v_view = self.layer(layer)
        k, v, bits = self._checked("k", k, len(slots)), self._checked("v", v, len(slots)), self._bits
        if cpu.write_kv(k, v, k_view, v_view, slots, k_dtype=bits, kv_dtype=self.spec.dtype):
            self.overflowing_writes += 1
            if self.overflowing_writes == 1:
                log.warning(
                    "layer %d: K or V was larger than any number of %s and is stored as infinity, which makes "
                    "attention NaN; said once, stats().overflowing_writes counts all",
                    layer, self.spec.dtype,
                )  # fmt: skip

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
        spec, shape = self.spec, gathered_shape(self.spec, start, stop, layout)
        if out is None:
            out = (np.empty(shape, spec.np_dtype), np.empty(shape, spec.np_dtype))
        if not isinstance(out, tuple) or len(out) != 2:
            raise LayoutMismatch(f"out must be a pair of arrays (k, v), got {type(out).__name__}")
        for array in out:
            found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != spec.np_dtype:
                raise LayoutMismatch(f"out must be {spec.np_dtype} {shape}, got {found}")
        k_out, v_out = (in_token_order(array, layout) for array in out)
        cpu.gather(self._k, self._v, blocks, start, stop, k_out, v_out)
        return out

    def _checked(self, name: str, values: NDArray[Any], num_tokens: int) -> NDArray[Any]:
        shape = (num_tokens, *self._row)
        if not isinstance(values, np.ndarray):
            try:
                values = as_array(values) if exchanges(values) else np.asarray(values)
            except (TypeError, ValueError, BufferError, RuntimeError) as error:
                raise LayoutMismatch(f"{name} cannot be read as an array: {error}") from None
        if values.shape != shape:
            raise LayoutMismatch(f"{name} must be [num_tokens, num_kv_heads, head_dim] = {shape}, got {values.shape}")
        if values.dtype != self._dtype and values.dtype.name not in _CONVERTIBLE:
            wanted = ", ".join(dict.fromkeys((self.spec.dtype, *_CONVERTIBLE)))
            raise LayoutMismatch(f"{name} has dtype {values.dtype}: one of {wanted} is needed")
        return values


class StepKV:
    """The KV of one step: its slots to write, its sequences to attend to.

    Parameters
    ----------
    kv : DeviceKV
    arrays : StepArrays
    """

    def __init__(self, kv: DeviceKV, arrays: StepArrays) -> None:
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
        if (q.dtype.num in _USUAL or q.dtype.name in _FAST) and (out is None or out.dtype == q.dtype):
            lse = np.empty(q.shape[:2], np.float32) if return_lse else None
            k, v = self._kv.layer(layer)
            o = cpu.attend(
                q if q.flags.c_contiguous else np.ascontiguousarray(q), k, v, arrays.seq_lens,
                block_tables=arrays.block_tables, q_indptr=arrays.q_indptr, kv_dtype=spec.dtype, out=out, lse=lse,
                **(_as_arrays(variant) if variant else variant),
            )  # fmt: skip
            return (o, lse) if return_lse else o
        try:
            return paged_attention(
                q, *self._kv.layer(layer), arrays.block_tables, arrays.seq_lens, arrays.q_indptr,
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
