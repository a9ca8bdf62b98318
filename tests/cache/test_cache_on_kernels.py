"""A KVCache whose steps run on the CUDA kernels gives what a KVCache on the CPU gives.

The PTX interpreter runs the kernels.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.attention import PagedAttention
from pagedkv.cache import gpu_kv
from tests.attention.noting import Noting
from tests.ptxsim.fixture import interpreted_backend
from tests.slices import one_in

SPEC = pk.KVSpec(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float16", block_size=4)
HEADS = 4

backend = interpreted_backend()


def values(tokens: np.ndarray, positions: np.ndarray, what: int) -> np.ndarray:
    """Made-up projections of tokens: the same for the same token at the same position."""
    heads = HEADS if what == 0 else SPEC.num_kv_heads
    out = np.empty((len(tokens), heads, SPEC.head_dim), np.float16)
    for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        rng = np.random.default_rng([int(token), int(position), what])
        out[i] = rng.standard_normal((heads, SPEC.head_dim))
    return out


def forward(cache: pk.KVCache, seqs: list[pk.Sequence], **options: Any) -> list[np.ndarray]:
    """One step over the sequences; the attention outputs by layer."""
    outputs = []
    with cache.step(seqs) as step:
        for layer in range(SPEC.num_layers):
            q, k, v = (values(step.tokens, step.positions, 3 * layer + i if i else 0) for i in range(3))
            step.write(layer, k, v)
            outputs.append(np.array(step.attend(layer, q, **options), np.float64))
    return outputs


def history(cache: pk.KVCache) -> list[np.ndarray]:
    """Run one history that reaches every kind of step.

    Prefill, decode, a fork with copy-on-write, a prefix hit with a partial block, demotion to the host and promotion.
    """
    seen: list[np.ndarray] = []
    first = cache.sequence(list(range(10)))
    seen += forward(cache, [first])
    first.append([50])
    seen += forward(cache, [first], window=3)
    (fork,) = first.fork()
    for seq, token in ((first, 60), (fork, 61)):
        seq.append([token])
    seen += forward(cache, [first, fork], soft_cap=4.0)
    seen += [np.array(x, np.float64) for seq in (first, fork) for x in seq.gather()]
    first.release()
    fork.release()
    again = cache.sequence([*range(10), 50, 60, 70])
    assert again.hit_tokens["device"] == 12
    partial = cache.sequence([*range(6), 99, 98])
    assert partial.hit_tokens == {"device": 4, "host": 0, "partial": 2}
    seen += forward(cache, [again, partial])
    again.release()
    partial.release()
    cache.sequence(list(range(1000, 1050))).release()
    big = cache.sequence(list(range(1000, 1050)))
    seen += forward(cache, [big])  # everything else goes to the host
    big.release()
    back = cache.sequence([*range(10), 50, 60, 70])
    assert back.hit_tokens["host"] >= 8
    assert sum(back.hit_tokens.values()) == 12
    seen += forward(cache, [back])
    back.release()
    cache.check_integrity()
    return seen


def test_a_history_through_the_kernels_equals_the_one_on_the_cpu(backend: Any) -> None:
    with (
        pk.KVCache(SPEC, pk.Blocks(14), pk.Blocks(20)) as exact,
        pk.KVCache(SPEC, pk.Blocks(14), pk.Blocks(20), backend=backend) as cache,
    ):
        for layer, (wanted, found) in enumerate(zip(history(exact), history(cache), strict=True)):
            assert wanted.shape == found.shape
            assert np.abs(wanted - found).max() < 3e-3, layer


def test_steps_of_different_sequences_may_take_turns(backend: Any) -> None:
    with pk.KVCache(SPEC, pk.Blocks(14)) as exact, pk.KVCache(SPEC, pk.Blocks(14), backend=backend) as cache:
        found: list[list[np.ndarray]] = []
        for one in (exact, cache):
            seqs = [one.sequence([1, 2, 3, 4, 5]), one.sequence([7, 8])]
            outputs = []
            with one.step(seqs[:1]) as first, one.step(seqs[1:]) as second:
                for layer in range(SPEC.num_layers):
                    for step in (first, second):
                        q, k, v = (values(step.tokens, step.positions, 3 * layer + i if i else 0) for i in range(3))
                        step.write(layer, k, v)
                        outputs.append(np.array(step.attend(layer, q), np.float64))
            found.append(outputs + [np.array(x, np.float64) for seq in seqs for x in seq.gather()])
            for seq in seqs:
                seq.release()
    for wanted, got in zip(*found, strict=True):
        assert np.abs(wanted - got).max() < 3e-3


def test_each_attention_of_a_step_has_its_own_mask(backend: Any) -> None:
    tree, alone = (np.packbits(mask.ravel() > 0, bitorder="little") for mask in (np.tri(5), np.eye(5)))
    bits, outputs = np.array([0, 4]), []
    for options in ({}, {"backend": backend}):
        with (
            pk.KVCache(SPEC, pk.Blocks(14), **options) as cache,
            cache.sequence([1, 2, 3, 4, 5]) as seq,
            cache.step([seq]) as step,
        ):
            q, k, v = (values(step.tokens, step.positions, i) for i in range(3))
            for layer in range(SPEC.num_layers):
                step.write(layer, k, v)
            outputs.append([
                np.array(step.attend(layer, q, mask=mask, mask_indptr=None if mask is None else bits), np.float64)
                for layer, mask in ((0, tree), (1, None), (0, alone), (1, alone), (0, tree))
            ])  # fmt: skip
    assert np.abs(np.array(outputs[0]) - outputs[1]).max() < 3e-3


def test_an_interrupt_after_a_plan_leaves_no_mask_in_anothers_place(backend: Any, monkeypatch: Any) -> None:
    first, second = (np.packbits(mask.ravel() > 0, bitorder="little") for mask in (np.tri(5), np.eye(5)))
    bits, plan = np.array([0, 4]), PagedAttention.plan
    with one_step(backend) as step:
        q = values(step.tokens, step.positions, 0)
        wanted = np.array(step.attend(0, q, mask=first, mask_indptr=bits))

        def interrupted(*arguments: Any, **options: Any) -> None:
            plan(*arguments, **options)
            raise KeyboardInterrupt

        def noted(*arguments: Any, **options: Any) -> None:
            planned.append("again")
            plan(*arguments, **options)

        planned: list[str] = []
        monkeypatch.setattr(PagedAttention, "plan", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.attend(0, q, mask=second, mask_indptr=bits)
        monkeypatch.setattr(PagedAttention, "plan", noted)
        np.testing.assert_array_equal(step.attend(0, q, mask=first, mask_indptr=bits), wanted)
        assert planned == ["again"], "of the interrupted plan there may be only a part"


@contextmanager
def one_step(backend: Any) -> Iterator[pk.Step]:
    """A step of five tokens whose layers are written."""
    cache = pk.KVCache(SPEC, pk.Blocks(8), backend=backend)
    with cache, cache.sequence(range(5)) as seq, cache.step([seq]) as step:
        for layer in range(SPEC.num_layers):
            step.write(layer, *(values(step.tokens, step.positions, 1) for _ in "kv"))
        yield step


@pytest.mark.parametrize(
    "options", [{"softmax_scale": [1]}, {"softmax_scale": "1"}, {"soft_cap": [1]}, {"soft_cap": True}, {"soft_cap": -1}]
)
def test_options_that_are_no_numbers_are_refused_by_name(backend: Any, options: dict[str, Any]) -> None:
    with one_step(backend) as step, pytest.raises(pk.errors.PagedKVError, match=next(iter(options))):
        step.attend(0, values(step.tokens, step.positions, 0), **options)


def test_layers_with_sinks_of_their_own_share_one_attention_and_one_plan_for_each_step(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    planned: list[str] = []
    real, plan = gpu_kv.PagedAttention, PagedAttention.plan
    monkeypatch.setattr(gpu_kv, "PagedAttention", lambda **given: made.append("one") or real(**given))
    monkeypatch.setattr(PagedAttention, "plan", lambda *given, **more: planned.append("one") or plan(*given, **more))
    numbers = np.array([[0.1] * HEADS, [3] * HEADS], np.float32)
    with (
        pk.KVCache(SPEC, pk.Blocks(4)) as exact,
        pk.KVCache(SPEC, pk.Blocks(4), backend=backend) as cache,
    ):
        found: list[list[Any]] = []
        for one in (exact, cache):
            outputs, seq = [], one.sequence([1])
            for token in (2, 3):
                with one.step([seq]) as step:
                    q, k, v = (values(step.tokens, step.positions, i) for i in range(3))
                    for layer in range(SPEC.num_layers):
                        step.write(layer, k, v)
                        copied = numbers[layer % 2].copy()
                        outputs.append(np.array(step.attend(layer, q, sinks=copied), np.float64))
                    outputs.append(np.array(step.attend(0, q), np.float64))  # without any
                seq.append(token)
            seq.release()
            found.append(outputs)
    assert len(made) == 2  # with sinks, and without
    assert len(planned) == 4  # each of them in each step
    for wanted, got in zip(*found, strict=True):
        assert np.abs(wanted - got).max() < 3e-3
    first, second, without = found[1][:3]
    assert np.abs(first - second).max() > 1e-2 < np.abs(first - without).max()


def test_views_of_the_same_slopes_share_an_attention_which_keeps_them(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], gpu_kv.PagedAttention
    monkeypatch.setattr(gpu_kv, "PagedAttention", lambda **given: made.append(None) or real(**given))
    numbers = np.array([[0.1] * HEADS, [3] * HEADS], np.float32)
    kept = weakref.ref(numbers)
    with pk.KVCache(SPEC, pk.Blocks(4), backend=backend) as cache, cache.sequence([1, 2]) as seq:
        for _ in range(2):
            with cache.step([seq]) as step:
                q, k, v = (values(step.tokens, step.positions, i) for i in range(3))
                for layer in range(SPEC.num_layers):
                    step.write(layer, k, v)
                views = (numbers[row] for row in (0, 0, 1))  # each a new one
                first, again, other = (step.attend(0, q, alibi_slopes=slopes) for slopes in views)
            assert np.array_equal(first, again)
            assert not np.array_equal(first, other)
            seq.append([3, 4])
        assert len(made) == 2
        del numbers
        gc.collect()
        assert kept() is not None


def test_batches_of_two_kinds_in_turn_share_an_attention_that_is_large_enough_for_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, real = [], gpu_kv.PagedAttention
    monkeypatch.setattr(gpu_kv, "PagedAttention", lambda **given: made.append(None) or real(**given))
    with pk.KVCache(SPEC, pk.Blocks(64), backend=Noting()) as cache:
        for turn in range(4):
            for count, length in ((1, 64), (8, 9), (2, 40)):
                prompts = (range(1000 * turn + 100 * n, 1000 * turn + 100 * n + length) for n in range(count))
                seqs = [cache.sequence(prompt) for prompt in prompts]
                with cache.step(seqs) as step:
                    k = np.zeros((len(step.tokens), SPEC.num_kv_heads, SPEC.head_dim), np.float16)
                    for layer in range(SPEC.num_layers):
                        step.write(layer, k, k)
                    step.attend(0, np.zeros((len(k), HEADS, SPEC.head_dim), np.float16))
                for seq in seqs:
                    seq.release()
        assert len(made) == 2  # for the first batch, and with room for the sequences of the second
        assert len(cache._engine.kv._outgrown) <= 1 + len(cache._engine.kv._buffers)


def test_a_step_keeps_some_launches_and_not_one_for_each_form_ever_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kv, "MAX_RECIPES", 3)
    with one_step(Noting()) as step:
        for width in range(SPEC.head_dim, SPEC.head_dim + 80, 8):
            q = np.zeros((len(step.tokens), HEADS, width), np.float16)[..., : SPEC.head_dim]
            step.attend(0, q)
            assert 0 < len(step._bound._launches) <= 3


@pytest.mark.parametrize(
    ("sinks", "error"),
    [
        (np.zeros(HEADS - 1, np.float32), pk.errors.LayoutMismatch),
        (np.zeros(HEADS), pk.errors.WrongType),
        (np.zeros(4 * HEADS + 2, np.uint8)[2:].view(np.float32), pk.errors.LayoutMismatch),  # 2 bytes off
    ],
    ids=["too few", "float64", "off their alignment"],
)
def test_sinks_that_do_not_fit_are_refused_by_name(backend: Any, sinks: Any, error: type[Exception]) -> None:
    with one_step(backend) as step:
        q = values(step.tokens, step.positions, 0)
        for _ in range(2):
            with pytest.raises(error, match="sinks"):
                step.attend(0, q, sinks=sinks)
            step.attend(0, q, sinks=np.zeros(HEADS, np.float32))


def test_queries_of_another_dtype_are_refused_before_anything_is_launched(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_step(backend) as step:
        monkeypatch.setattr(backend, "launch", lambda *_, **__: pytest.fail("something was launched"))
        with pytest.raises(pk.errors.WrongType, match="q is float32"):
            step.attend(0, values(step.tokens, step.positions, 0).astype(np.float32))


def test_log_sum_exp_and_out_reach_the_caller(backend: Any) -> None:
    with pk.KVCache(SPEC, pk.Blocks(14)) as exact, pk.KVCache(SPEC, pk.Blocks(14), backend=backend) as cache:
        found = []
        for one in (exact, cache):
            seq = one.sequence([1, 2, 3, 4, 5])
            with one.step([seq]) as step:
                q, k, v = (values(step.tokens, step.positions, i) for i in range(3))
                for layer in range(SPEC.num_layers):
                    step.write(layer, k, v)
                out = np.empty(q.shape, np.float16)
                o, lse = step.attend(0, q, return_lse=True, out=out)
                assert o is out
                found.append((np.array(o, np.float64), np.array(lse, np.float64)))
            seq.release()
    assert np.abs(found[0][0] - found[1][0]).max() < 3e-3
    assert np.abs(found[0][1] - found[1][1]).max() < 3e-3


def test_calls_of_a_step_with_other_outputs_are_worked_out_anew(backend: Any) -> None:
    with one_step(backend) as step:
        q = values(step.tokens, step.positions, 0)
        apart = np.zeros((len(q), 2 * HEADS, SPEC.head_dim), np.float16)
        wanted, wanted_lse = (np.array(x) for x in step.attend(0, q, return_lse=True))
        for _ in range(2):
            for out in (None, np.zeros_like(q), apart[:, ::2]):
                np.testing.assert_array_equal(step.attend(0, q, out=out), wanted)
                o, lse = step.attend(0, q, out=out, return_lse=True)
                np.testing.assert_array_equal(o, wanted)
                np.testing.assert_array_equal(lse, wanted_lse)
            with pytest.raises(pk.errors.LayoutMismatch, match="out"):
                step.attend(0, q, out=apart)
            spread = np.zeros_like(apart)
            spread[:, ::2] = q
            np.testing.assert_array_equal(step.attend(0, spread[:, ::2]), wanted)
        assert not apart[:, 1::2].any()


def test_scatter_and_gather_are_each_others_inverse_on_the_kernels(backend: Any) -> None:
    rng = np.random.default_rng(0)
    with pk.KVCache(SPEC, pk.Blocks(14), backend=backend) as cache, cache.sequence([1, 2, 3, 4, 5, 6]) as seq:
        k, v = (rng.standard_normal((2, 6, 2, 32)).astype(np.float16) for _ in "kv")
        seq.scatter(k, v)
        for found, wanted in zip(seq.gather(), (k, v), strict=True):
            assert np.array_equal(found, wanted)


def test_ranges_and_layouts_are_those_of_the_cpu_on_the_kernels(backend: Any) -> None:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 11, 2, 32)).astype(np.float16) for _ in "kv")
    found = []
    for options in ({}, {"backend": backend}):
        with pk.KVCache(SPEC, pk.Blocks(14), **options) as cache, cache.sequence(range(11)) as seq:
            seq.scatter(k[:, :6], v[:, :6], 0, 6)
            seq.scatter(k.swapaxes(1, 2), v.swapaxes(1, 2), 0, layout="HND")
            parts = [seq.gather(*part, layout=name) for part in ((0, 11), (3, 10)) for name in ("NHD", "HND")]
            found.append([np.array(array).tobytes() for pair in parts for array in pair])
    assert found[0] == found[1]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_float32_is_converted_to_the_dtype_of_the_cache(backend: Any, layout: str) -> None:
    spec = pk.KVSpec(num_layers=1, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_size=4, layout=layout)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((1, 6, 2, 32)).astype(np.float32) for _ in "kv")
    results = []
    for options in ({}, {"backend": backend}):
        with pk.KVCache(spec, pk.Blocks(14), **options) as cache, cache.sequence([1, 2, 3, 4, 5, 6]) as seq:
            seq.scatter(k, v)
            results.append([np.array(x).view(np.uint16) for x in seq.gather()])
    assert np.array_equal(results[0], results[1])


def test_other_peoples_kernels_are_told_to_the_device_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(pk.tiers.DeviceTier, "used_by", lambda self, stream: told.append(stream))
    cache = pk.KVCache(SPEC, pk.Blocks(14))
    cache.used_on(7)
    assert told == [7]
    cache.close()
    with pytest.raises(pk.errors.ClosedError):
        cache.used_on(7)


def test_a_stream_where_there_is_no_gpu_is_refused() -> None:
    with pk.KVCache(SPEC, pk.Blocks(14)) as cache, cache.sequence([1, 2]) as seq, cache.step([seq]) as step:
        kv = values(step.tokens, step.positions, 1)
        with pytest.raises(pk.errors.WrongType, match="stream"):
            step.write(0, kv, kv, stream=object())
        for layer in range(2):
            step.write(layer, kv, kv)


def test_a_block_that_changes_its_namespace_is_zeroed_on_the_device(backend: Any) -> None:
    tenants = [pk.Namespace(tenant=name) for name in "ab"]
    with pk.KVCache(SPEC, pk.Blocks(4), backend=backend) as cache:
        first = cache.sequence(list(range(14)), tenants[0])
        with cache.step([first]) as step:
            cache.device_arena[first.blocks] = 0xFF
            for layer in range(SPEC.num_layers):
                step.mark_written(layer)
        first.release()
        second = cache.sequence([1, 2, 3, 4, 5], tenants[1])
        forward(cache, [second])
        block = second.blocks[-1]
        for layer in range(SPEC.num_layers):
            for view in cache.layer(layer):
                assert view[block, 0].any()
                assert not view[block, 1:].any()
        second.release()


QUANTISED = {
    "int8 token_head": dataclasses.replace(SPEC, dtype="int8"),
    "int8 head HND": dataclasses.replace(
        SPEC, dtype="int8", layout="HND", scales=pk.Scales([[0.03, 0.04]] * 2, [[0.05, 0.03]] * 2)
    ),
    "e4m3 tensor": dataclasses.replace(SPEC, dtype="float8_e4m3", scales=pk.Scales([0.5, 0.25], [0.125, 1])),
    "e5m2 token_head HND": dataclasses.replace(SPEC, dtype="float8_e5m2", layout="HND"),
}


@pytest.mark.parametrize("name", one_in(2, QUANTISED))
def test_quantised_pages_are_written_read_and_gathered_by_the_kernels_as_on_the_cpu(backend: Any, name: str) -> None:
    spec, found = QUANTISED[name], []
    for options in ({}, {"backend": backend}):
        with pk.KVCache(spec, pk.Blocks(14), pk.Blocks(20), **options) as cache:  # type: ignore[arg-type]
            seen = []
            first = cache.sequence(list(range(10)))
            seen += forward(cache, [first])
            (fork,) = first.fork()
            for seq, token in ((first, 60), (fork, 61)):
                seq.append([token])
            seen += forward(cache, [first, fork], window=3)
            seen += [np.array(x, np.float64) for seq in (first, fork) for x in seq.gather(1, 11, layout="HND")]
            first.release()
            fork.release()
            cache.sequence(list(range(1000, 1050))).release()
            big = cache.sequence(list(range(1000, 1050)))
            seen += forward(cache, [big])  # everything else goes to the host
            big.release()
            back = cache.sequence([*range(10), 60, 70])
            assert back.hit_tokens["host"] >= 4
            seen += forward(cache, [back])
            back.release()
            found.append(seen)
    for wanted, got in zip(*found, strict=True):
        assert wanted.shape == got.shape
        assert np.abs(wanted - got).max() < 4e-3


def test_rows_of_bytes_on_a_gpu_are_the_callers_to_write(backend: Any) -> None:
    spec = pk.KVSpec.of([pk.Rows(24, 8)] * 2, block_size=4)
    rows = [np.random.default_rng(i).integers(0, 256, (6, 1, width), dtype=np.uint8) for i, width in ((0, 24), (1, 8))]
    with pk.KVCache(spec, pk.Blocks(14), backend=backend) as cache, cache.sequence([1, 2, 3, 4, 5, 6]) as seq:
        with cache.step([seq]) as step:
            for layer in range(2):
                with pytest.raises(pk.UnsupportedVariant, match="mark_written"):
                    step.write(layer, *rows)
                for view, side in zip(cache.layer(layer), rows, strict=True):
                    blocks, offsets = np.divmod(np.asarray(step.slot_mapping), 4)
                    view[blocks, offsets] = side
                step.mark_written(layer)
        for layer in range(2):
            for got, side in zip(seq.gather(), rows, strict=True):
                np.testing.assert_array_equal(got[layer], side)
