"""Arrays of any shape, dtype and strides go out and come back as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from pagedkv.interop import as_array, as_view, export
from pagedkv.interop.needs import _is_dense

from .conftest import Dlpack

DTYPES = st.sampled_from(["float16", "float32", "float64", "int8", "int64", "uint16", "bool", "complex64"])
MANY = settings(max_examples=150, deadline=None, database=None, derandomize=True)


@st.composite
def parts(draw: Any) -> np.ndarray[Any, Any]:
    """A part of an array: some of its rows, backwards, transposed, with axes added."""
    shape = draw(arrays_of.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6))
    whole = np.arange(np.prod(shape)).reshape(shape).astype(draw(DTYPES))
    part = whole[draw(arrays_of.basic_indices(shape, allow_newaxis=True))]
    part = np.asarray(part) if isinstance(part, np.ndarray) else whole
    return part.transpose(draw(st.permutations(range(part.ndim))))


@MANY
@given(parts(), st.booleans())
def test_an_array_comes_back_as_it_was_over_every_protocol(array: np.ndarray[Any, Any], read_only: bool) -> None:
    view = export(array, read_only=read_only)
    for back in (np.from_dlpack(view), view.numpy(), np.asarray(view), as_array(Dlpack(view)), as_array(view.raw())):
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert np.array_equal(back, array)
        if array.size:
            assert back.ctypes.data == array.ctypes.data
    assert as_view(view.raw()).strides == array.strides


@MANY
@given(parts())
def test_a_copy_is_equal_compact_aligned_and_apart(array: np.ndarray[Any, Any]) -> None:
    copied = export(array).copy()
    assert copied.is_compact
    assert copied.ptr % 64 == 0 or not array.size
    assert not copied.read_only
    assert np.array_equal(copied.numpy(), array)
    assert not np.shares_memory(copied.numpy(), array)


@MANY
@given(parts())
def test_what_counts_as_compact_and_as_dense_is_what_numpy_counts(array: np.ndarray[Any, Any]) -> None:
    view = export(array)
    assert view.is_compact == array.flags.c_contiguous
    if array.size:
        span = sum((n - 1) * abs(step) for n, step in zip(array.shape, array.strides)) + array.itemsize
        forwards = all(n == 1 or step > 0 for n, step in zip(array.shape, array.strides))
        assert _is_dense(view) == (forwards and span == array.nbytes)
