"""From hit blocks to their savings: tokens, and the floating-point work of their prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.lab.replay.trace import Int32, Int64, Trace


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers on which the cost of a prefill depends.

    The token at position p (from 0) costs ``2 * matmul_weights`` for the linear layers and
    ``4 * num_layers * num_qo_heads * head_dim * (p + 1)`` for attention: 2 for the scores and 2 for the
    weighted sum, each over p + 1 keys (causal). A prefix of n tokens therefore costs
    ``a n + b n (n + 1) / 2``, ``a = 2 * matmul_weights``, ``b = 4 * num_layers * num_qo_heads * head_dim``.
    Left out: embeddings, norms, routers, the softmax's exponentials, and the output head, which a prefill runs once.
    In a mixture of experts a token passes `num_mlps` MLPs of `mlp_size` in each layer: those chosen and those shared.
    """

    name: str
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_size: int
    num_mlps: int = 1

    @property
    def matmul_weights(self) -> int:
        """Weights that a token is multiplied with in all layers.

        q, k, v, o and the three matrices of each gated MLP that it passes in a layer.
        """
        attention = self.hidden_size * self.head_dim * (2 * self.num_qo_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.mlp_size * self.num_mlps)

    @property
    def balance_tokens(self) -> float:
        """Tokens of context at which a token's attention costs as much as its linear layers: a / b."""
        return self.matmul_weights / (2 * self.num_layers * self.num_qo_heads * self.head_dim)

    def prefill_flops(self, num_tokens: Int64) -> NDArray[np.float64]:
        """Cost of computing prefixes of ``num_tokens`` (int64 [n]) from nothing: float64 [n]."""
        n = num_tokens.astype(np.float64)
        return 2.0 * self.matmul_weights * n + 2.0 * self.num_layers * self.num_qo_heads * self.head_dim * n * (n + 1.0)


LLAMA_3_8B = ModelShape("Llama-3-8B", 32, 32, 8, 128, 4096, 14336)


def hit_tokens(trace: Trace, hit_blocks: Int32) -> Int64:
    """Input tokens in each request's leading ``hit_blocks``: int64 [n].

    A last block may be partial.
    """
    return np.minimum(hit_blocks.astype(np.int64) * trace.block_size, trace.input_tokens)


def token_hit_rate(trace: Trace, hit_blocks: Int32) -> float:
    """Hit tokens over input tokens."""
    asked = int(trace.input_tokens.sum(dtype=np.int64))
    return int(hit_tokens(trace, hit_blocks).sum()) / asked if asked else 0.0


def flop_weighted_hit_rate(trace: Trace, hit_blocks: Int32, model: ModelShape = LLAMA_3_8B) -> float:
    """Prefill work the hits save over the prefill work of all input tokens."""
    asked = float(model.prefill_flops(trace.input_tokens.astype(np.int64)).sum())
    return float(model.prefill_flops(hit_tokens(trace, hit_blocks)).sum()) / asked if asked else 0.0
