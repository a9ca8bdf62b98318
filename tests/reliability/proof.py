"""A proof: one claim of docs/reliability.md.

pytest runs it with few cases; ``python -m tests.reliability`` with many.

A proof lives in one module of ``tests/reliability/proofs`` and is its ``PROOF``. Its cases follow from the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


@dataclass
class Tally:
    """What a proof found.

    Attributes
    ----------
    count : cases run, in the proof's unit.
    wrong : cases in which something was wrong: a wrong byte served, a signal, a leak, a refusal that should not be.
        Has to be 0.
    hits : reads that were served and compared byte by byte.
    found : further counts worth a line (misses by reason, refusals, faults injected), so that no reader has to believe
        that the faults happened.
    first_wrong : how to see the first wrong case again.
    skipped : why cases could not run here (no root, no FUSE); an honest "not done".
    """

    count: int = 0
    wrong: int = 0
    hits: int = 0
    found: dict[str, int] = field(default_factory=dict)
    first_wrong: str = ""
    skipped: tuple[str, ...] = ()

    def fail(self, how: str) -> None:
        """One more wrong case."""
        self.wrong += 1
        self.first_wrong = self.first_wrong or how

    def add(self, what: str, count: int = 1) -> None:
        """Count something worth a line."""
        self.found[what] = self.found.get(what, 0) + count

    def require(self, *kinds: str) -> None:
        """Wrong unless each of these was found: a proof whose faults never came has proved nothing."""
        if never := [kind for kind in kinds if not self.found.get(kind)]:
            self.fail(f"these never happened: {', '.join(never)}")


Tick: TypeAlias = Callable[[int], object]


class Run(Protocol):
    """Runs `count` cases, or all of them where the proof is exhaustive.

    `tick(n)` says that n more are done.
    """

    def __call__(self, count: int, seed: int, tick: Tick) -> Tally: ...


@dataclass(frozen=True)
class Proof:
    """One row of the table.

    Attributes
    ----------
    claim : what is proved, as the table says it.
    unit : what is counted.
    quick, full : cases under pytest (quick or slow run), and in a full run on demand.
    run : see `Run`.
    """

    claim: str
    unit: str
    quick: int
    full: int
    run: Run
