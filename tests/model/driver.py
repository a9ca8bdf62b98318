"""A seeded random driver for a :class:`Pair`.

The same seed gives the same operations, so a failure is one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from tests.model.pair import Pair
from tests.oracle.tiers_model import DEVICE

NAMESPACES = (b"", b"a")


def closed_last(capacities: Sequence[int], last: bool) -> list[bool]:
    """Whether each tier is closed: only the coldest can be, if it is not the device."""
    return [*[False] * (len(capacities) - 1), last and len(capacities) > 1]


def claims_of(seed: int, capacities: Sequence[int]) -> list[int]:
    """The size of a tier of claims, in one history of three."""
    rng = Random(f"claims {seed}")
    return [rng.choice([2, 5, 9])] if rng.random() < 1 / 3 else []


class Driver:
    """Random operations on a pair of random shape.

    Runs of several blocks are compared as exactly as single ones, in the orders for which both sides must agree to
    the block: rooms asked for one by one, transfers completed in the order of their decision. With runs of one
    block (``max_run`` 1) any order goes, and tiers may be closed: what of a run hangs on what decides there whether
    its copies go together.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.capacities = [rng.randint(2, 8), *(rng.choice([0, 2, 5, 9, 9]) for _ in range(rng.choice([0, 1, 2, 2])))]
        self.block_size = rng.choice([1, 1, 2])
        self.max_run = rng.choice([1, 1, 2, 256])
        inclusive = [rng.random() < 0.5 for _ in self.capacities]
        closed = closed_last(self.capacities, self.max_run == 1 and rng.random() < 0.6)
        claims = claims_of(seed, self.capacities)
        self.capacities += claims
        self.grafted = 0
        self.pair = Pair(
            self.block_size,
            self.capacities,
            inclusive=inclusive,
            closed=closed,
            write=rng.choice(["never", "evicted", "reused", "all", "all"]),
            max_run=self.max_run,
            pin_budget=rng.choice([0, 3, 9]),
            beside=bool(claims),
        )
        self.pins = {True: 0, False: 0}
        weights: list[tuple[int, Callable[[], None]]] = [
            (24, self.acquire),
            (20, self.insert),
            (16, self.release),
            (6, self.resume),
            (4, self.settle),
            (3, self.share),
            (3, self.pin),
            (6, self.reserve),
            (10, self.complete),
            (2, self.hold),
            (3, self.pair.let_go),
            (1, self.forget),
            (4, self.look),
            (6 if self.max_run == 1 else 0, self.copy_wanted),
            (12 if claims else 0, self.graft),
        ]
        self.operations = [operation for weight, operation in weights for _ in range(weight)]

    def run(self, num_ops: int, *, deep_every: int = 8) -> None:
        for i in range(num_ops):
            self.rng.choice(self.operations)()
            self.pair.check(deep=i % deep_every == 0)
        self.pair.close()

    # ---- operations

    def tokens(self, num_blocks: int) -> list[int]:
        return [self.rng.randint(0, 1) for _ in range(num_blocks * self.block_size)]

    def prompt(self) -> tuple[list[int], bytes]:
        """Often a prefix that is cached now, or was a moment ago, with something else behind it."""
        namespace = self.rng.choice(NAMESPACES)
        known = [block for block in self.pair.model.blocks() if block.content[0] == namespace]
        if not known or self.rng.random() < 0.3:
            return self.tokens(self.rng.randint(0, 6)), namespace
        prefix = list(self.rng.choice(known).content[1])
        return prefix + self.tokens(self.rng.randint(0, 2)), namespace

    def some_owner(self) -> int | None:
        return self.rng.randrange(len(self.pair.owners)) if self.pair.owners else None

    def acquire(self) -> None:
        if len(self.pair.owners) == 4:
            self.release()
        tokens, namespace = self.prompt()
        tokens += [0] * self.rng.randrange(self.block_size)
        who = self.pair.acquire(tokens, namespace, self.rng.choice([None, None, None, 2]))
        if self.rng.random() < 0.7:
            self.bring_up(who)

    def insert(self) -> None:
        who = self.some_owner()
        if who is not None:
            num_blocks = self.rng.randint(1, 3)
            self.pair.make_room(num_blocks)
            tokens, size = self.tokens(num_blocks), self.block_size
            # of a run that is adopted at once the core lets the last copy below go first, the model the first one
            at_once = size if self.max_run > 1 and self.pair.num_colder(who, tokens) > 1 else max(1, len(tokens))
            for begin in range(0, len(tokens), at_once):
                if not self.pair.insert(who, tokens[begin : begin + at_once]):
                    break

    def release(self) -> None:
        who = self.some_owner()
        if who is not None:
            self.pair.release(who)

    def resume(self) -> None:
        who = self.some_owner()
        if who is not None:
            self.bring_up(who)

    def bring_up(self, who: int) -> None:
        """Do what a cache does with a prefix it owns: make room, promote, settle.

        Sometimes the driver does not carry it through.
        """
        self.pair.make_room(sum(block.top != DEVICE for block in self.pair.owners[who][1].path))
        self.pair.promote(who)
        if self.rng.random() < 0.7:
            self.pair.finish(self.rng.random() < 0.8)
        if self.rng.random() < 0.8:
            self.pair.settle(who)

    def settle(self) -> None:
        who = self.some_owner()
        if who is not None:
            self.pair.settle(who)

    def share(self) -> None:
        who = self.some_owner()
        if who is not None and len(self.pair.owners) < 5:
            self.pair.share(who)

    def pin(self) -> None:
        who = self.some_owner()
        if who is not None:
            self.pins[self.pair.pin(who)] += 1

    def reserve(self) -> None:
        tier = self.rng.choice([tier for tier, blocks in enumerate(self.capacities) if blocks])
        one_more = self.pair.model.free(tier) + 1
        self.pair.reserve(self.rng.randint(0, self.capacities[tier] + 1) if self.max_run == 1 else one_more, tier)

    def complete(self) -> None:
        self.pair.take()
        if self.pair.transfers:
            which = self.rng.randrange(len(self.pair.transfers)) if self.max_run == 1 else 0
            self.pair.complete(self.rng.random() < 0.8, which)

    def graft(self) -> None:
        tokens, namespace = self.prompt()
        self.grafted += self.pair.graft(tokens, namespace, self.rng.choice([1, 2, 256]))

    def copy_wanted(self) -> None:
        self.pair.copy_wanted(self.rng.choice([1, 2, 64]))

    def hold(self) -> None:
        self.pair.hold(self.rng.randint(0, 2))

    def forget(self) -> None:
        if self.rng.random() < 0.2:
            self.pair.drop_namespace(self.rng.choice(NAMESPACES))
        elif self.rng.random() < 0.2:
            self.pair.clear()

    def look(self) -> None:
        self.pair.look(*self.prompt())
