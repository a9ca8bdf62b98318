"""The forward pass: RMSNorm, rotary embedding, SwiGLU in NumPy or CuPy.

K, V and attention by the step of a KVCache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import pagedkv as pk
from examples.llama_numpy.config import LlamaConfig
from examples.llama_numpy.errors import PromptError
from examples.llama_numpy.weights import Floats, LlamaWeights


class Llama:
    """Computes logits for the tokens of a step.

    Parameters
    ----------
    weights : LlamaWeights, in host memory.
    xp : the array module that computes, where the cache's device is: NumPy, or CuPy for a cache on a GPU. The weights
        are moved there once; a step's tokens go there and its logits come back, and nothing else.
    q_dtype : that ``step.attend`` takes queries in. On the CPU float32 will always do; on a GPU it is the cache's.
    """

    def __init__(self, weights: LlamaWeights, xp: Any = np, *, q_dtype: str = "float32") -> None:
        self.weights, self.config = weights.on(xp), weights.config
        self._xp, self._q_dtype = xp, np.dtype(q_dtype)
        angles = angles_of(self.config, self.config.rope_base)
        self._cos, self._sin = (xp.asarray(table(angles).astype(np.float32)) for table in (np.cos, np.sin))

    def forward(self, step: pk.Step, rows: ArrayLike | None = None) -> Floats:
        """Compute the step's tokens, write their K and V, and return logits.

        Parameters
        ----------
        step : under way, of a cache with this model's KVSpec.
        rows : integers [num_rows], optional
            The tokens of the step whose logits are wanted. Default: the last one of each sequence.

        Returns
        -------
        logits : float32 [num_rows, vocab_size] in host memory; they may be NaN if the weights are bad.

        Raises
        ------
        PromptError
            A token is none of the model's, or stands behind its context length.
        """
        config, weights, xp = self.config, self.weights, self._xp
        self._check(step, rows)
        positions = xp.asarray(step.positions)
        cos, sin = (table[positions][:, None] for table in (self._cos, self._sin))
        wanted = xp.asarray(step.q_indptr[1:] - 1 if rows is None else np.asarray(rows, np.intp))
        edges = [config.qo_width, config.qo_width + config.kv_width]
        x = weights.embedding[xp.asarray(step.tokens)]
        with np.errstate(over="ignore", invalid="ignore"):  # exp(-gate) may overflow, rightly; NaN shows in the logits
            for layer in range(config.num_layers):
                h = self._norm(x, weights.attn_norm[layer])
                q, k, v = xp.split(self._project(h, weights.qkv[layer]), edges, axis=1)
                step.write(layer, self._rotate(self._heads(k), cos, sin), self._heads(v))
                x = x + self._whole(self._project(self._attend(step, layer, q, cos, sin), weights.attn_output[layer]))
                h = self._norm(x, weights.ffn_norm[layer])
                gate, up = xp.split(self._project(h, weights.gate_up[layer]), 2, axis=1)
                x = x + self._whole(self._project(gate / (1 + xp.exp(-gate)) * up, weights.ffn_down[layer]))
            logits = self._project(self._norm(x[wanted], weights.output_norm), weights.output)
        host: Floats = logits if xp is np else xp.asnumpy(logits)
        return host

    def _whole(self, partial: Floats) -> Floats:
        """A layer's result [num_tokens, width]; examples/ranks adds up parts here."""
        return partial

    def _attend(self, step: pk.Step, layer: int, q: Floats, cos: Floats, sin: Floats) -> Floats:
        """Attention of queries [num_tokens, qo_width] that are not turned yet, in the same shape."""
        turned = self._rotate(self._heads(q), cos, sin).astype(self._q_dtype, copy=False)
        attended: Floats = step.attend(layer, turned).astype(np.float32, copy=False)
        return attended.reshape(q.shape)

    def _project(self, x: Floats, matrix: Floats) -> Floats:
        """``x @ matrix.T`` [num_rows, out].

        A single row is a matrix-vector product, which in BLAS is faster.
        """
        if len(x) == 1:
            product: Floats = matrix @ x[0]
            return product[None]
        rows: Floats = self._xp.ascontiguousarray((matrix @ x.T).T)
        return rows

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        """RMSNorm: each row divided by the root of its mean square, times `weight`."""
        mean = self._xp.mean(x * x, axis=-1, keepdims=True)
        normed: Floats = x * (1 / self._xp.sqrt(mean + np.float32(self.config.rms_eps))) * weight
        return normed

    def _rotate(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        """Rotary embedding of [num_tokens, num_heads, head_dim].

        Neighbours (2i, 2i + 1) are a pair, as in GGUF.
        """
        even, odd = x[..., 0::2], x[..., 1::2]
        out: Floats = self._xp.empty_like(x)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out

    def _heads(self, x: Floats) -> Floats:
        return x.reshape(len(x), -1, self.config.head_dim)

    def _check(self, step: pk.Step, rows: ArrayLike | None) -> None:
        tokens, config = step.tokens, self.config
        if rows is None and not np.diff(step.q_indptr).all():
            raise PromptError("a sequence without new tokens has no logits: leave it out of the step, or name rows")
        check_tokens(tokens, config.vocab_size)
        if len(tokens) and step.positions.max() >= config.context_length:
            raise PromptError(f"position {step.positions.max()}: the model's context is {config.context_length} tokens")


def angles_of(config: LlamaConfig, base: float) -> NDArray[np.float64]:
    """Rotary embedding's angles of every position and pair, [context_length, head_dim / 2]."""
    half = np.arange(0, config.head_dim, 2) / config.head_dim
    angles: NDArray[np.float64] = np.arange(config.context_length)[:, None] * base**-half
    return angles


def check_tokens(tokens: NDArray[np.integer], vocab_size: int) -> None:
    """Raise PromptError unless all tokens are the model's."""
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(wrong):
        raise PromptError(f"token {wrong[0]} is none of the model's: they are 0 to {vocab_size - 1}")
