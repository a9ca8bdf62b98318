"""decode_simt against float64: every schedule, shape, dtype and variant it takes."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.kernels import decode_simt
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import Schedule
from tests.kernels.cases import Case, check
from tests.slices import one_in

RAGGED = (0, 1, 15, 16, 17, 70, 255)
VARIANTS = [
    Case((17, 70), window=20),
    Case((17, 70), soft_cap=5.0),
    Case((17, 70), alibi=True),
    Case((0, 70), sinks=True),
    Case((17, 70, 1), (3, 5, 2)),
    Case((17, 70, 1), (3, 5, 2), causal=False, window=7),
    Case((17, 70, 1), (3, 5, 2), mask=True),
    Case((17, 70, 1), (3, 5, 2), window=20, soft_cap=5.0, alibi=True, sinks=True, mask=True),
    Case((2, 3), (5, 3)),
]


@pytest.mark.parametrize("schedule", ["whole", "partitioned", "even"])
def test_a_ragged_batch_is_right_with_every_schedule(backend: Backend, schedule: Schedule) -> None:
    check(backend, Case(RAGGED), schedule=schedule)


@pytest.mark.parametrize("schedule", ["whole", "partitioned", "even"])
def test_a_long_sequence_beside_a_short_one(backend: Backend, schedule: Schedule) -> None:
    check(backend, Case((1000, 33), num_kv_heads=1), schedule=schedule)


@pytest.mark.parametrize("head_dim", one_in(2, [33, 32, 80, 96, 256, 128]))
def test_head_dims(backend: Backend, head_dim: int) -> None:
    check(backend, Case((17, 70), head_dim=head_dim, num_kv_heads=1))


@pytest.mark.parametrize("dtype", one_in(2, ["float32", "bfloat16"]))
@pytest.mark.parametrize("head_dim", [40, 64])
def test_dtypes(backend: Backend, dtype: str, head_dim: int) -> None:
    check(backend, Case((17, 70), head_dim=head_dim, q_dtype=dtype, kv_dtype=dtype))


@pytest.mark.parametrize("group_size", one_in(2, [1, 2, 7, 3, 16, 8]))
def test_group_sizes(backend: Backend, group_size: int) -> None:
    check(backend, Case((17, 70), group_size=group_size, num_kv_heads=1))


@pytest.mark.parametrize("block_size", one_in(2, [0, 1, 5, 8, 32, 64, 256, 128]))
def test_block_sizes(backend: Backend, block_size: int) -> None:
    check(backend, Case((17, 170), block_size=block_size, num_kv_heads=1))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts(backend: Backend, layout: str) -> None:
    check(backend, Case((17, 70), layout=layout, block_size=8))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "float8_e5m2", "int8"])
@pytest.mark.parametrize("scale_mode", one_in(2, ["head", "tensor", "token_head"]))
def test_quantised_kv(backend: Backend, kv_dtype: str, scale_mode: str) -> None:
    check(backend, Case((17, 70), kv_dtype=kv_dtype, scale_mode=scale_mode))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_variants(backend: Backend, case: Case) -> None:
    check(backend, case)


@pytest.mark.parametrize("schedule", one_in(2, ["even", "partitioned"]))
def test_a_window_with_every_schedule_that_splits(backend: Backend, schedule: Schedule) -> None:
    check(backend, Case((600, 530), (2, 1), window=70, num_kv_heads=1), schedule=schedule)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "kv_dtype"),
    [(576, 512, "float8_e4m3"), (576, 512, "float16"), (112, 112, "int8"), (256, 256, "float32"), (64, 64, "int8")],
)
def test_a_lane_holds_no_more_of_a_row_than_stays_in_registers(head_dim: int, head_dim_v: int, kv_dtype: str) -> None:
    case = Case((70,), head_dim=head_dim, head_dim_v=head_dim_v, kv_dtype=kv_dtype, scale_mode="tensor")
    tiling = decode_simt.tiling(case.config)
    vector = dict(tiling.macros)["VEC"]
    lanes = max(n for n in (1, 2, 4, 8, 16) if head_dim // vector % n == head_dim_v // vector % n == 0)
    assert tiling.row_tile * (head_dim + head_dim_v) // lanes <= decode_simt.MAX_FLOATS
    assert vector == case.config.vector or 2 * (head_dim + head_dim_v) // lanes > decode_simt.MAX_FLOATS


@pytest.mark.parametrize("kv_dtype", ["float16", "float32", "float8_e4m3"])
def test_heads_of_mla_shape(backend: Backend, kv_dtype: str) -> None:
    fp8 = kv_dtype == "float8_e4m3"
    types: dict[str, Any] = {"q_dtype": "bfloat16" if fp8 else kv_dtype, "scale_mode": "tensor" if fp8 else "none"}
    check(backend, Case((70,), head_dim=576, head_dim_v=512, group_size=2, num_kv_heads=1, kv_dtype=kv_dtype, **types))


def test_it_names_the_head_dims_it_cannot_take() -> None:
    reason = decode_simt.unsupported(Case(head_dim=640).config, (8, 0))
    assert reason is not None
    assert "640" in reason
    assert "576" in reason
