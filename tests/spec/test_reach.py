"""How far back a layer reads.

`need` against the tokens that are really read, over all sets of present blocks. The rule: a sequence can go on from
the boundary behind block k if every layer still has its last ``need(k)`` blocks before it. These tests enumerate;
nothing of the product is asked but `need`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from pagedkv.spec.layers import Attention, Latent, Layer, Recurrent, Rows, SameAs
from tests.slices import one_in

MOST = 6  # blocks
STATE = Recurrent((("state", (2, 2), "float32"),))
LAYERS: list[Layer] = [
    Attention(1, 1), Latent(4, 2), Rows(3, 1), STATE, SameAs(0),
    *(Attention(1, 1, window=window) for window in (1, 2, 3, 4, 5, 7, 8, 9, 13)),
    *(Attention(1, 1, chunk=chunk) for chunk in (1, 2, 3, 4, 6, 8, 12)),
]  # fmt: skip
MIXES: list[list[Layer]] = [
    [Attention(1, 1), Attention(1, 1, window=5)],
    [Attention(1, 1), Attention(1, 1, chunk=4)],
    [Attention(1, 1, window=3), Attention(1, 1, chunk=6)],
    [Attention(1, 1, window=5), STATE],
    [Latent(4, 2), STATE],
]


def name_of(layer: Layer) -> str:
    limits = {name: getattr(layer, name, None) for name in ("window", "chunk")}
    return " ".join([type(layer).__name__, *(f"{name} {value}" for name, value in limits.items() if value)])


def reads(layer: Layer, token: int) -> range:
    """Positions that a token reads, its own included."""
    if isinstance(layer, Attention) and layer.window is not None:
        return range(max(0, token - layer.window + 1), token + 1)
    if isinstance(layer, Attention) and layer.chunk is not None:
        return range(token // layer.chunk * layer.chunk, token + 1)
    return range(token + 1)


def can_go_on(layer: Layer, boundary: int, size: int, present: frozenset[int]) -> bool:
    """Whether all that later tokens read before the boundary is there, token by token."""
    if isinstance(layer, SameAs):
        return True
    if isinstance(layer, Recurrent):  # the page of the last block holds the state behind it
        return boundary == 0 or boundary - 1 in present
    later = range(boundary * size, boundary * size + 40)
    read = {position // size for token in later for position in reads(layer, token) if position < boundary * size}
    return read <= present


def subsets(count: int) -> list[frozenset[int]]:
    blocks = range(count)
    return [frozenset(some) for size in range(count + 1) for some in itertools.combinations(blocks, size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layer", LAYERS, ids=name_of)
def test_the_last_needed_blocks_are_all_that_later_tokens_read(layer: Layer, size: int) -> None:
    for present in subsets(MOST):
        for boundary in range(MOST + 1):
            need = layer.need(boundary, size)
            assert 0 <= need <= boundary
            suffices = present >= frozenset(range(boundary - need, boundary))
            assert suffices == can_go_on(layer, boundary, size, present), (present, boundary)


def longest(layers: Sequence[Layer], present: Sequence[frozenset[int]], size: int) -> int:
    """The longest prefix to go on from.

    It is found in one walk with one number for each layer, as a tree is matched.
    """
    since, best = [0] * len(layers), 0
    for boundary in range(1, MOST + 1):
        for number, there in enumerate(present):
            if boundary - 1 not in there:
                since[number] = boundary
        if all(since[i] <= boundary - layer.need(boundary, size) for i, layer in enumerate(layers)):
            best = boundary
    return best


@pytest.mark.parametrize("size", one_in(2, [2, 1]))
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: " and ".join(map(name_of, mix)))
def test_one_walk_finds_the_longest_prefix_that_all_layers_can_go_on_from(mix: list[Layer], size: int) -> None:
    ends = [
        {there: {end for end in range(MOST + 1) if can_go_on(layer, end, size, there)} for there in subsets(MOST)}
        for layer in mix
    ]
    for present in itertools.product(subsets(MOST), repeat=len(mix)):
        exact = max(set.intersection(*(of_layer[there] for of_layer, there in zip(ends, present, strict=True))))
        assert longest(mix, present, size) == exact
