"""The process ends at every call into the operating system.

It ends before the call, and within it when half of it is done.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.reliability import group_life as groups
from tests.reliability.faults import EXIT_CODE, Action, Fault, Faults, preloaded
from tests.reliability.ledger import Step, after
from tests.reliability.life import Life
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.scripts import CLOSE, FIXED, LIFE, MANY_PURGES, READ, Script, purge, write
from tests.reliability.small_store import scratch

EVERY = 1 << 30
CASES = [  # name, script, way of reading, how many of the last calls
    *((name, script, "pread", EVERY) for name, script in FIXED.items()), ("life", LIFE, "mapping", EVERY),
    ("many purges", MANY_PURGES, "pread", 80),
]  # fmt: skip
AFTERWARDS = (write(1000, 0, 4, 9), READ, *purge(0), CLOSE)  # a store that went through it has to work
CHILD_PATIENCE_S = 100
ONE_IN = 7  # calls of a cache over groups of layers; the seed chooses which
ROOMS_OF_GROUPS = (groups.NARROW, groups.ROOMY)
CALLS_LATER = 1.2  # calls of a cache vary with its threads: exits are planned for so many times the calls of one run


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Every exit of the fixed scripts, and a share of those by groups; no `count` is chosen."""
    return preloaded(exit_everywhere, count, seed, tick)


def exit_everywhere(count: int, seed: int, tick: Tick) -> Tally:
    """In the worker."""
    tally = Tally()
    with scratch() as place:
        for name, script, read_path, last in CASES:
            child = Child(place / "kv", partial(Life, read_path=read_path))
            calls = child.count(script)
            tally.add("calls in the fixed scripts", calls)
            reopening = child.count(([step for step in script if step.kind == "open"][-1], CLOSE))
            first = max(1, calls - last + 1)
            for k, action in itertools.product(range(first, calls + 1), (Action.EXIT_BEFORE, Action.EXIT_WITHIN)):
                shutil.rmtree(child.path)
                what = f"{name}, {read_path}, call {k}: {action.name}"
                second = 1 + k * 7919 % reopening
                problems = exit_once_or_twice(child, script, read_path, Fault(k, k, action), second, tally)
                if problems:
                    tally.fail(f"{what}: {'; '.join(problems[:3])}")
                tally.count += 1
                tick(1)
            shutil.rmtree(child.path)
        exit_by_groups(place / "groups", seed, tally, tick)
    tally.require(groups.HITS)
    return tally


def exit_by_groups(path: Path, seed: int, tally: Tally, tick: Tick) -> None:
    """Run caches over groups of layers.

    Of their calls one in `ONE_IN` meets an exit, of both kinds in turns.
    """
    for first, room in enumerate(ROOMS_OF_GROUPS, seed):
        child = Child(path, partial(groups.GroupLife, room=room))
        calls = child.count(groups.LIFE)
        tally.add("calls in the script by groups", calls)
        for k in range(1 + first % ONE_IN, round(calls * CALLS_LATER) + 1, ONE_IN):
            shutil.rmtree(path, ignore_errors=True)
            action = (Action.EXIT_BEFORE, Action.EXIT_WITHIN)[k % 2]
            code, done = child.run(groups.LIFE, Fault(k, k, action))
            life = groups.GroupLife(path, child.faults, room, groups.after(groups.LIFE, done))
            if code not in (0, EXIT_CODE):
                life.complaints.append(f"the process ended with {code} within step {done}")
            try:
                life.settle()
            except Exception as problem:
                life.complaints.append(f"raised {type(problem).__name__}: {problem}")
            if life.complaints:
                tally.fail(f"groups, {room} blocks, call {k}: {action.name}: {'; '.join(life.complaints[:3])}")
            life.tell(tally)
            tally.add("exits by groups", code == EXIT_CODE)
            tally.count += 1
            tick(1)
        shutil.rmtree(path)


def exit_once_or_twice(
    child: Child, script: Script, read_path: str, fault: Fault, second: int, tally: Tally
) -> list[str]:
    """Exit, look at everything, use the store and look again; what was wrong.

    After every exit before a call, the process that reopens the store ends as well, before its call `second`.
    """
    code, done = child.run(script, fault)
    if code != EXIT_CODE:
        return [f"the process ended with {code} within step {done}, and not where it should"]
    if fault.action == Action.EXIT_BEFORE:
        opening = [step for step in script[: done + 1] if step.kind == "open"][-1]
        code, _ = child.run((opening, CLOSE), Fault(second, second, Action.EXIT_BEFORE))
        tally.add("second exits while reopening", code == EXIT_CODE)
    life = Life(child.path, child.faults, read_path, after(script, done))
    try:
        life.settle()
        if fault.action == Action.EXIT_WITHIN:
            life.run((Step("open", fingerprint=life.ledger.fingerprint), *AFTERWARDS))
            life.settle()
    except Exception as problem:
        life.complaints.append(f"raised {type(problem).__name__}: {problem}")
    tally.hits += life.hits
    tally.add("openings refused", life.refused)
    return life.complaints


class Child:
    """Runs scripts in forked processes.

    Parameters
    ----------
    path : the store's directory.
    make : a life in it, under these faults.
    """

    def __init__(self, path: Path, make: Callable[[Path, Faults], Life | groups.GroupLife]) -> None:
        self.path, self.faults, self._make = path, Faults(path), make
        self._progress = mmap.mmap(-1, 8)

    def count(self, script: Sequence[Any]) -> int:
        """How many calls a script makes from what lies in the directory now."""
        life = self._make(self.path, self.faults)
        self.faults.plan()
        life.run(script)
        self.faults.off()
        return self.faults.calls

    def run(self, script: Sequence[Any], fault: Fault) -> tuple[int, int]:
        """Run the script in a child; return its exit code and the step that it was in.

        A negative exit code is a signal's number.
        """
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(CHILD_PATIENCE_S)
                self.faults.plan(fault)
                life: Any = self._make(self.path, self.faults)
                for index, step in enumerate(script):
                    self._progress[:] = index.to_bytes(8, "little")
                    life.do(step)
                self._progress[:] = len(script).to_bytes(8, "little")
                code = 2 if life.complaints else 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), int.from_bytes(self._progress[:], "little")


PROOF = Proof(
    claim="the process ends before or within every system call of fixed scripts, and again while reopening, and at one "
    f"call in {ONE_IN} of caches over groups of layers: nothing wrong is served, nothing else is lost",
    unit="exits",
    quick=1_000,
    full=1_000,
    run=run,
)
