"""The forward pass of Gemma 3.

Norms before and after each part, GeGLU, and two kinds of layers. Local layers see a window and turn with a base of
their own; ``step.attend`` knows the window from the cache's spec.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

import pagedkv as pk
from examples.gemma_numpy.weights import GemmaWeights
from examples.llama_numpy.model import Llama, angles_of
from examples.llama_numpy.weights import Floats


class Gemma(Llama):
    """Computes logits for the tokens of a step.

    Parameters
    ----------
    weights : GemmaWeights
    """

    def __init__(self, weights: GemmaWeights) -> None:
        self.gemma, self.config, self._shape = weights, weights.config, weights.config
        self._xp, self._q_dtype = np, np.dtype(np.float32)
        self._turns = [
            tuple(table(angles_of(weights.config, base)).astype(np.float32) for table in (np.cos, np.sin))
            for base in (weights.config.rope_base, weights.config.local_rope_base)
        ]

    def forward(self, step: pk.Step, rows: ArrayLike | None = None) -> Floats:
        """Compute the step's tokens, write their K and V, and return logits.

        As :meth:`examples.llama_numpy.model.Llama.forward`.
        """
        config, weights = self._shape, self.gemma
        self._check(step, rows)
        wanted = step.q_indptr[1:] - 1 if rows is None else np.asarray(rows, np.intp)
        edges = [config.qo_width, config.qo_width + config.kv_width]
        x = weights.embedding[step.tokens] * np.float32(np.sqrt(config.width))
        for layer in range(config.num_layers):
            local = config.is_local(layer)
            cos, sin = (table[step.positions][:, None] for table in self._turns[local])
            h = self._norm(x, weights.attn_norm[layer])
            q, k, v = np.split(self._project(h, weights.qkv[layer]), edges, axis=1)
            q = self._rotate(self._norm(self._heads(q), weights.q_norm[layer]), cos, sin)
            step.write(layer, self._rotate(self._norm(self._heads(k), weights.k_norm[layer]), cos, sin), self._heads(v))
            o = step.attend(layer, q).reshape(len(x), -1)
            x = x + self._norm(self._project(o, weights.attn_output[layer]), weights.attn_post_norm[layer])
            h = self._norm(x, weights.ffn_norm[layer])
            gate, up = np.split(self._project(h, weights.gate_up[layer]), 2, axis=1)
            h = self._project(self.gelu(gate) * up, weights.ffn_down[layer])
            x = x + self._norm(h, weights.ffn_post_norm[layer])
        return self._project(self._norm(x[wanted], weights.output_norm), weights.embedding)

    @staticmethod
    def gelu(x: Floats) -> Floats:
        """The gate's function."""
        return gelu(x)

    def _rotate(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        """Rotary embedding of [num_tokens, num_heads, head_dim].

        Numbers i and i + head_dim / 2 are a pair.
        """
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)


def gelu(x: Floats) -> Floats:
    """The Gaussian error linear unit by its tanh approximation (arXiv:1606.08415)."""
    inner = np.float32(np.sqrt(2 / np.pi)) * x * (1 + np.float32(0.044715) * x * x)
    result: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result
