"""A number that the cache's dtype cannot hold is stored as infinity, and that is told."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cpu import write_kv

TOKENS = 70  # more than one thread's share of the larger ones


def overflows(number, source, cache, *, dim=64, dtype="", at=(69, 0, 63)):
    """Whether a write says that this number does not fit."""
    k = np.ones((TOKENS, 1, dim), source)
    k[at] = number
    stored = np.zeros((5, 16, 1, dim), cache)
    return write_kv(np.ones_like(k), k, stored.copy(), stored, np.arange(TOKENS), kv_dtype=dtype)


@pytest.mark.parametrize("number", [65520.0, -65520.0, 1e6, 3e38])
@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [64, 7])
def test_a_number_beyond_float16_is_told_wherever_it_stands(number, source, dim):
    assert overflows(number, source, np.float16, dim=dim, at=(69, 0, dim - 1)) is True
    assert overflows(number, source, np.float16, dim=dim, at=(0, 0, 0)) is True


@pytest.mark.parametrize("number", [65504.0, 65519.9, -65504.0, np.inf, -np.inf, np.nan, 0.0])
def test_numbers_that_fit_and_infinities_that_were_given_are_not(number):
    assert overflows(number, np.float32, np.float16) is False


@pytest.mark.parametrize(("number", "told"), [(3.4e38, True), (3.38e38, False), (1e6, False)])
def test_bfloat16_ends_close_to_float32(number, told):
    assert overflows(number, np.float32, np.uint16, dtype="bfloat16") is told


def test_float32_holds_them_and_quantised_dtypes_saturate():
    assert overflows(3e38, np.float32, np.float32) is False
    k = np.full((1, 1, 8), 1e6, np.float32)
    scale = np.ones(1, np.float32)
    stored = np.zeros((1, 1, 1, 8), np.int8)
    slots = np.zeros(1, np.int64)
    scales = {"scale_mode": "tensor", "k_scale": scale, "v_scale": scale}
    assert write_kv(k, k, stored, stored.copy(), slots, kv_dtype="int8", **scales) is False


def test_a_cache_logs_the_first_and_counts_all(caplog):
    spec = pk.KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float16", block_size=4)
    large, small = np.full((3, 1, 8), 1e6, np.float32), np.ones((3, 1, 8), np.float32)
    with pk.KVCache(spec, memory="1MiB") as cache, caplog.at_level(logging.WARNING, "pagedkv"):
        for prompt in ([1, 2, 3], [4, 5, 6]):
            with cache.sequence(prompt) as seq, cache.step([seq]) as step:
                step.write(0, small, small)
                step.write(1, small, large)
        with cache.sequence([7, 8, 9]) as seq:
            seq.scatter(np.stack([large, large]), np.stack([small, small]))
        assert cache.stats().overflowing_writes == 4
    told = [record.getMessage() for record in caplog.records if "infinity" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("layer 1: K or V was larger than any number of float16")
