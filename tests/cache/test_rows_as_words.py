"""Rows of bytes as words of 2 or 4 bytes: for runtimes whose V lies transposed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagedkv as pk

LAYERS, TOKENS = 2, 37


def rows_of(width: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, TOKENS, 1, width)).astype(np.uint8)


def laid(values: Any, dtype: Any, how: str) -> Any:
    """The same words, as rows or transposed."""
    words = values.view(dtype)
    if how == "rows":
        return words.copy()
    return np.ascontiguousarray(words.transpose(0, 3, 2, 1)).transpose(0, 3, 2, 1)


@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
@pytest.mark.parametrize("widths", [(8, 20), (68, 12), (4, 4), (384, 384)])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("how", ["rows", "transposed"])
def test_words_are_the_bytes_of_rows(how: str, dtype: Any, widths: tuple[int, int], block_size: int) -> None:
    spec = pk.KVSpec.of([pk.Rows(*widths)] * LAYERS, block_size=block_size)
    k, v = rows_of(widths[0], 1), rows_of(widths[1], 2)
    with pk.KVCache(spec, memory=pk.Blocks(80)) as cache, cache.sequence(np.arange(TOKENS)) as seq:
        seq.scatter(laid(k[:, :9], dtype, how), laid(v[:, :9], dtype, how), stop=9)
        seq.scatter(k[:, 9:], v[:, 9:])  # as bytes
        for start, stop in ((0, TOKENS), (3, 30), (5, 5)):
            out = tuple(np.zeros_like(laid(side[:, start:stop], dtype, how)) for side in (k, v))
            seq.gather(start, stop, out=out)  # type: ignore[arg-type]
            for got, side in zip(out, (k, v), strict=True):
                assert np.array_equal(got, side[:, start:stop].view(dtype))


def test_every_pattern_of_bits_stays_as_it_is() -> None:
    """NaNs with a payload, and numbers that no float16 has: the words are not numbers."""
    spec = pk.KVSpec.of([pk.Rows(512, 512)], block_size=16)
    words = np.arange(2**16, dtype=np.uint16).reshape(1, 256, 1, 256)
    with pk.KVCache(spec, memory=pk.Blocks(20)) as cache, cache.sequence(np.arange(256)) as seq:
        seq.scatter(words, words[..., ::-1])
        k, v = (np.empty_like(words) for _ in range(2))
        seq.gather(out=(k, v))
        assert np.array_equal(k, words)
        assert np.array_equal(v, words[..., ::-1])
        assert cache.stats().overflowing_writes == 0


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "v_dtype"),
    [((2, 16, 1, 5), (2, 16, 1, 4), "u2"), ((2, 16, 1, 4), (2, 16, 1, 4), "u4"), ((2, 16, 1, 8), (2, 16, 1, 8), "u2")],
)
def test_words_that_do_not_fit_are_refused(k_shape: Any, v_shape: Any, v_dtype: str) -> None:
    spec = pk.KVSpec.of([pk.Rows(8, 8)] * LAYERS, block_size=8)
    k, v = np.zeros(k_shape, np.uint16), np.zeros(v_shape, v_dtype)
    with pk.KVCache(spec, memory=pk.Blocks(20)) as cache, cache.sequence(np.arange(16)) as seq:
        with pytest.raises(pk.LayoutMismatch):
            seq.scatter(k, v)
        seq.scatter(*(np.zeros((2, 16, 1, 8), np.uint8),) * 2)
        with pytest.raises(pk.LayoutMismatch):
            seq.gather(out=(k, v))


def test_rows_that_are_not_whole_words_are_refused() -> None:
    spec = pk.KVSpec.of([pk.Rows(6, 7)], block_size=8)
    with pk.KVCache(spec, memory=pk.Blocks(20)) as cache, cache.sequence(np.arange(16)) as seq:
        with pytest.raises(pk.LayoutMismatch, match="7 bytes of each token as uint16"):
            seq.scatter(np.zeros((1, 16, 1, 3), np.uint16), np.zeros((1, 16, 1, 3), np.uint16))
        seq.scatter(np.zeros((1, 16, 1, 6), np.uint8), np.zeros((1, 16, 1, 7), np.uint8))
        with pytest.raises(pk.LayoutMismatch, match="not whole uint16"):
            seq.gather(out=(np.zeros((1, 16, 1, 3), np.uint16), np.zeros((1, 16, 1, 3), np.uint16)))
