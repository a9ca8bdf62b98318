"""ALiBi, sinks and custom masks of the attention oracle.

The tests check by hand, against loops, and against identities.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedkv.reference import merge_states, online_softmax_attention, pack_mask, paged_attention
from tests.reference.batches import FORMS, Batch, bits_of, check

RAGGED = [(5, 5), (0, 4), (3, 11), (1, 9), (4, 2), (2, 0), (7, 8)]
SLOPES = np.array([0.5, 0.25, -0.125, 1.0])
SINKS = np.array([0.3, -2.0, 1.5, -math.inf])


def random_masks(lens: list[tuple[int, int]], seed: int = 0, density: float = 0.5) -> list[NDArray[np.bool_]]:
    rng = np.random.default_rng(seed)
    return [rng.random(shape) < density for shape in lens]


def three_keys() -> list[Any]:
    """One query of zeros over three keys whose values are unit vectors.

    All scores are 0, so o is the weights.
    """
    q, k, v = np.zeros((1, 1, 2)), np.ones((1, 3, 1, 2)), np.eye(3).reshape(1, 3, 1, 3)
    return [q, k, v, np.zeros((1, 1), np.int32), [3], [0, 1]]


# ---- by hand


@pytest.mark.parametrize("form", FORMS)
def test_a_slope_of_ln_2_halves_a_weight_for_each_position_that_a_key_lies_back(form: Any) -> None:
    o, lse = form(*three_keys(), alibi_slopes=[math.log(2)], return_lse=True)
    np.testing.assert_allclose(o.ravel(), [1 / 7, 2 / 7, 4 / 7], rtol=1e-15)
    np.testing.assert_allclose(lse, math.log(1.75), rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_sink_takes_its_share_of_the_softmax_and_gives_no_value(form: Any) -> None:
    o, lse = form(*three_keys(), sinks=[math.log(5)], return_lse=True)
    np.testing.assert_allclose(o.ravel(), [1 / 8] * 3, rtol=1e-15)
    np.testing.assert_allclose(lse, math.log(8), rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_bit_i_of_a_mask_is_key_i_of_the_first_query_from_the_lowest_bit_up(form: Any) -> None:
    packed = {"mask": np.array([0b110], np.uint8), "mask_indptr": [0, 1]}
    o, lse = form(*three_keys(), **packed, return_lse=True)
    assert o.ravel().tolist() == [0, 0.5, 0.5]
    np.testing.assert_allclose(lse, math.log(2), rtol=1e-6)


def test_masks_are_packed_row_after_row_and_each_sequence_begins_at_a_byte() -> None:
    first = np.array([[1, 0, 1, 0, 0], [0, 1, 1, 0, 1]], bool)
    last = np.array([[0, 1]], bool)
    mask, indptr = pack_mask([first, np.ones((0, 4), bool), np.ones((2, 0), bool), last])
    assert mask.dtype == np.uint8
    assert indptr.dtype == np.int64
    assert mask.tolist() == [0b11000101, 0b10, 0b10]
    assert indptr.tolist() == [0, 2, 2, 2, 3]


def test_no_masks_at_all_are_no_bytes() -> None:
    mask, indptr = pack_mask([])
    assert (mask.dtype, mask.tolist(), indptr.dtype, indptr.tolist()) == (np.uint8, [], np.int64, [0])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 19)), max_size=4), st.integers(0, 2**31))
@settings(deadline=None)
def test_packing_agrees_with_packing_one_bit_after_the_other(lens: list[tuple[int, int]], seed: int) -> None:
    masks = random_masks(lens, seed)
    mask, indptr = pack_mask(array.T.copy().T for array in masks)  # of any strides, and any iterable
    bits = bits_of(masks)
    assert mask.tolist() == bits["mask"].tolist()
    assert indptr.tolist() == bits["mask_indptr"].tolist()


def test_what_is_no_boolean_matrix_is_not_packed() -> None:
    with pytest.raises(TypeError, match="sequence 1 must be bool"):
        pack_mask([np.ones((1, 2), bool), np.ones((1, 2))])
    with pytest.raises(ValueError, match="sequence 0 must be"):
        pack_mask([np.ones(2, bool)])


# ---- against the loops


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("option", ["alibi_slopes", "sinks", "masks", "all"])
def test_each_variant_agrees_with_the_loops_under_every_limit(
    form: Any, causal: bool, window: int | None, option: str
) -> None:
    options = {"alibi_slopes": SLOPES, "sinks": SINKS, "masks": random_masks(RAGGED)}
    chosen = options if option == "all" else {option: options[option]}
    check(Batch(RAGGED, seed=3), form, causal=causal, window=window, **chosen)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_slopes_and_sinks_belong_to_query_heads_however_these_share_kv_heads(form: Any, heads: Any) -> None:
    check(Batch([(3, 7), (1, 4)], heads=heads, dim=(8, 5)), form, alibi_slopes=SLOPES, sinks=SINKS)


@pytest.mark.parametrize("form", FORMS)
def test_positions_are_added_after_the_scale_and_the_soft_cap(form: Any) -> None:
    check(Batch([(3, 9)]), form, softmax_scale=2.0, soft_cap=0.5, alibi_slopes=SLOPES)


def test_more_queries_than_a_tile_keep_their_positions_and_their_rows_of_the_mask() -> None:
    lens = [(70, 71), (2, 3)]
    batch = Batch(lens, heads=(2, 1), dim=(4, 4))
    check(batch, window=40, alibi_slopes=SLOPES[:2], sinks=SINKS[:2], masks=random_masks(lens))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=4),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([(2, 1), (3, 3), (4, 2)]),
    st.booleans(),
    st.none() | st.integers(1, 8),
    st.none() | st.just(0.7),
    st.tuples(st.booleans(), st.booleans(), st.none() | st.sampled_from([0.0, 0.2, 0.9])),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_both_forms_agree_with_the_loops_on_any_combination(
    lens: Any,
    block_size: int,
    heads: Any,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    variant: tuple[bool, bool, float | None],
    num_splits: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    alibi, sink, density = variant
    options = {
        "causal": causal,
        "window": window,
        "soft_cap": soft_cap,
        "alibi_slopes": rng.normal(size=heads[0]) if alibi else None,
        "sinks": rng.normal(size=heads[0]) * 3 if sink else None,
        "masks": None if density is None else random_masks(lens, seed, density),
    }
    batch = Batch(lens, heads=heads, dim=(4, 3), block_size=block_size, seed=seed)
    check(batch, **options)
    check(batch, online_softmax_attention, num_splits, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "misread",
    [
        {"alibi_slopes": -SLOPES},
        {"alibi_slopes": SLOPES[[0, 2, 1, 3]]},  # kv head and group exchanged
        {"sinks": SINKS[[0, 2, 1, 3]]},
        {"sinks": np.full(4, -math.inf)},
        {"masks": [np.flip(mask) for mask in random_masks([(3, 7), (2, 4)])]},
        {"masks": [mask.reshape(mask.shape[::-1]).T for mask in random_masks([(3, 7), (2, 4)])]},
        {"causal": False},
        {"window": None},
    ],
)
def test_an_option_read_another_way_would_be_noticed(form: Any, misread: dict[str, Any]) -> None:
    batch = Batch([(3, 7), (2, 4)])
    options = {"alibi_slopes": SLOPES, "sinks": SINKS, "masks": random_masks([(3, 7), (2, 4)]), "window": 4}
    right = batch.expected(**options)
    wrong = batch.expected(**options | misread)
    assert not np.allclose(right[0], wrong[0], atol=1e-3)
    check(batch, form, **options)


# ---- identities


@pytest.mark.parametrize("form", FORMS)
def test_alibi_is_one_more_dimension_in_which_keys_carry_their_position(form: Any) -> None:
    batch = Batch([(3, 7)], spare=0.0)
    q, k, v, tables, lens, indptr = batch.args
    scale = 8**-0.5
    longer_q = np.concatenate([q, np.broadcast_to((SLOPES / scale)[None, :, None], (3, 4, 1))], axis=2)
    longer_k = np.concatenate([k, np.zeros((*k.shape[:3], 1))], axis=3)
    for token in range(7):
        longer_k[tables[0, token // 3], token % 3, :, 8] = token
    expected = form(longer_q, longer_k, v, tables, lens, indptr, softmax_scale=scale)
    np.testing.assert_allclose(form(*batch.args, alibi_slopes=SLOPES), expected, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_sink_scales_the_output_by_the_share_that_it_leaves(form: Any) -> None:
    batch = Batch([(5, 5), (3, 11), (1, 9)])
    o, lse = form(*batch.args, return_lse=True)
    with_sinks, with_sinks_lse = form(*batch.args, sinks=SINKS, return_lse=True)
    share = 1 / (1 + np.exp(SINKS - lse))
    np.testing.assert_allclose(with_sinks, o * share[..., None], rtol=1e-5, atol=1e-7)  # lse is float32
    np.testing.assert_allclose(with_sinks_lse, np.logaddexp(lse, SINKS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_options_that_say_nothing_change_no_bit(form: Any) -> None:
    batch = Batch(RAGGED)
    plain = form(*batch.args, return_lse=True)
    mask, indptr = pack_mask(np.ones(shape, bool) for shape in RAGGED)
    nothing = {"alibi_slopes": np.zeros(4), "sinks": np.full(4, -np.inf), "mask": mask, "mask_indptr": indptr}
    for got, wanted in zip(form(*batch.args, **nothing, return_lse=True), plain):
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_a_causal_window_drawn_as_a_mask_is_the_causal_window(form: Any) -> None:
    batch = Batch([(5, 9), (2, 4)])
    drawn = [np.tri(5, 9, 4, bool) & ~np.tri(5, 9, 4 - 3, bool), np.tri(2, 4, 2, bool) & ~np.tri(2, 4, 2 - 3, bool)]
    by_mask = form(*batch.args, causal=False, **bits_of(drawn), return_lse=True)
    for got, wanted in zip(by_mask, form(*batch.args, window=3, return_lse=True)):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_halves_merge_to_the_whole_when_one_of_them_has_the_sink() -> None:
    batch = Batch([(1, 8)], block_size=4, spare=0.0)
    q, k, v, tables, _, indptr = batch.args

    def half(at: int, **options: Any) -> Any:
        return paged_attention(q, k, v, tables[:, at : at + 1], [4], indptr, causal=False, return_lse=True, **options)

    o, lse = merge_states(*half(0), *half(1, sinks=SINKS))
    whole_o, whole_lse = paged_attention(*batch.args, sinks=SINKS, return_lse=True)
    np.testing.assert_allclose(o, whole_o, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)


# ---- edges


@pytest.mark.parametrize("form", FORMS)
def test_a_query_with_a_sink_and_no_key_gives_zero_and_the_sink(form: Any) -> None:
    lens = [(2, 0), (3, 1), (2, 5)]
    masks = [np.zeros((2, 0), bool), np.ones((3, 1), bool), np.zeros((2, 5), bool)]
    o, lse = form(*Batch(lens).args, **bits_of(masks), sinks=SINKS, return_lse=True)
    blind = [0, 1, 2, 3, 5, 6]
    assert not o[blind].any()
    assert np.array_equal(lse[blind], np.broadcast_to(SINKS.astype(np.float32), (6, 4)))
    assert o[4].all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sink", [-1e300, 1e300])
def test_a_huge_sink_takes_all_or_nothing_without_a_warning(form: Any, sink: float) -> None:
    batch = Batch([(2, 5)])
    o, lse = form(*batch.args, sinks=np.full(4, sink), return_lse=True)
    plain, plain_lse = form(*batch.args, return_lse=True)
    assert np.array_equal(o, plain if sink < 0 else np.zeros_like(plain))
    assert np.array_equal(lse, plain_lse if sink < 0 else np.full_like(lse, np.inf))  # float32 ends below 1e300


@pytest.mark.parametrize("form", FORMS)
def test_nan_under_a_zero_of_the_mask_reaches_only_those_whose_bit_is_one(form: Any) -> None:
    batch = Batch([(3, 4)], heads=(1, 1), block_size=4)
    _, k_cache, v_cache, tables, *_ = batch.args
    packed = bits_of([np.array([[1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]], bool)])
    clean = form(*batch.args, **packed, alibi_slopes=[0.5])
    k_cache[tables[0, 0], 1], v_cache[tables[0, 0], 1] = np.nan, np.inf
    o = form(*batch.args, **packed, alibi_slopes=[0.5])
    assert np.array_equal(o[[0, 2]], clean[[0, 2]])
    assert np.isnan(o[1]).all()


@pytest.mark.parametrize("form", FORMS)
def test_bytes_behind_a_sequences_bits_are_not_looked_at(form: Any) -> None:
    batch = Batch([(3, 7), (1, 4)])
    bits = bits_of(random_masks([(3, 7), (1, 4)]))
    roomy = np.full(16, 0xFF, np.uint8)
    roomy[:3], roomy[8] = bits["mask"][:3], bits["mask"][3]
    roomy[2] |= 0xE0
    padded = form(*batch.args, mask=roomy, mask_indptr=np.array([0, 8, 16], np.uint64))
    assert np.array_equal(padded, form(*batch.args, **bits))


@pytest.mark.parametrize("form", FORMS)
def test_slopes_and_sinks_of_any_floating_type_are_taken_as_they_are(form: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    batch = Batch([(2, 5)])
    exact = form(*batch.args, alibi_slopes=SLOPES, sinks=SINKS)  # all of them but 0.3 are exact in 16 bits
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        slopes, sinks = SLOPES.astype(dtype), SINKS.astype(dtype)
        wanted = form(*batch.args, alibi_slopes=SLOPES, sinks=sinks.astype(float))
        assert np.array_equal(form(*batch.args, alibi_slopes=slopes, sinks=sinks), wanted)
        np.testing.assert_allclose(wanted, exact, rtol=1e-2)


GOOD_MASK, GOOD_INDPTR = np.zeros(3, np.uint8), np.array([0, 3])
BAD: list[tuple[str, dict[str, Any]]] = [
    ("alibi_slopes must be one", {"alibi_slopes": np.zeros(3)}),
    ("alibi_slopes must be one", {"alibi_slopes": np.zeros((4, 1))}),
    ("alibi_slopes must be one", {"alibi_slopes": 0.5}),
    ("alibi_slopes must be floating", {"alibi_slopes": [1, 2, 3, 4]}),
    ("alibi_slopes must be finite", {"alibi_slopes": [0, 0, 0, math.nan]}),
    ("alibi_slopes must be finite", {"alibi_slopes": [0, 0, 0, -math.inf]}),
    ("sinks must be one", {"sinks": np.zeros(2)}),
    ("sinks must be floating", {"sinks": np.zeros(4, np.uint16)}),
    ("sinks must be finite", {"sinks": [0, 0, 0, math.nan]}),
    ("sinks must be finite", {"sinks": [0, 0, 0, math.inf]}),
    ("given together", {"mask": GOOD_MASK}),
    ("given together", {"mask_indptr": GOOD_INDPTR}),
    ("packed bits in uint8", {"mask": np.ones((3, 7), bool), "mask_indptr": GOOD_INDPTR}),
    ("packed bits in uint8", {"mask": [0, 0, 0], "mask_indptr": GOOD_INDPTR}),
    ("one axis", {"mask": np.zeros((3, 1), np.uint8), "mask_indptr": GOOD_INDPTR}),
    ("one axis", {"mask": GOOD_MASK, "mask_indptr": [[0, 3]]}),
    ("must be integers", {"mask": GOOD_MASK, "mask_indptr": [0.0, 3.0]}),
    ("must rise", {"mask": GOOD_MASK, "mask_indptr": np.zeros(0, int)}),
    ("must rise", {"mask": GOOD_MASK, "mask_indptr": [1, 3]}),
    ("must rise", {"mask": GOOD_MASK, "mask_indptr": [0, 4]}),
    ("must rise", {"mask": GOOD_MASK, "mask_indptr": [0, 4, 3]}),
    ("1 sequences", {"mask": GOOD_MASK, "mask_indptr": [0, 3, 3]}),
    ("16 bits, its queries and keys need 21", {"mask": GOOD_MASK[:2], "mask_indptr": [0, 2]}),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("message", "options"), BAD)
def test_options_that_do_not_fit_are_refused_and_nothing_is_written(
    form: Any, message: str, options: dict[str, Any]
) -> None:
    out = np.full((3, 4, 8), 5.0)
    with pytest.raises((ValueError, TypeError), match=message):
        form(*Batch([(3, 7)]).args, **options, out=out)
    assert (out == 5.0).all()
