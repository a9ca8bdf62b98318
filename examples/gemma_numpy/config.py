"""The numbers of a Gemma 3 model, checked once."""

from __future__ import annotations

from dataclasses import dataclass

import pagedkv as pk
from examples.llama_numpy.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class GemmaConfig(LlamaConfig):
    """Shape of a model; fields of :class:`LlamaConfig`, and three more.

    Parameters
    ----------
    window : tokens that a query of a local layer sees, its own included.
    period : every so many layers, the last one sees all tokens.
    local_rope_base : of local layers; ``rope_base`` is the others'.
    """

    window: int = 512
    period: int = 6
    local_rope_base: float = 10000.0

    def kv_spec(self, model: str, *, block_size: int = 16, dtype: str = "float32") -> pk.KVSpec:
        """The KVSpec of this model's cache, with the windows of its layers."""
        windows = [self.window if self.is_local(layer) else None for layer in range(self.num_layers)]
        layers = [pk.Attention(self.num_kv_heads, self.head_dim, window=window) for window in windows]
        return pk.KVSpec.of(layers, dtype=dtype, block_size=block_size, model=model)

    def is_local(self, layer: int) -> bool:
        """Whether a layer has a window."""
        return layer % self.period < self.period - 1
