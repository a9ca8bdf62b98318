"""Rotary position embedding as the kernels take it: rotated elements and their angles."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.errors import InvalidArgument, UnsupportedVariant
from pagedkv.kernels.arrays import alignment, check_array, check_dense_rows, check_range, element_strides
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.recipe import signature

Pairing = Literal["split", "interleaved"]
PAIRINGS: dict[str, int] = {"split": 0, "interleaved": 1}
ROPE_ARRAYS = ("rope.positions", "rope.cos", "rope.sin", "rope.frequencies")  # pointers of RopeParams within a struct


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotation of K (and Q) by position. Either ``cos`` and ``sin``, or ``frequencies``.

    Parameters
    ----------
    positions : int32 [num_tokens], device.
    rotary_dim : elements of a head that turn, an even number.
    pairing : ``"split"`` (NeoX: element i with i + rotary_dim / 2) or ``"interleaved"`` (GPT-J: 2i with 2i + 1).
    cos, sin : float32 [max_position, rotary_dim / 2], device, of the same strides.
    frequencies : uint64 [rotary_dim / 2], device, from :func:`rope_frequencies`: angles are computed, for any position.
    offset : where in a head the elements that turn begin (MLA: behind the latent).
    """

    positions: Any
    rotary_dim: int
    pairing: Pairing = "split"
    cos: Any = None
    sin: Any = None
    frequencies: Any = None
    offset: int = 0
    signature: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        numbers = (self.rotary_dim, self.pairing, self.offset)
        object.__setattr__(self, "signature", (*numbers, *map(signature, self.arrays())))

    def arrays(self) -> tuple[Any, ...]:
        """The arrays of ROPE_ARRAYS."""
        return self.positions, self.cos, self.sin, self.frequencies

    def check(self, backend: Backend, num_tokens: int, head_dim: int) -> None:
        """Raise unless it fits a call; values are checked by :meth:`check_positions`.

        Raises
        ------
        WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        """
        if self.pairing not in PAIRINGS:
            raise InvalidArgument(f"rope.pairing must be 'split' or 'interleaved', got {self.pairing!r}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise InvalidArgument(f"rope.rotary_dim must be an even number from 2 on, got {self.rotary_dim}")
        if self.offset < 0 or self.offset + self.rotary_dim > head_dim:
            raise UnsupportedVariant(
                f"rope turns elements {self.offset}..{self.offset + self.rotary_dim - 1}: head_dim is {head_dim}"
            )
        check_array(backend, "rope.positions", self.positions, (num_tokens,), "num_tokens", dtype="int32")
        if num_tokens > 1 and self.positions.strides[0] != 4:
            raise InvalidArgument(f"rope.positions has stride {self.positions.strides[0]}: it must be contiguous")
        half = self.rotary_dim // 2
        if (self.frequencies is None) == (self.cos is None) or (self.cos is None) != (self.sin is None):
            raise InvalidArgument("rope takes either cos and sin or frequencies")
        if self.frequencies is not None:
            check_array(backend, "rope.frequencies", self.frequencies, (half,), "rotary_dim / 2", dtype="uint64")
            check_dense_rows("rope.frequencies", self.frequencies)
        else:
            rows = len(self.cos)
            for name, table in (("rope.cos", self.cos), ("rope.sin", self.sin)):
                check_array(backend, name, table, (rows, half), "max_position, rotary_dim / 2", dtype="float32")
                check_dense_rows(name, table)
            if element_strides(self.cos) != element_strides(self.sin):
                raise InvalidArgument(
                    f"rope.cos and rope.sin differ in strides: {self.cos.strides}, {self.sin.strides}"
                )

    def check_positions(self, used: NDArray[np.bool_] | None) -> None:
        """Raise InvalidArgument for a position that is not there, if positions lie on the host.

        ``used`` says which of them are read; None: all.
        """
        if isinstance(self.positions, np.ndarray):
            positions = self.positions if used is None else self.positions[used]
            last = 2**31 - 1 if self.cos is None else len(self.cos) - 1
            check_range("rope.positions", positions, last)

    def fits(self, vec: int) -> bool:
        """Whether vectors of ``vec`` elements turn whole."""
        part = self.rotary_dim // 2 if self.pairing == "split" else self.rotary_dim
        return self.offset % vec == 0 and part % vec == 0

    def macros(self, vec: int) -> dict[str, int]:
        """The -D macros of rope.cuh for vectors of ``vec`` elements."""
        table_vec = 1
        if self.cos is not None:
            turns = vec if self.pairing == "split" else max(vec // 2, 1)
            table_vec = math.gcd(turns, alignment(self.cos, self.sin) // 4)
        return {
            "ROPE": 1 if self.cos is not None else 2,
            "PAIRING": PAIRINGS[self.pairing],
            "ROTARY_DIM": self.rotary_dim,
            "ROTARY_OFFSET": self.offset,
            "TABLE_VEC": table_vec,
        }

    def fields(self) -> dict[str, Any]:
        """Fields of the struct RopeParams but for the arrays."""
        return {
            "table_stride": 0 if self.cos is None else element_strides(self.cos)[0],
            "max_position": 0 if self.cos is None else len(self.cos),
        }


NO_ROPE_MACROS = {"ROPE": 0, "PAIRING": 0, "ROTARY_DIM": 0, "ROTARY_OFFSET": 0, "TABLE_VEC": 1}
NO_ROPE_FIELDS = {"table_stride": 0, "max_position": 0}
NO_ROPE_ARRAYS = (None,) * 4


def rope_inverse_frequencies(rotary_dim: int, base: float = 10000.0) -> NDArray[np.float64]:
    """Radians per position (Su et al. 2021).

    ``base ** (-2 i / rotary_dim)`` for i in 0..rotary_dim / 2 - 1.
    """
    return np.asarray(base, np.float64) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def rope_frequencies(inverse_frequencies: ArrayLike) -> NDArray[np.uint64]:
    """Radians per position as the kernel takes them.

    In 2^-64 turns per position, whole turns left out.

    Parameters
    ----------
    inverse_frequencies : floats [rotary_dim / 2], scaled for long contexts or not.

    Raises
    ------
    InvalidArgument
        One of them is not finite.
    """
    turns = np.asarray(inverse_frequencies, np.float64) / (2 * np.pi)
    if not np.isfinite(turns).all():
        raise InvalidArgument("inverse_frequencies must be finite")
    fraction = turns - np.floor(turns)
    # 1 - tiny may round to 1.0, which is no turn at all.
    return np.where(fraction < 1, np.ldexp(fraction, 64), 0).astype(np.uint64)
