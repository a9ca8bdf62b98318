"""A llama model split over ranks by heads and by the width of its gated layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from examples.llama_numpy.model import Llama
from examples.llama_numpy.weights import Floats, LlamaWeights

Sum = Callable[[Floats], Floats]


def part_of(weights: LlamaWeights, rank: int, size: int) -> LlamaWeights:
    """The weights of one rank: its heads and its share of the gated layer.

    Norms and embeddings are the same at all.
    """
    config, head = weights.config, weights.config.head_dim
    queries, kv, width = (
        count // size for count in (config.num_qo_heads * head, config.num_kv_heads * head, config.ff_width)
    )
    part = dataclasses.replace(
        config, num_qo_heads=config.num_qo_heads // size, num_kv_heads=config.num_kv_heads // size, ff_width=width
    )
    firsts = [rank * queries, config.qo_width + rank * kv, config.qo_width + config.kv_width + rank * kv]
    rows = [slice(first, first + count) for first, count in zip(firsts, (queries, kv, kv), strict=True)]
    gates = [slice(first, first + width) for first in (rank * width, config.ff_width + rank * width)]
    return dataclasses.replace(
        weights,
        config=part,
        qkv=np.concatenate([weights.qkv[:, some] for some in rows], axis=1),
        attn_output=np.ascontiguousarray(weights.attn_output[:, :, rows[0]]),
        gate_up=np.concatenate([weights.gate_up[:, some] for some in gates], axis=1),
        ffn_down=np.ascontiguousarray(weights.ffn_down[:, :, gates[0]]),
    )


class SplitLlama(Llama):
    """One rank's part of a model.

    Parameters
    ----------
    weights : of the whole model.
    rank, size : which part, of how many.
    add_up : returns the sum over all ranks of a float32 array, the same bits at each.
    """

    def __init__(self, weights: LlamaWeights, rank: int, size: int, add_up: Sum) -> None:
        super().__init__(part_of(weights, rank, size))
        self._add_up = add_up

    def _whole(self, partial: Floats) -> Floats:
        """The layer's result, of which this rank has computed a part."""
        return self._add_up(partial)
