"""Every history of a tiny cache up to the same state: breadth first, each step of it done to both sides.

A state is the model's: cached prefixes with their copies, failures and moves, the order of every tier, owners,
held blocks. From each new state every operation is tried. The real core cannot be copied, so a state is reached
again by repeating its history. The search starts from an empty cache, from a full device, and from prefixes that
lie in two tiers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest

from pagedkv.reference.tiers_model import Block
from tests.model.pair import Pair

Operation = tuple[Any, ...]

PROMPTS = [(0,), (0, 0), (0, 1), (1, 0)]
PIECES = [(0,), (1,), (0, 1)]
MAX_OWNERS, MAX_DEPTH = 2, 3

EMPTY: tuple[Operation, ...] = ()
FULL: tuple[Operation, ...] = (("acquire", (0, 0)), ("insert", 0, (0, 1)), ("release", 0))
SPREAD = (*FULL, ("make_room", 1), ("acquire", (1,)), ("insert", 0, (1,)), ("release", 0))


def operations(pair: Pair) -> Iterator[Operation]:
    """What may be tried in the present state."""
    if len(pair.owners) < MAX_OWNERS:
        yield from (("acquire", prompt) for prompt in PROMPTS)
    for who, (_, owner) in enumerate(pair.owners):
        yield from (("insert", who, piece) for piece in PIECES if len(owner.path) + len(piece) <= MAX_DEPTH)
        yield from ((name, who) for name in ("promote", "settle", "release"))
    for tier in range(len(pair.pools)):
        yield "reserve", pair.model.free(tier) + 1, tier
    for which in range(len(pair.transfers) + len(pair.model.moves)):
        yield "complete", True, which
        yield "complete", False, which
    yield ("let_go",) if pair.private else ("hold", 1)


def state(pair: Pair) -> Hashable:
    """Everything that decides what happens next, without the ids."""
    model = pair.model

    def name(block: Block) -> Hashable:
        return block.content[1]

    blocks = sorted(
        (name(b), sorted(b.copies), b.owners, b.failed, b.moving is not None and b.moving.dst) for b in model.blocks()
    )
    return (
        repr(blocks),
        tuple(tuple(name(b) for b in order) for order in model.order),
        tuple(sorted(tuple(name(b) for b in owner.path) for _, owner in pair.owners)),
        tuple(name(transfer.block) for transfer in model.in_flight),
        len(pair.private),
    )


class Search:
    """Breadth-first search from one history of a cache of one shape."""

    def __init__(self, capacities: Sequence[int], inclusive: Sequence[bool], max_run: int = 1) -> None:
        self.capacities, self.inclusive, self.max_run = capacities, inclusive, max_run

    def repeat(self, history: Sequence[Operation]) -> Pair:
        pair = Pair(1, self.capacities, inclusive=self.inclusive, max_run=self.max_run)
        for operation in history:
            getattr(pair, operation[0])(*operation[1:])
        return pair

    def run(self, start: tuple[Operation, ...], max_steps: int) -> int:
        """Compares both sides after every step; how many steps, fewer than asked only if there are no more."""
        histories = [start]
        seen = {state(self.repeat(start))}
        steps = 0
        for history in histories:
            for operation in list(operations(self.repeat(history))):
                pair = self.repeat(history)
                try:
                    getattr(pair, operation[0])(*operation[1:])
                    pair.check(deep=True)
                except AssertionError as error:
                    raise AssertionError(f"{error} after {[*history, operation]}") from error
                steps += 1
                reached = state(pair)
                if reached not in seen:
                    seen.add(reached)
                    histories.append((*history, operation))
                if steps == max_steps:
                    return steps
        return steps


SHAPES = [((2, 1), (False, False)), ((2, 2), (False, True)), ((3, 1), (True, False)), ((2, 1, 1), (False, False, True))]


@pytest.mark.slow
@pytest.mark.parametrize("start", [EMPTY, FULL, SPREAD], ids=["empty", "full", "spread"])
@pytest.mark.parametrize(("capacities", "inclusive"), SHAPES)
def test_every_step_of_small_pools_agrees_with_the_oracle(capacities: Any, inclusive: Any, start: Any) -> None:
    assert Search(capacities, inclusive).run(start, 3_000) == 3_000


@pytest.mark.full
@pytest.mark.parametrize("start", [EMPTY, FULL, SPREAD], ids=["empty", "full", "spread"])
@pytest.mark.parametrize(("capacities", "inclusive"), SHAPES)
def test_a_million_steps_of_small_pools_agree_with_the_oracle(capacities: Any, inclusive: Any, start: Any) -> None:
    assert Search(capacities, inclusive).run(start, 90_000) == 90_000
