"""What a store must, may and must not serve.

It follows from what the store was asked and what it answered.

    steps   what a run asks for, one after the other
    ledger  what follows from them

A step is entered twice: before it, for a process may end within it, and after it, with its answer.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.reliability.stores import MOST_BLOCKS, NUM_BLOCKS, namespace_of, record_of

Kind = Literal["open", "write", "invalidate", "purge", "clear", "flush", "read", "close"]


@dataclass(frozen=True)
class Step:
    """One call.

    `numbers` go into `slots` one by one; `namespace` is what is purged; `fingerprint` what is opened, with room for
    `num_blocks`, or for as many as it has.
    """

    kind: Kind
    slots: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    namespace: int = 0
    fingerprint: int = 0
    num_blocks: int = 0

    def __str__(self) -> str:
        parts = (self.slots and f"slots {self.slots}", self.numbers and f"numbers {self.numbers}")
        about = f"namespace {self.namespace}" if self.kind == "purge" else ", ".join(part for part in parts if part)
        return f"{self.kind} {about}".rstrip()


@dataclass
class Ledger:
    """Slots and the numbers in them.

    Attributes
    ----------
    held : what the open tier has to answer: this number, or nothing. Of slots not named it may serve anything allowed.
    stored : what a tier opened without faults has to serve.
    synced : what it has to serve even after the power failed.
    dead : purged, or stored under another fingerprint; may never be served.
    buried : invalidated; may not be served.
    written : every number that was ever to be written to a slot.
    numbers : these, by the key of their record.
    fingerprint : what the store was last opened as.
    num_blocks : the largest size that the store was opened with, or was to be.
    clearing : the latest clear was refused: it may have happened, or may happen yet when the tier is closed.
    """

    held: dict[int, int | None] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    synced: dict[int, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    buried: set[int] = field(default_factory=set)
    written: dict[int, set[int]] = field(default_factory=lambda: {slot: set() for slot in range(MOST_BLOCKS)})
    numbers: dict[bytes, int] = field(default_factory=dict)
    fingerprint: int = 0
    num_blocks: int = NUM_BLOCKS
    clearing: bool = False
    _replaced: list[int] = field(default_factory=list)

    def begin(self, step: Step) -> None:
        """The step is about to be tried: from now on it may have happened, or a part of it."""
        if step.kind == "open":
            self.held, self.clearing = {}, False
            self.num_blocks = max(self.num_blocks, step.num_blocks)
            if step.fingerprint != self.fingerprint:
                self.fingerprint = step.fingerprint
                self.dead |= set(self.numbers.values())
                self._forget(self.dead)
        elif step.kind in ("purge", "clear"):
            doomed = self._doomed(step)
            self._forget(doomed)
            self.held = {slot: number for slot, number in self.held.items() if number not in doomed}
            self.clearing |= step.kind == "clear"
        elif step.kind in ("write", "invalidate"):
            self._replaced = [self.stored[slot] for slot in step.slots if slot in self.stored]
            self._forget(set(step.numbers), step.slots)
            for slot in step.slots:
                self.held.pop(slot, None)
        for slot, number in zip(step.slots, step.numbers):
            self.written[slot].add(number)
            self.numbers[record_of(number).key] = number
            self.dead.discard(number)
            self.buried.discard(number)

    def end(self, step: Step, went_well: Sequence[bool], *, faultless: bool) -> None:
        """Enter that the step did not raise.

        `went_well`: of a write, for each slot. `faultless`: no fault met it so far.
        """
        if step.kind == "write":
            for slot, number, ok in zip(step.slots, step.numbers, went_well):
                self.held[slot] = number if ok else None
                if ok and not self.clearing:
                    self.stored[slot] = number
        elif step.kind == "invalidate":
            self.held |= dict.fromkeys(step.slots)
            if faultless:
                self.buried |= {n for n in self._replaced if sum(n in there for there in self.written.values()) == 1}
        elif step.kind in ("purge", "clear"):
            self.dead |= self._doomed(step)
            self.clearing &= step.kind != "clear"
        elif (step.kind == "flush" and all(went_well)) or (step.kind == "close" and faultless):
            self.synced = dict(self.stored)

    def opened(self, listed: Mapping[int, int], *, faultless: bool) -> None:
        """Enter that the open tier lists these numbers in these slots.

        It may give up what a fault kept it from finding.
        """
        self.held = {slot: number for slot, number in listed.items() if self.stored.get(slot) == number}
        if not faultless:
            self._forget((), self.stored.keys() - self.held.keys())

    def power_failed(self) -> None:
        """Only what was synced has to be there, and an invalidation may be lost; a purge may not."""
        self.held, self.stored = {}, dict(self.synced)
        self.buried.clear()

    def nothing_is_sure(self) -> None:
        """Something that no tier can notice took away what was stored."""
        self.held = {slot: None for slot, number in self.held.items() if number is None}
        self.stored.clear()
        self.synced.clear()

    def allows(self, slot: int, number: int) -> bool:
        """Whether the tier may serve `number` from `slot`."""
        gone = number in self.dead or number in self.buried
        return not gone and number in self.written[slot] and self.held.get(slot, number) == number

    def _doomed(self, step: Step) -> set[int]:
        """What a purge is about."""
        everything = step.kind == "clear"
        return {number for number in self.numbers.values() if everything or namespace_of(number) == step.namespace}

    def _forget(self, numbers: Collection[int], slots: Collection[int] = ()) -> None:
        """The tier need not serve these numbers, nor anything from these slots, any more."""
        for kept in (self.stored, self.synced):
            for slot in [slot for slot, number in kept.items() if slot in slots or number in numbers]:
                del kept[slot]


def after(steps: Iterable[Step], done: int, before: Ledger | None = None) -> Ledger:
    """Return the ledger of a process that ended within step number `done`.

    Every step before it has gone well.
    """
    ledger = copy.deepcopy(before or Ledger())
    for index, step in enumerate(steps):
        if index > done:
            break
        ledger.begin(step)
        if index < done:
            ledger.end(step, [True] * max(1, len(step.slots)), faultless=True)
    return ledger
