"""Windows and chunks of a model's layers: the cost of a step, and the spec of a cache.

A layer with a window or chunks attends to fewer tokens than the sequence has, and a step reads fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, UnsupportedVariant
from pagedkv.lab.sizing.shape import Group, LayerGroup
from pagedkv.spec.groups import groups_of
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.layers import Attention, Layer

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShortLayers:
    """Layers with one window, or with chunks of one length, and their cost.

    Attributes
    ----------
    key_flops : of a new token and a token that it attends to, over these layers.
    token_bytes : read of each token, over these layers.
    window, chunk : as :class:`pagedkv.lab.sizing.LayerGroup`; one of them is a number.
    """

    key_flops: int
    token_bytes: int
    window: int | None
    chunk: int | None

    def keys(self, q: Tokens, context: Tokens) -> Tokens:
        """Pairs of a new token and one that it attends to: int64, as `context`.

        Of sequences with so many new tokens, and so many with them.
        """
        return self._keys(context) - self._keys(context - q)

    def tokens(self, q: Tokens, context: Tokens) -> Tokens:
        """Tokens that a step reads: int64, as `context`.

        They begin with the first one that the first new token attends to.
        """
        if self.chunk is None:
            assert self.window is not None
            read = np.minimum(context, q + (self.window - 1))
        else:
            read = context - (context - q) // self.chunk * self.chunk
        tokens: Tokens = np.where(q > 0, read, 0)
        return tokens

    def _keys(self, length: Tokens) -> Tokens:
        """The pairs of a whole sequence."""
        if self.chunk is None:
            assert self.window is not None
            inside: Tokens = np.minimum(length, self.window)
            return inside * (inside + 1) // 2 + (length - inside) * self.window
        chunks, rest = length // self.chunk, length % self.chunk
        return chunks * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2


def spec_of(name: str, groups: Sequence[Group], block_size: int) -> KVSpec:
    """The spec of a cache that keeps each layer's reach alone, in 16 bits.

    Raises
    ------
    InvalidArgument
        All layers see equally far, or none sees everything.
    UnsupportedVariant
        The layers keep different things.
    """
    layers: list[Layer] = []
    for group in groups:
        if not isinstance(group, LayerGroup) or group.v_head_dim is not None:
            raise UnsupportedVariant(f"system groups: some layers of {name} keep no K and V of one shape: take tiered")
        one = Attention(group.num_kv_heads, group.head_dim, window=group.window, chunk=group.chunk)
        layers += [one] * group.num_layers
    spec = KVSpec.of(layers, block_size=block_size)
    if len(groups_of(spec)) == 1:
        which = "all see equally far" if len(set(layers)) == 1 else "none sees everything"
        raise InvalidArgument(
            "system groups keeps each layer's reach alone, and is for models with full attention in some layers and a "
            f"window or chunks in others; of the layers of {name} {which}: take tiered"
        )
    return spec
