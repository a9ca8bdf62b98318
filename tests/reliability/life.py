"""A small store's life: steps done on a real tier beside the ledger.

Everything that the tier serves is compared with the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.tiers import DiskTier
from tests.reliability.ledger import Ledger, Step
from tests.reliability.stores import BLOCK_BYTES, NUM_BLOCKS, bytes_of, digest_of, open_store, record_of

Answer: TypeAlias = tuple[int, int, NDArray[np.uint8] | None]  # slot, number, what was served for it

LONG_S = 1e6  # by then a tier that gave up for a while looks again


class Faulty(Protocol):
    """Where faults come from."""

    @property
    def fired(self) -> int:
        """How many may have met the store; 0 if none."""

    def off(self) -> None:
        """No more of them."""


class Outside:
    """Faults that come from outside the process, between `on` and `off`; `end` makes them stop."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.fired = 0
        self._end = end

    def on(self) -> None:
        """From now on they may come."""
        self.fired = 1

    def off(self) -> None:
        """No more of them."""
        self._end()


class Life:
    """One store directory from step to step.

    Attributes
    ----------
    ledger : what may be served.
    complaints : what was wrong, in words; has to stay empty.
    misses : by reason, of the tiers that were closed.
    hits, refused, failed_writes : reads served and compared, openings refused, blocks that could not be written.
    """

    def __init__(self, path: Path, faults: Faulty, read_path: str, ledger: Ledger | None = None) -> None:
        self.path, self.read_path = path, read_path
        self.ledger = ledger or Ledger()
        self.complaints: list[str] = []
        self.misses: Counter[str] = Counter()
        self.hits = self.refused = self.failed_writes = 0
        self._faults = faults
        self._tier: DiskTier | None = None
        self._now = 0.0
        self._settled = self._was_open = False

    def run(self, steps: Sequence[Step]) -> None:
        """Do the steps. A tier that cannot be opened leaves out those that need it."""
        for step in steps:
            if step.kind == "open" or self._tier is not None:
                self.do(step)

    def do(self, step: Step) -> None:
        """Do one step.

        Only opening, purging and clearing may raise: a `TierError`, because of a fault.
        """
        self.ledger.begin(step)
        try:
            answer = self._ask(step)
        except TierError as problem:
            if step.kind not in ("open", "purge", "clear"):
                raise
            self.refused += step.kind == "open"
            if self._faultless:
                self.complaints.append(f"{step} was refused without any fault: {problem}")
        else:
            self.ledger.end(step, answer, faultless=self._faultless)

    def settle(self) -> None:
        """End all faults, and check that all that has to be served is served.

        Now, and by a tier opened again.
        """
        self._faults.off()
        self._settled = True
        self._now += LONG_S
        if self._tier is not None:
            self._judge(self._answers(thorough=True), self._held, "the open tier")
            self.do(Step("close"))
        self.ledger.begin(Step("open", fingerprint=self.ledger.fingerprint))
        try:
            self._open()
        except TierError as problem:
            self.refused += 1
            if self._was_open or self._faultless or self.ledger.stored:  # else faults met its making and the clean-up
                self.complaints.append(f"cannot be opened again: {problem}")
            return
        self._judge(self._answers(thorough=True), self.ledger.stored, "opened again")
        self.do(Step("close"))

    def abandon(self) -> None:
        """Close the tier if it is open, and ask nothing more."""
        if self._tier is not None:
            self._tier.close()

    @property
    def _faultless(self) -> bool:
        return not self._faults.fired

    def _ask(self, step: Step) -> Sequence[bool]:
        """Whether it went well: of a write, for each slot."""
        if step.kind == "open":
            self._open()
            return [True]
        tier = self._tier
        assert tier is not None
        if step.kind == "write":
            arena = np.stack([bytes_of(number) for number in step.numbers])
            records = [record_of(number) for number in step.numbers]
            written = tier.write(step.slots, records, arena, np.arange(len(records)))
            self.failed_writes += int((~written).sum())
            return [bool(ok) for ok in written]
        if step.kind == "flush":
            return [tier.flush()]
        if step.kind == "invalidate":
            tier.invalidate(step.slots)
        elif step.kind == "purge":
            tier.purge(digest_of(step.namespace))
        elif step.kind == "clear":
            tier.clear()
        elif step.kind == "read":
            answers = self._answers(thorough=False)
            self._judge(answers, self._held if self._faultless else {}, "the open tier")
        else:
            self._tier = None
            tier.close()
            self.misses.update(tier.stats().misses)
        return [True]

    def _open(self) -> None:
        fingerprint = self.ledger.fingerprint
        self._tier = open_store(
            self.path, num_blocks=self.ledger.num_blocks, fingerprint=fingerprint,
            on_mismatch="reset" if fingerprint else "refuse",
            clock=lambda: self._now, read_path=self.read_path,
        )  # fmt: skip
        self._was_open = True
        listed = self._listed()
        self.ledger.opened(listed, faultless=self._faultless or self._settled)

    def _listed(self) -> dict[int, int]:
        """Number in each slot, as the tier lists them."""
        assert self._tier is not None
        listed = {}
        for stored in self._tier.records():
            number = self.ledger.numbers.get(stored.record.key)
            if number is None or stored.record != record_of(number):
                self.complaints.append(f"slot {stored.block} lists a record that no step wrote")
            else:
                listed[stored.block] = number
        return listed

    @property
    def _held(self) -> dict[int, int]:
        return {slot: number for slot, number in self.ledger.held.items() if number is not None}

    def _answers(self, *, thorough: bool) -> list[Answer]:
        """Ask for all that was ever written to a slot, and return the answers.

        If thorough, also for what is listed or elsewhere.
        """
        assert self._tier is not None
        written = self.ledger.written
        pairs = {(slot, number) for slot, numbers in written.items() for number in numbers}
        if thorough:
            pairs |= set(self._listed().items())
            pairs |= {((slot + 1) % NUM_BLOCKS, max(numbers)) for slot, numbers in written.items() if numbers}
        asked = sorted(pairs)
        arena = np.zeros((len(asked), BLOCK_BYTES), np.uint8)
        slots = np.array([slot for slot, _ in asked], np.int32)
        hits = self._tier.read(slots, [record_of(n) for _, n in asked], arena, np.arange(len(asked), dtype=np.int32))
        self.hits += int(hits.sum())
        return [(slot, n, row if hit else None) for (slot, n), hit, row in zip(asked, hits.tolist(), arena)]

    def _judge(self, answers: Iterable[Answer], must: Mapping[int, int], place: str) -> None:
        for slot, number, row in answers:
            what = f"{place}: number {number} in slot {slot}"
            if row is None:
                if must.get(slot) == number:
                    self.complaints.append(f"{what} is lost")
            elif not np.array_equal(row, bytes_of(number)):
                self.complaints.append(f"{what} is served with other bytes")
            elif not self.ledger.allows(slot, number):
                self.complaints.append(f"{what} may not be served any more")
