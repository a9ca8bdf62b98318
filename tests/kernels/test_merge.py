"""merge_state and merge_states against float64.

They agree bit for bit where there is nothing to merge.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, WrongType
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.merge import merge_state, merge_states
from tests.kernels.pools import DTYPES, assert_same_bytes

BOUNDS = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
INF = np.inf
TYPES = [(name, name) for name in BOUNDS] + [("float32", "bfloat16")]


def merged(states: NDArray[Any], lse: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """States [num_states, heads, dim] and lse [num_states, heads] of one token, in float64."""
    heads, dim = states.shape[1:]
    o, total = np.zeros((heads, dim)), np.full(heads, -INF)
    for state, value in zip(states.astype(np.float64), lse.astype(np.float64), strict=True):
        for head in range(heads):
            if value[head] == -INF:
                continue
            both = np.logaddexp(total[head], value[head])
            o[head] = np.exp(total[head] - both) * o[head] + np.exp(value[head] - both) * state[head]
            total[head] = both
    return o, total


def some_states(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Random states; a third saw no key, and their o is NaN."""
    o = rng.standard_normal(shape).astype(DTYPES[dtype])
    lse = (10 * rng.standard_normal(shape[:-1])).astype(np.float32)
    unseen = rng.random(shape[:-1]) < 0.33
    o[unseen], lse[unseen] = np.nan, -INF
    return o, lse


def assert_merged(o: NDArray[Any], lse: NDArray[Any], expected: list[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    """Places of -inf first, then NaN, then the tolerance."""
    wanted_o, wanted_lse = np.array([pair[0] for pair in expected]), np.array([pair[1] for pair in expected])
    assert np.array_equal(np.isneginf(lse), np.isneginf(wanted_lse))
    assert np.isfinite(o.astype(np.float32)).all()
    seen = np.isfinite(wanted_lse)
    assert (o[~seen] == 0).all()
    assert np.abs(lse[seen] - wanted_lse[seen]).max(initial=0) < 1e-5
    bound = BOUNDS[o.dtype.name] * max(1, np.abs(wanted_o).max(initial=0))
    assert np.abs(o.astype(np.float64) - wanted_o).max(initial=0) < bound


@pytest.mark.parametrize("dim", [32, 80, 128, 512, 33])
@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
def test_two_states_are_merged_as_float64_does(backend: Backend, dtype: str, out_dtype: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    (a, lse_a), (b, lse_b) = (some_states(rng, (9, 3, dim), dtype) for _ in range(2))
    to = backend.asarray
    out, lse = to(np.full((9, 3, dim), np.nan, DTYPES[out_dtype])), to(np.full((9, 3), np.nan, np.float32))
    merge_state(backend, to(a), to(lse_a), to(b), to(lse_b), out, lse)
    expected = [merged(np.stack([a[t], b[t]]), np.stack([lse_a[t], lse_b[t]])) for t in range(9)]
    assert_merged(backend.to_host(out), backend.to_host(lse), expected)


def test_a_state_that_saw_nothing_leaves_the_other_bit_for_bit(backend: Backend) -> None:
    rng = np.random.default_rng(1)
    o = rng.standard_normal((2, 4, 64)).astype(np.float16)
    lse = (100 * rng.standard_normal((2, 4))).astype(np.float32)
    nothing, unseen = np.full_like(o, np.nan), np.full_like(lse, -INF)
    to = backend.asarray
    for first in (True, False):
        out, lse_out = to(np.full_like(o, np.nan)), to(np.full_like(lse, np.nan))
        pair = [to(o), to(lse)], [to(nothing), to(unseen)]
        a, b = pair if first else pair[::-1]
        merge_state(backend, *a, *b, out, lse_out)
        assert_same_bytes(backend.to_host(out), o)
        assert_same_bytes(backend.to_host(lse_out), lse)
    out, lse_out = to(np.full_like(o, np.nan)), to(np.full_like(lse, np.nan))
    merge_state(backend, to(nothing), to(unseen), to(nothing), to(unseen), out, lse_out)
    assert not backend.to_host(out).any()
    assert np.isneginf(backend.to_host(lse_out)).all()


def test_lse_far_apart_or_large_do_not_overflow(backend: Backend) -> None:
    to = backend.asarray
    ones = np.ones((4, 1, 32), np.float32)
    lse_a = np.array([[3e4], [-3e4], [88.0], [-1e30]], np.float32)
    lse_b = np.array([[3e4], [3e4], [-88.0], [-1e30]], np.float32)
    out, lse = to(np.full_like(ones, np.nan)), to(np.full_like(lse_a, np.nan))
    merge_state(backend, to(ones), to(lse_a), to(3 * ones), to(lse_b), out, lse)
    assert np.allclose(backend.to_host(out)[:, 0, 0], [2, 3, 1, 2])
    assert np.allclose(backend.to_host(lse)[:, 0], [3e4 + np.log(2), 3e4, 88, -1e30])


def test_nan_stays_nan(backend: Backend) -> None:
    to = backend.asarray
    ones = np.ones((3, 1, 32), np.float32)
    bad = ones.copy()
    bad[0] = np.nan
    lse_a, lse_b = np.array([[1.0], [np.nan], [2.0]], np.float32), np.array([[1.0], [1.0], [2.0]], np.float32)
    out, lse = to(np.zeros_like(ones)), to(np.zeros_like(lse_a))
    merge_state(backend, to(bad), to(lse_a), to(ones), to(lse_b), out, lse)
    assert np.isnan(backend.to_host(out)).all(axis=(1, 2)).tolist() == [True, True, False]
    assert np.isnan(backend.to_host(lse))[:, 0].tolist() == [False, True, False]


@pytest.mark.parametrize("into", ["a", "b"])
def test_merging_in_place_over_strided_views(backend: Backend, into: str) -> None:
    rng = np.random.default_rng(2)
    o, lse = some_states(rng, (5, 2, 4, 80), "float16")  # both states interleaved in one array
    to = backend.asarray
    states, lses = to(o.copy()), to(lse.copy())
    at = 0 if into == "a" else 1
    merge_state(backend, states[:, 0], lses[:, 0], states[:, 1], lses[:, 1], states[:, at], lses[:, at])
    found, found_lse = backend.to_host(states), backend.to_host(lses)
    assert_merged(found[:, at], found_lse[:, at], [merged(o[t], lse[t]) for t in range(5)])
    assert_same_bytes(found[:, 1 - at], o[:, 1 - at])
    assert_same_bytes(found_lse[:, 1 - at], lse[:, 1 - at])


@pytest.mark.parametrize("num_states", [0, 1, 2, 9])
def test_many_states_are_merged(backend: Backend, num_states: int) -> None:
    rng = np.random.default_rng(num_states)
    o, lse = some_states(rng, (7, num_states, 3, 64), "bfloat16")
    to = backend.asarray
    out, lse_out = to(np.full((7, 3, 64), np.nan, np.float32)), to(np.full((7, 3), np.nan, np.float32))
    merge_states(backend, to(o), to(lse), out, lse_out)
    assert_merged(backend.to_host(out), backend.to_host(lse_out), [merged(o[t], lse[t]) for t in range(7)])


def test_each_token_may_have_another_number_of_states(backend: Backend) -> None:
    rng = np.random.default_rng(4)
    counts = np.array([1, 0, 5, 2, 0, 3])
    indptr = np.concatenate([[1], 1 + np.cumsum(counts)]).astype(np.int32)  # state 0 belongs to no token
    o, lse = some_states(rng, (int(indptr[-1]), 4, 32), "float16")
    to = backend.asarray
    out, lse_out = to(np.full((6, 4, 32), np.nan, np.float16)), to(np.full((6, 4), np.nan, np.float32))
    merge_states(backend, to(o), to(lse), out, lse_out, indptr=to(indptr))
    parts = [slice(a, b) for a, b in itertools.pairwise(indptr)]
    assert_merged(backend.to_host(out), backend.to_host(lse_out), [merged(o[part], lse[part]) for part in parts])


def test_states_may_be_merged_into_the_first_and_heads_may_lie_outside(backend: Backend) -> None:
    rng = np.random.default_rng(5)
    o, lse = some_states(rng, (4, 3, 2, 32), "float32")
    to = backend.asarray
    states = to(np.ascontiguousarray(o.transpose(2, 1, 0, 3))).transpose(2, 1, 0, 3)
    lses = to(np.ascontiguousarray(lse.transpose(1, 2, 0))).transpose(2, 0, 1)
    merge_states(backend, states, lses, states[:, 0], lses[:, 0])
    found, found_lse = backend.to_host(states), backend.to_host(lses)
    assert_merged(found[:, 0], found_lse[:, 0], [merged(o[t], lse[t]) for t in range(4)])
    assert_same_bytes(found[:, 1:], o[:, 1:])


def test_lse_need_not_be_wanted_and_no_tokens_are_no_work(backend: Backend) -> None:
    to = backend.asarray
    ones, lse = to(np.ones((2, 1, 32), np.float16)), to(np.zeros((2, 1), np.float32))
    out = to(np.full((2, 1, 32), np.nan, np.float16))
    merge_state(backend, ones, lse, ones, lse, out)
    assert (backend.to_host(out) == 1).all()
    merge_state(backend, ones[:0], lse[:0], ones[:0], lse[:0], out[:0])
    merge_states(backend, ones[:0, None], lse[:0, None], out[:0])


OUT = np.zeros((2, 3, 32), np.float16)
LSE = np.zeros((2, 3), np.float32)
WRONG: list[tuple[str, Any, type[PagedKVError], str]] = [
    (
        "another shape",
        lambda b: merge_state(b, OUT, LSE, OUT[:, :2], LSE, OUT.copy()),
        LayoutMismatch,
        r"o_b has shape \(2, 2, 32\)",
    ),
    (
        "another dtype",
        lambda b: merge_state(b, OUT, LSE, OUT.astype(np.float32), LSE, OUT.copy()),
        WrongType,
        "one dtype",
    ),
    (
        "integers",
        lambda b: merge_state(b, OUT.view(np.int16), LSE, OUT, LSE, OUT.copy()),
        WrongType,
        "o_a has dtype int16",
    ),
    (
        "fp8",
        lambda b: merge_state(b, *2 * (OUT.astype(np.int8), LSE), OUT.copy()),
        WrongType,
        "o_a has dtype int8: results are",
    ),
    (
        "half lse",
        lambda b: merge_state(b, OUT, LSE.astype(np.float16), OUT, LSE, OUT.copy()),
        WrongType,
        "lse_a has dtype float16",
    ),
    ("short lse", lambda b: merge_state(b, OUT, LSE, OUT, LSE[:, :2], OUT.copy()), LayoutMismatch, "lse_b has shape"),
    ("no array", lambda b: merge_state(b, OUT, LSE, OUT, LSE, None), WrongType, "out must be an array"),
    (
        "half in place",
        lambda b: merge_state(b, OUT[::2], LSE[::2], OUT[::2], LSE[::2], OUT.view(np.uint16)[::2]),
        LayoutMismatch,
        "begins where",
    ),
    (
        "too many states",
        lambda b: merge_states(b, OUT, LSE, OUT.copy(), indptr=np.array([0, 1, 3], np.int32)),
        InvalidArgument,
        r"within 0\.\.2",
    ),
    (
        "falling",
        lambda b: merge_states(b, OUT, LSE, OUT.copy(), indptr=np.array([2, 1, 2], np.int32)),
        InvalidArgument,
        "must rise",
    ),
    (
        "dense without states",
        lambda b: merge_states(b, OUT, LSE, OUT.copy()),
        LayoutMismatch,
        r"states has shape \(2, 3, 32\)",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_does_not_fit_is_refused(backend: Backend, call: Any, error: type[PagedKVError], message: str) -> None:
    if backend.name != "ptxsim":
        pytest.skip("index values are checked on the host only")
    with pytest.raises(error, match=message):
        call(backend)
