"""Fixed scales of quantised K and V: value = stored * scale.

The other kind, one for each token and head, is computed when KV is written and lies in the block.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType
from pagedkv.spec.dtypes import LARGEST, bfloat16_to_float32, dtype_name

TOKEN_HEAD = "token_head"
PER = ("tensor", "head")


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales that stay the same, of K and of V: one per layer, or one per layer and KV head.

    Parameters
    ----------
    k, v : positive numbers, kept as float32
        One for all layers, [num_layers], or [num_layers, num_kv_heads]; K's and V's are of the same shape. v None
        for latents alone, of which V is a part: those of K.

    Raises
    ------
    WrongType, InvalidArgument
        No numbers, of another shape, not positive or not finite.
    """

    k: Any
    v: Any = None
    are_of_latents: bool = field(init=False, default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.v is None:
            object.__setattr__(self, "v", self.k)
            object.__setattr__(self, "are_of_latents", True)
        for name in ("k", "v"):
            object.__setattr__(self, name, _rows(name, getattr(self, name)))
        if self.shape != (len(self.v), len(self.v[0])):
            raise InvalidArgument(f"scales of k are {list(self.shape)} and of v {[len(self.v), len(self.v[0])]}")

    @classmethod
    def measured(cls, k: ArrayLike, v: ArrayLike | None, dtype: Any, *, per: str = "head") -> Scales:
        """Scales with which the largest of these values becomes the dtype's largest number.

        Parameters
        ----------
        k, v : [num_layers, num_tokens, num_kv_heads, head_dim]
            Samples, as :meth:`pagedkv.Sequence.gather` gives them. Values that are larger saturate when they are
            written, so samples should be many. v None, or of width 0 as gather gives it of latents: scales of K alone.
        dtype : ``"int8"``, ``"float8_e4m3"`` or ``"float8_e5m2"``.
        per : ``"tensor"`` or ``"head"``.

        Raises
        ------
        WrongType, InvalidArgument, LayoutMismatch
            Not such arrays, without tokens, or with a number that is not finite.
        """
        name = dtype_name(dtype)
        if name not in LARGEST:
            raise InvalidArgument(f"{name} has no scales: only {', '.join(LARGEST)} have")
        if not isinstance(per, str) or per not in PER:
            raise InvalidArgument(f"per must be 'tensor' or 'head', got {per!r}")
        found = []
        latents = v is None or getattr(v, "shape", ()) == (*getattr(k, "shape", ())[:-1], 0)
        for side, given in (("k", k),) if latents else (("k", k), ("v", v)):
            largest = np.abs(_samples(side, given)).max(axis=(1, 3) if per == "head" else (1, 2, 3))
            if not np.isfinite(largest).all():
                raise InvalidArgument(f"{side} holds a number that is not finite in float32")
            largest = np.where(largest > 0, largest, LARGEST[name])  # zeros fit any scale
            found.append(np.maximum(largest / np.float32(LARGEST[name]), np.finfo(np.float32).tiny))
        return cls(*found)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, or 1; KV heads, or 1."""
        return len(self.k), len(self.k[0])

    @property
    def per(self) -> str:
        """``"tensor"`` or ``"head"``: of a layer."""
        return "tensor" if self.shape[1] == 1 else "head"

    def of_layer(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Scales of K and V of a layer, float32 [1] or [num_kv_heads], read-only."""
        row = layer if self.shape[0] > 1 else 0
        k, v = np.array(self.k[row], np.float32), np.array(self.v[row], np.float32)
        k.flags.writeable = v.flags.writeable = False
        return k, v

    def of_heads(self, first: int, stop: int) -> Scales:
        """Scales of some of the KV heads."""
        if self.per == "tensor":
            return self
        return Scales(*([row[first:stop] for row in side] for side in (self.k, self.v)))

    def check_fits(self, num_layers: int, num_kv_heads: int) -> None:
        """Raise InvalidArgument unless they are of so many layers and heads."""
        layers, heads = self.shape
        if layers not in (1, num_layers) or heads not in (1, num_kv_heads):
            raise InvalidArgument(
                f"scales are [{layers}, {heads}], and the model has {num_layers} layers and {num_kv_heads} KV heads"
            )

    def digest(self) -> str:
        """32 hexadecimal digits that differ between any two sets of scales."""
        numbers = np.array([self.k, self.v], "<f4")
        return hashlib.blake2b(repr(numbers.shape).encode() + numbers.tobytes(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        return f"<Scales per {self.per}, [{self.shape[0]}, {self.shape[1]}]>"


def check_kind(scales: Any) -> None:
    """Raise unless they are None, ``"token_head"`` or fixed ones.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if scales is None or isinstance(scales, Scales) or (isinstance(scales, str) and scales == TOKEN_HEAD):
        return
    kind = InvalidArgument if isinstance(scales, str) else WrongType
    raise kind(f"scales must be {TOKEN_HEAD!r} or a pagedkv.Scales, got {str(scales)[:40]!r}")


def _samples(side: str, given: Any) -> NDArray[np.float32]:
    """Samples as float32; bfloat16 may come as its bits."""
    try:
        values = np.asarray(given)
        if values.dtype == np.uint16:
            values = bfloat16_to_float32(values)
        with np.errstate(all="ignore"):
            floats = values.astype(np.float32)
    except (TypeError, ValueError):
        raise LayoutMismatch(f"{side} cannot be read as an array of numbers") from None
    if floats.ndim != 4 or not floats.size or values.dtype.kind in "biuOSUcmM" or values.dtype.names is not None:
        raise LayoutMismatch(
            f"{side} must be numbers [num_layers, num_tokens, num_kv_heads, head_dim], got {values.dtype} "
            f"{values.shape}"
        )
    return floats


def _rows(name: str, given: Any) -> tuple[tuple[float, ...], ...]:
    """Scales as [layers or 1][heads or 1] float32 numbers."""
    try:
        array = np.asarray(given)
        if array.dtype.kind not in "fiu":
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise WrongType(f"scales of {name} must be numbers: one, [num_layers] or [num_layers, num_kv_heads]") from None
    if array.ndim > 2 or not array.size:
        raise InvalidArgument(
            f"scales of {name} must be one, [num_layers] or [num_layers, num_kv_heads], got {array.shape}"
        )
    with np.errstate(over="ignore", under="ignore"):
        single = array.astype(np.float32).reshape(array.shape[0] if array.ndim else 1, -1)
    for number in single.flat:
        if not (math.isfinite(number) and number > 0):
            raise InvalidArgument(f"scales of {name} must be positive and finite in float32, got {number}")
    return tuple(tuple(float(number) for number in row) for row in single)
