"""`merge_states` on the CPU against float64.

Dtypes, layouts, states without keys, threads, and refusals.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv import cpu
from pagedkv.cpu import _write
from pagedkv.cpu.merge import merge_states
from pagedkv.errors import LayoutMismatch, PagedKVError, WrongType
from tests.cpu import by_numpy
from tests.cpu.by_numpy import SOURCES
from tests.cpu.gil import lets_others_run

STEP = {"float64": 2.0**-50, "float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # a last bit, more or less


def drawn(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """States and their lse; about a third have no keys, and hold NaN."""
    rng = np.random.default_rng(seed)
    states, lses = rng.standard_normal(shape).astype(dtype), rng.uniform(-30, 30, shape[:3]).astype(np.float32)
    none = rng.random(shape[:3]) < 0.3
    states[none], lses[none] = np.nan, -np.inf
    return states, lses


def merged(states: NDArray[Any], lses: NDArray[Any], dtype: Any = None) -> tuple[NDArray[Any], NDArray[np.float32]]:
    out = np.full(states.shape[1:], 7, states.dtype if dtype is None else dtype)
    lse = np.full(lses.shape[1:], 7, np.float32)
    merge_states(states, lses, out, lse)
    return out, lse


def near(found: NDArray[Any], exact: NDArray[np.float64], step: float) -> None:
    """Assert the same non-finite values, and elsewhere values within one rounding.

    The rounding is that of the larger of the parts.
    """
    found = found.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(exact))
    whole = np.isfinite(exact)
    np.testing.assert_array_equal(found[~whole], exact[~whole])
    np.testing.assert_allclose(found[whole], exact[whole], rtol=step, atol=step * 1e-3)


@pytest.mark.parametrize("out_dtype", SOURCES)
@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("shape", [(1, 3, 2, 16), (2, 5, 3, 64), (3, 1, 1, 1), (7, 4, 2, 300), (2, 3, 1, 0)], ids=str)
def test_states_of_every_dtype_are_merged_by_their_weights(shape, dtype, out_dtype):
    states, lses = drawn(shape, SOURCES[dtype])
    out, lse = merged(states, lses, SOURCES[out_dtype])
    exact, exact_lse = by_numpy.merge(states, lses)
    near(out, exact, STEP[out_dtype])
    near(lse, exact_lse, STEP["float32"])


@pytest.mark.parametrize("dtype", SOURCES)
def test_one_state_is_given_back_bit_for_bit_and_zeros_where_it_has_no_keys(dtype):
    states, lses = drawn((1, 50, 2, 16), SOURCES[dtype])
    states[0, 0, 0, :3], lses[0, 0, 0] = [-0.0, np.inf, np.nan], 1
    out, lse = merged(states, lses)
    by_numpy.same_bits(out, np.where(np.isneginf(lses[0])[..., None], 0, states[0]).astype(SOURCES[dtype]))
    np.testing.assert_array_equal(lse, lses[0])


def test_nan_and_infinity_reach_the_result_of_their_own_row_alone():
    states, lses = drawn((3, 4, 2, 8))
    states[...], lses[...] = 1, 0
    states[1, 0, 0, 3], states[2, 1, 0, 4], lses[0, 2, 0], lses[0, 3, 1] = np.nan, np.inf, np.nan, np.inf
    lses[:, 3, 0] = np.nan
    out, lse = merged(states, lses)
    exact, exact_lse = by_numpy.merge(states, lses)
    np.testing.assert_array_equal(out, exact.astype(np.float32))
    near(lse, exact_lse, STEP["float32"])
    assert np.isfinite(out[0, 1]).all()


def test_states_of_any_lse_are_weighed_without_overflow():
    states, lses = drawn((2, 1, 1, 4))
    states[0], states[1] = 1, 3
    for a, b, expected in ((5000, 5000, 2), (-5000, -5000, 2), (5000, -5000, 1), (3e38, 0, 1)):
        lses[:, 0, 0] = a, b
        np.testing.assert_array_equal(merged(states, lses)[0], np.full((1, 1, 4), expected, np.float32))


@pytest.mark.parametrize(("dtype", "bits"), [(np.float16, 10), (ml_dtypes.bfloat16, 7)], ids=["float16", "bfloat16"])
def test_a_result_is_rounded_once(dtype, bits):
    states, lses = np.zeros((1, 1, 1, 2)), np.zeros((1, 1, 1), np.float32)
    states[...] = 1 + 2.0 ** -(bits + 1) + 2**-40
    assert (merged(states, lses, dtype)[0] == 1 + 2.0**-bits).all()


@pytest.mark.parametrize("layout", ["backwards", "every second", "states last", "another byte order"])
def test_any_layout_is_read_and_written_in_place(layout):
    states, lses = drawn((3, 6, 4, 32))
    right, right_lse = merged(states, lses)
    out, lse = np.zeros((6, 4, 32), np.float32), np.zeros((6, 4), np.float32)
    if layout == "backwards":
        states, lses = states[::-1], lses[::-1]
        right, right_lse = merged(states.copy(), lses.copy())
        out, lse = out[::-1, :, ::-1], lse[:, ::-1]
    elif layout == "every second":
        wide = np.repeat(states, 2, axis=3)
        states, out = wide[..., ::2], np.zeros((12, 4, 64), np.float32)[::2, :, 1::2]
    elif layout == "states last":
        states, lses = np.moveaxis(np.moveaxis(states, 0, -1).copy(), -1, 0), lses.astype(np.float64)
    else:
        states, lses = states.astype(">f4"), lses.astype(">f4")
    merge_states(states, lses, out, lse)
    np.testing.assert_array_equal(out, right)
    np.testing.assert_array_equal(lse, right_lse)


def test_the_result_may_be_written_over_a_state_and_its_lse():
    states, lses = drawn((3, 40, 2, 16))
    right, right_lse = merged(states, lses)
    merge_states(states, lses, states[1], lses[2])
    np.testing.assert_array_equal(states[1], right)
    np.testing.assert_array_equal(lses[2], right_lse)


def test_the_bits_do_not_depend_on_the_threads(threads):
    states, lses = drawn((3, 200, 8, 64), np.float16)
    results = []
    for number in (1, 2, 3):
        cpu.set_num_threads(number)
        results.append([array.tobytes() for array in merged(states, lses)])
    assert results[0] == results[1] == results[2]


def test_others_run_while_a_call_merges():
    states, lses = drawn((4, 400, 8, 128))
    out = np.zeros(states.shape[1:], np.float32)
    assert lets_others_run(lambda: _write.merge(states, lses, out, None, "float32", "float32", 1))


STATES, LSES = np.ones((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)
OUT, LSE = np.full((3, 4, 8), 7, np.float32), np.full((3, 4), 7, np.float32)
READ_ONLY = np.broadcast_to(np.float32(7), (3, 4, 8))
WRONG: dict[str, tuple[tuple[Any, ...], type[PagedKVError]]] = {
    "integers": ((STATES.astype(np.int32), LSES, OUT, LSE), WrongType),
    "a list": ((STATES.tolist(), LSES, OUT, LSE), WrongType),
    "an out of integers": ((STATES, LSES, OUT.astype(np.int32), LSE), WrongType),
    "an out in another byte order": ((STATES, LSES, OUT.astype(">f4"), LSE), WrongType),
    "lse that are text": ((STATES, LSES.astype(str), OUT, LSE), WrongType),
    "lse of another shape": ((STATES, LSES[:, :2], OUT, LSE), LayoutMismatch),
    "too few axes": ((STATES[0], LSES, OUT, LSE), LayoutMismatch),
    "no states": ((STATES[:0], LSES[:0], OUT, LSE), LayoutMismatch),
    "an out of another shape": ((STATES, LSES, OUT[:2], LSE), LayoutMismatch),
    "a result lse of another shape": ((STATES, LSES, OUT, LSE[:2]), LayoutMismatch),
    "a result lse of float64": ((STATES, LSES, OUT, LSE.astype(np.float64)), LayoutMismatch),
    "a result lse that is a list": ((STATES, LSES, OUT, LSE.tolist()), LayoutMismatch),
    "a read-only out": ((STATES, LSES, READ_ONLY, LSE), LayoutMismatch),
    "a read-only lse": ((STATES, LSES, OUT, READ_ONLY[..., 0]), LayoutMismatch),
}


@pytest.mark.parametrize(("given", "kind"), WRONG.values(), ids=WRONG)
def test_states_that_do_not_fit_are_refused_and_nothing_is_written(given, kind):
    with pytest.raises(kind):
        merge_states(*given)
    assert (OUT == 7).all()
    assert (LSE == 7).all()


def test_bfloat16_comes_as_its_own_dtype_alone():
    with pytest.raises(WrongType, match="uint16"):
        merge_states(STATES.astype(ml_dtypes.bfloat16).view(np.uint16), LSES, OUT)
