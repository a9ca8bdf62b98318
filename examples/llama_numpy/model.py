"""The forward pass: RMSNorm, rotary embedding, SwiGLU in NumPy; K, V and attention by the step of a KVCache."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

import pagedkv as pk
from examples.llama_numpy.errors import PromptError
from examples.llama_numpy.weights import Floats, LlamaWeights


class Llama:
    """Computes logits for the tokens of a step.

    Parameters
    ----------
    weights : LlamaWeights
    """

    def __init__(self, weights: LlamaWeights) -> None:
        self.weights, self.config = weights, weights.config
        half = np.arange(0, self.config.head_dim, 2) / self.config.head_dim
        angles = np.arange(self.config.context_length)[:, None] * self.config.rope_base**-half  # float64
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def forward(self, step: pk.Step, rows: ArrayLike | None = None) -> Floats:
        """Compute the step's tokens, write their K and V, and return logits.

        Parameters
        ----------
        step : under way, of a cache with this model's KVSpec.
        rows : integers [num_rows], optional
            The tokens of the step whose logits are wanted. Default: the last one of each sequence.

        Returns
        -------
        logits : float32 [num_rows, vocab_size]; they may be NaN if the weights are bad.

        Raises
        ------
        PromptError
            A token is none of the model's, or stands behind its context length.
        """
        config, weights = self.config, self.weights
        self._check(step, rows)
        cos, sin = (table[step.positions][:, None] for table in (self._cos, self._sin))
        wanted = step.q_indptr[1:] - 1 if rows is None else np.asarray(rows, np.intp)
        edges = [config.qo_width, config.qo_width + config.kv_width]
        x = weights.embedding[step.tokens]
        with np.errstate(over="ignore", invalid="ignore"):  # exp(-gate) may overflow, rightly; NaN shows in the logits
            for layer in range(config.num_layers):
                h = rms_norm(x, weights.attn_norm[layer], config.rms_eps)
                q, k, v = np.split(project(h, weights.qkv[layer]), edges, axis=1)
                step.write(layer, rotate(self._heads(k), cos, sin), self._heads(v))
                attended = step.attend(layer, rotate(self._heads(q), cos, sin))
                x = x + project(attended.reshape(len(x), -1), weights.attn_output[layer])
                h = rms_norm(x, weights.ffn_norm[layer], config.rms_eps)
                gate, up = np.split(project(h, weights.gate_up[layer]), 2, axis=1)
                x = x + project(gate / (1 + np.exp(-gate)) * up, weights.ffn_down[layer])
            return project(rms_norm(x[wanted], weights.output_norm, config.rms_eps), weights.output)

    def _heads(self, x: Floats) -> Floats:
        return x.reshape(len(x), -1, self.config.head_dim)

    def _check(self, step: pk.Step, rows: ArrayLike | None) -> None:
        tokens, config = step.tokens, self.config
        if rows is None and not np.diff(step.q_indptr).all():
            raise PromptError("a sequence without new tokens has no logits: leave it out of the step, or name rows")
        check_tokens(tokens, config.vocab_size)
        if len(tokens) and step.positions.max() >= config.context_length:
            raise PromptError(f"position {step.positions.max()}: the model's context is {config.context_length} tokens")


def check_tokens(tokens: NDArray[np.integer], vocab_size: int) -> None:
    """Raise PromptError unless all tokens are the model's."""
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(wrong):
        raise PromptError(f"token {wrong[0]} is none of the model's: they are 0 to {vocab_size - 1}")


def project(x: Floats, matrix: Floats) -> Floats:
    """``x @ matrix.T`` [num_rows, out]; a single row goes through BLAS's matrix-vector product, which is faster."""
    if len(x) == 1:
        product: Floats = matrix @ x[0]
        return product[None]
    return np.ascontiguousarray((matrix @ x.T).T)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Each row divided by the root of its mean square, times `weight`."""
    normed: Floats = x * (1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))) * weight
    return normed


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotary embedding of [num_tokens, num_heads, head_dim]; neighbours (2i, 2i + 1) are a pair, as in GGUF's llama."""
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out
