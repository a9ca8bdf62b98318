"""KVSpec: its arithmetic, its fingerprint, and the views it cuts out of an arena."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, WrongType
from pagedkv.spec.block_layout import layer_view
from pagedkv.spec.kv_spec import KVSpec

LLAMA3_8B = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128)
SMALL = KVSpec(3, 2, 4, "float32", 5)


def test_a_block_of_an_8b_model_is_two_mebibytes() -> None:
    assert LLAMA3_8B.block_bytes == 2 * 2**20
    assert LLAMA3_8B.bytes_per_token == 131072
    assert LLAMA3_8B.block_shape == (32, 2, 16, 8, 128)
    assert LLAMA3_8B.np_dtype == np.float16


def test_hnd_puts_heads_before_tokens_and_keeps_the_size() -> None:
    hnd = dataclasses.replace(LLAMA3_8B, layout="HND")
    assert hnd.block_shape == (32, 2, 8, 16, 128)
    assert hnd.block_bytes == LLAMA3_8B.block_bytes


def test_a_spec_is_frozen_and_numbers_are_plain_ints() -> None:
    spec = KVSpec(np.int64(2), np.int32(2), np.uint8(4), np.dtype(np.float16))  # type: ignore[arg-type]
    assert type(spec.num_layers) is int
    assert spec.dtype == "float16"
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.num_layers = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, InvalidArgument), (-1, InvalidArgument), (2**31, InvalidArgument), (10**400, InvalidArgument)]
    + [(bad, WrongType) for bad in (True, 1.0, math.nan, "8", None, [8], np.float32(8))],
)
def test_numbers_that_are_not_positive_whole_numbers_are_refused(field: str, value: Any, error: Any) -> None:
    numbers: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "block_size": 4} | {
        field: value
    }
    with pytest.raises(error, match=field):
        KVSpec(**numbers)


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"block_size": 257},
            {"layout": "DHN"},
            {"layout": "nhd"},
            {"dtype": "int4"},
            {"model": "x" * 70_000},
        ),
        *({"num_layers": 2**16, "num_kv_heads": 2**10}, {"model": "\ud800"}),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        KVSpec(**({"num_layers": 1, "num_kv_heads": 1, "head_dim": 128} | fields))


@pytest.mark.parametrize("fields", [{"layout": 1}, {"layout": b"NHD"}, {"model": None}, {"model": b"x"}])
def test_names_that_are_not_text_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(WrongType):
        KVSpec(1, 1, 1, **fields)


CHANGES: list[dict[str, Any]] = [
    {},
    {"num_layers": 4},
    {"num_kv_heads": 3},
    {"head_dim": 5},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"block_size": 4},
    {"layout": "HND"},
    {"model": "m"},
    {"num_layers": 2, "num_kv_heads": 3},  # the same bytes in a block
]


def test_any_change_of_a_field_changes_the_fingerprint() -> None:
    prints = {dataclasses.replace(SMALL, **change).fingerprint() for change in CHANGES}
    assert len(prints) == len(CHANGES)
    assert all(len(fingerprint) == 32 for fingerprint in prints)


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    script = "from pagedkv.spec.kv_spec import KVSpec; print(KVSpec(3, 2, 4, 'float32', 5).fingerprint().hex())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == SMALL.fingerprint().hex()


@pytest.mark.skipif(sys.byteorder != "little", reason="the fingerprint carries the byte order")
def test_the_fingerprint_is_what_it_was_in_the_first_release() -> None:
    assert SMALL.fingerprint().hex() == "8152bd935871d5cebcf5183362ca6612464a9c7214df164901396f96ac63391e"


specs = st.builds(
    KVSpec,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 5),
    layout=st.sampled_from(["NHD", "HND"]),
)


@given(specs, st.integers(0, 4))
def test_layer_views_cover_every_byte_once_and_in_the_spec_s_order(spec: KVSpec, num_blocks: int) -> None:
    arena = np.zeros((num_blocks, spec.block_bytes), np.uint8)
    numbers = arena.view(spec.np_dtype).view(np.uint16 if spec.itemsize == 2 else np.uint32)
    numbers[...] = np.arange(numbers.size, dtype=numbers.dtype).reshape(numbers.shape)
    expected = numbers.reshape(num_blocks, *spec.block_shape)
    if spec.layout == "HND":
        expected = expected.swapaxes(3, 4)
    for layer in range(spec.num_layers):
        for side, view in enumerate(layer_view(arena, layer, spec)):
            assert view.shape == (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
            assert view.dtype == spec.np_dtype
            assert np.shares_memory(view, arena) or num_blocks == 0
            assert np.array_equal(view.view(numbers.dtype), expected[:, layer, side])


def test_writing_through_a_view_writes_the_arena() -> None:
    arena = np.zeros((2, SMALL.block_bytes), np.uint8)
    _, v = layer_view(arena, 2, SMALL)
    v[1, 4, 1, 3] = 7.0
    assert arena[1].view(np.float32)[-1] == 7.0
    assert not arena[0].any()


def test_rows_may_be_apart() -> None:
    arena = np.zeros((6, SMALL.block_bytes), np.uint8)
    k, _ = layer_view(arena[::2], 0, SMALL)
    k[1] = 1.0
    assert arena[2].any()
    assert not arena[1].any()


@pytest.mark.parametrize(
    "arena",
    [
        np.zeros((2, SMALL.block_bytes), np.int8),
        np.zeros((2, SMALL.block_bytes + 4), np.uint8),
        np.zeros(SMALL.block_bytes, np.uint8),
        np.zeros((2, 2 * SMALL.block_bytes), np.uint8)[:, ::2],
        np.zeros((2, SMALL.block_bytes + 1), np.uint8)[:, :-1],
        np.zeros(2 * SMALL.block_bytes + 1, np.uint8)[1:].reshape(2, -1),
        [[0] * SMALL.block_bytes],
    ],
)
def test_an_arena_that_is_not_the_spec_s_is_a_layout_mismatch(arena: Any) -> None:
    with pytest.raises(LayoutMismatch):
        layer_view(arena, 0, SMALL)


@pytest.mark.parametrize("layer", [-1, 3, 1.0, True, None])
def test_a_layer_that_is_not_there_is_refused(layer: Any) -> None:
    with pytest.raises(PagedKVError):
        layer_view(np.zeros((1, SMALL.block_bytes), np.uint8), layer, SMALL)
