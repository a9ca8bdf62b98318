"""Bytes that a running sequence of a real model holds by groups, and those it can read."""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.core import BlockTable, ExtentPool, Placement, RadixTree
from pagedkv.spec.groups import layout_of

SIZE, CHUNK = 16, 1024  # tokens of a block, and of a step
SHARE = 1.01  # of the bytes that the next token reads; beside a page of each group


def model(num_layers: int, every: int, full: pk.Attention, short: pk.Attention) -> pk.KVSpec:
    """Each `every`-th layer sees everything."""
    layers = [full if layer % every == every - 1 else short for layer in range(num_layers)]
    return pk.KVSpec.of(layers, dtype="bfloat16", block_size=SIZE)


MODELS = {
    "Gemma 3 27B": model(62, 6, pk.Attention(16, 128), pk.Attention(16, 128, window=1024)),
    "gpt-oss-120b": model(36, 2, pk.Attention(8, 64), pk.Attention(8, 64, window=128)),
    "Llama 4 Scout": model(48, 4, pk.Attention(8, 128), pk.Attention(8, 128, chunk=8192)),
}


@pytest.mark.parametrize("num_tokens", [4096, 32768, 131072])
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_of_a_real_model_holds_the_bytes_that_its_next_token_reads(name: str, num_tokens: int) -> None:
    spec = MODELS[name]
    layout = layout_of(spec)
    shared = ExtentPool(40 + 2 * num_tokens // SIZE, layout.per_extent)
    groups = [
        (pool, group.window or 0, group.chunk or 0)
        for pool, group in zip(shared.pools[1:], layout.groups[1:], strict=True)
    ]
    table = BlockTable(Placement(RadixTree(SIZE), [shared.pools[0]], groups=groups), 1)
    row, _ = table.open(np.arange(num_tokens, dtype=np.int32))
    while (computed := table.info(row).num_computed) < num_tokens:
        table.step([row], [min(CHUNK, num_tokens - computed)])
        table.commit([row])
    pages = [group.page_bytes for group in layout.groups]
    held = sum(
        page * pool.counts()["live"] for page, pool in zip(pages, shared.pools, strict=True)
    )  # what points alone hold is cached
    read = sum(
        page * group.need(num_tokens // SIZE) for page, group in zip(pages, layout.groups, strict=True)
    )  # at a boundary: of tokens before it
    assert read <= held <= SHARE * read + sum(pages)
    if name == "Gemma 3 27B" and num_tokens == 32768:
        assert 3.1e9 < held < 3.2e9
        assert held * 5.3 < spec.block_bytes * num_tokens // SIZE, "a cache of all tokens holds 16.6 GB"
