"""gather_kv and scatter_kv: ragged sequences out of their blocks and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, UnsupportedVariant, WrongType
from pagedkv.kernels import gather_kv as module
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import ScaleMode
from pagedkv.kernels.gather_kv import gather_kv, scatter_kv
from tests.kernels.pools import DTYPES, Layer, Shape, assert_same_bytes, encode, layer_kv

LENGTHS = (0, 1, 7, 0, 12, 3)
STARTS = (0, 3, 1, 5, 0, 2)
KERNELS = {"gather_kv": gather_kv, "scatter_kv": scatter_kv}


def tables_of(rng: np.random.Generator, shape: Shape, lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Blocks in no order, each of one sequence; one column more than anybody needs."""
    blocks = -(-lengths // shape.block_size)
    assert blocks.sum() <= shape.num_blocks
    tables = np.full((len(lengths), int(blocks.max()) + 1), -1, np.int32)
    order = rng.permutation(shape.num_blocks)
    for seq, count in enumerate(blocks):
        tables[seq, :count], order = order[:count], order[count:]
    return tables


def random_pool(rng: np.random.Generator, shape: Shape) -> Layer:
    """A pool of numbers, or of all bits where there are no scales."""
    pool = shape.blank()
    layer = shape.views(pool)
    if shape.scale_mode == "none":
        pool[...] = rng.integers(0, 256, pool.shape)
        return layer
    for view in (layer.k, layer.v):
        view[...] = encode((20 * rng.standard_normal(view.shape)).astype(np.float32), shape.dtype)
    if shape.scale_mode == "token_head":
        layer.k_scale[...], layer.v_scale[...] = rng.random((2, *layer.k_scale.shape))
        return layer
    count = 1 if shape.scale_mode == "tensor" else shape.heads
    layer.k_scale, layer.v_scale = rng.random((2, count)).astype(np.float32)
    return layer


def rows_of(view: NDArray[Any], table: NDArray[np.int32], begin: int, end: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Block ids and offsets of a sequence's positions."""
    at = np.arange(begin, end)
    return table[at // view.shape[1]], at % view.shape[1]


@pytest.mark.parametrize("starts", [None, STARTS], ids=["from the start", "from within"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(30, 1, dim=32),
        Shape(20, 4, dim=80, layout="HND"),
        Shape(20, 5, dim=35, heads=3, dtype="float32"),
        Shape(20, 16, dim=64, dtype="int8", skew=4),
        Shape(20, 3, heads=1, dim=576, dim_v=512, dtype="bfloat16"),
        Shape(20, 256, heads=1, dim=128, dim_v=-1, dtype="float8_e4m3", layout="HND"),
    ],
    ids=str,
)
def test_sequences_come_out_of_their_blocks_and_go_back_bit_by_bit(
    backend: Backend, shape: Shape, starts: tuple[int, ...] | None
) -> None:
    rng = np.random.default_rng(shape.dim)
    begin = np.array(starts or [0] * len(LENGTHS))
    end = begin + LENGTHS
    indptr = np.concatenate([[0], np.cumsum(end - begin)]).astype(np.int32)
    tables = tables_of(rng, shape, np.where(end > begin, end, 0))
    host = random_pool(rng, shape)
    to = backend.asarray
    layer = shape.views(to(host.bytes))
    cache = layer_kv(backend, shape, layer)
    views = [view for view in (host.k, host.v) if view is not None]
    outs = [to(np.full((indptr[-1] + 1, *view.shape[2:]), 0x77, np.uint8).astype(view.dtype)) for view in views]
    guards = [backend.to_host(out).copy() for out in outs]
    common = {"first_positions": None if starts is None else to(begin.astype(np.int32))}
    gather_kv(cache, to(tables), to(indptr), *(out[:-1] for out in outs), **common)
    for view, out, guard in zip(views, outs, guards, strict=True):
        for seq in range(len(LENGTHS)):
            guard[indptr[seq] : indptr[seq + 1]] = view[rows_of(view, tables[seq], begin[seq], end[seq])]
        assert_same_bytes(backend.to_host(out), guard)

    empty = shape.views(to(shape.blank()))
    expected = shape.views(shape.blank())
    scatter_kv(layer_kv(backend, shape, empty), to(tables), to(indptr), *(out[:-1] for out in outs), **common)
    for view, target in zip(views, (expected.k, expected.v), strict=False):
        for seq in range(len(LENGTHS)):
            places = rows_of(view, tables[seq], begin[seq], end[seq])
            target[places] = view[places]
    assert_same_bytes(backend.to_host(empty.bytes), expected.bytes)


@pytest.mark.parametrize("scale_mode", ["none", "tensor", "head", "token_head"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("int8", "float16"), ("float8_e4m3", "bfloat16"), ("float8_e5m2", "float32")]
)
def test_quantised_kv_comes_out_decoded(backend: Backend, dtype: str, out_dtype: str, scale_mode: ScaleMode) -> None:
    shape = Shape(6, 4, dim=40, dim_v=24, heads=3, dtype=dtype, scale_mode=scale_mode)
    rng = np.random.default_rng(11)
    host = random_pool(rng, shape if scale_mode != "none" else Shape(6, 4, dim=40, dim_v=24, heads=3, dtype="int8"))
    host = shape.views(np.where(host.bytes & 0x7C == 0x7C, 0x11, host.bytes), (host.k_scale, host.v_scale))  # no NaN
    if scale_mode == "token_head":
        host.k_scale[...], host.v_scale[...] = rng.random((2, *host.k_scale.shape))
    lengths = np.array([9, 2])
    tables = tables_of(rng, shape, lengths)
    indptr = np.array([0, 9, 11], np.int32)
    to = backend.asarray
    scales = tuple(None if scale is None or scale.ndim == 3 else to(scale) for scale in (host.k_scale, host.v_scale))
    cache = layer_kv(backend, shape, shape.views(to(host.bytes), scales))
    outs = [to(np.full((11, 3, dim), np.nan, DTYPES[out_dtype])) for dim in (40, 24)]
    gather_kv(cache, to(tables), to(indptr), *outs)
    for view, scale, out in ((host.k, host.k_scale, outs[0]), (host.v, host.v_scale, outs[1])):
        for seq in range(2):
            places = rows_of(view, tables[seq], 0, lengths[seq])
            values = view[places].astype(np.float32)
            if scale is not None:
                values = (
                    values * (scale[places] if scale.ndim == 3 else np.broadcast_to(scale, values.shape[:2]))[..., None]
                )
            assert_same_bytes(backend.to_host(out)[indptr[seq] : indptr[seq + 1]], encode(values, out_dtype))


def test_no_tokens_are_no_work(backend: Backend) -> None:
    shape = Shape()
    to = backend.asarray
    layer = shape.views(to(shape.blank()))
    none = to(np.zeros((0, 2, 32), np.float16))
    for tables, indptr in ((np.zeros((0, 0)), [0]), (np.full((2, 1), -1), [0, 0, 0])):
        given = (to(tables.astype(np.int32)), to(np.array(indptr, np.int32)), none, none)
        gather_kv(layer_kv(backend, shape, layer), *given)
        scatter_kv(layer_kv(backend, shape, layer), *given)
    assert_same_bytes(backend.to_host(layer.bytes), shape.blank())


def arguments(backend: Backend) -> dict[str, Any]:
    shape = Shape()
    rows = np.zeros((6, 2, 32), np.float16)
    return {
        "cache": layer_kv(backend, shape, shape.views(shape.blank())),
        "block_tables": np.array([[1, 2], [3, -1]], np.int32),
        "indptr": np.array([0, 5, 6], np.int32),
        "k": rows,
        "v": rows.copy(),
    }


def test_with_debug_the_device_stops_at_a_block_outside_the_pool(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.name != "ptxsim":
        pytest.skip("a trap ends the CUDA context")
    monkeypatch.setattr(module, "_check_values", lambda *_: None)
    for kernel in KERNELS.values():
        for bad in (-1, 5):
            given = arguments(backend)
            rows = [given.pop("k"), given.pop("v")]
            given["block_tables"][0, 1] = bad
            with pytest.raises(Exception, match="trap"):
                kernel(given["cache"], given["block_tables"], given["indptr"], *rows, debug=True)


WRONG: list[tuple[str, dict[str, Any], type[PagedKVError], str]] = [
    ("too many tokens", {"indptr": np.array([0, 5, 7], np.int32)}, InvalidArgument, "indptr must rise from 0 to 6"),
    ("falling offsets", {"indptr": np.array([0, 7, 6], np.int32)}, InvalidArgument, "indptr must rise"),
    ("long offsets", {"indptr": np.array([0, 5, 6])}, WrongType, "indptr has dtype int64, not int32"),
    ("a table too few", {"block_tables": np.zeros((1, 2), np.int32)}, LayoutMismatch, "block_tables has shape"),
    (
        "a missing block",
        {"block_tables": np.array([[1, -1], [3, -1]], np.int32)},
        InvalidArgument,
        "has -1 for sequence 0",
    ),
    (
        "a far block",
        {"block_tables": np.array([[1, 2], [5, -1]], np.int32)},
        InvalidArgument,
        r"has 5 for sequence 1: .*\.\.4",
    ),
    (
        "too short a table",
        {"first_positions": np.array([4, 0], np.int32)},
        InvalidArgument,
        "sequence 0 needs 3 blocks",
    ),
    ("a negative start", {"first_positions": np.array([-1, 0], np.int32)}, InvalidArgument, "first_positions has -1"),
    ("another dtype", {"k": np.zeros((6, 2, 32), np.float32)}, WrongType, "is float16 and .* float32"),
    ("another shape", {"v": np.zeros((6, 2, 31), np.float16)}, LayoutMismatch, r"has shape \(6, 2, 31\)"),
    ("no V", {"v": None}, InvalidArgument, "is missing, and the cache has a V"),
]


@pytest.mark.parametrize("name", ["gather_kv", "scatter_kv"])
@pytest.mark.parametrize(("change", "error", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    backend: Backend, name: str, change: dict[str, Any], error: type[PagedKVError], message: str
) -> None:
    if backend.name != "ptxsim":
        pytest.skip("index values are checked on the host only")
    given = arguments(backend) | change
    rows = [given.pop("k"), given.pop("v")]
    with pytest.raises(error, match=message):
        KERNELS[name](*(given.pop(key) for key in ("cache", "block_tables", "indptr")), *rows, **given)
    assert all(row is None or not row.any() for row in rows)


def test_only_quantised_kv_changes_its_dtype_and_only_on_the_way_out(backend: Backend) -> None:
    given = arguments(backend)
    index = (given["block_tables"], given["indptr"])
    wide = np.zeros((6, 2, 32), np.float32)
    with pytest.raises(UnsupportedVariant, match="k_out is float32 and the cache float16"):
        gather_kv(given["cache"], *index, wide, wide)
    with pytest.raises(UnsupportedVariant, match="k is float32 and the cache float16: only equal bits"):
        scatter_kv(given["cache"], *index, wide, wide)
    shape = Shape(dtype="int8", scale_mode="token_head")
    scaled = layer_kv(backend, shape, shape.views(shape.blank()))
    small = wide.astype(np.int8)
    with pytest.raises(UnsupportedVariant, match="the cache has scales"):
        gather_kv(scaled, *index, small, small)
    with pytest.raises(UnsupportedVariant, match="int8 with scales"):
        scatter_kv(scaled, *index, small, small)
