"""Writes K and V of new tokens into slots of NumPy caches.

Values are converted (round to nearest even) or quantised with scales.

The rules are those of the CUDA kernel of the same name: int8 and fp8 saturate, NaN stays NaN (in int8 it is 0). Where
each token's head has a scale, its largest absolute value becomes the type's largest number. float64 is rounded once
into float32 and float16; for the other types it is made float32 first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cpu import _write
from pagedkv.cpu.numbers import apart, dtype_of, source_of
from pagedkv.cpu.threads import num_threads
from pagedkv.errors import InvalidArgument, LayoutMismatch, UnsupportedVariant

QUANTISED = ("int8", "float8_e4m3", "float8_e5m2")


def write_kv(
    k: NDArray[Any],
    v: NDArray[Any],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    slot_mapping: NDArray[np.int64],
    *,
    k_dtype: str = "",
    kv_dtype: str = "",
    scale_mode: str = "none",
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
) -> bool:
    """Put K and V of new tokens into slots, converted to the cache's dtype.

    Of two tokens with the same slot the later one stays. The bits do not depend on the number of threads.

    Parameters
    ----------
    k, v : float32, float16, bfloat16 or float64 [num_tokens, num_kv_heads, head_dim (head_dim_v)]; uint8 for a cache
        of uint8, which are copied.
    k_cache, v_cache : [num_blocks, block_size, num_kv_heads, head_dim (head_dim_v)], any strides.
    slot_mapping : integers [num_tokens], ``block * block_size + offset``; a negative one skips its token.
    k_dtype : ``"bfloat16"`` where k or v hold its bits, in uint16.
    kv_dtype : where the cache only holds bits: ``"bfloat16"`` in uint16, fp8 in uint8; or ``"uint8"``.
    scale_mode : ``"none"``, ``"tensor"``, ``"head"`` or ``"token_head"`` (then the scales are computed and stored).
    k_scale, v_scale : float32 [1], [num_kv_heads], or [num_blocks, block_size, num_kv_heads].

    Returns
    -------
    bool
        Whether a finite number was stored as infinity: float16 ends at 65,504.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arrays that do not fit. Nothing was written.
    """
    if kv_dtype == _write.BYTES:
        name = k_name = v_name = _write.BYTES
        for what, array in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
            dtype_of(what, array, allowed=(_write.BYTES,))
    else:
        name, k_name = dtype_of("k_cache", k_cache, kv_dtype), source_of("k", k, k_dtype)
        v_name = k_name if getattr(v, "dtype", None) is k.dtype else source_of("v", v, k_dtype)
    is_plain = scale_mode == "none" and k_scale is None and v_scale is None and name not in QUANTISED
    if is_plain and _write.plainly_fits(k, v, k_cache, v_cache, slot_mapping):
        return _write.write(
            k, v, k_cache, v_cache, slot_mapping, None, None, k_name, v_name, name, False, num_threads()
        )  # fmt: skip
    if name != _write.BYTES:
        dtype_of("v_cache", v_cache, kv_dtype)
    shapes_fit = k_cache.ndim == v_cache.ndim == 4 and v_cache.shape[:3] == k_cache.shape[:3]
    if not shapes_fit or v_cache.dtype != k_cache.dtype:
        raise LayoutMismatch(
            f"k_cache and v_cache must be [num_blocks, block_size, num_kv_heads, head_dim] of one dtype, got "
            f"{k_cache.dtype} {k_cache.shape} and {v_cache.dtype} {v_cache.shape}"
        )
    try:
        slots = np.asarray(slot_mapping)
    except ValueError as error:
        raise LayoutMismatch(f"slot_mapping must be integers, one for each token: {error}") from None
    if slots.dtype.kind not in "iu":
        raise LayoutMismatch(f"slot_mapping must be integers, got {slots.dtype}")
    if slots.shape != k.shape[:1]:
        raise LayoutMismatch(f"slot_mapping must have one slot per token of k {k.shape}, got {slots.shape}")
    if k.shape != (*slots.shape, *k_cache.shape[2:]) or v.shape != (*slots.shape, *v_cache.shape[2:]):
        raise LayoutMismatch(f"k {k.shape} and v {v.shape} do not fit caches {k_cache.shape}, {v_cache.shape}")
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    if slots.size and slots.max() >= num_slots:
        raise InvalidArgument(f"slot_mapping has {slots.max()}: slots are -1..{num_slots - 1}")
    for what, array in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not array.flags.writeable:
            raise LayoutMismatch(f"{what} is read-only")
    if (scale_mode == "none") != (name not in QUANTISED):
        raise UnsupportedVariant(f"a cache of {name} is written with scale_mode {'not ' * (name in QUANTISED)}'none'")
    for what, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(what, scale, scale_mode, k_cache)
    k, v = (apart(values, k_cache, v_cache, k_scale, v_scale) for values in (k, v))
    return _write.write(
        k, v, k_cache, v_cache, np.ascontiguousarray(slots, np.int64), k_scale, v_scale, k_name, v_name, name,
        scale_mode == "token_head", num_threads(),
    )  # fmt: skip


def _check_scale(what: str, scale: NDArray[np.float32] | None, mode: str, cache: NDArray[Any]) -> None:
    shapes: dict[str, tuple[int, ...]] = {"tensor": (1,), "head": cache.shape[2:3], "token_head": cache.shape[:3]}
    if not isinstance(mode, str) or (mode != "none" and mode not in shapes):
        raise InvalidArgument(f"scale_mode must be 'none', {', '.join(map(repr, shapes))}, got {mode!r}")
    if (scale is None) != (mode == "none"):
        raise InvalidArgument(f"scale_mode = {mode!r}: {what} must {'not ' * (mode == 'none')}be given")
    if scale is not None and not isinstance(scale, np.ndarray):
        raise LayoutMismatch(f"{what} must be a NumPy array of float32, not {type(scale).__name__}")
    if scale is not None and mode == "token_head" and not scale.flags.writeable:
        raise LayoutMismatch(f"{what} is read-only, and the scales are to be stored")
    if scale is not None and (scale.dtype != np.float32 or scale.shape != shapes[mode]):
        raise LayoutMismatch(f"{what} must be float32 {list(shapes[mode])}, got {scale.dtype} {list(scale.shape)}")
