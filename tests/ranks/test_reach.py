"""Ranks attend as far as the spec says, as a cache alone does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import pagedkv as pk
from tests.ranks.conftest import SPEC, World


def test_a_rank_has_the_scales_of_the_layer_that_is_read(world: Callable[..., World]) -> None:
    factors = [[float(layer)] * 3 for layer in (1, 2, 3)]
    spec = pk.KVSpec(3, 3, 4, "int8", 4, model="toy", reads=(0, 0, 1, 2, 1), scales=pk.Scales(factors, factors))
    here = world(spec=spec)
    assert here.cache is not None
    for layer, factor in enumerate((1, 1, 2, 3, 2)):
        assert here.parts[1].layer_scales(layer)[0].tolist() == [factor]
        assert here.parts[1].layer(layer)[0].shape[2] == 1
    with pytest.raises(pk.InvalidArgument, match="layer"):
        here.parts[1].layer(5)


def test_each_rank_keeps_to_windows_and_chunks(world: Callable[..., World]) -> None:
    spec = dataclasses.replace(SPEC, windows=(3, None), chunks=(None, 8))
    here = world(spec=spec)
    assert here.cache is not None
    tokens = list(range(21))
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, len(tokens), 3, SPEC.head_dim), np.float32) for _ in range(3))
    with pk.KVCache(spec, pk.Blocks(8)) as alone, alone.sequence(tokens) as seq, alone.step([seq]) as step:
        for layer in range(2):
            step.write(layer, k[layer], v[layer])
        wanted = [step.attend(layer, q[layer]) for layer in range(2)]
    with here.cache.sequence(tokens) as seq, here.cache.step([seq]) as step:
        for rank, part in enumerate(here.parts):
            mine = part.step(step.slot_mapping, step.block_tables, step.seq_lens, step.q_indptr)
            for layer in range(2):
                head = slice(rank, rank + 1)
                mine.write(layer, k[layer, :, head], v[layer, :, head])
                assert np.array_equal(mine.attend(layer, q[layer, :, head]), wanted[layer][:, head])
            with pytest.raises(pk.InvalidArgument, match="layer 0 has a window of 3"):
                mine.attend(0, q[0, :, :1], window=4)
            with pytest.raises(pk.LayoutMismatch, match="one step"):
                part.step(step.slot_mapping, step.block_tables, step.seq_lens - 1, step.q_indptr).attend(1, q[1, :, :1])
        for layer in range(2):
            step.mark_written(layer)
