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
from tests.reliability.faults import Entry, Faults, preloaded
from tests.reliability.ledger import Ledger, after
from tests.reliability.life import Life
from tests.reliability.power import Image, lose_power, replay
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.scripts import Script, random_script
from tests.reliability.small_store import scratch
from tests.reliability.stores import READ_PATHS

IMAGES_OF_A_LIFE, LIVES, RESET_SHARE = 25, 3, 0.5
CONTROL_SHARE = 10  # one of so many images once more without payload sums


def run(count: int, seed: int, tick: Tick) -> Tally:
    """`count` images, and a control."""
    return preloaded(lose_power_often, count, seed, tick)


def lose_power_often(count: int, seed: int, tick: Tick) -> Tally:
    """In the worker."""
    tally = look_at_images(count, seed, tick)
    with without_payload_sums():
        control = look_at_images(max(500, count // CONTROL_SHARE), seed, lambda n: tick(0))
    tally.add("control, payload sums not compared: images", control.count)
    tally.add("control, payload sums not compared: images with wrong reads", control.wrong)
    if not control.wrong:
        tally.fail(f"control of seed {seed}: without payload sums nothing wrong was found in {control.count} images")
    return tally


def look_at_images(count: int, seed: int, tick: Tick) -> Tally:
    """Look at `count` images of store after store.

    Each store has a few lives that end in a power loss.
    """
    tally = Tally()
    with scratch() as place:
        faults = Faults(place / "kv")
        for history in itertools.count():
            rng = np.random.default_rng([seed, history])
            numbers = itertools.count()
            base, ledger = Image(), Ledger()
            for life in range(LIVES):
                script = random_script(rng, int(rng.integers(6, 20)), numbers)
                if life == LIVES - 1 and rng.random() < RESET_SHARE:
                    script = tuple(replace(step, fingerprint=1) if step.kind == "open" else step for step in script)
                past = Past(place / "kv", faults, base, script, ledger, READ_PATHS[history % 2])
                for complaint in past.complaints:
                    tally.fail(f"seed {seed}, history {history}, life {life}: {complaint}")
                for number in range(IMAGES_OF_A_LIFE):
                    if tally.count == count:
                        return tally
                    image, at_loss = past.lose_power(rng)
                    what = f"seed {seed}, history {history}, life {life}, image {number}"
                    opened, ledger = look_at(image, at_loss, place / "kv", faults, what, tally)
                    base = image if opened else Image()
                    ledger = ledger if opened else Ledger()
                    tick(1)
                tally.add("lives")
    raise AssertionError("histories do not end")


class Past:
    """What one process did to a store, to be cut off anywhere.

    `base` is the directory that it found.
    """

    def __init__(self, path: Path, faults: Faults, base: Image, script: Script, before: Ledger, read_path: str) -> None:
        self.script, self.before = script, before
        shutil.rmtree(path, ignore_errors=True)
        if base.names:
            base.write(path)
        self.base = Image.of(path)
        faults.plan()
        faults.log()
        life = Life(path, faults, read_path, after((), 0, before))
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

    def lose_power(self, rng: np.random.Generator) -> tuple[Image, Ledger]:
        """What is left if the power fails somewhere, and what is known of it."""
        cut = int(rng.integers(len(self.log) + 1))
        behind = self.ends[cut - 1] if cut else 0
        within = sum(begun <= behind for begun in self.begun) - 1
        finished = cut == len(self.log)
        ledger = after(self.script, len(self.script) if finished else within, self.before)
        ledger.power_failed()
        return lose_power(self.base, self.log[:cut], rng), ledger


def look_at(image: Image, ledger: Ledger, path: Path, faults: Faults, what: str, tally: Tally) -> tuple[bool, Ledger]:
    """Open an image and read everything.

    Returns whether it could be opened, and what is known of it afterwards.
    """
    image.write(path)
    faults.plan()
    life = Life(path, faults, READ_PATHS[tally.count % 2], ledger)
    try:
        life.settle()
    except Exception as problem:
        life.complaints.append(f"raised {type(problem).__name__}: {problem}")
    if life.complaints:
        tally.fail(f"{what}: {'; '.join(life.complaints[:3])}")
    tally.count += 1
    tally.hits += life.hits
    tally.add("images refused", life.refused)
    tally.add("torn payloads found out", life.misses["payload"])
    return not life.refused, ledger


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
    claim="the power fails: what was synced and any sectors of the rest are opened and read; nothing wrong is served, "
    "nothing synced is lost, nothing purged comes back",
    unit="power-loss images",
    quick=5_000,
    full=100_000,
    run=run,
)
