"""The rotation in write_kv: the table's in NumPy's bits, the computed one against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, UnsupportedVariant, WrongType
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.rope import Pairing, Rope, rope_frequencies, rope_inverse_frequencies
from pagedkv.kernels.write_kv import write_kv
from tests.kernels.pools import DTYPES, LARGEST, Shape, assert_same_bytes, encode, layer_kv, quantise, row_scales

PAIRINGS: tuple[Pairing, ...] = ("split", "interleaved")


def angles(positions: NDArray[Any], rotary_dim: int) -> NDArray[np.float64]:
    """float64 [num_tokens, rotary_dim / 2]."""
    return positions[:, None] * rope_inverse_frequencies(rotary_dim)


def rotate(
    rows: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], pairing: Pairing, rotary_dim: int, offset: int = 0
) -> NDArray[Any]:
    """Rotate rows [num_tokens, heads, dim], in the dtype of cos.

    cos and sin are [num_tokens, rotary_dim / 2].
    """
    out = rows.astype(cos.dtype)
    part = out[..., offset : offset + rotary_dim]
    half = rotary_dim // 2
    first, second = (
        (slice(0, half), slice(half, None)) if pairing == "split" else (slice(0, None, 2), slice(1, None, 2))
    )
    x, y, c, s = part[..., first].copy(), part[..., second].copy(), cos[:, None], sin[:, None]
    part[..., first] = x * c - y * s
    part[..., second] = y * c + x * s
    return out


@pytest.mark.parametrize(
    ("dim", "rotary_dim", "offset", "src", "dtype", "scale_mode"),
    [
        (32, 32, 0, "float16", "float16", "none"),
        (64, 16, 0, "bfloat16", "bfloat16", "none"),
        (80, 20, 4, "float16", "float32", "none"),
        (70, 14, 7, "float32", "float32", "none"),  # one element at a time
        (576, 64, 512, "bfloat16", "float8_e4m3", "token_head"),
        (128, 128, 0, "float32", "int8", "token_head"),
    ],
)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_k_and_q_turn_as_the_table_says_and_the_rest_stays(
    backend: Backend, pairing: Pairing, dim: int, rotary_dim: int, offset: int, src: str, dtype: str, scale_mode: Any
) -> None:
    rng = np.random.default_rng(dim)
    shape = Shape(dim=dim, dtype=dtype, scale_mode=scale_mode)
    positions = np.array([0, 3, 17, 5, 17], np.int32)
    slots = np.array([7, 0, -1, 19, 4])
    k, v, q = (rng.standard_normal((5, heads, dim)).astype(DTYPES[src]) for heads in (2, 2, 6))
    table = angles(np.arange(18), rotary_dim)
    both = np.concatenate([np.cos(table), np.sin(table)], axis=1).astype(np.float32)
    cos, sin = both[:, : rotary_dim // 2], both[:, rotary_dim // 2 :]

    to = backend.asarray
    layer = shape.views(to(shape.blank()))
    on_device, half = to(both), rotary_dim // 2
    rope = Rope(to(positions), rotary_dim, pairing, on_device[:, :half], on_device[:, half:], offset=offset)
    q_out = to(np.full(q.shape, np.nan, DTYPES[src]))
    write_kv(layer_kv(backend, shape, layer), to(slots), to(k), to(v), q=to(q), q_out=q_out, rope=rope)

    turned = {
        name: rotate(rows, cos[positions], sin[positions], pairing, rotary_dim, offset)
        for name, rows in (("k", k), ("q", q))
    }
    assert_same_bytes(backend.to_host(q_out), encode(turned["q"], src))
    host = shape.views(shape.blank())
    kept = slots >= 0
    blocks, offsets = np.divmod(slots[kept], shape.block_size)
    for rows, view, scales in ((turned["k"], host.k, host.k_scale), (v.astype(np.float32), host.v, host.v_scale)):
        if scale_mode == "none":
            view[blocks, offsets] = encode(rows[kept], dtype)
        else:
            scales[blocks, offsets] = row_scales(rows[kept], dtype)
            view[blocks, offsets] = quantise(rows[kept], scales[blocks, offsets], dtype)
    assert_same_bytes(backend.to_host(layer.bytes), host.bytes)
    assert dtype in LARGEST or scale_mode == "none"


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_q_turns_in_place_also_where_its_token_is_skipped(backend: Backend, pairing: Pairing) -> None:
    rng = np.random.default_rng(5)
    shape = Shape(dim=96, dim_v=-1, heads=1)
    positions = np.array([4, 2, 9], np.int32)
    qkv = rng.standard_normal((3, 6, 96)).astype(np.float16)
    table = angles(np.arange(10), 96).astype(np.float64)
    cos, sin = np.cos(table).astype(np.float32), np.sin(table).astype(np.float32)
    to = backend.asarray
    layer = shape.views(to(shape.blank()))
    device = to(qkv.copy())
    rope = Rope(to(positions), 96, pairing, to(cos), to(sin))
    write_kv(layer_kv(backend, shape, layer), to(np.full(3, -1)), device[:, 4:5], q=device[:, :4], rope=rope)
    expected = qkv.copy()
    expected[:, :4] = rotate(qkv[:, :4], cos[positions], sin[positions], pairing, 96)
    assert_same_bytes(backend.to_host(device), expected)
    assert_same_bytes(backend.to_host(layer.bytes), shape.blank())


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_computed_angles_are_exact_at_any_position(backend: Backend, pairing: Pairing) -> None:
    rng = np.random.default_rng(6)
    shape = Shape(dim=64, dtype="float32", dim_v=-1)
    positions = np.array([0, 1, 131_071, 1_048_575, 2**31 - 1], np.int32)
    k = rng.standard_normal((5, 2, 64)).astype(np.float32)
    to = backend.asarray
    layer = shape.views(to(shape.blank()))
    frequencies = rope_frequencies(rope_inverse_frequencies(64))
    rope = Rope(to(positions), 64, pairing, frequencies=to(frequencies))
    write_kv(layer_kv(backend, shape, layer), to(np.arange(5)), to(k), rope=rope)
    found = shape.views(backend.to_host(layer.bytes)).k.reshape(-1, 2, 64)[:5]
    exact = angles(positions.astype(np.longdouble), 64).astype(np.float64)
    expected = rotate(k, np.cos(exact), np.sin(exact), pairing, 64)
    assert np.abs(found - expected).max() < 2e-6


def test_frequencies_are_fractions_of_a_turn() -> None:
    turns = rope_frequencies([0.0, np.pi, 2 * np.pi, -np.pi / 2, 5 * np.pi])
    assert turns.tolist() == [0, 2**63, 0, 3 * 2**62, 2**63]
    with pytest.raises(InvalidArgument, match="finite"):
        rope_frequencies([np.inf])


def test_positions_of_skipped_tokens_are_not_looked_at_without_q(backend: Backend) -> None:
    shape = Shape(dim_v=-1)
    to = backend.asarray
    layer = shape.views(to(shape.blank()))
    ones = to(np.ones((4, 16), np.float32))
    rope = Rope(to(np.array([3, 2**30], np.int32)), 32, cos=ones, sin=ones)
    rows = to(np.ones((2, 2, 32), np.float16))
    write_kv(layer_kv(backend, shape, layer), to(np.array([2, -1])), rows, rope=rope)
    host = shape.views(shape.blank())
    host.k[0, 2, :, :16], host.k[0, 2, :, 16:] = 0, 2
    assert_same_bytes(backend.to_host(layer.bytes), host.bytes)


def test_with_debug_the_device_stops_at_a_position_outside_the_table(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.name != "ptxsim":
        pytest.skip("a trap ends the CUDA context")
    shape = Shape(dim_v=-1)
    cache = layer_kv(backend, shape, shape.views(shape.blank()))
    rows = np.ones((2, 2, 32), np.float16)
    monkeypatch.setattr(Rope, "check_positions", lambda *_: None)
    for position, bad in ((7, False), (8, True), (-1, True)):
        rope = Rope(np.array([0, position], np.int32), 32, cos=ONES, sin=ONES)
        if not bad:
            write_kv(cache, np.array([1, 2]), rows, rope=rope, debug=True)
            continue
        with pytest.raises(Exception, match="trap"):
            write_kv(cache, np.array([1, 2]), rows, rope=rope, debug=True)


ONES = np.ones((8, 16), np.float32)
WRONG: list[tuple[str, dict[str, Any], type[PagedKVError], str]] = [
    ("an odd dim", {"rotary_dim": 31}, InvalidArgument, "rope.rotary_dim must be an even number from 2 on, got 31"),
    ("more than the head", {"offset": 2}, UnsupportedVariant, r"elements 2\.\.33: head_dim is 32"),
    ("another pairing", {"pairing": "neox"}, InvalidArgument, "rope.pairing must be .* got 'neox'"),
    ("a narrow table", {"cos": ONES[:, :8]}, LayoutMismatch, r"rope.cos has shape \(8, 8\)"),
    ("no sines", {"sin": None}, InvalidArgument, "either cos and sin or frequencies"),
    ("a half table", {"cos": ONES.astype(np.float16)}, WrongType, "rope.cos has dtype float16, not float32"),
    ("both kinds", {"frequencies": np.zeros(16, np.uint64)}, InvalidArgument, "either cos and sin or frequencies"),
    ("a position too far", {"positions": np.array([1, 8], np.int32)}, InvalidArgument, r"positions has 8: .* 0\.\.7"),
    ("a negative position", {"positions": np.array([1, -1], np.int32)}, InvalidArgument, "positions has -1"),
    ("too few positions", {"positions": np.zeros(1, np.int32)}, LayoutMismatch, r"rope.positions has shape \(1,\)"),
    ("long positions", {"positions": np.zeros(2, np.int64)}, WrongType, "rope.positions has dtype int64, not int32"),
]


@pytest.mark.parametrize(("change", "error", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_rotation_that_does_not_fit_is_refused(
    backend: Backend, change: dict[str, Any], error: type[PagedKVError], message: str
) -> None:
    if backend.name != "ptxsim":
        pytest.skip("index values are checked on the host only")
    shape = Shape(dim_v=-1)
    layer = shape.views(shape.blank())
    given = {"positions": np.zeros(2, np.int32), "rotary_dim": 32, "cos": ONES, "sin": ONES} | change
    rows = np.ones((2, 2, 32), np.float16)
    with pytest.raises(error, match=message):
        write_kv(layer_kv(backend, shape, layer), np.array([1, 2]), rows, rope=Rope(**given))
    assert_same_bytes(layer.bytes, shape.blank())
