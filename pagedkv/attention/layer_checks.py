"""Checks of one layer's arrays that follow from their form alone.

:class:`pagedkv.attention.PagedAttention` asks once per form (:func:`pagedkv.kernels.recipe.signature`) and batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagedkv.attention.checks import check_contiguous, check_dtype, check_rows, check_shape, check_writable
from pagedkv.attention.planned import Arrays
from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType
from pagedkv.kernels.arrays import check_place
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.batch import Batch, Options
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.dtypes import ITEMSIZES, kernel_dtype
from pagedkv.kernels.params import address


def check_values_given(config: AttentionConfig, v_cache: Any, v_scale: Any) -> None:
    """Raise unless V is given, or with ``v_in_k`` neither V nor its scale.

    Raises
    ------
    InvalidArgument, WrongType
    """
    if not config.v_in_k:
        if v_cache is None:
            raise WrongType("v_cache must be an array, not NoneType: only with v_in_k = True do latents hold V")
        return
    if v_cache is not None and getattr(v_cache, "shape", ())[-1:] != (0,):  # of KVCache.layer
        raise InvalidArgument("v_in_k = True: v_cache must not be given, the latents hold it")
    if v_scale is not None:
        raise InvalidArgument("v_in_k = True: v_scale must not be given, k_scale is that of the latents")


def sinks_of(config: AttentionConfig, options: Options, given: Any) -> Any:
    """A layer's sinks: those given, else the attention's own; None without sinks.

    Raises
    ------
    InvalidArgument
        There are none for a kernel that was made with sinks, or the other way round.
    """
    sinks = options.sinks if given is None else given
    if (sinks is None) is config.sinks:
        raise InvalidArgument(
            "sinks = True: each run must be given its layer's sinks"
            if sinks is None
            else "sinks must not be given: this attention was made without, make one with sinks = True"
        )
    return sinks


def with_values(config: AttentionConfig, num_kv_heads: int, arrays: Arrays) -> Arrays:
    """A layer's arrays where latents stand for V too: V is the first numbers of their rows.

    Latents of one head may lack the axis of heads.

    Raises
    ------
    LayoutMismatch
        Latents of another shape.
    """
    q, out, lse, latents, _, scale, _, sinks = arrays
    blocks = ("num_blocks", config.block_size) if config.block_size else ("num_kv_tokens",)
    if num_kv_heads == 1 and len(getattr(latents, "shape", ())) == len(blocks) + 1:
        latents = latents[..., None, :]
    check_shape("k_cache", latents, (*blocks, num_kv_heads, config.head_dim))
    return q, out, lse, latents, latents[..., : config.head_dim_v], scale, scale, sinks


def check_inputs(
    config: AttentionConfig,
    num_kv_heads: int,
    batch: Batch,
    max_tokens: int,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k_scale: Any,
    v_scale: Any,
    sinks: Any,
) -> None:
    """Raise unless Q, K, V, the scales and the sinks fit the config and the batch.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
    """
    check_shape("q", q, ("num_tokens", num_kv_heads * config.group_size, config.head_dim))
    middle = (config.block_size, num_kv_heads) if config.block_size else (num_kv_heads,)
    for name, array, dim, dtype in (
        ("q", q, config.head_dim, config.q_dtype),
        ("k_cache", k_cache, config.head_dim, config.kv_dtype),
        ("v_cache", v_cache, config.head_dim_v, config.kv_dtype),
    ):
        if name != "q":
            check_shape(name, array, ("num_blocks" if config.block_size else "num_kv_tokens", *middle, dim))
        kernel_dtype(name, array, dtype)
        alignment = config.kv_alignment if name != "q" else math.gcd(16, config.head_dim * ITEMSIZES[dtype])
        check_rows(name, array, alignment)
    if batch.q_indptr is None and len(q) != len(batch.seq_lens):
        raise LayoutMismatch(
            f"q has {len(q)} tokens, but without q_indptr there is one for each of {len(batch.seq_lens)} sequences"
        )
    if len(q) > max_tokens:
        raise InvalidArgument(f"q has {len(q)} tokens, but this was made for max_tokens = {max_tokens}")
    _check_scales(config, num_kv_heads, k_scale, v_scale, k_cache)
    check_per_head(num_kv_heads * config.group_size, sinks=sinks)


def check_per_head(num_qo_heads: int, **arrays: Any) -> None:
    """Raise unless all arrays but None are a float32 for each query head.

    Raises
    ------
    WrongType, LayoutMismatch
    """
    for name, array in arrays.items():
        if array is not None:
            check_shape(name, array, (num_qo_heads,))
            check_dtype(name, array, np.float32)
            check_contiguous(name, array)


def check_outputs(config: AttentionConfig, shape: tuple[int, int, int], out: Any, lse: Any) -> None:
    """Raise unless ``out`` and ``lse``, where given, can be written.

    Parameters
    ----------
    shape : num_tokens, num_qo_heads, head_dim_v.

    Raises
    ------
    WrongType, LayoutMismatch
    """
    if out is not None:
        check_shape("out", out, shape)
        kernel_dtype("out", out, config.q_dtype)
        check_rows("out", out, math.gcd(16, config.head_dim_v * ITEMSIZES[config.q_dtype]))
        check_writable("out", out)
    if lse is not None:
        check_shape("lse", lse, shape[:2])
        check_dtype("lse", lse, np.float32)
        check_contiguous("lse", lse)
        check_writable("lse", lse)


def check_places(backend: Backend | None, **arrays: Any) -> None:
    """Raise WrongType unless all arrays but None lie in the backend's memory.

    Without a backend, they must be NumPy's.
    """
    for name, array in arrays.items():
        if array is None:
            continue
        if backend is not None:
            check_place(backend, name, array)
        elif not isinstance(array, np.ndarray):
            raise WrongType(f"{name} must be an array of NumPy on the CPU, not {type(array).__name__}")


def _check_scales(config: AttentionConfig, num_kv_heads: int, k_scale: Any, v_scale: Any, k_cache: Any) -> None:
    mode = config.scale_mode
    shapes: dict[str, tuple[int | str, ...]] = {
        "tensor": (1,),
        "head": (num_kv_heads,),
        "token_head": tuple(k_cache.shape[:-1]),
    }
    for name, array in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (array is None) != (mode == "none"):
            raise InvalidArgument(f"scale_mode = {mode!r}: {name} must {'not ' if mode == 'none' else ''}be given")
        if array is not None:
            check_shape(name, array, shapes[mode])
            check_dtype(name, array, np.float32)
            if address(array) % 4 or any(stride % 4 for stride in array.strides):
                raise LayoutMismatch(f"{name} is not aligned: its address and strides must be multiples of 4 bytes")
    if k_scale is not None and k_scale.strides != v_scale.strides:
        raise LayoutMismatch(
            f"k_scale and v_scale must have the same strides, got {k_scale.strides} and {v_scale.strides}"
        )
