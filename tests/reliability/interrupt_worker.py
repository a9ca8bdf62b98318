"""Runs interruptions in a process of their own.

``python -m tests.reliability.interrupt_worker MODE FIRST COUNT SEED FILE``.

FILE is told which case is under way, for the parent of a worker that dies.

Case number n follows from n and the seed alone: its setup, its scene, how far along the call it is, and its kind.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.reliability import child
from tests.reliability.interrupt_cases import GOLDEN, Case, Cases
from tests.reliability.interrupt_control import plant_old_order
from tests.reliability.interrupt_kinds import Alarm
from tests.reliability.interrupt_scenes import SCENES, Scene
from tests.reliability.interrupt_world import LOG, SETUPS, SLOWNESS, Setup, World, slow_transfers
from tests.reliability.proof import Tally
from tests.reliability.small_remote import serve_small_stores
from tests.reliability.small_store import scratch

for scenes in ("interrupt_step_scenes", "interrupt_cache_scenes", "interrupt_schedules", "interrupt_remote_scenes"):
    importlib.import_module(f"tests.reliability.{scenes}")  # each adds its own to SCENES
PATIENCE_S = float(os.environ.get("PAGEDKV_INTERRUPT_PATIENCE_S", "60"))
MOST_WRONG = int(os.environ.get("PAGEDKV_INTERRUPT_MOST_WRONG", "40"))  # then the rest is not worth its time
LIFE = 24  # cases that a world lives for
ROUNDS = 8  # a setup comes in every one of them, or in one of so many
TELL_EVERY = 100
SLOWEST_S = 0.08  # copies of a setup for the control: callers that wait look for signals in between


def kernels_backend() -> Any:
    """The CUDA kernels in the interpreter; None where NVRTC is missing."""
    from pagedkv.errors import KernelsUnavailable
    from pagedkv.kernels.nvrtc import default_nvrtc

    try:
        default_nvrtc()
    except KernelsUnavailable:
        return None
    from tests.ptxsim.backend import PtxsimBackend

    return PtxsimBackend(races=False)


def slots(setups: list[Setup]) -> list[Setup]:
    """Whose turn it is, world by world: heavy setups come less often."""
    return [setup for turn in range(ROUNDS) for setup in setups if turn % setup.every == 0]


def plan(mode: str, first: int, seed: int, setups: list[Setup]) -> Iterator[tuple[Setup, Scene, float, int, str]]:
    """Yield cases from number `first` on, for ever.

    `LIFE` scenes of one setup, then of the next, and points along each.
    """
    order = slots(setups)
    number = first
    while True:
        world, within = divmod(number, LIFE)
        rounds, at = divmod(world, len(order))
        setup = order[at]
        place = setups.index(setup)
        worlds = rounds * order.count(setup) + order[:at].count(setup)
        turn, which = divmod(worlds * LIFE + within + place * 7, len(SCENES))
        walk = (turn * GOLDEN + which * 0.37 + place * 0.11 + seed * 0.7548) % 1.0
        yield setup, SCENES[which], walk, turn + which + seed, f"{mode} {number} of seed {seed}"
        number += 1


def main(mode: str, first: int, count: int, seed: int, progress: int) -> Tally:
    """So many cases; `progress` is a file that says which is under way."""
    tally, alarm = Tally(), Alarm(PATIENCE_S)
    backend = kernels_backend() if mode not in ("allocations", "dispatcher") else None
    setups = [setup for setup in SETUPS if not setup.kernels or backend is not None]
    if mode == "callbacks":
        setups = [setup for setup in setups if setup.hooks or setup.clock]
    if mode == "dispatcher":
        setups = [setup for setup in setups if (len(setup.tiers) > 1 or setup.remote) and not setup.synchronous]
    slow_transfers()
    serve_small_stores(lambda: SLOWNESS.delay_s)
    gc.collect()
    gc.freeze()  # so that collections look at little
    if mode == "control":
        setups = [setup for setup in setups if setup.slow >= SLOWEST_S]
    planted = plant_old_order() if mode == "control" else None
    cases = Cases(mode, alarm, PATIENCE_S, tally, planted)
    world: World | None = None
    told = 0
    with scratch() as folder:
        for number, (setup, scene, walk, kind, name) in enumerate(plan(mode, first, seed, setups)):
            if tally.count >= count or tally.wrong >= MOST_WRONG or (planted and tally.found.get("wrong bytes")):
                break
            if world is None or world.setup != setup:
                if world is not None and planted is None:
                    close(world, cases, name)
                world = World(setup, fresh(folder, number), backend, seed)
            os.pwrite(progress, number_of(first + number), 0)
            if not scene.fits(world) or (mode == "control" and "host memory" not in scene.name):
                continue
            if not cases.run(Case(mode, world, scene, walk, kind, name)):
                LOG.removeHandler(world.listener)
                ABANDONED.append(world)  # as it is: closing what hangs would hang
                world = None
            if tally.count - told >= TELL_EVERY:
                child.done(tally.count - told)
                child.answer(tally)
                told = tally.count
        if world is not None and planted is None:
            close(world, cases, "the last world")
    if planted is not None:
        tally.add("given up although queued", planted.given_up)
    child.done(tally.count - told)
    return tally


def number_of(case: int) -> bytes:
    """As the progress file has it."""
    return f"{case:12}".encode()


ABANDONED: list[World] = []


def close(world: World, cases: Cases, name: str) -> None:
    """A world's end must work, too."""
    faulthandler.dump_traceback_later(2 * PATIENCE_S + 30, exit=True)
    try:
        with cases.alarm.watch():
            world.close()
    except BaseException as problem:
        cases.tally.fail(f"closing {world.setup.name} before {name}: {problem!r}")
        print(f"closing {world.setup.name} before {name}: {problem!r}", file=sys.stderr)
    shutil.rmtree(world.folder, ignore_errors=True)
    gc.collect()


def fresh(folder: Path, number: int) -> Path:
    """An empty directory."""
    path = folder / str(number)
    path.mkdir()
    return path


if __name__ == "__main__":
    faulthandler.enable()
    sys.unraisablehook = lambda unraisable: None  # interruptions in finalizers are dropped by the interpreter
    asked, numbers = sys.argv[1], [int(word) for word in sys.argv[2:5]]
    child.answer(main(asked, numbers[0], numbers[1], numbers[2], os.open(sys.argv[5], os.O_WRONLY | os.O_CREAT)))
    sys.stdout.flush()
    os._exit(0)  # threads of worlds that hang are left
