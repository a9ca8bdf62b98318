"""K and V of new tokens into their slots, wherever the arrays live."""

from __future__ import annotations

from typing import Any

from pagedkv import cpu
from pagedkv.attention.places import Device, backend_of, home_of
from pagedkv.errors import UnsupportedVariant
from pagedkv.kernels import write_kv as kernel
from pagedkv.kernels.config import ScaleMode
from pagedkv.kernels.layer_kv import LayerKv
from pagedkv.kernels.rope import Rope


def write_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    kv_dtype: str = "",
    scale_mode: ScaleMode = "none",
    k_scale: Any = None,
    v_scale: Any = None,
    rope: Rope | None = None,
    q: Any = None,
    q_out: Any = None,
    device: Device | None = None,
    stream: Any = None,
) -> None:
    """Put K and V of new tokens into slots, converted to the cache's dtype.

    Parameters
    ----------
    k, v : float32, float16 or bfloat16 [num_tokens, num_kv_heads, head_dim (head_dim_v)].
    k_cache, v_cache : [num_blocks, block_size, num_kv_heads, head_dim (head_dim_v)], any strides but the last.
    slot_mapping : int64 [num_tokens], ``block * block_size + offset``; a negative one skips its token.
    kv_dtype : where the cache only says how many bits: fp8 in uint8.
    scale_mode, k_scale, v_scale : of a quantised cache; with ``"token_head"`` the scales are computed and stored.
    rope, q, q_out : rotate K on the way (and Q): :mod:`pagedkv.kernels.rope`. On a GPU only.
    device : default where the arrays live.
    stream : where the kernel runs; the host does not wait.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arrays that do not fit. Nothing was written.
    """
    backend = home_of(k=k, v=v, k_cache=k_cache, v_cache=v_cache) if device is None else backend_of(device)
    if backend is not None:
        cache = LayerKv(
            backend, k_cache, v_cache, dtype=kv_dtype, scale_mode=scale_mode, k_scale=k_scale, v_scale=v_scale
        )
        kernel.write_kv(cache, slot_mapping, k, v, rope=rope, q=q, q_out=q_out, stream=stream)
        return
    if rope is not None or q is not None:
        raise UnsupportedVariant("on the CPU K and V are written as they are: rotate them before (no rope, no q)")
    cpu.write_kv(
        k, v, k_cache, v_cache, slot_mapping, kv_dtype=kv_dtype, scale_mode=scale_mode, k_scale=k_scale, v_scale=v_scale
    )
