"""The numbers of a llama-architecture model, checked once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pagedkv as pk


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a model.

    Parameters
    ----------
    vocab_size, num_layers, width, ff_width : tokens, layers, and the widths of the residual and of the gated layer.
    num_qo_heads, num_kv_heads, head_dim : attention's; query heads share KV heads in equal groups.
    context_length : tokens the model was trained for.
    rope_base, rms_eps : of the rotary embedding and of the norms.
    tied : whether the output layer is the embedding.

    Raises
    ------
    ValueError
        A number is not a positive one of its kind, or they do not fit together.
    """

    vocab_size: int
    num_layers: int
    width: int
    ff_width: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rope_base: float = 10000.0
    rms_eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if type(value).__name__ != field.type:
                raise ValueError(f"{field.name} is {value!r}, and must be of type {field.type}")
            if not isinstance(value, bool) and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} is {value!r}, and must be above 0")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_qo_heads} query heads do not share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embeddings turn pairs")

    @property
    def qo_width(self) -> int:
        """Numbers in a token's queries, and in its attention output."""
        return self.num_qo_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers in a token's keys of a layer, and in its values."""
        return self.num_kv_heads * self.head_dim

    def kv_spec(self, model: str, *, block_size: int = 16, dtype: str = "float32") -> pk.KVSpec:
        """The KVSpec of this model's cache.

        Parameters
        ----------
        model : name and revision of the weights; a disk tier refuses KV of another one.
        block_size : tokens in a block.
        dtype : of K and V; int8 and fp8 have a scale for each token and head.
        """
        return pk.KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, dtype, block_size, model=model)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; ``LlamaConfig(**data)`` makes it again."""
        return dataclasses.asdict(self)
