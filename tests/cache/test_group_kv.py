"""KV of groups of layers in one arena, against a DeviceKV that keeps all blocks."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.cache.device_kv import DeviceKV
from pagedkv.cache.group_kv import GroupKV
from pagedkv.cache.reach import in_chunks
from pagedkv.errors import InvalidArgument, LayoutMismatch, UnsupportedVariant, WrongType
from pagedkv.spec.groups import layout_of

HEADS, KV_HEADS, DIM, SIZE, EXTENTS = 4, 2, 8, 4, 60
WINDOWS = (5, None, 9, 2, None, 5, None)  # reach: 1, all, 2, 1, all, 1; the last has chunks
CHUNKS = (None,) * 6 + (8,)
GROUPS = ((1, 4), (0, 3, 5), (2,), (6,))
BASE = pk.KVSpec(7, KV_HEADS, DIM, "float32", SIZE, windows=WINDOWS, chunks=CHUNKS, model="toy")
NUMBERS = np.linspace(0.01, 0.03, 7)
SPECS = {
    "float32": BASE,
    "float16 HND": dataclasses.replace(BASE, dtype="float16", layout="HND"),
    "bfloat16": dataclasses.replace(BASE, dtype="bfloat16"),
    "bfloat16 HND, narrow V": dataclasses.replace(BASE, dtype="bfloat16", layout="HND", head_dim_v=6),
    "int8, scales of tokens": dataclasses.replace(BASE, dtype="int8"),
    "int8 HND, scales of tokens": dataclasses.replace(BASE, dtype="int8", layout="HND"),
    "int8, scales of layers": dataclasses.replace(BASE, dtype="int8", scales=pk.Scales(NUMBERS, 2 * NUMBERS)),
    "fp8, one scale": dataclasses.replace(BASE, dtype="float8_e4m3", scales=pk.Scales(0.01, 0.02)),
    "two groups": pk.KVSpec(4, KV_HEADS, DIM, "float16", SIZE, windows=(None, 5, None, 5)),
}


@dataclass
class Tables:
    """Tables of a step, as the core has them."""

    block_tables: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    q_indptr: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    groups: tuple[Tables, ...] = field(default=())


def new_kv(spec: pk.KVSpec, seed: int = 0, extents: int = EXTENTS) -> tuple[GroupKV, NDArray[np.uint8]]:
    """A KV over an arena of random bytes."""
    layout = layout_of(spec)
    arena = np.random.default_rng(seed).integers(0, 256, (extents, layout.extent_bytes), np.uint8)
    return GroupKV(spec, layout, arena), arena


class Sequences:
    """Sequences in a GroupKV, as far as each group needs them, and whole in a DeviceKV.

    The extents are dealt out to the groups at random. Of each sequence a step computes the last `q_lens` tokens.
    """

    def __init__(self, spec: pk.KVSpec, lens: list[int], q_lens: list[int], seed: int = 0) -> None:
        self.spec, self.lens, self.q_lens, rng = spec, lens, q_lens, np.random.default_rng(seed)
        self.kv, _ = new_kv(spec, seed)
        layout = self.kv.layout
        owners = rng.permutation(np.arange(EXTENTS) % self.kv.num_groups)
        self.tables: list[list[tuple[int, NDArray[np.int32]]]] = []  # by group and sequence: first block, pages
        for number, group in enumerate(layout.groups):
            mine, count = np.flatnonzero(owners == number), layout.per_extent[number]
            pages = iter(rng.permutation((mine[:, None] * count + np.arange(count)).ravel()).astype(np.int32))
            self.tables.append([])
            for length, new in zip(lens, q_lens, strict=True):
                boundary = (length - new) // SIZE
                first = boundary - group.need(boundary)
                taken = [next(pages) for _ in range(first, -(-length // SIZE))]
                self.tables[-1].append((first, np.array(taken, np.int32)))
        blocks = rng.permutation(sum(-(-length // SIZE) for length in lens)).astype(np.int32)
        self.plain = DeviceKV(spec, np.zeros((len(blocks), spec.block_bytes), np.uint8))
        edges = np.cumsum([0, *(-(-length // SIZE) for length in lens)])
        self.blocks = [(0, blocks[a:b]) for a, b in itertools.pairwise(edges)]
        self.rng = rng

    def step(self, tables: list[tuple[int, NDArray[np.int32]]], q_lens: list[int]) -> Tables:
        """The last `q_lens` tokens of each sequence; those without a page have no slot."""
        padded = np.full((len(tables), max(len(pages) for _, pages in tables)), -1, np.int32)
        slots: list[int] = []
        for row, ((first, pages), length, new) in enumerate(zip(tables, self.lens, q_lens, strict=True)):
            padded[row, : len(pages)] = pages
            for token in range(length - new, length):
                column = token // SIZE - first
                slots.append(int(pages[column]) * SIZE + token % SIZE if column >= 0 else -1)
        lens = [length - first * SIZE for (first, _), length in zip(tables, self.lens, strict=True)]
        indptr = np.cumsum([0, *q_lens]).astype(np.int32)
        return Tables(padded, np.array(lens, np.int32), indptr, np.array(slots, np.int64))

    def bind(self, q_lens: list[int]) -> tuple[Any, Any]:
        """A step in the groups, and the same in the plain KV."""
        whole, *short = (self.step(tables, q_lens) for tables in self.tables)
        whole.groups = tuple(short)
        return self.kv.bind(whole), self.plain.bind(self.step(self.blocks, q_lens))

    def write(self) -> None:
        """All tokens, in every layer of both."""
        grouped, plain = self.bind(self.lens)
        for layer in range(self.spec.num_layers):
            k, v = (self.numbers(sum(self.lens), KV_HEADS, w) for w in (self.spec.head_dim, self.spec.width_of_v))
            grouped.write(layer, k, v)
            plain.write(layer, k, v)

    def numbers(self, *shape: int) -> NDArray[np.float32]:
        return self.rng.standard_normal(shape).astype(np.float32)

    def outputs(self, dtype: Any) -> Iterator[tuple[Any, Any]]:
        """Attention of each layer, by groups and in the plain KV, where float64 computes it."""
        grouped, _ = self.bind(self.q_lens)
        whole = self.step(self.blocks, self.q_lens)
        for layer in range(self.spec.num_layers):
            q = self.numbers(sum(self.q_lens), HEADS, DIM).astype(dtype)
            window = None if self.spec.windows is None else self.spec.windows[layer]
            chunk = None if self.spec.chunks is None else self.spec.chunks[layer]
            bound: Any = grouped
            plain: Any = whole
            if chunk is not None:
                bound = grouped.bound_over(layer, in_chunks(grouped.tables_of(layer), chunk, SIZE))
                plain = in_chunks(whole, chunk, SIZE)
            expected = self.plain.bind(plain).attend(layer, q.astype(np.float64), window=window)
            yield bound.attend(layer, q, window=window), expected


def some(spec: pk.KVSpec, seed: int) -> Sequences:
    rng = np.random.default_rng([seed, 7])
    lens = [int(length) for length in rng.integers(1, 40, 3)]
    return Sequences(spec, lens, [int(rng.integers(1, 1 + length)) for length in lens], seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SPECS)
def test_each_layer_attends_over_the_pages_of_its_group_as_over_all_blocks(name: str, seed: int) -> None:
    seqs = some(SPECS[name], seed)
    seqs.write()
    for dtype, close in ((np.float32, 2e-5), (np.float64, 1e-12), (np.float16, 1e-2)):
        for found, expected in seqs.outputs(dtype):
            assert found.dtype == dtype
            assert np.abs(found - expected).max() < close


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", SPECS)
def test_tokens_that_every_group_keeps_are_gathered_bit_for_bit(name: str, layout: str) -> None:
    seqs = some(SPECS[name], 5)
    seqs.write()
    for row, length in enumerate(seqs.lens):
        tables = [group[row] for group in seqs.tables]
        begin = max(first for first, _ in tables) * SIZE
        for start, stop in ((begin, length), (begin + (begin < length), length), (length, length), (0, 0)):
            expected = seqs.plain.gather(seqs.blocks[row][1], start, stop, None, layout)
            out = tuple(np.empty_like(side) for side in expected)
            given = seqs.kv.gather_pages(tables, start, stop, out, layout)
            assert given is out
            for found in (given, seqs.kv.gather_pages(tables, start, stop, None, layout)):
                for side, wanted in zip(found, expected, strict=True):
                    assert (side.shape, side.dtype) == (wanted.shape, wanted.dtype)
                    assert side.tobytes() == wanted.tobytes()


def test_a_gather_of_tokens_that_a_group_lacks_names_a_layer_and_where_to_begin() -> None:
    spec = pk.KVSpec(4, KV_HEADS, DIM, "float16", SIZE, windows=(5, None, 9, None), reads=(0, 0, 1, 2, 3))
    seqs = Sequences(spec, [30], [1])
    tables = [group[0] for group in seqs.tables]
    assert [first for first, _ in tables] == [0, 6, 5]
    for start in (0, 20, 23):
        with pytest.raises(InvalidArgument, match=f"layer 0 .* from 24 on, and start is {start}: .*by_group=False"):
            seqs.kv.gather_pages(tables, start, 30, None)
    assert seqs.kv.gather_pages(tables, 24, 30, None)[0].shape == (4, 6, KV_HEADS, DIM)
    later = [*tables[:2], (7, tables[2][1])]
    with pytest.raises(InvalidArgument, match=r"layer 3 .* from 28 on"):  # of the model: two layers share the KV of 0
        seqs.kv.gather_pages(later, 24, 30, None)
    with pytest.raises(UnsupportedVariant, match=r"Sequence\.gather"):
        seqs.kv.gather(tables[0][1], 24, 30, None)
    with pytest.raises(LayoutMismatch, match="2 groups"):
        seqs.kv.gather_pages(tables[:2], 24, 30, None)


def test_gathered_values_go_only_into_arrays_that_fit() -> None:
    spec = SPECS["two groups"]
    seqs = Sequences(spec, [6], [6])
    tables = [group[0] for group in seqs.tables]
    shape = (4, 6, KV_HEADS, DIM)
    frozen = np.empty(shape, np.float16)
    frozen.flags.writeable = False
    kv, arena = new_kv(spec)
    inside = arena.reshape(-1)[: 2 * int(np.prod(shape))].view(np.float16).reshape(shape)
    for array, said in (
        (np.empty(shape, np.float32), "must be float16"), (np.empty((3, 6, KV_HEADS, DIM), np.float16), "must be"),
        (frozen, "read-only"), (inside, "shares memory with the arena"),
    ):  # fmt: skip
        out = (np.zeros(shape, np.float16), array)
        with pytest.raises(LayoutMismatch, match=said):
            kv.gather_pages(tables, 0, 6, out)
        assert not out[0].any()


@pytest.mark.parametrize("name", SPECS)
def test_a_page_lies_in_its_extent_and_overlaps_other_groups_pages_there_alone(name: str) -> None:
    kv, arena = new_kv(SPECS[name])
    layout = kv.layout
    covered = []
    for number, group in enumerate(layout.groups):
        per_extent, stride = layout.per_extent[number], layout.strides[number]
        for page in (0, per_extent - 1, 3 * per_extent, 4 * per_extent - 1, EXTENTS * per_extent - 1):
            arena[...] = 255
            kv.zero_pages(number, np.array([page], np.int32))
            found = np.flatnonzero(arena == 0)
            assert found.tolist() == list(range(page * stride, page * stride + group.page_bytes))
            assert {int(byte) // layout.extent_bytes for byte in found} == {page // per_extent}
            if page == 3 * per_extent:
                covered.append(set(found.tolist()))
    for own in covered[1:]:
        assert own & covered[0]


@pytest.mark.parametrize("name", SPECS)
def test_pages_are_copied_whole_within_their_group(name: str) -> None:
    kv, arena = new_kv(SPECS[name])
    for number, group in enumerate(kv.layout.groups):
        before, stride = arena.reshape(-1).copy(), kv.layout.strides[number]
        pairs = np.array([[0, 7], [7, 9]], np.int32)
        if number:
            kv.copy_pages(number, pairs)
        else:
            kv.copy_blocks(pairs)
        for target in (7, 9):
            before[target * stride : target * stride + group.page_bytes] = before[: group.page_bytes]
        assert np.array_equal(arena.reshape(-1), before)
    kv.zero_blocks(np.array([1], np.int32))
    stride = kv.layout.strides[0]
    assert not arena.reshape(-1)[stride : stride + kv.layout.groups[0].page_bytes].any()


@pytest.mark.parametrize("name", SPECS)
def test_layers_are_views_of_their_groups_pages(name: str) -> None:
    spec = SPECS[name]
    kv, arena = new_kv(spec)
    for number in range(kv.num_groups):
        for within, layer in enumerate(kv.group_layers(number)):
            assert kv.group_of(layer) == (number, within)
            for side, width in zip(kv.layer(layer), (spec.head_dim, spec.width_of_v), strict=True):
                assert side.shape == (EXTENTS * kv.layout.per_extent[number], SIZE, KV_HEADS, width)
                assert np.may_share_memory(side, arena)
                assert side.strides[0] == kv.layout.strides[number]
            scales = kv.layer_scales(layer)
            if isinstance(spec.scales, pk.Scales):
                assert scales is not None
                assert np.array_equal(scales, spec.scales.of_layer(layer))
            else:
                assert (scales is None) == (spec.scales is None)
                assert scales is None or scales[0].shape == (EXTENTS * kv.layout.per_extent[number], SIZE, KV_HEADS)
    wrong: list[Any] = [-1, spec.num_layers, True, 1.0]
    for layer in wrong:
        with pytest.raises((InvalidArgument, WrongType), match="layer"):
            kv.layer(layer)


def test_the_groups_of_a_spec_are_those_of_its_reaches() -> None:
    kv, _ = new_kv(BASE)
    assert tuple(kv.group_layers(group) for group in range(kv.num_groups)) == GROUPS
    assert kv.decode is DeviceKV(BASE, np.zeros((1, BASE.block_bytes), np.uint8)).decode
    assert kv.is_synchronous
    for group in (4, -1):
        with pytest.raises(InvalidArgument, match="group"):
            kv.group_layers(group)


def test_a_step_with_tables_of_too_few_groups_is_refused() -> None:
    seqs = Sequences(BASE, [9], [9])
    whole = seqs.step(seqs.tables[0], [9])
    with pytest.raises(LayoutMismatch, match="tables for 1 groups of layers, and 4"):
        seqs.kv.bind(whole)


def test_a_mask_over_all_keys_is_refused_where_a_table_begins_later() -> None:
    seqs = some(SPECS["two groups"], 1)
    seqs.write()
    grouped, plain = seqs.bind(seqs.q_lens)
    q = seqs.numbers(sum(seqs.q_lens), HEADS, DIM)
    sizes = [-(-new * length // 8) for new, length in zip(seqs.q_lens, seqs.lens, strict=True)]
    mask: dict[str, Any] = {"mask": np.full(sum(sizes), 255, np.uint8), "mask_indptr": np.cumsum([0, *sizes])}
    assert np.abs(grouped.attend(0, q, **mask) - plain.attend(0, q, **mask)).max() < 2e-5
    with pytest.raises(UnsupportedVariant, match=r"layer 1 .* mask .*by_group=False"):
        grouped.attend(1, q, window=5, **mask)


@pytest.mark.parametrize("order", [(0, 1, 1), (3, 2, 0)])
def test_a_number_that_does_not_fit_is_logged_once_with_the_models_layer(caplog: Any, order: tuple[int, ...]) -> None:
    seqs = Sequences(dataclasses.replace(SPECS["two groups"], reads=(0, 0, 1, 2, 3)), [3], [3])
    grouped, _ = seqs.bind([3])
    large = np.full((3, KV_HEADS, DIM), 1e6, np.float32)
    with caplog.at_level(logging.WARNING, "pagedkv"):
        for layer in order:
            grouped.write(layer, large, large)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"layer {seqs.spec.model_layer(order[0])}: K or V was larger than any number of float16")
    assert seqs.kv.overflowing_writes == 3


def test_an_arena_that_is_not_in_extents_is_refused() -> None:
    layout = layout_of(BASE)
    good = np.zeros((4, layout.extent_bytes), np.uint8)
    wrong: list[Any] = [good[:, :-1].copy(), good[::2], good.view(np.int8), good.reshape(-1)]
    for arena in wrong:
        with pytest.raises(LayoutMismatch, match=f"num_extents, {layout.extent_bytes}"):
            GroupKV(BASE, layout, arena)
    assert GroupKV(BASE, layout, good[:0]).layer(0)[0].shape == (0, SIZE, KV_HEADS, DIM)
