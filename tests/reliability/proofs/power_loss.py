"""The power fails at any moment, and the proof opens whatever is left.

Of what was not synced, any sectors got to the disk.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.tiers.disk.format import SlotFormat
from tests.reliability import group_life as groups
from tests.reliability.faults import Entry, Faults, preloaded
from tests.reliability.ledger import Ledger, after
from tests.reliability.life import Life
from tests.reliability.power import Image, lose_power, replay
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.scripts import Script, random_script
from tests.reliability.small_store import scratch
from tests.reliability.stores import READ_PATHS

IMAGES_OF_A_LIFE, LIVES, RESET_SHARE = 25, 3, 0.5
BY_GROUP = 8  # one of so many histories is of a cache over groups of layers
ENOUGH = 5_000  # images after which some of these must have served blocks from disk, and some been torn
CONTROL_SHARE = 10  # one of so many images once more without payload sums


def run(count: int, seed: int, tick: Tick) -> Tally:
    """`count` images, and a control."""
    return preloaded(lose_power_often, count, seed, tick)


def lose_power_often(count: int, seed: int, tick: Tick) -> Tally:
    """In the worker."""
    tally = look_at_images(count, seed, tick)
    if count >= ENOUGH:
        tally.require(groups.HITS, "torn payloads found out by groups")
    with without_payload_sums():
        control = look_at_images(max(500, count // CONTROL_SHARE), seed, lambda n: tick(0))
    tally.add("control, payload sums not compared: images", control.count)
    tally.add("control, payload sums not compared: images with wrong reads", control.wrong)
    if not control.wrong:
        tally.fail(f"control of seed {seed}: without payload sums nothing wrong was found in {control.count} images")
    return tally


class WholeBlocks:
    """The lives of one history: stores of whole blocks, judged by the ledger."""

    def __init__(self, path: Path, faults: Faults, history: int, rng: np.random.Generator) -> None:
        self.path, self.faults, self.history, self._rng = path, faults, history, rng
        self._numbers = itertools.count()

    def script(self, life: int) -> Script:
        """The steps of a life; the last one may be of another fingerprint."""
        script = random_script(self._rng, int(self._rng.integers(6, 20)), self._numbers)
        if life == LIVES - 1 and self._rng.random() < RESET_SHARE:
            script = tuple(replace(step, fingerprint=1) if step.kind == "open" else step for step in script)
        return script

    def life(self, known: Any, turn: int) -> Life:
        """One that goes on from `known`."""
        return Life(self.path, self.faults, READ_PATHS[turn % 2], known)

    def known(self, steps: Script, done: int, before: Any) -> Ledger:
        """As `after`; of nothing before it, an empty ledger."""
        return after(steps, done, before)

    def at_loss(self, steps: Script, done: int, before: Any) -> Ledger:
        """The ledger when the power is back."""
        ledger = after(steps, done, before)
        ledger.power_failed()
        return ledger


class ByGroup:
    """The same of caches over groups of layers."""

    def __init__(self, path: Path, faults: Faults, history: int, rng: np.random.Generator) -> None:
        self.path, self.faults, self.history, self._rng = path, faults, history, rng
        self._room = int(rng.choice((groups.NARROW, groups.ROOMY)))

    def script(self, life: int) -> groups.Script:
        """The steps of a life."""
        return groups.random_script(self._rng, int(self._rng.integers(6, 25)))

    def life(self, known: Any, turn: int) -> groups.GroupLife:
        """One that goes on from `known`."""
        return groups.GroupLife(self.path, self.faults, self._room, known)

    def known(self, steps: groups.Script, done: int, before: Any) -> groups.Known:
        """As `groups.after`."""
        return groups.after(steps, done, before)

    at_loss = known  # a close has synced all that it left


def look_at_images(count: int, seed: int, tick: Tick) -> Tally:
    """Look at `count` images of store after store.

    Each store has a few lives that end in a power loss.
    """
    tally = Tally()
    with scratch() as place:
        faults = Faults(place / "kv")
        for history in itertools.count():
            rng = np.random.default_rng([seed, history])
            make = ByGroup if history % BY_GROUP == BY_GROUP - 1 else WholeBlocks
            store = make(place / "kv", faults, history, rng)
            base, known = Image(), store.known((), 0, None)
            for life in range(LIVES):
                past = Past(store, base, store.script(life), known)
                for complaint in past.complaints:
                    tally.fail(f"seed {seed}, history {history}, life {life}: {complaint}")
                for number in range(IMAGES_OF_A_LIFE):
                    if tally.count == count:
                        return tally
                    image, at_loss = past.lose_power(rng)
                    what = f"seed {seed}, history {history}, life {life}, image {number}"
                    opened, known = look_at(image, at_loss, store, what, tally)
                    base = image if opened else Image()
                    known = known if opened else store.known((), 0, None)
                    tick(1)
                tally.add("lives")
    raise AssertionError("histories do not end")


class Past:
    """What one process did to a store, to be cut off anywhere.

    `base` is the directory that it found.
    """

    def __init__(self, store: WholeBlocks | ByGroup, base: Image, script: Any, before: Any) -> None:
        self.store, self.script, self.before = store, script, before
        path, faults = store.path, store.faults
        shutil.rmtree(path, ignore_errors=True)
        if base.names:
            base.write(path)
        self.base = Image.of(path)
        faults.plan()
        faults.log()
        life: Any = store.life(store.known((), 0, before), store.history)
        self.begun: list[int] = []  # where each step begins in the log
        for step in script:
            self.begun.append(faults.log_bytes)
            life.do(step)
        faults.off()
        logged = list(faults.entries())
        self.ends = [end for end, _ in logged]
        self.log: list[Entry] = [entry for _, entry in logged]
        assert replay(self.base, self.log).same(Image.of(path)), "a change of the directory was not logged"
        self.complaints = life.complaints
        life.abandon()

    def lose_power(self, rng: np.random.Generator) -> tuple[Image, Any]:
        """What is left if the power fails somewhere, and what is known of it."""
        cut = int(rng.integers(len(self.log) + 1))
        behind = self.ends[cut - 1] if cut else 0
        within = sum(begun <= behind for begun in self.begun) - 1
        finished = cut == len(self.log)
        known = self.store.at_loss(self.script, len(self.script) if finished else within, self.before)
        return lose_power(self.base, self.log[:cut], rng), known


def look_at(image: Image, known: Any, store: WholeBlocks | ByGroup, what: str, tally: Tally) -> tuple[bool, Any]:
    """Open an image and read everything.

    Returns whether it could be opened, and what is known of it afterwards.
    """
    image.write(store.path)
    store.faults.plan()
    life = store.life(known, tally.count)
    try:
        life.settle()
    except Exception as problem:
        life.complaints.append(f"raised {type(problem).__name__}: {problem}")
    if life.complaints:
        tally.fail(f"{what}: {'; '.join(life.complaints[:3])}")
    tally.count += 1
    if isinstance(life, groups.GroupLife):
        life.tell(tally)
        tally.add("images by groups")
        tally.add("torn payloads found out by groups", life.misses["payload"])
        return not life.refused, life.known
    tally.hits += life.hits
    tally.add("images refused", life.refused)
    tally.add("torn payloads found out", life.misses["payload"])
    return not life.refused, life.ledger


@contextmanager
def without_payload_sums() -> Iterator[None]:
    """A store that believes what its headers say of its payloads."""
    careful = SlotFormat.mismatch

    def careless(*arguments: Any) -> str | None:
        reason = careful(*arguments)
        return None if reason == "payload" else reason

    SlotFormat.mismatch = careless  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SlotFormat.mismatch = careful  # type: ignore[method-assign]


PROOF = Proof(
    claim="the power fails: what was synced and any sectors of the rest are opened and read, one store in "
    f"{BY_GROUP} by a cache over groups of layers; nothing wrong is served, nothing synced is lost, nothing purged "
    "comes back",
    unit="power-loss images",
    quick=5_000,
    full=100_000,
    run=run,
)
