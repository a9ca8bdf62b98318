"""The attention oracle against a dense softmax written another way.

Its two forms are also compared with each other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedkv.reference import OnlineState, merge_states, online_softmax_attention, paged_attention
from tests.reference.batches import FORMS, Batch, check


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_lengths_around_a_block_agree_with_the_dense_softmax(form: Any, block_size: int) -> None:
    lens = [(1, n) for n in (0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size + 2)]
    check(Batch(lens, block_size=block_size), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_ragged_prefills_agree_with_every_mask(form: Any, causal: bool, window: int | None, soft_cap: Any) -> None:
    lens = [(5, 5), (0, 4), (3, 11), (1, 9), (4, 2), (2, 0), (7, 8)]
    check(Batch(lens, seed=3), form, causal=causal, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 2), (7, 1)])
def test_query_heads_share_kv_heads_in_consecutive_groups(form: Any, heads: tuple[int, int]) -> None:
    check(Batch([(3, 7), (1, 4)], heads=heads), form)


@pytest.mark.parametrize("form", FORMS)
def test_values_may_have_another_head_dim_and_the_scale_may_be_given(form: Any) -> None:
    check(Batch([(3, 7)], dim=(8, 5)), form, softmax_scale=0.3)


def test_more_queries_than_a_tile_agree() -> None:
    check(Batch([(70, 71)], heads=(2, 1), dim=(4, 4)), window=40)


def test_no_sequences_and_no_queries_give_empty_results() -> None:
    for lens in ([], [(0, 5)], [(0, 0)]):
        o, lse = paged_attention(*Batch(lens).args, return_lse=True)
        assert o.shape == (0, 4, 8)
        assert lse.shape == (0, 4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=4),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([(2, 1), (3, 3), (4, 2)]),
    st.booleans(),
    st.none() | st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_both_forms_agree_on_any_batch(
    lens: Any, block_size: int, heads: Any, causal: bool, window: int | None, num_splits: int, seed: int
) -> None:
    batch = Batch(lens, heads=heads, dim=(4, 4), block_size=block_size, seed=seed)
    check(batch, causal=causal, window=window)
    check(batch, online_softmax_attention, causal=causal, window=window, num_splits=num_splits)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spare", [np.nan, np.inf, 1e300])
def test_what_lies_in_slots_nobody_owns_does_not_reach_the_output(form: Any, spare: float) -> None:
    lens = [(2, 4), (1, 1)]
    assert np.array_equal(form(*Batch(lens, spare=spare).args), form(*Batch(lens, spare=0.0).args))


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinity_behind_the_mask_reach_only_those_who_see_them(form: Any) -> None:
    batch = Batch([(4, 4)], heads=(1, 1), block_size=4)
    _, k_cache, v_cache, tables, *_ = batch.args
    clean = form(*batch.args)
    k_cache[tables[0, 0], 3], v_cache[tables[0, 0], 3] = np.nan, np.inf
    o = form(*batch.args)
    assert np.array_equal(o[:3], clean[:3])
    assert np.isnan(o[3]).all()


@pytest.mark.parametrize("form", FORMS)
def test_huge_scores_neither_overflow_nor_warn(form: Any) -> None:
    batch = Batch([(1, 5)], heads=(1, 1))
    batch.args[0][...] *= 1e6
    o, lse = form(*batch.args, return_lse=True)
    _, k, v = batch.dense[0]
    best = int(np.argmax(k[:, 0] @ batch.args[0][0, 0]))
    np.testing.assert_allclose(o[0, 0], v[best, 0], rtol=1e-12)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_query_without_keys_gives_zero_and_minus_infinity(form: Any) -> None:
    o, lse = form(*Batch([(3, 1)]).args, return_lse=True)
    assert not o[:2].any()
    assert np.isneginf(lse[:2]).all()
    assert o[2].all()


@pytest.mark.parametrize("form", FORMS)
def test_window_entries_that_left_the_table_are_not_looked_at(form: Any) -> None:
    batch = Batch([(2, 12)], block_size=3)
    whole = form(*batch.args, window=4)
    batch.args[3][0, :2] = -1
    assert np.array_equal(form(*batch.args, window=4), whole)


def test_float16_is_rounded_once_and_out_float64_not_at_all() -> None:
    batch = Batch([(3, 9)])
    half = [array.astype(np.float16) for array in batch.args[:3]]
    exact = np.empty(half[0].shape)
    assert paged_attention(*half, *batch.args[3:], out=exact) is exact
    o = paged_attention(*half, *batch.args[3:])
    assert o.dtype == np.float16
    assert np.array_equal(o, exact.astype(np.float16))
    assert not np.array_equal(o, exact)


def to_bits(array: NDArray[Any]) -> NDArray[np.uint16]:
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_comes_as_ml_dtypes_or_as_bits_with_decode(form: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    batch = Batch([(3, 9), (1, 4)], spare=0.0)
    bits = [to_bits(array) for array in batch.args[:3]]
    typed = [array.view(ml_dtypes.bfloat16) for array in bits]
    by_bits = form(*bits, *batch.args[3:], decode=from_bits)
    by_dtype = form(*typed, *batch.args[3:])
    assert by_bits.dtype == np.float32
    assert by_dtype.dtype == ml_dtypes.bfloat16
    assert np.array_equal(by_bits.astype(ml_dtypes.bfloat16), by_dtype)
    mixed = form(batch.args[0], *bits[1:], *batch.args[3:], decode=from_bits)
    assert mixed.dtype == np.float64


def test_strided_caches_are_read_as_they_lie() -> None:
    batch = Batch([(3, 9)])
    q, k, v, *rest = batch.args
    other_way = np.ascontiguousarray(k.swapaxes(1, 2)).swapaxes(1, 2)
    assert np.array_equal(paged_attention(q, other_way, v[::1], *rest), paged_attention(*batch.args))


BAD: list[tuple[dict[int, Any], dict[str, Any]]] = [
    ({0: np.zeros((3, 4))}, {}),
    ({0: np.zeros((3, 3, 8))}, {}),
    ({0: np.zeros((3, 4, 7))}, {}),
    ({0: np.zeros((4, 4, 8))}, {}),
    ({0: np.zeros((3, 4, 8), np.uint16)}, {}),
    ({0: np.zeros((3, 4, 8), np.complex128)}, {}),
    ({0: np.zeros((3, 4, 8), bool)}, {}),
    ({1: np.zeros((5, 3, 2))}, {}),
    ({1: np.zeros((6, 3, 2, 8))}, {}),
    ({2: np.zeros((5, 3, 1, 8))}, {}),
    ({3: np.zeros((1, 4))}, {}),
    ({3: np.full((1, 4), 5)}, {}),
    ({3: np.full((1, 4), -1)}, {}),
    ({3: np.zeros((1, 2), np.int32)}, {}),
    ({3: np.zeros((2, 4), np.int32)}, {}),
    ({4: [-1]}, {}),
    ({4: [7.0]}, {}),
    ({4: [[7]]}, {}),
    ({5: [0, 2]}, {}),
    ({5: [1, 3]}, {}),
    ({5: [0, 4, 3]}, {}),
    ({5: [0.0, 3.0]}, {}),
    ({}, {"window": 0}),
    ({}, {"soft_cap": 0.0}),
    ({}, {"soft_cap": math.nan}),
    ({}, {"softmax_scale": math.inf}),
    ({}, {"out": np.zeros((3, 4, 7))}),
    ({}, {"out": np.zeros((3, 4, 8), np.int32)}),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", range(len(BAD)))
def test_arrays_that_do_not_fit_together_are_refused_and_nothing_is_written(form: Any, case: int) -> None:
    batch = Batch([(3, 7)])
    changes, options = BAD[case]
    args = [changes.get(i, array) for i, array in enumerate(batch.args)]
    options = {"out": np.full((3, 4, 8), 5.0)} | options
    out = options["out"]
    before = out.copy()
    with pytest.raises((ValueError, TypeError)):
        form(*args, **options)
    assert np.array_equal(out, before)


def test_a_read_only_out_and_no_splits_are_refused() -> None:
    batch = Batch([(3, 7)])
    out = np.zeros((3, 4, 8))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        paged_attention(*batch.args, out=out)
    with pytest.raises(ValueError, match="num_splits"):
        online_softmax_attention(*batch.args, num_splits=0)


# ---- the online state and the merge


def state_of(scores: NDArray[Any], values: NDArray[Any]) -> OnlineState:
    state = OnlineState(1, scores.shape[0], values.shape[1])
    state.update(scores[None], values[None])
    return state


pieces = st.lists(st.integers(0, 4), min_size=3, max_size=3)


@settings(deadline=None)
@given(pieces, st.integers(0, 2**31), st.floats(0, 500))
def test_merging_is_associative_and_order_does_not_matter(sizes: list[int], seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    scores = [rng.normal(size=(2, n)) * spread for n in sizes]
    values = [rng.normal(size=(n, 3)) for n in sizes]

    def merged(*order: int) -> tuple[Any, Any]:
        state = state_of(scores[order[0]], values[order[0]])
        for i in order[1:]:
            state.merge(state_of(scores[i], values[i]))
        return state.finish()

    right = state_of(scores[1], values[1])
    right.merge(state_of(scores[2], values[2]))
    nested = state_of(scores[0], values[0])
    nested.merge(right)
    at_once = state_of(np.concatenate(scores, axis=1), np.concatenate(values)).finish()
    for result in (merged(0, 1, 2), merged(2, 0, 1), nested.finish()):
        for got, wanted in zip(result, at_once):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)


def test_an_empty_state_changes_nothing_it_is_merged_with() -> None:
    rng = np.random.default_rng(0)
    state = state_of(rng.normal(size=(2, 5)), rng.normal(size=(5, 3)))
    o, lse = state.finish()
    state.merge(OnlineState(1, 2, 3))
    empty = OnlineState(1, 2, 3)
    empty.merge(state)
    for result in (state.finish(), empty.finish()):
        assert np.array_equal(result[0], o)
        assert np.array_equal(result[1], lse)
    o, lse = OnlineState(1, 2, 3).finish()
    assert not o.any()
    assert np.isneginf(lse).all()


@settings(deadline=None)
@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 2**31))
def test_merge_states_of_two_halves_is_the_whole(left: int, right: int, seed: int) -> None:
    batch = Batch([(1, left + right)], block_size=1, seed=seed, spare=0.0)
    q, k, v, tables, _, indptr = batch.args

    def part(begin: int, end: int) -> Any:
        table = tables[:, begin : max(end, begin + 1)]
        return paged_attention(q, k, v, table, [end - begin], indptr, causal=False, return_lse=True)

    o, lse = merge_states(*part(0, left), *part(left, left + right))
    whole_o, whole_lse = part(0, left + right)
    np.testing.assert_allclose(o, whole_o, rtol=1e-5, atol=1e-7)  # lse is float32
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6, atol=1e-6)


def test_merge_states_ignores_what_lies_in_the_output_of_a_side_without_keys() -> None:
    o, lse = np.ones((2, 3), np.float16), np.array([0.5, -np.inf], np.float32)
    garbage = np.full((2, 3), np.nan, np.float16)
    none = np.full(2, -np.inf, np.float32)
    for result_o, result_lse in (merge_states(o, lse, garbage, none), merge_states(garbage, none, o, lse)):
        assert result_o.dtype == np.float16
        assert result_o.tolist() == [[1, 1, 1], [0, 0, 0]]
        assert result_lse.tolist() == [0.5, -math.inf]


def test_merge_states_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        merge_states(np.zeros((2, 3)), np.zeros(2), np.zeros((2, 3)), np.zeros(3))
    with pytest.raises(ValueError, match="do not fit together"):
        merge_states(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 3)))
