"""The same comparison as a hypothesis state machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.model.driver import NAMESPACES
from tests.model.machine import run_histories
from tests.model.pair import Pair

prompts = st.lists(st.integers(0, 1), max_size=6)
who = st.integers(0, 3)
namespaces = st.sampled_from(NAMESPACES)


class PlacementMachine(RuleBasedStateMachine):
    """Owners acquire, fill, share, suspend and release prefixes; blocks move, arrive, fail and are dropped."""

    pair: Pair
    steps: ClassVar[int] = 0  # of all histories

    @initialize(
        capacities=st.tuples(st.integers(2, 6), st.sampled_from([0, 2, 4]), st.sampled_from([0, 3])),
        inclusive=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        max_run=st.sampled_from([1, 256]),
    )
    def start(self, capacities: Sequence[int], inclusive: Sequence[bool], max_run: int) -> None:
        self.pair = Pair(1, capacities, inclusive=inclusive, max_run=max_run, pin_budget=3)

    def somebody(self, who: int) -> int:
        return who % len(self.pair.owners)

    @rule(tokens=prompts, namespace=namespaces, limit=st.none() | st.integers(0, 3))
    @precondition(lambda self: len(self.pair.owners) < 4)
    def acquire(self, tokens: list[int], namespace: bytes, limit: int | None) -> None:
        self.pair.acquire(tokens, namespace, limit)

    @rule(who=who, tokens=prompts)
    @precondition(lambda self: self.pair.owners)
    def insert(self, who: int, tokens: list[int]) -> None:
        self.pair.make_room(len(tokens))
        self.pair.insert(self.somebody(who), tokens)

    @rule(who=who)
    @precondition(lambda self: self.pair.owners)
    def release(self, who: int) -> None:
        self.pair.release(self.somebody(who))

    @rule(who=who)
    @precondition(lambda self: 0 < len(self.pair.owners) < 4)
    def share(self, who: int) -> None:
        self.pair.share(self.somebody(who))

    @rule(who=who)
    @precondition(lambda self: self.pair.owners)
    def promote(self, who: int) -> None:
        self.pair.promote(self.somebody(who))

    @rule(who=who)
    @precondition(lambda self: self.pair.owners)
    def settle(self, who: int) -> None:
        self.pair.settle(self.somebody(who))

    @rule(who=who)
    @precondition(lambda self: self.pair.owners)
    def pin(self, who: int) -> None:
        self.pair.pin(self.somebody(who))

    @rule(tier=st.integers(0, 2))
    def reserve_one_more(self, tier: int) -> None:
        if self.pair.pools[tier]:
            self.pair.reserve(self.pair.model.free(tier) + 1, tier)

    @rule(ok=st.booleans(), which=st.integers(0, 5))
    def complete(self, ok: bool, which: int) -> None:
        self.pair.take()
        if self.pair.transfers:
            self.pair.complete(ok, which % len(self.pair.transfers) if self.pair.max_run == 1 else 0)

    @rule(num_blocks=st.integers(1, 2))
    def hold(self, num_blocks: int) -> None:
        self.pair.hold(num_blocks)

    @rule()
    def let_go(self) -> None:
        self.pair.let_go()

    @rule(tokens=prompts, namespace=namespaces)
    def look(self, tokens: list[int], namespace: bytes) -> None:
        self.pair.look(tokens, namespace)

    @rule()
    def clear(self) -> None:
        self.pair.clear()

    @rule(namespace=namespaces)
    def drop_namespace(self, namespace: bytes) -> None:
        self.pair.drop_namespace(namespace)

    @invariant()
    def both_sides_agree(self) -> None:
        if hasattr(self, "pair"):
            PlacementMachine.steps += 1
            self.pair.check(deep=True)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.close()


def test_fifty_thousand_steps_of_the_machine_agree_with_the_oracle() -> None:
    PlacementMachine.steps = 0
    run_histories(PlacementMachine, 1000, 100)
    assert PlacementMachine.steps >= 50_000
