"""From scattered blocks to contiguous K and V.

By hand through the block tables, and by ``Sequence.gather``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import pagedkv as pk

SPEC = pk.KVSpec(num_layers=4, num_kv_heads=8, head_dim=64, dtype="float32", block_size=16)
LENGTHS = (40, 25, 60)  # tokens of three sequences: three, two and four blocks


def gather(blocks: Any, block_tables: Any, seq_lens: Any) -> Any:
    """K or V of several sequences, 0 behind a sequence's end.

    [num_seqs, longest, num_kv_heads, head_dim].

    Parameters
    ----------
    blocks : [num_blocks, block_size, num_kv_heads, head_dim], of one layer.
    block_tables : int [num_seqs, max_blocks], -1 where there is no block.
    seq_lens : int [num_seqs].
    """
    block_size = blocks.shape[1]
    positions = np.arange(max(seq_lens))
    inside = positions < np.asarray(seq_lens)[:, None]  # [num_seqs, longest]
    block_ids = np.where(inside, np.asarray(block_tables)[:, positions // block_size], 0)
    return np.where(inside[..., None, None], blocks[block_ids, positions % block_size], 0)


def main() -> None:
    draw = np.random.default_rng(0)
    with pk.KVCache(SPEC, device_memory=pk.Blocks(20)) as cache:
        written = [draw.standard_normal((2, SPEC.num_layers, n, 8, 64)).astype(np.float32) for n in LENGTHS]
        seqs = [cache.sequence([100 * i]) for i in range(len(LENGTHS))]
        for end in range(10, max(LENGTHS) + 1, 10):  # they grow in turn, so their blocks lie among each other
            for seq, kv in zip(seqs, written, strict=True):
                start, stop = seq.num_computed, min(end, kv.shape[2])
                seq.append(np.arange(len(seq), stop))
                seq.scatter(*kv[:, :, start:stop])  # of a sequence that is complete: nothing
        tables = np.full((len(seqs), max(len(seq.blocks) for seq in seqs)), -1)
        for row, seq in zip(tables, seqs, strict=True):
            row[: len(seq.blocks)] = seq.blocks
        print("block tables:", tables.tolist())
        for layer in range(SPEC.num_layers):
            for part, blocks in enumerate(cache.layer(layer)):
                gathered = gather(blocks, tables, LENGTHS)
                for row, seq, kv in zip(gathered, seqs, written, strict=True):
                    assert (row[: len(seq)] == kv[part][layer]).all()
                    assert (row[: len(seq)] == seq.gather()[part][layer]).all()
                    assert not row[len(seq) :].any()
        print(f"K and V of {SPEC.num_layers} layers, each gathered to {gathered.shape}, are what was written")
        for seq in seqs:
            seq.release()


if __name__ == "__main__":
    main()
