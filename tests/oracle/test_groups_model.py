"""The model of groups: every read of every layer of random requests is right.

Each mutant of a rule must be caught, or the checks would not be worth much.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pagedkv.spec.layers import Attention, Latent, Layer, Recurrent, Rows
from tests.oracle.groups_model import GroupsModel, Need, NoRoom, needed

FULL, STATE = Attention(1, 1), Recurrent((("state", (2, 2), "float32"),))


def window(tokens: int) -> Attention:
    return Attention(1, 1, window=tokens)


def chunk(tokens: int) -> Attention:
    return Attention(1, 1, chunk=tokens)


MIXES: dict[str, list[Layer]] = {
    "full": [FULL], "full and window": [FULL, window(5)], "full and a window of itself": [FULL, window(1)],
    "full and chunk": [FULL, chunk(6)], "rows and state": [Rows(3, 1), STATE], "window": [window(4)],
    "state": [STATE], "latent, window and state": [Latent(4, 2), window(3), STATE],
    "full and two windows": [FULL, window(9), window(2)],
    "four groups": [FULL, chunk(4), window(6), STATE],
}  # fmt: skip
MOVES = 120


def play(layers: list[Layer], rng: Random, need: Need = needed, model: type[GroupsModel] = GroupsModel) -> Any:
    """Random requests on a small cache; the tokens that were asked for and that were hit."""
    sizes = [size for size in (1, 2, 3) if not any(isinstance(x, Attention) and (x.chunk or 6) % size for x in layers)]
    cache = model(layers, [rng.choice((1, 3, 5)) for _ in layers], rng.choice(sizes), rng.randrange(40, 160), need)
    history: list[list[int]] = [[]]
    asked = hit = 0
    for _ in range(MOVES):
        move = rng.random()
        row = rng.choice(cache.rows) if cache.rows else None
        if move < 0.3 and len(cache.rows) < 3:
            base = rng.choice(history)
            prompt = base[: rng.randrange(len(base) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            found = cache.open(prompt)
            asked, hit = asked + len(prompt), hit + found.num_computed
        elif row is not None:
            over = move >= 0.85
            if not over:
                if row.num_computed == len(row.tokens):
                    row.tokens.append(rng.randrange(2))
                try:
                    cache.step(row, rng.randrange(1, len(row.tokens) - row.num_computed + 1))
                except NoRoom:
                    over = True
            if over:
                history = [*history[-8:], row.tokens[: row.num_computed]]
                kept = cache.release(row)
                if STATE not in layers:
                    assert kept, "the end of a sequence is lost"
        cache.check()
    return cache, asked, hit


@pytest.mark.parametrize("layers", MIXES.values(), ids=MIXES)
def test_whatever_a_layer_reads_is_there_and_of_its_tokens(layers: list[Layer]) -> None:
    asked = hit = 0
    for seed in range(12):
        _, more, found = play(layers, Random(seed))
        asked, hit = asked + more, hit + found
    assert 0.1 < hit / asked < 1


def test_a_hit_ends_where_every_group_can_go_on_and_the_rest_is_counted() -> None:
    cache = GroupsModel([FULL, window(5)], [1, 1], 2, 100)
    first = cache.open(range(13))
    cache.step(first, 13)
    cache.release(first)  # points at 6 blocks; the window keeps blocks 4 and 5 alone
    assert [len(block.pages) for block in cache.find(range(12))] == [1, 1, 1, 1, 2, 2]
    assert cache.open([*range(12), 99]).num_computed == 12
    assert cache.lagging_tokens == 0
    assert cache.open([*range(8), 99, 99]).num_computed == 0, "blocks 2 and 3 of the window are gone"
    assert cache.lagging_tokens == 8


def test_where_two_prompts_part_is_a_point_from_the_second_on() -> None:
    cache = GroupsModel([FULL, window(5)], [1, 1], 2, 100)
    for last, hit in ((20, 0), (21, 0), (22, 8)):
        row = cache.open([*range(8), *[last] * 6])
        assert row.num_computed == hit
        cache.step(row, len(row.tokens) - hit)
        cache.release(row)
        cache.check()


def test_a_point_goes_as_a_whole_and_with_it_the_dead_end() -> None:
    cache = GroupsModel([FULL, window(5)], [1, 1], 2, 100)
    row = cache.open(range(13))
    cache.step(row, 13)
    cache.release(row)
    end = cache.find(range(12))[-1]
    assert end.used
    cache.drop_point(end)
    assert cache.bytes == 0
    assert not cache.root.children


MUTANTS: dict[str, Any] = {
    "the last block of a window is forgotten":
        lambda layer, k, size: layer.need(k, size) - bool(getattr(layer, "window", None)),
    "a chunk begins where its last block ends":
        lambda layer, k, size: 0 if getattr(layer, "chunk", None) else layer.need(k, size),
    "no state is needed": lambda layer, k, size: 0 if isinstance(layer, Recurrent) else layer.need(k, size),
    "full attention is a window of 4 blocks":
        lambda layer, k, size: min(4, k) if layer is FULL else layer.need(k, size),
    "a window counts from W and rounds down":
        lambda layer, k, size: layer.window // size if getattr(layer, "window", None) else layer.need(k, size),
}  # fmt: skip


class HalfATail(GroupsModel):
    """Drops the coldest page instead of the coldest point."""

    def drop_point(self, end: Any) -> None:
        for group, block in self.tails(self.path_to(end)):
            if group in block.pages and block.pages[group].references == 1:
                self._let_go(block.pages.pop(group))
                return
        super().drop_point(end)


class WithoutItsTail(GroupsModel):
    """Makes points of boundaries whose pages are not all there."""

    def make_point(self, path: list[Any]) -> bool:
        self._clock += 1
        path[-1].used = self._clock
        return True


class AnotherMoment(GroupsModel):
    """Gives the tree the state that the row has now, for each whole block of the step."""

    def _give(self, row: Any, group: int, number: int, block: Any) -> None:
        computed = row.num_computed
        if group in self._states:
            row.num_computed = (number + 1) * self.block_size
        super()._give(row, group, number, block)
        row.num_computed = computed


def fails(layers: list[Layer], seed: int, need: Need, model: type[GroupsModel]) -> bool:
    try:
        play(layers, Random(seed), need, model)
    except (AssertionError, KeyError):
        return True
    return False


def dies(need: Need = needed, model: type[GroupsModel] = GroupsModel) -> bool:
    return any(fails(layers, seed, need, model) for seed in range(40) for layers in MIXES.values())


@pytest.mark.parametrize("need", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_rule_is_caught(need: Any) -> None:
    assert dies(need)


@pytest.mark.parametrize("model", [HalfATail, WithoutItsTail, AnotherMoment])
def test_a_wrong_cache_is_caught(model: type[GroupsModel]) -> None:
    assert dies(model=model)
