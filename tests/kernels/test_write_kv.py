"""write_kv against NumPy, bit for bit: what is written where, and that nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, UnsupportedVariant, WrongType
from pagedkv.kernels import write_kv as module
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.layer_kv import LayerKv
from pagedkv.kernels.write_kv import write_kv
from tests.kernels.pools import (
    DTYPES,
    LARGEST,
    Layer,
    Shape,
    assert_same_bytes,
    encode,
    huge,
    layer_kv,
    quantise,
    row_scales,
)

SOURCES = ("float32", "float16", "bfloat16")
# Ties, the edges of fp16, e4m3 and e5m2, signed zeros, what has no finite place.
ODD = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -3.5,
    126.5,
    127.5,
    240.0,
    447.9,
    448.0,
    463.9,
    464.0,
    1e4,
    57344.0,
    -61440.0,
]
ODD += [65504.0, 65519.0, 65520.0, 1e38, -1e38, 2.0**-9, 3 * 2.0**-10, 2.0**-10, 2.0**-16, 1.0078125, 1.01171875, 0.1]
ODD += [float("inf"), float("-inf")]


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def slots_of(rng: np.random.Generator, shape: Shape, num_tokens: int, skipped: int = 1) -> NDArray[np.int64]:
    """Return distinct slots in no order, the pool's first and last among them.

    Some tokens are written nowhere.
    """
    last = shape.num_blocks * shape.block_size - 1
    slots = np.concatenate([[0, last], 1 + rng.permutation(last - 1)])[:num_tokens].astype(np.int64)
    slots[rng.permutation(num_tokens)[:skipped]] = -1
    return slots


def put(shape: Shape, layer: Layer, slots: NDArray[np.int64], k: NDArray[Any], v: NDArray[Any] | None) -> None:
    """write_kv without rotation, in NumPy."""
    kept = slots >= 0
    blocks, offsets = np.divmod(slots[kept], shape.block_size)
    for rows, view, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
        if rows is None:
            continue
        values = rows[kept]
        if values.dtype == view.dtype:
            view[blocks, offsets] = values
        elif shape.scale_mode == "none":
            view[blocks, offsets] = encode(values.astype(np.float32), shape.dtype)
        else:
            wide = values.astype(np.float32)
            if shape.scale_mode == "token_head":
                scales[blocks, offsets] = row_scales(wide, shape.dtype)
                used = scales[blocks, offsets]
            else:
                used = np.broadcast_to(scales, values.shape[:2])
            view[blocks, offsets] = quantise(wide, used, shape.dtype)


def given_scales(rng: np.random.Generator, shape: Shape) -> tuple[Any, Any]:
    if shape.scale_mode not in ("tensor", "head"):
        return None, None
    count = 1 if shape.scale_mode == "tensor" else shape.heads
    k_scale, v_scale = (0.01 + rng.random((2, count))).astype(np.float32)
    return k_scale, None if shape.dim_v == -1 else v_scale


def check(
    backend: Backend,
    shape: Shape,
    src: str = "float16",
    num_tokens: int = 7,
    k: NDArray[Any] | None = None,
    slots: NDArray[np.int64] | None = None,
) -> None:
    """Write random (or given) rows both ways and compare all bytes of the pool."""
    rng = np.random.default_rng(shape.block_size + shape.dim)
    if k is None:
        k = numbers(rng, (num_tokens, shape.heads, shape.dim), src)
    v = None if shape.dim_v == -1 else numbers(rng, (len(k), shape.heads, shape.width_v), src)
    if slots is None:
        slots = slots_of(rng, shape, len(k))
    scales = given_scales(rng, shape)
    host = shape.views(shape.blank(), scales)
    to = backend.asarray
    device = shape.views(to(shape.blank()), tuple(None if scale is None else to(scale) for scale in scales))
    write_kv(layer_kv(backend, shape, device), to(slots), to(k), None if v is None else to(v))
    put(shape, host, slots, k, v)
    assert_same_bytes(backend.to_host(device.bytes), host.bytes)


def odd_numbers(src: str) -> NDArray[Any]:
    """Rows [4, 2, 32] with all of ODD, and others."""
    rng = np.random.default_rng(1)
    with np.errstate(over="ignore"):
        odd = np.array(ODD, np.float32).astype(DTYPES[src])
    return np.concatenate([np.tile(odd, 4), numbers(rng, (4 * 32 * 2 - 4 * len(ODD),), src)]).reshape(4, 2, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("src", SOURCES)
def test_every_dtype_is_rounded_as_numpy_rounds(backend: Backend, src: str, dtype: str) -> None:
    check(backend, Shape(dtype=dtype), src, k=odd_numbers(src))


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2", "bfloat16"])
def test_devices_without_the_conversion_round_alike(backend: Backend, dtype: str) -> None:
    if backend.name != "ptxsim":
        pytest.skip("another device would be needed")
    from tests.ptxsim.backend import PtxsimBackend

    older = PtxsimBackend((8, 0))
    check(older, Shape(dtype=dtype), "float32", k=odd_numbers("float32"))
    if dtype in LARGEST:
        check(older, Shape(dtype=dtype, scale_mode="token_head"), "float32")


@pytest.mark.parametrize("scale_mode", ["tensor", "head", "token_head"])
@pytest.mark.parametrize("dtype", LARGEST)
def test_scales_divide_before_rounding(backend: Backend, dtype: str, scale_mode: Any) -> None:
    check(backend, Shape(dtype=dtype, scale_mode=scale_mode, heads=3), "bfloat16")


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_row_of_zeros_gets_the_scale_zero_and_what_is_not_finite_spoils_its_row_alone(
    backend: Backend, dtype: str
) -> None:
    shape = Shape(dtype=dtype, scale_mode="token_head", heads=1, dim_v=-1)
    k = np.ones((5, 1, 32), np.float32)
    k[0] = 0
    k[1, 0, 3], k[2, 0, 31], k[3, 0, 9] = np.nan, np.inf, -np.inf
    k[4] *= 1e-38  # too small for a scale
    layer = shape.views(backend.asarray(shape.blank()))
    write_kv(layer_kv(backend, shape, layer), backend.asarray(np.arange(5)), backend.asarray(k))
    host = shape.views(backend.to_host(layer.bytes))
    scales = host.k_scale.reshape(-1)[:5]
    with np.errstate(invalid="ignore"):
        decoded = host.k.reshape(-1, 32)[:5].astype(np.float32) * scales[:, None]
    assert scales[0] == scales[4] == 0
    assert not decoded[[0, 4]].any()
    assert np.isnan(decoded[1:4]).all(axis=1).tolist() == [True] * 3


def test_nan_stays_nan_where_scales_are_given_and_is_zero_in_int8(backend: Backend) -> None:
    for dtype in DTYPES:
        mode: Any = "tensor" if dtype in LARGEST else "none"
        shape = Shape(dtype=dtype, scale_mode=mode, heads=1, dim_v=-1)
        scale = backend.asarray(np.ones(1, np.float32)) if mode == "tensor" else None
        layer = shape.views(backend.asarray(shape.blank()), (scale, None))
        k = np.ones((1, 1, 32), np.float32)
        k[0, 0, 7] = np.nan
        write_kv(layer_kv(backend, shape, layer), backend.asarray(np.array([6])), backend.asarray(k))
        row = shape.views(backend.to_host(layer.bytes)).k[1, 2, 0].astype(np.float32)
        assert np.isnan(row[7]) if dtype != "int8" else row[7] == 0
        assert (np.delete(row, 7) == 1).all()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(block_size=1, num_blocks=9),
        Shape(block_size=3, layout="HND"),
        Shape(block_size=16, num_blocks=3, dim=80, layout="HND"),
        Shape(block_size=37, num_blocks=2, dim=96),
        Shape(block_size=256, num_blocks=2, dim=64, dtype="bfloat16"),
        Shape(dim=256, heads=1, dtype="float32"),
        Shape(dim=576, dim_v=512, heads=1),
        Shape(dim=576, dim_v=-1, heads=1, dtype="bfloat16"),
        Shape(dim=35, heads=3),  # no vector wider than one element
        Shape(dim=1, heads=1),
        Shape(skew=2),
        Shape(skew=4, dtype="float8_e4m3"),
        Shape(skew=4, dtype="float8_e5m2", scale_mode="token_head", dim=80, layout="HND"),
        Shape(skew=4, dtype="int8", scale_mode="token_head", dim=40, dim_v=24, block_size=5, heads=3),
    ],
    ids=str,
)
def test_every_layout_gets_its_rows_and_nothing_else(backend: Backend, shape: Shape) -> None:
    check(backend, shape, "bfloat16" if shape.dtype == "bfloat16" else "float16")


def test_many_tokens_take_several_ctas(backend: Backend) -> None:
    check(backend, Shape(num_blocks=20, block_size=8, dim=64), num_tokens=150)


def test_sources_may_be_strided_views(backend: Backend) -> None:
    shape = Shape()
    rng = np.random.default_rng(2)
    qkv = numbers(rng, (6, 3 * shape.heads + 1, shape.dim + 8), "float16")
    slots = slots_of(rng, shape, 6)
    on_device = backend.asarray(qkv)
    for begin in (0, 8, 3):  # 3: rows begin at odd addresses
        columns = slice(begin, begin + shape.dim)
        for k_heads, v_heads in ((slice(0, 2), slice(2, 4)), (slice(5, 1, -3), slice(6, 2, -2))):
            device = shape.views(backend.asarray(shape.blank()))
            host = shape.views(shape.blank())
            k, v = on_device[:, k_heads, columns], on_device[:, v_heads, columns]
            if k.shape[2] != shape.dim:
                continue
            write_kv(layer_kv(backend, shape, device), backend.asarray(slots), k, v)
            put(shape, host, slots, qkv[:, k_heads, columns], qkv[:, v_heads, columns])
            assert_same_bytes(backend.to_host(device.bytes), host.bytes)


def test_bits_of_bfloat16_and_of_fp8_may_come_as_integers(backend: Backend) -> None:
    rng = np.random.default_rng(3)
    k = numbers(rng, (3, 2, 32), "bfloat16")
    slots = np.array([5, -1, 0])
    for dtype, bits in (("bfloat16", np.uint16), ("float8_e5m2", np.uint8)):
        shape = Shape(dtype=dtype, dim_v=-1)
        device, host = shape.views(backend.asarray(shape.blank())), shape.views(shape.blank())
        cache = LayerKv(backend, device.k.view(bits), dtype=dtype)
        write_kv(cache, backend.asarray(slots), backend.asarray(k.view(np.uint16)))
        put(shape, host, slots, k, None)
        assert_same_bytes(backend.to_host(device.bytes), host.bytes)


def test_no_tokens_and_only_skipped_tokens_write_nothing(backend: Backend) -> None:
    shape = Shape()
    layer = shape.views(backend.asarray(shape.blank()))
    for count in (0, 5):
        rows = backend.asarray(np.ones((count, shape.heads, shape.dim), np.float16))
        slots = -1 - np.arange(count)  # every negative slot skips
        write_kv(layer_kv(backend, shape, layer), backend.asarray(slots), rows, rows)
    assert_same_bytes(backend.to_host(layer.bytes), shape.blank())


def arguments(backend: Backend, shape: Shape | None = None) -> dict[str, Any]:
    """Arguments of a call that is right."""
    shape = shape or Shape()
    to = backend.asarray
    layer = shape.views(to(shape.blank()))
    rows = to(np.ones((3, shape.heads, shape.dim), np.float16))
    return {"cache": layer_kv(backend, shape, layer), "slot_mapping": to(np.array([1, 2, 3])), "k": rows, "v": rows}


WRONG: list[tuple[str, dict[str, Any], type[PagedKVError], str]] = [
    ("k has fewer heads", {"k": np.ones((3, 1, 32), np.float16)}, LayoutMismatch, r"k has shape \(3, 1, 32\)"),
    ("v has another dim", {"v": np.ones((3, 2, 16), np.float16)}, LayoutMismatch, r"v has shape .* 32"),
    ("fewer tokens than slots", {"k": np.ones((2, 2, 32), np.float16)}, LayoutMismatch, "k has shape"),
    ("k is no array", {"k": [[1.0]]}, WrongType, "k must be an array .* not list"),
    ("k is float64", {"k": np.ones((3, 2, 32))}, WrongType, "k has dtype float64"),
    ("v is another dtype", {"v": np.ones((3, 2, 32), np.float32)}, WrongType, "v is float32 and k is float16"),
    ("k is int8", {"k": np.ones((3, 2, 32), np.int8)}, WrongType, "k has dtype int8"),
    ("k's rows have gaps", {"k": np.ones((3, 2, 64), np.float16)[..., ::2]}, LayoutMismatch, "neighbours"),
    ("k stands at an odd byte", {"k": "odd"}, LayoutMismatch, "not aligned"),
    ("v is missing", {"v": None}, InvalidArgument, "v is missing"),
    ("slots are int32", {"slot_mapping": np.zeros(3, np.int32)}, WrongType, "slot_mapping has dtype int32, not int64"),
    (
        "slots are not contiguous",
        {"slot_mapping": np.zeros(6, np.int64)[::2]},
        LayoutMismatch,
        "slot_mapping has .* neighbours",
    ),
    ("slots are a table", {"slot_mapping": np.zeros((3, 1), np.int64)}, LayoutMismatch, "slot_mapping has shape"),
    ("a slot too far", {"slot_mapping": np.array([1, 20, 2])}, InvalidArgument, r"slot_mapping has 20: .* 0\.\.19"),
    ("q without rope", {"q": np.ones((3, 4, 32), np.float16)}, InvalidArgument, "q is given without rope"),
    ("q_out without q", {"q_out": np.ones((3, 4, 32), np.float16)}, InvalidArgument, "q_out is given without q"),
]


@pytest.mark.parametrize(("change", "error", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(
    backend: Backend, change: dict[str, Any], error: type[PagedKVError], message: str
) -> None:
    if backend.name != "ptxsim":
        pytest.skip("index values are checked on the host only, and copies to a device are contiguous")
    given = arguments(backend)
    if isinstance(change.get("k"), str):
        change = {"k": np.ones(400, np.uint8)[1:385].view(np.float16).reshape(3, 2, 32)}
    with pytest.raises(error, match=message):
        write_kv(**(given | change))
    assert (backend.to_host(given["cache"].k).view(np.uint8) == 0xFF).all()


def test_a_cache_that_does_not_fit_is_refused(backend: Backend) -> None:
    to = backend.asarray
    k, v = to(np.zeros((3, 4, 2, 8), np.float16)), to(np.zeros((3, 4, 2, 8), np.float32))
    with pytest.raises(LayoutMismatch, match="one dtype"):
        LayerKv(backend, k, v)
    with pytest.raises(LayoutMismatch, match=r"v has shape"):
        LayerKv(backend, k, k[:2])
    with pytest.raises(UnsupportedVariant, match="block_size is 257"):
        LayerKv(backend, to(np.zeros((1, 257, 1, 8), np.float16)))
    with pytest.raises(UnsupportedVariant, match=r"head dims are 1025"):
        LayerKv(backend, to(np.zeros((1, 1, 1, 1025), np.float16)))
    with pytest.raises(WrongType, match="must be named"):
        LayerKv(backend, to(np.zeros((1, 1, 1, 8), np.uint8)))
    with pytest.raises(UnsupportedVariant, match="float16: only"):
        LayerKv(backend, k, scale_mode="tensor", k_scale=to(np.ones(1, np.float32)))
    small = to(np.zeros((3, 4, 2, 8), np.int8))
    with pytest.raises(InvalidArgument, match="k_scale is missing"):
        LayerKv(backend, small, scale_mode="head")
    with pytest.raises(LayoutMismatch, match=r"k_scale has shape \(3,\)"):
        LayerKv(backend, small, scale_mode="head", k_scale=to(np.ones(3, np.float32)))
    with pytest.raises(InvalidArgument, match="scale_mode must be one of"):
        LayerKv(backend, small, scale_mode="block")  # type: ignore[arg-type]
    tokens, other = to(np.ones((3, 4, 2), np.float32)), to(np.ones((3, 4, 4), np.float32))[..., :2]
    with pytest.raises(LayoutMismatch, match="differ in strides"):
        LayerKv(backend, small, small, scale_mode="token_head", k_scale=tokens, v_scale=other)


def test_a_read_only_cache_is_refused(backend: Backend) -> None:
    if backend.name != "ptxsim":
        pytest.skip("device arrays are always writeable")
    given = arguments(backend)
    frozen = given["cache"].k.view()
    frozen.flags.writeable = False
    with pytest.raises(LayoutMismatch, match="read-only"):
        write_kv(**(given | {"cache": LayerKv(backend, frozen, given["cache"].v)}))


def test_with_debug_the_device_stops_at_a_slot_outside_the_pool(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.name != "ptxsim":
        pytest.skip("a trap ends the CUDA context")
    given = arguments(backend)
    write_kv(**given, debug=True)
    monkeypatch.setattr(module, "check_range", lambda *_, **__: None)
    with pytest.raises(Exception, match="trap"):
        write_kv(**(given | {"slot_mapping": np.array([1, 20, 2])}), debug=True)


def test_slots_past_2_to_the_31_elements_are_reached(backend: Backend) -> None:
    block = 2**20  # a block's K and V; int8 elements
    num_blocks = 2**31 // block + 3
    pool = huge(backend, (num_blocks, block), np.int8)
    shape = Shape(num_blocks, 4, 2, 32, dtype="int8")
    rows = 4 * 2 * 32
    k, v = (pool[:, begin : begin + rows].reshape(num_blocks, 4, 2, 32) for begin in (0, rows))
    near = [0, 1, num_blocks - 1]
    pool[near] = 77
    values = np.arange(2 * 2 * 32).reshape(2, 2, 32).astype(np.float32) - 64
    cache = LayerKv(backend, k, v)
    slots = np.array([4 * (num_blocks - 1) + 3, 1])
    write_kv(cache, backend.asarray(slots), backend.asarray(values), backend.asarray(-values))
    expected = np.full((3, 2, 4, 2, 32), 77, np.int8)
    for block_idx, offset, token in ((2, 3, 0), (0, 1, 1)):
        expected[block_idx, 0, offset], expected[block_idx, 1, offset] = values[token], -values[token]
    found = backend.to_host(pool[near])[:, : 2 * rows].reshape(3, 2, 4, 2, 32)
    assert_same_bytes(found, expected)
    assert shape.dtype == cache.dtype


def test_a_layer_without_v_takes_k_alone(backend: Backend) -> None:
    given = arguments(backend, Shape(dim_v=-1))
    with pytest.raises(InvalidArgument, match="v is given, and the cache has no V"):
        write_kv(**given)


def test_a_repeated_call_writes_to_the_arrays_it_is_given(backend: Backend) -> None:
    shape = Shape()
    rng = np.random.default_rng(8)
    for _ in range(3):  # the second call repeats the first one's launch with other addresses
        slots = slots_of(rng, shape, 4)
        k, v = numbers(rng, (2, 4, shape.heads, shape.dim), "float16")
        device, host = shape.views(backend.asarray(shape.blank())), shape.views(shape.blank())
        to = backend.asarray
        write_kv(layer_kv(backend, shape, device), to(slots), to(k), to(v))
        put(shape, host, slots, k, v)
        assert_same_bytes(backend.to_host(device.bytes), host.bytes)
    with pytest.raises(LayoutMismatch, match="k has shape"):
        write_kv(layer_kv(backend, shape, device), to(slots), to(k[:3]), to(v))
    if backend.name == "ptxsim":
        with pytest.raises(InvalidArgument, match="slot_mapping has 20"):
            write_kv(layer_kv(backend, shape, device), to(slots * 0 + 20), to(k), to(v))
        assert_same_bytes(backend.to_host(device.bytes), host.bytes)
