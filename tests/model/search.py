"""Every history of a tiny cache up to the same state, breadth first.

The search does each step to both sides.

A state is the model's: cached prefixes with their copies, failures and moves, the order of every tier, owners,
held blocks. From each new state every operation is tried. The real core cannot be copied, so a state is reached
again by repeating its history. The search starts from an empty cache, from a full device, and from prefixes that
lie in two tiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tests.model.pair import Pair
from tests.oracle.tiers_model import Block

Operation = tuple[Any, ...]

PROMPTS = [(0,), (0, 0), (0, 1), (1, 0)]
PIECES = [(0,), (1,), (0, 1)]
MAX_DEPTH = 3

EMPTY: tuple[Operation, ...] = ()
FULL: tuple[Operation, ...] = (("acquire", (0, 0)), ("insert", 0, (0, 1)), ("release", 0))
SPREAD = (*FULL, ("make_room", 1), ("acquire", (1,)), ("insert", 0, (1,)), ("release", 0))


@dataclass(frozen=True)
class Shape:
    """A tiny cache: blocks per tier, which tiers are inclusive, and owners at most."""

    capacities: tuple[int, ...]
    inclusive: tuple[bool, ...]
    max_owners: int = 2


SHAPES = (
    Shape((2, 1), (False, False)),
    Shape((2, 2), (False, True)),
    Shape((3, 1), (True, False)),
    Shape((2, 1, 1), (False, False, True)),
    Shape((3, 2), (False, True), max_owners=3),
)


class Search:
    """Breadth-first search from one history of a cache of one shape.

    It can be pickled, and goes on where it was.

    Attributes
    ----------
    states : of which every operation was tried.
    edges : operations tried; after each both sides were compared.
    reads : contents compared.
    """

    def __init__(self, shape: Shape, start: tuple[Operation, ...]) -> None:
        self.shape, self.start = shape, start
        self.states = self.edges = self.reads = 0
        self._known: list[tuple[int, Operation]] = [(-1, ())]  # by state: the one it was first reached from, and how
        self._seen = {state(self.repeat(start))}

    @property
    def exhausted(self) -> bool:
        """Whether every operation was tried in every state there is."""
        return self.states == len(self._known)

    def repeat(self, history: Sequence[Operation]) -> Pair:
        """A cache with this history."""
        pair = Pair(1, self.shape.capacities, inclusive=self.shape.inclusive, max_run=1)
        for operation in history:
            getattr(pair, operation[0])(*operation[1:])
        return pair

    def run(self, more: int) -> None:
        """Compare both sides after every operation in so many more states, or in all that are left.

        Raises
        ------
        AssertionError
            They differ; names the history.
        """
        known, seen, until = self._known, self._seen, self.states + more
        while self.states < min(until, len(known)):
            history = self._history(self.states)
            pair = self.repeat(history)
            here = reached = state(pair)
            for operation in list(operations(pair, self.shape.max_owners)):
                if reached != here:  # what changed nothing need not be undone
                    pair = self.repeat(history)
                before = pair.reads
                try:
                    getattr(pair, operation[0])(*operation[1:])
                    reached = state(pair)
                    pair.check(deep=reached not in seen)
                except Exception as error:
                    what = f"{type(error).__name__}: {error}"
                    raise AssertionError(f"{what} after {[*history, operation]} in {self.shape}") from error
                self.edges += 1
                self.reads += pair.reads - before
                if reached not in seen:
                    seen.add(reached)
                    known.append((self.states, operation))
            self.states += 1

    def _history(self, number: int) -> list[Operation]:
        backwards = []
        while number > 0:
            number, operation = self._known[number]
            backwards.append(operation)
        return [*self.start, *reversed(backwards)]


def operations(pair: Pair, max_owners: int) -> Iterator[Operation]:
    """What may be tried in the present state."""
    if len(pair.owners) < max_owners:
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


def state(pair: Pair) -> bytes:
    """Digest of everything that decides what happens next, without the ids."""
    model = pair.model

    def name(block: Block) -> Any:
        return block.content[1]

    blocks = sorted(
        (name(b), sorted(b.copies), b.owners, b.failed, b.moving is not None and b.moving.dst) for b in model.blocks()
    )
    everything = (
        blocks,
        [[name(b) for b in order] for order in model.order],
        sorted([name(b) for b in owner.path] for _, owner in pair.owners),
        [name(transfer.block) for transfer in model.in_flight],
        len(pair.private),
    )
    return blake2b(repr(everything).encode(), digest_size=16).digest()
