"""What one token's K and V cost: groups of equal layers, and the storage format.

Bytes are those of K and V alone, for all layers. ``2 * layers * heads * head_dim * bytes`` is multi-head attention; the
rest are its variations:

* grouped queries (GQA, arXiv:2305.13245; MQA, arXiv:1911.02150): only `num_kv_heads` heads are kept;
* latent attention (MLA, arXiv:2405.04434): one vector per token and layer, V being a part of it at no cost;
* sliding window (arXiv:2310.06825): a layer needs no more than its last `window` tokens;
* quantised: fewer bits per number, and scales beside them.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, TypeAlias

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.sizing.checks import MAX_TOKENS, block_tokens, token_count
from pagedkv.spec.dtypes import FLOATS
from pagedkv.spec.kv_spec import MAX_DIMENSION, KVSpec
from pagedkv.spec.sizes import whole_number

FORMATS = {name: 8 * size for name, size in FLOATS.items()} | {"fp8": 8, "int8": 8, "int4": 4}  # bits of a number


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How the numbers of K and V are kept.

    Parameters
    ----------
    name : of :data:`FORMATS`.
    scale_group : numbers of one head's vector that share a scale; 0: scales are shared by so many tokens (one per
        head or per layer) that they count for nothing.
    scale_bits : bits of a scale (with its zero point, where there is one).

    Raises
    ------
    WrongType, InvalidArgument
    """

    name: str = "float16"
    _: KW_ONLY
    scale_group: int = 0
    scale_bits: int = 16

    def __post_init__(self) -> None:
        if type(self.name) is not str:
            raise WrongType(f"a KV format must be a name, not {type(self.name).__name__}")
        if self.name not in FORMATS:
            raise InvalidArgument(f"KV format must be one of {', '.join(FORMATS)}, got {self.name[:40]!r}")
        whole_number(self.scale_group, "scale_group", 0, MAX_DIMENSION)
        whole_number(self.scale_bits, "scale_bits", 1, 128)

    def vector_bytes(self, num_values: int) -> int:
        """Bytes of one head's vector and its scales, each rounded up to whole bytes."""
        groups = -(-num_values // self.scale_group) if self.scale_group else 0
        return -(-num_values * FORMATS[self.name] // 8) + -(-groups * self.scale_bits // 8)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV has the same shape.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : as in :class:`pagedkv.KVSpec`; `head_dim` is that of K.
    v_head_dim : that of V; None: as K; 0: V is a part of K's vector (MLA).
    window : tokens a query sees, its own included; None: all.
    chunk : a query sees the tokens since the last multiple of this; None: all.

    Raises
    ------
    WrongType, InvalidArgument
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    _: KW_ONLY
    v_head_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    fixed_bytes: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            whole_number(getattr(self, name), name, 1, MAX_DIMENSION)
        if self.v_head_dim is not None:
            whole_number(self.v_head_dim, "v_head_dim", 0, MAX_DIMENSION)
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, 1, MAX_TOKENS)

    @classmethod
    def of(cls, spec: KVSpec) -> LayerGroup:
        """The layers of a cache's spec."""
        return cls(spec.num_layers, spec.num_kv_heads, spec.head_dim, v_head_dim=spec.width_of_v)

    def token_bytes(self, kv: KVFormat) -> int:
        """K and V of one token over these layers, with their scales."""
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        return self.num_layers * self.num_kv_heads * (kv.vector_bytes(self.head_dim) + kv.vector_bytes(v_head_dim))

    def kept_tokens(self, num_tokens: int) -> int:
        """Tokens that the newest query of a sequence sees: all, the window's or the chunk's."""
        if self.chunk is not None and num_tokens:
            return (num_tokens - 1) % self.chunk + 1
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def with_all_kept(self) -> LayerGroup:
        """The same layers in a pool that also keeps tokens that no query sees."""
        return replace(self, window=None, chunk=None)

    def kept_blocks(self, num_tokens: int, block_size: int) -> range:
        """Logical blocks of a sequence that hold any of :meth:`kept_tokens`."""
        return range((num_tokens - self.kept_tokens(num_tokens)) // block_size, -(-num_tokens // block_size))


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Recurrent layers: two states of a sequence, the one being written and the last block's.

    Parameters
    ----------
    num_layers : of them.
    state_bytes : of one state of one layer.

    Raises
    ------
    WrongType, InvalidArgument
    """

    num_layers: int
    state_bytes: int
    num_kv_heads: ClassVar[int] = 1
    window: ClassVar[None] = None
    chunk: ClassVar[None] = None

    def __post_init__(self) -> None:
        whole_number(self.num_layers, "num_layers", 1, MAX_DIMENSION)
        whole_number(self.state_bytes, "state_bytes", 1, 2**40)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a sequence, however long."""
        return 2 * self.num_layers * self.state_bytes

    def token_bytes(self, kv: KVFormat) -> int:
        """Bytes of one token more: none."""
        return 0

    def kept_tokens(self, num_tokens: int) -> int:
        """Tokens of a sequence whose KV is kept: none."""
        return 0

    def kept_blocks(self, num_tokens: int, block_size: int) -> range:
        """Logical blocks of a sequence that hold any: none."""
        return range(0)

    def with_all_kept(self) -> StateGroup:
        """Itself: there is nothing more to keep."""
        return self


Group: TypeAlias = LayerGroup | StateGroup


def mla(num_layers: int, latent_dim: int, rope_dim: int) -> LayerGroup:
    """Layers with multi-head latent attention.

    One vector of ``latent_dim + rope_dim`` per token and layer.

    Raises
    ------
    WrongType, InvalidArgument
    """
    latent = whole_number(latent_dim, "latent_dim", 1, MAX_DIMENSION)
    rope = whole_number(rope_dim, "rope_dim", 0, MAX_DIMENSION)
    return LayerGroup(num_layers, 1, latent + rope, v_head_dim=0)


def token_bytes(groups: tuple[Group, ...], kv: KVFormat | None = None) -> int:
    """Bytes of K and V that one token adds, over all layers.

    Parameters
    ----------
    groups : the model's layers; see :func:`pagedkv.lab.sizing.find_model`.
    kv : default float16.
    """
    return sum(group.token_bytes(kv or KVFormat()) for group in groups)


def block_bytes(groups: tuple[Group, ...], block_size: int = 16, kv: KVFormat | None = None) -> int:
    """Bytes of one block: `block_size` tokens over all layers."""
    return token_bytes(groups, kv) * block_tokens(block_size)


def sequence_bytes(
    groups: tuple[Group, ...], num_tokens: int, block_size: int | None = None, kv: KVFormat | None = None
) -> int:
    """Bytes a sequence needs: of its blocks, or with ``block_size=None`` of its tokens exactly.

    Layers with a window are counted as if what no query can see any more were given back, block by block. A pool whose
    blocks hold all layers, as pagedkv's own, keeps it: count such a model with ``window=None``.

    Raises
    ------
    WrongType, InvalidArgument
    """
    count, kv = token_count(num_tokens), kv or KVFormat()
    fixed = sum(group.fixed_bytes for group in groups)
    if block_size is None:
        return fixed + sum(group.token_bytes(kv) * group.kept_tokens(count) for group in groups)
    size = block_tokens(block_size)
    return fixed + sum(group.token_bytes(kv) * size * len(group.kept_blocks(count, size)) for group in groups)
