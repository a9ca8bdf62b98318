"""Checks of the names and numbers that an attention is made with."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from pagedkv.attention.checks import MAX_INT32
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.kernels.config import SCALE_MODES, SCHEDULES
from pagedkv.kernels.dtypes import CUDA_NAMES, ITEMSIZES
from pagedkv.kernels.recipe import place
from pagedkv.spec.layers import check_scale_of_latents
from pagedkv.spec.sizes import check_flag, whole_number

MAX_FLOAT32 = float(np.finfo(np.float32).max)


WHOLE_NUMBERS = {
    "num_kv_heads": (1, 2**16),
    "num_qo_heads": (1, 2**16),
    "head_dim": (1, 2**12),
    "head_dim_v": (1, 2**12),
    "block_size": (0, 256),
    "max_sequences": (1, MAX_INT32),
    "max_q_len": (1, MAX_INT32),
    "max_tokens": (1, MAX_INT32),
    "max_seq_len": (0, MAX_INT32),
    "max_workspace_bytes": (0, 2**63 - 1),
    "window": (1, MAX_INT32),
    "kv_alignment": (1, 16),
}
OPTIONAL = frozenset({"max_tokens", "window", "kv_alignment"})  # may be None
NAMES: dict[str, Iterable[str] | None] = {
    "dtype": CUDA_NAMES,
    "kv_dtype": CUDA_NAMES,
    "scale_mode": SCALE_MODES,
    "schedule": ("auto", *SCHEDULES),
    "kernel": None,  # each place has its own
}


def check_options(**options: Any) -> None:
    """Raise unless numbers are in their ranges, names known, and all others True or False.

    Raises
    ------
    WrongType, InvalidArgument
    """
    for name, value in options.items():
        if name in WHOLE_NUMBERS:
            if value is not None or name not in OPTIONAL:
                whole_number(value, name, *WHOLE_NUMBERS[name])
        elif name in NAMES:
            _check_name(value, name, NAMES[name])
        else:
            check_flag(value, name)


def float32_number(value: Any, name: str) -> float:
    """`value` as a float that the kernels' float32 holds.

    Raises
    ------
    WrongType, InvalidArgument
        It is no number, not finite, or too large.
    """
    if type(value) is float and -MAX_FLOAT32 <= value <= MAX_FLOAT32:
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise WrongType(f"{name} must be a number, not {type(value).__name__}")
    if not -MAX_FLOAT32 <= value <= MAX_FLOAT32:  # nor NaN
        shown = value if isinstance(value, float | np.floating) else "a larger whole number"
        raise InvalidArgument(f"{name} must be finite in float32, got {shown}")
    return float(value)


def option_key(name: str, value: Any) -> Hashable:
    """A key of an option's value: of slopes where they lie, as their attention keeps them.

    Raises
    ------
    WrongType, InvalidArgument
        A number that is none in float32.
    """
    if name == "softmax_scale" or name == "soft_cap":
        return float32_number(value, name)
    return place(value) if name == "alibi_slopes" else value


def scale_of(softmax_scale: Any, head_dim: int, v_in_k: bool) -> float:
    """The factor of scores; by default that of K's width, which latents do not have.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if v_in_k:
        check_scale_of_latents(softmax_scale, head_dim)
    return head_dim**-0.5 if softmax_scale is None else float32_number(softmax_scale, "softmax_scale")


def alignment_of(kv_alignment: int | None, kv_dtype: str, head_dim: int, head_dim_v: int) -> int:
    """Bytes at a multiple of which rows of K and V begin.

    By default the most that the rows allow, up to 16.

    Raises
    ------
    InvalidArgument
    """
    size = ITEMSIZES[kv_dtype]
    if kv_alignment is None:
        return math.gcd(16, head_dim * size, head_dim_v * size)
    if kv_alignment not in (1, 2, 4, 8, 16) or kv_alignment % size:
        raise InvalidArgument(f"kv_alignment must be {size}..16 and a power of two, got {kv_alignment}")
    return kv_alignment


def _check_name(value: Any, name: str, names: Iterable[str] | None) -> None:
    if not isinstance(value, str):
        raise WrongType(f"{name} must be a string, not {type(value).__name__}")
    if names is not None and value not in names:
        raise InvalidArgument(f"{name} must be one of {', '.join(names)}, got {value[:40]!r}")
