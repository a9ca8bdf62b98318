"""A tiny llama with random weights, for sessions."""

from __future__ import annotations

import numpy as np

from examples.llama_numpy.config import LlamaConfig
from examples.llama_numpy.weights import LlamaWeights, stored_shapes

TINY = LlamaConfig(199, 2, 32, 48, 4, 2, 16, 1024)


def tiny_weights(seed: int = 0) -> LlamaWeights:
    """Weights whose answers depend on all of a prompt."""
    draw = np.random.default_rng(seed)
    arrays = {
        name: (draw.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in stored_shapes(TINY).items()
    }
    for name in ("output_norm", "attn_norm", "ffn_norm"):
        arrays[name] = np.ones_like(arrays[name])
    arrays["embedding"] *= 4
    return LlamaWeights.from_arrays(TINY, arrays)
