"""Random lives of sequences on the real block table beside the oracle.

The driver reads every computed slot after every step.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.model.rows import Rows

NAMESPACES = (b"", b"a")
OPS_PER_SEED = 200


class Driver:
    """A driver of sequences over one to three tiers.

    They open, grow, run in batches, fork, are cut back and end.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.rows = Rows(
            block_size=rng.choice([1, 2, 3]),
            capacities=[rng.randint(4, 12), *(rng.choice([0, 4, 9]) for _ in range(rng.randrange(3)))],
            inclusive=[rng.random() < 0.5 for _ in range(3)],
            max_run=rng.choice([1, 256]),
        )
        self.refused = 0

    def run(self, num_ops: int) -> None:
        kinds = [self.open] * 20 + [self.step] * 40 + [self.append] * 20 + [self.fork] * 8
        kinds += [self.truncate] * 8 + [self.release] * 15
        for i in range(num_ops):
            self.rng.choice(kinds)()
            self.rows.check(deep=i % 16 == 0)
        self.rows.close()

    def tokens(self, num_tokens: int) -> list[int]:
        return [self.rng.randint(0, 1) for _ in range(num_tokens)]

    def some_sequence(self) -> int:
        return self.rng.randrange(len(self.rows.rows))

    def open(self) -> None:
        if len(self.rows.rows) == 5:
            return
        namespace = self.rng.choice(NAMESPACES)
        known = [block for block in self.rows.pair.model.blocks() if block.content[0] == namespace]
        prefix = list(self.rng.choice(known).content[1]) if known and self.rng.random() < 0.7 else []
        self.rows.open(prefix + self.tokens(self.rng.randint(0, 6)), namespace)

    def step(self) -> None:
        order = list(range(len(self.rows.rows)))
        self.rng.shuffle(order)
        if not self.rows.step(order[: self.rng.randint(1, 4)]):
            self.refused += 1
            self.rows.release(self.some_sequence())

    def append(self) -> None:
        if self.rows.rows:
            self.rows.append(self.some_sequence(), self.tokens(self.rng.choice([1, 1, 1, 4])))

    def fork(self) -> None:
        if 0 < len(self.rows.rows) < 6:
            who = self.some_sequence()
            self.rows.fork(who)
            if self.rng.random() < 0.7:
                self.rows.append(who, self.tokens(1))
                self.rows.append(len(self.rows.rows) - 1, self.tokens(1))

    def truncate(self) -> None:
        if self.rows.rows:
            who = self.some_sequence()
            num_tokens = len(self.rows.rows[who][1].tokens)
            self.rows.truncate(who, max(0, num_tokens - self.rng.randint(0, 5)))

    def release(self) -> None:
        if self.rows.rows:
            self.rows.release(self.some_sequence())


def drive(seed: int) -> Driver:
    driver = Driver(seed)
    try:
        driver.run(OPS_PER_SEED)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return driver


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_twenty_thousand_operations_on_sequences_agree_with_the_oracle(first: int) -> None:
    drivers = [drive(seed) for seed in range(first, first + 20)]
    assert sum(driver.rows.copies for driver in drivers) > 10, "nothing was ever copied on write"
    assert sum(driver.refused for driver in drivers) > 10, "there was always room"


@pytest.mark.full
@pytest.mark.parametrize("first", range(1_000_000, 1_005_000, 250))
def test_a_million_operations_on_sequences_agree_with_the_oracle(first: int) -> None:
    for seed in range(first, first + 250):
        drive(seed)
