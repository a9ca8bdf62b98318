"""Caches of latents, of which V is the first numbers, on the CPU and on the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from tests.ptxsim.fixture import interpreted_backend

from .conftest import BLOCK, Toy, prompt
from .test_tiers_end_to_end import Traffic

RANK, ROPE, HEADS, SCALE = 256, 64, 16, 0.08
FIXED = pk.Scales(0.01, 0.01)
STORED: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "e4m3": {"dtype": "float8_e4m3", "scales": FIXED},
    "e4m3 by token": {"dtype": "float8_e4m3"},
}

backend = interpreted_backend(races=False)


def spec_of(stored: str = "float16", **changes: Any) -> pk.KVSpec:
    return pk.KVSpec.of([pk.Latent(RANK, ROPE, **STORED[stored])], **changes)


def latents(num_tokens: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((num_tokens, 1, RANK + ROPE)).astype(np.float32)


def exact(q: NDArray[Any], kept: NDArray[np.float64]) -> NDArray[np.float64]:
    """Attention in float64: the last queries [num_tokens, heads, dim], latents [num_keys, dim]."""
    out = np.empty((*q.shape[:2], RANK))
    for row in range(len(q)):
        seen = kept[: len(kept) - len(q) + 1 + row]
        scores = q[row].astype(np.float64) @ seen.T * SCALE
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[row] = weights @ seen[:, :RANK] / weights.sum(axis=1, keepdims=True)
    return out


def as_floats(cache: pk.KVCache, array: Any) -> NDArray[np.float64]:
    values = np.asarray(array)
    return np.asarray(cache.decode(values) if cache.decode else values).astype(np.float64)


@pytest.mark.parametrize(
    ("stored", "heads", "kernel"),
    [
        *((stored, HEADS, "") for stored in STORED), ("float16", HEADS, "decode_mla"), ("e4m3", HEADS, "decode_mla"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("bfloat16", HEADS, "decode_mla"), ("e4m3 by token", HEADS, "decode_simt"),
                ("float16", 32, "decode_mla"), ("float16", 64, "decode_mla_wgmma"),
            )
        ),
    ],
)  # fmt: skip
def test_attention_over_latents_is_that_of_float64(
    backend: Any, monkeypatch: pytest.MonkeyPatch, stored: str, heads: int, kernel: str
) -> None:
    """By the CPU or a kernel; the one for many heads is named, as nothing is timed."""
    launched: list[str] = []
    named = {"kernel": kernel} if kernel == "decode_mla_wgmma" else {}
    if kernel:
        real = backend.launch

        def launch(variant: Any, *given: Any, **options: Any) -> None:
            launched.append(variant.kernel)
            real(variant, *given, **options)

        monkeypatch.setattr(backend, "launch", launch)
    options = {"backend": backend} if kernel else {}
    dtype = np.dtype(pk.KVSpec(1, 1, 1, "bfloat16").np_dtype if stored == "bfloat16" else np.float16)
    with pk.KVCache(spec_of(stored), pk.Blocks(8), **options) as cache:
        seqs = [cache.sequence(list(range(first, first + length))) for first, length in ((0, 33), (100, 9))]
        for turn in range(2):
            with cache.step(seqs) as step:
                rng = np.random.default_rng(turn)
                q = rng.standard_normal((len(step.tokens), heads, RANK + ROPE)).astype(np.float32).astype(dtype)
                step.write(0, latents(len(step.tokens), turn))
                found = as_floats(cache, step.attend(0, q, softmax_scale=SCALE, **named))
                indptr = step.q_indptr
            for number, seq in enumerate(seqs):
                kept, empty = seq.gather()
                assert empty.shape == (1, seq.num_computed, 1, 0)
                mine = slice(indptr[number], indptr[number + 1])
                wanted = exact(as_floats(cache, q[mine]), as_floats(cache, kept)[0, :, 0])
                assert np.abs(found[mine] - wanted).max() < (2e-2 if stored == "bfloat16" else 3e-3)
                seq.append([500 + turn])
        kept = as_floats(cache, seqs[1].gather()[0])[0, :9, 0]
        assert kept == pytest.approx(latents(42, 0)[33:, 0], rel=0.07, abs=0.02)
    assert {one for one in launched if one in ("decode_simt", "decode_mla", "decode_mla_wgmma")} == (
        {kernel} if kernel else set()
    )


class LatentToy(Toy):
    """The toy whose V is a part of K."""

    def kv(self, tokens: Any, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        k, v = super().kv(tokens, layer)
        return k, v[..., :0]


@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "float8_e4m3", "scales": pk.Scales(1, 1)}, {"dtype": "float8_e4m3"}],
    ids=["float32", "tensor", "by token"],
)
def test_latents_move_between_tiers_and_outlive_a_restart(open_cache: Any, changes: dict[str, Any]) -> None:
    spec = pk.KVSpec.of([pk.Latent(6, 2, **changes)] * 2, dtype="float32", block_size=BLOCK, model="toy")
    toy = LatentToy(open_cache(12, spec, host=12, disk=24))
    Traffic(toy, seed=5).play(40)
    stats = toy.cache.stats()
    assert toy.tokens_checked > 100
    assert stats.hit_tokens["host"] + stats.hit_tokens["disk"] > 0
    toy.use(prompt(1))
    toy.cache.close()
    assert LatentToy(open_cache(12, spec, host=12, disk=24)).use(prompt(1)) == {"disk": 3 * BLOCK}


@pytest.mark.parametrize("on_kernels", [False, True], ids=["cpu", "kernels"])
def test_latents_that_were_gathered_can_be_scattered(backend: Any, on_kernels: bool) -> None:
    options = {"backend": backend} if on_kernels else {}
    with pk.KVCache(spec_of(block_size=4), pk.Blocks(8), **options) as cache, cache.sequence(range(6)) as seq:
        with cache.step([seq]) as step:
            step.write(0, latents(6, 3))
        k, v = seq.gather()
        with cache.sequence(range(100, 106)) as other:
            other.scatter(k, v)
            found, _ = other.gather()
        assert np.array_equal(found, latents(6, 3)[None].astype(np.float16))


@pytest.mark.parametrize("on_kernels", [False, True], ids=["cpu", "kernels"])
def test_arrays_that_do_not_fit_latents_are_refused_and_nothing_changes(backend: Any, on_kernels: bool) -> None:
    options = {"backend": backend} if on_kernels else {}
    refused = pk.InvalidArgument if on_kernels else pk.LayoutMismatch
    rows, q = latents(5, 0).astype(np.float16), np.ones((5, HEADS, RANK + ROPE), np.float16)
    with (
        pk.KVCache(spec_of(), pk.Blocks(8), **options) as cache,
        cache.sequence(range(5)) as seq,
        cache.step([seq]) as step,
    ):
        with pytest.raises(refused, match="v is given, and the cache has no V"):
            step.write(0, rows, rows[..., :RANK])
        with pytest.raises(pk.LayoutMismatch, match=r"k .*320"):
            step.write(0, rows[..., :RANK])
        assert not np.asarray(cache.layer(0)[0]).any()
        step.write(0, rows)
        out = np.full((5, HEADS, RANK + ROPE), 7, np.float16)
        with pytest.raises(pk.LayoutMismatch, match="320"):
            step.attend(0, q[..., :RANK], softmax_scale=SCALE)
        with pytest.raises(pk.LayoutMismatch, match="out"):
            step.attend(0, q, out=out, softmax_scale=SCALE)
        with pytest.raises(pk.InvalidArgument, match=r"softmax_scale .* latents .*qk_nope_head_dim.* width, 320"):
            step.attend(0, q, out=out)
        assert (out == 7).all()
    with (
        pk.KVCache(pk.KVSpec(1, 1, 8, "float16"), pk.Blocks(8), **options) as cache,
        cache.sequence(range(5)) as seq,
        cache.step([seq]) as step,
    ):
        with pytest.raises(refused, match="v is missing, and the cache has a V"):
            step.write(0, np.ones((5, 1, 8), np.float16))
        step.mark_written(0)
