"""Layers of a model: they keep KV of tokens, a latent, a state, or nothing of their own.

A layer's *reach* is how far back it reads. With blocks of B tokens, a sequence can go on from the boundary behind block
k if each layer still has its last ``need(k)`` blocks before it.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.dtypes import dtype_name
from pagedkv.spec.scales import Scales, check_kind
from pagedkv.spec.sizes import whole_number

MOST_TOKENS = 2**31 - 1  # of a window
MOST_VALUES = 2**16  # of one dimension
STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer that keeps K and V of each token.

    Parameters
    ----------
    num_kv_heads, head_dim : of K and of V.
    window : tokens that a query sees, its own included; None: all before it.
    chunk : a query sees the tokens since the last multiple of this; None: all before it.
    dtype : of K and V, as in :class:`pagedkv.KVSpec`; "": the model's.
    scales : of int8 and fp8, as in :class:`pagedkv.KVSpec`.

    Raises
    ------
    WrongType, InvalidArgument
    """

    num_kv_heads: int
    head_dim: int
    _: KW_ONLY
    window: int | None = None
    chunk: int | None = None
    dtype: str = ""
    scales: str | Scales | None = None

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim"):
            whole_number(getattr(self, name), name, 1, MOST_VALUES)
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), f"{name} of {self._described}", 1, MOST_TOKENS)
        if self.window is not None and self.chunk is not None:
            raise InvalidArgument(f"{self._described} has a window and a chunk: a layer has one of them")
        if not isinstance(self.dtype, str) or self.dtype:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        check_kind(self.scales)

    @property
    def _described(self) -> str:
        """The layer in errors: it has no number before it is in a list."""
        given = [f"{name}={getattr(self, name)!r}" for name in ("window", "chunk") if getattr(self, name) is not None]
        return f"Attention({', '.join([str(self.num_kv_heads), str(self.head_dim), *given])})"

    @property
    def stored(self) -> tuple[object, ...]:
        """All that decides which bytes it keeps of a token."""
        return self.num_kv_heads, self.head_dim, self.dtype, self.scales

    @property
    def values_per_token(self) -> int:
        """Numbers that it keeps of one token."""
        return 2 * self.num_kv_heads * self.head_dim

    def need(self, num_blocks: int, block_size: int) -> int:
        """Blocks, of the `num_blocks` before a boundary, that it reads from there on: the last."""
        if self.window is not None:
            return min(num_blocks, -(-(self.window - 1) // block_size))
        if self.chunk is not None:
            return num_blocks - num_blocks * block_size // self.chunk * self.chunk // block_size
        return num_blocks


@dataclass(frozen=True, slots=True)
class Rows:
    """A layer whose K and V only the caller understands: so many bytes of each token.

    For engines with formats of their own (llama.cpp's q8_0 and the like). :meth:`pagedkv.Step.attend` cannot compute
    with them; all else works: ``step.write``, gather, scatter, tiers, restarts. On the CPU their arrays may also be
    uint16 or uint32, any strides, with 2 or 4 bytes in a word: for runtimes whose V lies transposed.

    Parameters
    ----------
    k_bytes, v_bytes : of one token. 0 of V: all is in K.

    Raises
    ------
    WrongType, InvalidArgument
    """

    k_bytes: int
    v_bytes: int

    def __post_init__(self) -> None:
        whole_number(self.k_bytes, "k_bytes", 1, MOST_VALUES)
        whole_number(self.v_bytes, "v_bytes", 0, MOST_VALUES)

    @property
    def stored(self) -> tuple[object, ...]:
        """All that decides which bytes it keeps of a token."""
        return self.k_bytes, self.v_bytes

    @property
    def values_per_token(self) -> int:
        """Bytes that it keeps of one token."""
        return self.k_bytes + self.v_bytes

    def need(self, num_blocks: int, block_size: int) -> int:
        """Blocks before a boundary that it reads from there on: all."""
        return num_blocks


@dataclass(frozen=True, slots=True)
class Latent:
    """A layer that keeps one vector of each token, for K and V (MLA, arXiv:2405.04434).

    Parameters
    ----------
    rank : numbers of the compressed K and V, the vector's first.
    rope_dim : numbers of the part of K with positions.
    dtype, scales : as of :class:`Attention`.

    Raises
    ------
    WrongType, InvalidArgument
    """

    rank: int
    rope_dim: int = 0
    _: KW_ONLY
    dtype: str = ""
    scales: str | Scales | None = None

    def __post_init__(self) -> None:
        whole_number(self.rank, "rank", 1, MOST_VALUES)
        whole_number(self.rope_dim, "rope_dim", 0, MOST_VALUES)
        if not isinstance(self.dtype, str) or self.dtype:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        check_kind(self.scales)

    @property
    def stored(self) -> tuple[object, ...]:
        """All that decides which bytes it keeps of a token."""
        return self.rank, self.rope_dim, self.dtype, self.scales

    @property
    def values_per_token(self) -> int:
        """Numbers that it keeps of one token."""
        return self.rank + self.rope_dim

    def need(self, num_blocks: int, block_size: int) -> int:
        """Blocks before a boundary that it reads from there on: all."""
        return num_blocks


def check_scale_of_latents(softmax_scale: object, width: int) -> None:
    """Raise InvalidArgument where scores over latents of a width are given no scale."""
    if softmax_scale is None:
        raise InvalidArgument(
            f"softmax_scale must be given with latents (v_in_k): it follows from the heads before they are compressed, "
            f"(qk_nope_head_dim + qk_rope_head_dim) ** -0.5 and the factor of a scaled RoPE, and not from their "
            f"width, {width}"
        )


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer that keeps a state of a fixed size, and nothing of each token.

    Parameters
    ----------
    planes : arrays that the state consists of, each a name, a shape and a dtype
        The dtype is ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Raises
    ------
    WrongType, InvalidArgument
    """

    planes: tuple[tuple[str, tuple[int, ...], str], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.planes, tuple) or not self.planes:
            raise WrongType("planes must be a tuple of (name, shape, dtype), at least one")
        for plane in self.planes:
            if not isinstance(plane, tuple) or [type(part) for part in plane] != [str, tuple, str]:
                raise WrongType(f"a plane is (name, shape, dtype), as ('conv', (3, 8192), 'float32'), not {plane!r}")
            name, shape, dtype = plane
            for size in shape:
                whole_number(size, f"a dimension of the state's {name!r}", 1, MOST_VALUES)
            if dtype not in STATE_BYTES:
                raise InvalidArgument(f"the dtype of a state is one of {', '.join(STATE_BYTES)}, not {dtype!r}")

    @property
    def values_per_token(self) -> int:
        """Numbers that it keeps of one token."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return sum(math.prod(shape) * STATE_BYTES[dtype] for _, shape, dtype in self.planes)

    def need(self, num_blocks: int, block_size: int) -> int:
        """Blocks before a boundary that it reads: one, the state behind the last."""
        return min(num_blocks, 1)


@dataclass(frozen=True, slots=True)
class SameAs:
    """A layer that reads the KV of another layer and keeps none.

    Parameters
    ----------
    layer : index of that layer, which comes before this one and keeps KV of its own.

    Raises
    ------
    WrongType, InvalidArgument
    """

    layer: int

    def __post_init__(self) -> None:
        whole_number(self.layer, "layer", 0, MOST_VALUES)

    @property
    def values_per_token(self) -> int:
        """Numbers that it keeps of one token."""
        return 0

    def need(self, num_blocks: int, block_size: int) -> int:
        """Blocks before a boundary that it keeps: none."""
        return 0


Layer: TypeAlias = Attention | Rows | Latent | Recurrent | SameAs


def check_layers(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return layers none of which contradicts the others.

    Raises
    ------
    InvalidArgument
        A layer shares the KV of itself, of a later layer, or of one that keeps none. The message names it.
    """
    for number, layer in enumerate(layers):
        if isinstance(layer, SameAs) and (
            layer.layer >= number or not isinstance(layers[layer.layer], Attention | Latent | Rows)
        ):
            raise InvalidArgument(
                f"layer {number} shares the KV of layer {layer.layer}: that must be an earlier layer with KV of its own"
            )
    return layers
