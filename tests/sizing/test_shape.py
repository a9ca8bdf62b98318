"""Bytes of K and V against counting one by one.

Multi-head, grouped, latent, windowed and quantised.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import InvalidArgument, KVSpec, WrongType
from pagedkv.lab.sizing import KVFormat, LayerGroup, block_bytes, mla, sequence_bytes, token_bytes


def test_grouped_queries_keep_only_the_kv_heads() -> None:
    multi, grouped = (LayerGroup(32, 32, 128),), (LayerGroup(32, 8, 128),)
    assert token_bytes(multi) == 2 * 32 * 32 * 128 * 2 == 524_288
    assert token_bytes(grouped) == token_bytes(multi) // 4 == 131_072


def test_a_latent_is_one_vector_per_token_and_layer() -> None:
    """DeepSeek-V3 (arXiv:2412.19437): 576 numbers in each of 61 layers."""
    assert token_bytes((mla(61, 512, 64),)) == 61 * 576 * 2 == 70_272


def test_v_may_have_another_width_than_k() -> None:
    assert token_bytes((LayerGroup(2, 3, 192, v_head_dim=128),)) == 2 * 3 * (192 + 128) * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_bytes_are_those_of_a_cache_s_spec(dtype: str) -> None:
    spec = KVSpec(num_layers=5, num_kv_heads=3, head_dim=40, dtype=dtype, block_size=24)
    groups, kv = (LayerGroup.of(spec),), KVFormat(dtype)
    assert token_bytes(groups, kv) == spec.bytes_per_token
    assert block_bytes(groups, spec.block_size, kv) == spec.block_bytes


@pytest.mark.parametrize(
    ("kv", "num_bytes"),
    [
        (KVFormat("float32"), 512),
        (KVFormat("bfloat16"), 256),
        (KVFormat("fp8"), 128),
        (KVFormat("int8"), 128),
        (KVFormat("int8", scale_group=128), 128 + 2),  # a scale per token and head
        (KVFormat("int8", scale_group=128, scale_bits=32), 128 + 4),
        (KVFormat("int4"), 64),
        (KVFormat("int4", scale_group=32, scale_bits=32), 64 + 4 * 4),  # scale and zero point of every 32 numbers
        (KVFormat("int4", scale_group=100, scale_bits=16), 64 + 2 * 2),  # the last group is not full
        (KVFormat("int4", scale_group=128, scale_bits=4), 64 + 1),  # half a byte is rounded up
    ],
)
def test_a_head_of_128_numbers(kv: KVFormat, num_bytes: int) -> None:
    assert kv.vector_bytes(128) == num_bytes
    assert token_bytes((LayerGroup(7, 3, 128),), kv) == 7 * 3 * 2 * num_bytes


def test_an_odd_number_of_half_bytes_is_rounded_up() -> None:
    assert KVFormat("int4").vector_bytes(5) == 3


def test_layers_with_and_without_a_window_add_up() -> None:
    full, near = LayerGroup(21, 8, 256), LayerGroup(21, 8, 256, window=4096)
    assert sequence_bytes((full, near), 8192) == sequence_bytes((full,), 8192) + sequence_bytes((near,), 4096)
    assert sequence_bytes((full, near), 100) == sequence_bytes((full, full), 100)


@given(
    num_tokens=st.integers(0, 300),
    window=st.none() | st.integers(1, 100),
    block_size=st.integers(1, 33),
)
def test_windowed_blocks_are_those_that_a_query_sees(num_tokens: int, window: int | None, block_size: int) -> None:
    group = LayerGroup(1, 1, 1, window=window)
    query = num_tokens - 1
    seen = [token for token in range(num_tokens) if window is None or query - token < window]
    assert group.kept_tokens(num_tokens) == len(seen)
    assert set(group.kept_blocks(num_tokens, block_size)) == {token // block_size for token in seen}
    assert sequence_bytes((group,), num_tokens) == 4 * len(seen)
    assert sequence_bytes((group,), num_tokens, block_size) == 4 * block_size * len({t // block_size for t in seen})


@given(
    num_values=st.integers(0, 300),
    name=st.sampled_from(["float16", "fp8", "int4"]),
    group=st.integers(0, 70),
    bits=st.integers(1, 40),
)
def test_a_vector_s_bytes_hold_its_bits_and_waste_less_than_two_bytes(
    num_values: int, name: str, group: int, bits: int
) -> None:
    kv = KVFormat(name, scale_group=group, scale_bits=bits)
    width = {"float16": 16, "fp8": 8, "int4": 4}[name]
    scales = len(range(0, num_values, group)) if group else 0
    needed = num_values * width + scales * bits
    assert needed <= 8 * kv.vector_bytes(num_values) < needed + 16


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: LayerGroup(0, 1, 1), InvalidArgument),
        (lambda: LayerGroup(1, 1, 2**17), InvalidArgument),
        (lambda: LayerGroup(1, 1, 1.0), WrongType),  # type: ignore[arg-type]
        (lambda: LayerGroup(1, 1, 1, v_head_dim=-1), InvalidArgument),
        (lambda: LayerGroup(1, 1, 1, window=0), InvalidArgument),
        (lambda: mla(1, 0, 64), InvalidArgument),
        (lambda: KVFormat("int3"), InvalidArgument),
        (lambda: KVFormat(8), WrongType),  # type: ignore[arg-type]
        (lambda: KVFormat("int8", scale_group=-1), InvalidArgument),
        (lambda: KVFormat("int8", scale_bits=0), InvalidArgument),
        (lambda: sequence_bytes((LayerGroup(1, 1, 1),), -1), InvalidArgument),
        (lambda: sequence_bytes((LayerGroup(1, 1, 1),), 1, 257), InvalidArgument),
        (lambda: block_bytes((LayerGroup(1, 1, 1),), 0), InvalidArgument),
    ],
)
def test_what_is_no_shape_is_refused(make: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        make()


def test_a_spec_whose_v_is_not_as_wide_as_its_k_is_counted_so() -> None:
    for width in (None, 3, 12):
        spec = KVSpec(2, 3, 8, "float16", head_dim_v=width)
        assert LayerGroup.of(spec).token_bytes(KVFormat("float16")) == spec.bytes_per_token
