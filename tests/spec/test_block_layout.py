"""The planes of a block: they cover it, do not overlap, and lie where kernels read them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkv as pk
from pagedkv import cpu
from pagedkv.errors import InvalidArgument, LayoutMismatch, UnsupportedVariant, WrongType
from pagedkv.spec.block_layout import layer_view, plane_view, planes

QUANTISED = ("int8", "float8_e4m3", "float8_e5m2")


@st.composite
def specs(draw: Any) -> pk.KVSpec:
    dtype = draw(st.sampled_from(("float32", "float16", "bfloat16", *QUANTISED, "uint8")))
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    scales: Any = None
    in_k = dtype != "uint8" and draw(st.booleans())
    if dtype in QUANTISED:
        scales = draw(
            st.sampled_from(
                [
                    "token_head",
                    pk.Scales(1, 1 if in_k else 2),
                    pk.Scales(np.ones((layers, heads)), np.ones((layers, heads))),
                ]
            )
        )
    dim = draw(st.integers(1, 9))
    return pk.KVSpec(
        layers, heads, dim, dtype, draw(st.integers(1, 5)), layout=draw(st.sampled_from(["NHD", "HND"])),
        head_dim_v=draw(st.sampled_from([None, 1, min(4, dim) if in_k else 4])), scales=scales, v_in_k=in_k,
    )  # fmt: skip


@given(specs(), st.integers(0, 3))
def test_planes_cover_each_byte_at_most_once_and_leave_only_their_filling(spec: pk.KVSpec, num_blocks: int) -> None:
    arena = np.zeros((num_blocks, spec.block_bytes), np.uint8)
    names, layer_bytes = planes(spec)
    assert list(names) == ["k", "v", "k_scale", "v_scale"][: 4 if spec.scales == "token_head" else 2]
    assert layer_bytes * spec.num_layers == spec.block_bytes
    covered = 0
    if spec.v_in_k and "v_scale" in names:
        assert names.pop("v_scale") == names["k_scale"]
    for name in names:
        view = plane_view(arena, spec, name)
        width = {"k": (spec.head_dim,), "v": (spec.width_of_v,)}.get(name, ())
        assert view.shape == (num_blocks, spec.num_layers, spec.block_size, spec.num_kv_heads, *width)
        assert np.shares_memory(view, arena) or not view.size
        covered += view.nbytes
        bits = view.view(f"u{view.itemsize}") if width else view.view(np.uint32)
        bits += np.array(1, bits.dtype)
    assert arena.max(initial=0) <= 1  # nothing twice
    assert int(arena.sum()) == sum(plane_view(arena, spec, name).size for name in names)
    assert covered == spec.bytes_per_token * spec.block_size * num_blocks
    assert 0 <= spec.block_bytes - spec.bytes_per_token * spec.block_size < 16 * 4 * spec.num_layers


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_bytes_of_a_block_with_scales_are_as_documented(layout: str) -> None:
    spec = pk.KVSpec(2, 3, 5, "int8", 2, layout=layout)
    arena = np.arange(2 * spec.block_bytes, dtype=np.uint32).astype(np.uint8).reshape(2, -1)
    plane, scales = 32, 32  # 2 * 3 * 5 = 30 bytes, and 2 * 3 * 4 = 24, filled up to 32
    assert spec.block_bytes == 2 * (2 * plane + 2 * scales) == 256
    for layer in range(2):
        for at in range(2):
            first = layer * 128 + at * plane
            shape = (2, 3, 5) if layout == "NHD" else (3, 2, 5)
            wanted = arena[1, first : first + 30].view(np.int8).reshape(shape)
            found = layer_view(arena, layer, spec)[at][1]
            assert np.array_equal(found, wanted if layout == "NHD" else wanted.swapaxes(0, 1))
        for at, name in enumerate(("k_scale", "v_scale")):
            first = layer * 128 + 2 * plane + at * scales
            wanted = arena[1, first : first + 24].view(np.float32).reshape((2, 3) if layout == "NHD" else (3, 2))
            found = plane_view(arena, spec, name)[1, layer]
            np.testing.assert_array_equal(found, wanted if layout == "NHD" else wanted.T)


def test_planes_with_scales_begin_where_kernels_load_16_bytes_at_once() -> None:
    for heads, dim, size in ((1, 1, 1), (3, 80, 7), (2, 7, 16)):
        found, layer_bytes = planes(pk.KVSpec(2, heads, dim, "float8_e4m3", size))
        assert all(plane.first % 16 == 0 for plane in found.values())
        assert layer_bytes % 16 == 0


def test_an_arena_that_does_not_fit_is_refused_for_scales_as_for_values() -> None:
    spec = pk.KVSpec(1, 1, 4, "int8", 4)
    for arena in (np.zeros((2, spec.block_bytes + 1), np.uint8), np.zeros((2, spec.block_bytes), np.int8)):
        with pytest.raises(LayoutMismatch, match=f"{spec.block_bytes}"):
            plane_view(arena, spec, "k_scale")
    odd = np.zeros(2 * spec.block_bytes + 1, np.uint8)[1:].reshape(2, -1)
    with pytest.raises(LayoutMismatch, match="multiple of 4"):
        plane_view(odd, spec, "v_scale")


def test_a_block_that_is_not_one_array_has_no_shape() -> None:
    assert pk.KVSpec(1, 2, 4, "int8", scales=pk.Scales(1, 1)).block_shape == (1, 2, 16, 2, 4)
    assert pk.KVSpec(1, 2, 4, head_dim_v=4).block_shape == (1, 2, 16, 2, 4)
    others = (pk.KVSpec(1, 2, 4, head_dim_v=3), pk.KVSpec(1, 2, 4, v_in_k=True))
    for spec, why in ((pk.KVSpec(1, 2, 4, "int8"), "scales"), *((spec, "as wide") for spec in others)):
        with pytest.raises(UnsupportedVariant, match=why):
            _ = spec.block_shape


def test_what_changes_the_bytes_changes_the_fingerprint_and_nothing_else_does() -> None:
    base = pk.KVSpec(2, 3, 4, "int8", 4)
    others = [
        base, dataclasses.replace(base, scales=pk.Scales(1, 1)), dataclasses.replace(base, scales=pk.Scales(1, 2)),
        dataclasses.replace(base, scales=pk.Scales([1, 1], [1, 1])),
        dataclasses.replace(base, scales=pk.Scales(np.ones((2, 3)), np.ones((2, 3)))),
        dataclasses.replace(base, head_dim_v=5), dataclasses.replace(base, dtype="float8_e4m3"),
        dataclasses.replace(base, dtype="uint8", scales=None), dataclasses.replace(base, dtype="float32", scales=None),
        dataclasses.replace(base, dtype="float32", scales=None, head_dim_v=3),
        dataclasses.replace(base, v_in_k=True), dataclasses.replace(base, v_in_k=True, head_dim_v=3),
        dataclasses.replace(base, scales=pk.Scales(1, 1), v_in_k=True),
        dataclasses.replace(base, dtype="float32", scales=None, v_in_k=True),
    ]  # fmt: skip
    assert len({spec.fingerprint() for spec in others}) == len(others)
    assert dataclasses.replace(base, scales="token_head").fingerprint() == base.fingerprint()
    assert dataclasses.replace(base, head_dim_v=4) == base


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "scales for floats": ({"dtype": "float16", "scales": "token_head"}, InvalidArgument, "float16"),
    "scales for bytes": ({"dtype": "uint8", "scales": pk.Scales(1, 1)}, InvalidArgument, "uint8"),
    "scales of another kind": ({"scales": "block"}, InvalidArgument, "token_head"),
    "scales that are a number": ({"scales": 0.5}, WrongType, "Scales"),
    "scales that are an array": ({"scales": np.ones(2)}, WrongType, "Scales"),
    "scales of other layers": ({"scales": pk.Scales([1, 1, 1], [1, 1, 1])}, InvalidArgument, r"\[3, 1\].*2 layers"),
    "scales of other heads": ({"scales": pk.Scales([[1, 1]], [[1, 1]])}, InvalidArgument, r"\[1, 2\].*3 KV heads"),
    "a V of no width": ({"head_dim_v": 0}, InvalidArgument, "head_dim_v"),
    "a V of half a number": ({"head_dim_v": 1.5}, WrongType, "head_dim_v"),
    "a V wider than the K that holds it": ({"v_in_k": True, "head_dim_v": 5}, InvalidArgument, "5 is more than .* 4"),
    "a V in bytes": ({"v_in_k": True, "dtype": "uint8"}, InvalidArgument, "head_dim_v = 0"),
    "V in K by a number": ({"v_in_k": 1}, WrongType, "v_in_k must be a bool"),
    "scales of a V in K": ({"v_in_k": True, "scales": pk.Scales(1, 2)}, InvalidArgument, "must be those of K"),
    "the short name of fp8": ({"dtype": "fp8"}, InvalidArgument, "float8_e4m3"),
}


@pytest.mark.parametrize(("changes", "kind", "said"), WRONG.values(), ids=WRONG)
def test_specs_that_contradict_themselves_are_refused(changes: dict[str, Any], kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        pk.KVSpec(**({"num_layers": 2, "num_kv_heads": 3, "head_dim": 4, "dtype": "int8"} | changes))


def test_a_spec_layer_by_layer_is_the_same_spec() -> None:
    full = pk.Attention(3, 4, dtype="int8")
    assert pk.KVSpec.of([full, full], block_size=8) == pk.KVSpec(2, 3, 4, "int8", 8)
    assert pk.KVSpec.of([pk.Attention(3, 4)] * 2, dtype="bfloat16", model="m") == pk.KVSpec(
        2, 3, 4, "bfloat16", model="m"
    )
    rows = pk.KVSpec.of([pk.Rows(136, 128)] * 2, block_size=4, layout="HND")
    assert (rows.dtype, rows.head_dim, rows.width_of_v, rows.num_kv_heads) == ("uint8", 136, 128, 1)
    assert rows.block_bytes == 2 * 4 * (136 + 128)
    assert pk.KVSpec.of([pk.Rows(8, 0)]).bytes_per_token == 8
    latents = pk.KVSpec.of([pk.Latent(512, 64), pk.SameAs(0), pk.Latent(512, 64)], dtype="bfloat16")
    assert latents == pk.KVSpec(2, 1, 576, "bfloat16", head_dim_v=512, v_in_k=True, reads=(0, 0, 1))
    assert (latents.bytes_per_token, latents.output_dim, latents.width_of_v) == (2 * 576 * 2, 512, 0)
    quantised = pk.KVSpec.of([pk.Latent(512, 64, dtype="int8")])
    assert (quantised.scales, quantised.bytes_per_token) == ("token_head", 576 + 4)
    assert quantised.block_bytes == 16 * quantised.bytes_per_token


@pytest.mark.parametrize(
    ("layers", "kind", "said"),
    [
        ([], WrongType, "at least one"),
        ("k", WrongType, "list"),
        ([pk.Attention(1, 4), 7], UnsupportedVariant, "layer 1 is 7"),
        ([pk.Attention(1, 4), pk.Attention(1, 8)], UnsupportedVariant, "layer 1 keeps"),
        ([pk.Attention(1, 4), pk.Attention(1, 4, dtype="int8")], UnsupportedVariant, "layer 1 keeps"),
        ([pk.Rows(4, 4), pk.Rows(4, 5)], UnsupportedVariant, "layer 1 keeps"),
        ([pk.Rows(4, 4), pk.Attention(1, 4)], UnsupportedVariant, "layer 1 keeps"),
        ([pk.Latent(4, 2), pk.Latent(4, 3)], UnsupportedVariant, "layer 1 keeps"),
        ([pk.Attention(1, 6), pk.Latent(4, 2)], UnsupportedVariant, "layer 1 keeps"),
        ([pk.Attention(1, 4), pk.Attention(1, 4, chunk=8)], InvalidArgument, "layer 1 has a chunk of 8 .* 16"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused_by_number(layers: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        pk.KVSpec.of(layers)


def test_ranks_share_out_the_scales_of_their_heads() -> None:
    scales = pk.Scales([[1, 2, 3, 4]], [[5, 6, 7, 8]])
    ranks = pk.Ranks("/nowhere", 2, secret=b"s" * 16)
    part = ranks.shard_spec(pk.KVSpec(2, 4, 8, "int8", scales=scales), 1)
    assert part.scales == pk.Scales([[3, 4]], [[7, 8]])
    assert ranks.shard_spec(pk.KVSpec(2, 4, 8, "int8"), 1).scales == "token_head"
    assert ranks.shard_spec(pk.KVSpec(2, 4, 8, "int8", scales=pk.Scales(2, 3)), 0).scales == pk.Scales(2, 3)


def test_a_layer_of_wrong_scales_is_refused() -> None:
    with pytest.raises(WrongType, match="Scales"):
        pk.Attention(1, 4, dtype="int8", scales=np.ones(2))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="token_head"):
        pk.Attention(1, 4, dtype="int8", scales="block")


def test_the_fp8_with_infinities_is_not_taken_for_ours() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for ask in (
        lambda: pk.KVSpec(1, 1, 4, ml_dtypes.float8_e4m3),
        lambda: pk.Scales.measured(np.ones((1, 1, 1, 1)), np.ones((1, 1, 1, 1)), ml_dtypes.float8_e4m3),
    ):
        with pytest.raises(InvalidArgument, match="float8_e4m3fn"):
            ask()
    assert pk.KVSpec(1, 1, 4, ml_dtypes.float8_e4m3fn).dtype == "float8_e4m3"
    array, one = np.zeros((1, 16, 1, 4), ml_dtypes.float8_e4m3), np.ones(1, np.float32)
    q, lens, tables = np.zeros((1, 1, 4), np.float32), np.ones(1, np.int32), np.zeros((1, 1), np.int32)
    scaled, slots = {"scale_mode": "tensor", "k_scale": one, "v_scale": one}, np.zeros(1, np.int64)
    for name in ("", "float8_e4m3"):
        with pytest.raises(WrongType):
            cpu.attend(q, array, array, lens, block_tables=tables, kv_dtype=name)
        with pytest.raises(WrongType):
            cpu.write_kv(q, q, array, array, slots, kv_dtype=name, **scaled)  # type: ignore[arg-type]
