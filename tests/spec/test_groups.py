"""Groups of layers: who sees equally far back, and how their pages fill an extent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkv as pk
from pagedkv.errors import InvalidArgument
from pagedkv.spec.groups import MAX_EXTENT_BYTES, MAX_GROUPS, groups_of, layout_of

from .published import CONFIGS

REACHES = [(None, None), (1, None), (5, None), (8, None), (9, None), (30, None), (None, 8), (None, 12)]


def published(name: str, **options: Any) -> pk.KVSpec:
    return pk.KVSpec.from_config(CONFIGS[name], dtype="bfloat16", **options)


@st.composite
def mixed(draw: Any) -> pk.KVSpec:
    """Specs of at most four groups of layers, with blocks of 4 tokens."""
    short = draw(st.lists(st.sampled_from(REACHES[1:]), max_size=3, unique=True))
    reaches = draw(st.lists(st.sampled_from([REACHES[0], *short]), min_size=1, max_size=30))
    dtype = draw(st.sampled_from(["float16", "float32", "int8"]))
    scales: Any = None
    if dtype == "int8":
        numbers = np.arange(1, len(reaches) + 1)
        scales = draw(st.sampled_from(["token_head", pk.Scales(1, 2), pk.Scales(numbers, 2 * numbers)]))
    windows, chunks = zip(*reaches, strict=True)
    return pk.KVSpec(
        len(reaches), draw(st.integers(1, 8)), draw(st.integers(1, 128)), dtype, 4,
        layout=draw(st.sampled_from(["NHD", "HND"])), head_dim_v=draw(st.sampled_from([None, 3])), scales=scales,
        windows=windows, chunks=chunks,
    )  # fmt: skip


def attention(spec: pk.KVSpec, layer: int) -> pk.Attention:
    window, chunk = (None if limits is None else limits[layer] for limits in (spec.windows, spec.chunks))
    return pk.Attention(1, 1, window=window, chunk=chunk)


@given(mixed())
def test_each_layer_is_in_one_group_which_needs_as_many_blocks_as_the_layer(spec: pk.KVSpec) -> None:
    groups = groups_of(spec)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(spec.num_layers))
    assert [group.is_short for group in groups] == [False] + [True] * (len(groups) - 1)
    assert [group.layers[0] for group in groups[1:]] == sorted(group.layers[0] for group in groups[1:])
    assert len({(group.window, group.chunk) for group in groups}) == len(groups)
    for group in groups:
        assert list(group.layers) == sorted(group.layers)
        for layer in group.layers if len(groups) > 1 else ():
            for boundary in range(20):
                assert group.need(boundary) == attention(spec, layer).need(boundary, spec.block_size)


@given(mixed())
def test_a_groups_spec_is_the_whole_one_with_its_layers_alone(spec: pk.KVSpec) -> None:
    for group in groups_of(spec):
        part = group.spec
        assert part.num_layers == len(group.layers)
        assert group.page_bytes * spec.num_layers == spec.block_bytes * len(group.layers)
        assert (part.layout, part.dtype, part.head_dim_v, part.scale_mode) == (
            spec.layout, spec.dtype, spec.head_dim_v, spec.scale_mode,
        )  # fmt: skip
        for within, layer in enumerate(group.layers):
            assert attention(part, within) == attention(spec, layer)
            if isinstance(spec.scales, pk.Scales):
                assert isinstance(part.scales, pk.Scales)
                assert np.array_equal(part.scales.of_layer(within), spec.scales.of_layer(layer))


@given(mixed())
def test_pages_at_equal_distances_fill_an_extent_of_every_group(spec: pk.KVSpec) -> None:
    layout = layout_of(spec)
    assert layout.groups == groups_of(spec)
    for group, count, stride, waste in zip(layout.groups, layout.per_extent, layout.strides, layout.waste, strict=True):
        assert count * stride == layout.extent_bytes <= MAX_EXTENT_BYTES
        assert stride >= group.page_bytes
        assert stride % 16 == 0
        assert waste == pytest.approx(1 - count * group.page_bytes / layout.extent_bytes)
    assert (layout.point_every == 0) == (len(layout.groups) == 1)


FIGURES: dict[str, tuple[int, tuple[int, ...], tuple[tuple[int | None, int | None], ...]]] = {
    "gemma-3-27b-it": (34_078_720, (26, 5), ((None, None), (64, None))),
    "Llama-4-Scout-17B-16E": (2_359_296, (3, 1), ((None, None), (None, 512))),
    "gpt-oss-120b": (589_824, (1, 1), ((None, None), (8, None))),
    "gemma-3n-E4B-it": (524_288, (4, 1), ((None, None), (32, None))),
}


@pytest.mark.parametrize("name", FIGURES)
def test_extents_of_published_models_are_full(name: str) -> None:
    layout = layout_of(published(name))
    extent, per_extent, reaches = FIGURES[name]
    assert (layout.extent_bytes, layout.per_extent) == (extent, per_extent)
    assert tuple((group.window, group.chunk) for group in layout.groups) == reaches
    assert layout.waste == (0, 0)
    assert layout.strides == tuple(group.page_bytes for group in layout.groups)


def test_tails_at_regular_points_take_a_sixteenth_of_the_full_layers_bytes() -> None:
    layout = layout_of(published("gemma-3-27b-it"))
    full, local = layout.groups
    assert layout.point_every == 5325
    share = 64 * local.page_bytes / (layout.point_every * full.page_bytes)
    assert 0.999 / 16 < share <= 1 / 16
    assert layout_of(published("gpt-oss-120b")).point_every == 128
    assert layout_of(pk.KVSpec(2, 1, 8, windows=(None, 1))).point_every == 1  # no tail, and every block is a point


@pytest.mark.parametrize(
    ("full", "short", "per_extent"),
    [
        (7, 30, (17, 4)),  # one page of 30 layers leaves 2 of 30 layers, two 4 of 60, three 6 of 90, four 1 of 120
        (2, 151, (75, 1)),  # 1 of 151
        (2, 101, (101, 2)),  # 1 of 101, but with strides of whole 256 bytes more than 1 %
        (151, 2, (1, 75)),
    ],
)
def test_an_extent_has_as_few_pages_as_one_percent_of_waste_allows(
    full: int, short: int, per_extent: tuple[int, int]
) -> None:
    layout = layout_of(pk.KVSpec(full + short, 8, 128, windows=(None,) * full + (64,) * short))
    assert layout.per_extent == per_extent
    assert max(layout.waste) <= 0.01
    assert all(stride % 256 == 0 for stride in layout.strides)


def test_windows_with_the_same_reach_in_blocks_share_a_group() -> None:
    spec = pk.KVSpec(4, 1, 8, block_size=16, windows=(18, None, 33, 34))
    assert [group.layers for group in groups_of(spec)] == [(1,), (0, 2), (3,)]
    assert groups_of(spec)[1].spec.windows == (18, 33)


@pytest.mark.parametrize(
    "limits",
    [
        {}, {"windows": (5, 5, 5)}, {"windows": (5, 9, 30)}, {"chunks": (16, 32, 16)},
        {"windows": (5, None, None), "chunks": (None, 16, 16)},
    ],
)  # fmt: skip
def test_a_model_whose_layers_all_see_alike_or_of_which_none_sees_everything_is_one_group(limits: Any) -> None:
    spec = pk.KVSpec(3, 2, 8, **limits)
    (group,) = groups_of(spec)
    assert (group.layers, group.window, group.chunk, group.spec) == ((0, 1, 2), None, None, spec)
    assert (group.is_short, group.need(7)) == (False, 7)
    assert layout_of(spec).point_every == 0


def test_a_fifth_group_is_refused_by_the_models_number_of_its_first_layer() -> None:
    windows = (None, 17, 17, 33, 49, 65, 81, None)
    with pytest.raises(InvalidArgument, match=rf"layer 5 needs group {MAX_GROUPS + 1} of 6 groups"):
        groups_of(pk.KVSpec(8, 1, 8, windows=windows))
    with pytest.raises(InvalidArgument, match=r"layer 7 needs group 5 of 6"):
        layout_of(pk.KVSpec(8, 1, 8, windows=windows, reads=(0, 0, 0, 1, 2, 3, 4, 5, 6, 7)))
    assert len(groups_of(pk.KVSpec(5, 1, 8, windows=windows[:5]))) == MAX_GROUPS


def test_layers_that_share_kv_have_no_pages() -> None:
    groups = groups_of(published("gemma-3n-E4B-it"))
    assert [len(group.layers) for group in groups] == [4, 16]
    assert all(group.spec.reads is None for group in groups)


def test_an_extent_past_2_gib_is_refused() -> None:
    spec = pk.KVSpec(1, 21_483, 49_981, "uint8", 1)
    assert spec.block_bytes == 2**31 - 2  # a multiple of 256 would be past it
    with pytest.raises(InvalidArgument, match="pass 2 GiB"):
        layout_of(spec)
