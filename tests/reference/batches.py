"""Random batches of paged KV, and the attention over them.

Loops over plain Python floats compute it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.reference import online_softmax_attention, paged_attention

FORMS = [paged_attention, online_softmax_attention]


@dataclass
class Batch:
    """Random sequences, their keys and values kept both densely and in scattered blocks."""

    lens: list[tuple[int, int]]  # (query tokens, keys) of each sequence
    heads: tuple[int, int] = (4, 2)
    dim: tuple[int, int] = (8, 8)
    block_size: int = 3
    seed: int = 0
    spare: float = np.nan  # what lies in blocks and slots that no sequence owns
    dense: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = field(default_factory=list)
    args: tuple[NDArray[Any], ...] = ()

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        q_heads, kv_heads = self.heads
        blocks_of = [-(-keys // self.block_size) for _, keys in self.lens]
        num_blocks = sum(blocks_of) + 2
        k_cache = np.full((num_blocks, self.block_size, kv_heads, self.dim[0]), self.spare)
        v_cache = np.full((num_blocks, self.block_size, kv_heads, self.dim[1]), self.spare)
        free = rng.permutation(num_blocks)
        tables = np.full((len(self.lens), max([*blocks_of, 0]) + 1), -1, np.int32)
        used = 0
        for seq, (queries, keys) in enumerate(self.lens):
            q = rng.normal(size=(queries, q_heads, self.dim[0]))
            k = rng.normal(size=(keys, kv_heads, self.dim[0]))
            v = rng.normal(size=(keys, kv_heads, self.dim[1]))
            self.dense.append((q, k, v))
            tables[seq, : blocks_of[seq]] = free[used : used + blocks_of[seq]]
            used += blocks_of[seq]
            for token in range(keys):
                block, offset = tables[seq, token // self.block_size], token % self.block_size
                k_cache[block, offset], v_cache[block, offset] = k[token], v[token]
        q_all = np.concatenate([q for q, _, _ in self.dense] or [np.zeros((0, q_heads, self.dim[0]))])
        indptr = np.cumsum([0, *(queries for queries, _ in self.lens)]).astype(np.int32)
        self.args = (q_all, k_cache, v_cache, tables, np.array([n for _, n in self.lens], np.int32), indptr)

    def expected(
        self,
        *,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        softmax_scale: float | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        sinks: NDArray[Any] | None = None,
        masks: list[NDArray[np.bool_]] | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """One query and one head at a time, one key at a time, in plain Python floats."""
        outputs, lses = [], []
        for seq, (q, k, v) in enumerate(self.dense):
            for i in range(len(q)):
                position = len(k) - len(q) + i
                for head in range(self.heads[0]):
                    kv_head = head // (self.heads[0] // self.heads[1])
                    scores: dict[int, float] = {}
                    for j in range(len(k)):
                        if (causal and j > position) or (window is not None and j <= position - window):
                            continue
                        if masks is not None and not masks[seq][i, j]:
                            continue
                        factor = self.dim[0] ** -0.5 if softmax_scale is None else softmax_scale
                        score = factor * math.fsum(q[i, head] * k[j, kv_head])
                        scores[j] = score if soft_cap is None else soft_cap * math.tanh(score / soft_cap)
                        if alibi_slopes is not None:
                            scores[j] -= float(alibi_slopes[head]) * (position - j)
                    without_key = 0.0 if sinks is None else math.exp(sinks[head])
                    total = math.fsum([without_key, *(math.exp(score) for score in scores.values())])
                    lses.append(math.log(total) if total else -math.inf)
                    weighted = [math.exp(score) / total * v[j, kv_head] for j, score in scores.items()]
                    outputs.append(np.sum(weighted, axis=0) if weighted else np.zeros(self.dim[1]))
        tokens = sum(queries for queries, _ in self.lens)
        shape = (tokens, self.heads[0])
        return np.reshape(outputs, (*shape, self.dim[1])), np.reshape(lses, shape)


def bits_of(masks: list[NDArray[np.bool_]]) -> dict[str, NDArray[Any]]:
    """``mask`` and ``mask_indptr``, one bit after the other."""
    data, indptr = bytearray(), [0]
    for mask in masks:
        q_len, seq_len = mask.shape
        data += bytes(-(-q_len * seq_len // 8))
        for i in range(q_len):
            for key in range(seq_len):
                if mask[i, key]:
                    bit = i * seq_len + key
                    data[indptr[-1] + bit // 8] += 2 ** (bit % 8)
        indptr.append(len(data))
    return {"mask": np.frombuffer(bytes(data), np.uint8), "mask_indptr": np.array(indptr, np.int32)}


def check(batch: Batch, form: Any = paged_attention, num_splits: int | None = None, **options: Any) -> None:
    """Check that attention of ``form`` equals the loops' result.

    ``masks`` are bool [q_len, seq_len], one for each sequence.
    """
    given = options | ({} if num_splits is None else {"num_splits": num_splits})
    if "masks" in given:
        masks = given.pop("masks")
        given |= {} if masks is None else bits_of(masks)
    o, lse = form(*batch.args, return_lse=True, **given)
    expected_o, expected_lse = batch.expected(**options)
    np.testing.assert_array_equal(np.isfinite(o), np.isfinite(expected_o))
    np.testing.assert_allclose(o, expected_o, rtol=1e-12, atol=1e-13)
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, expected_lse.astype(np.float32), rtol=1e-6, atol=1e-6)
