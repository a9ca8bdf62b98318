"""The process ends at every call into the operating system.

It ends before the call, and within it when half of it is done.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

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


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Every exit of the fixed scripts; there is nothing random, and no `count` to choose."""
    return preloaded(exit_everywhere, count, seed, tick)


def exit_everywhere(count: int, seed: int, tick: Tick) -> Tally:
    """In the worker."""
    tally = Tally()
    with scratch() as place:
        for name, script, read_path, last in CASES:
            child = Child(place / "kv", read_path)
            calls = child.count(script)
            tally.add("calls in the fixed scripts", calls)
            reopening = child.count(([step for step in script if step.kind == "open"][-1], CLOSE))
            first = max(1, calls - last + 1)
            for k, action in itertools.product(range(first, calls + 1), (Action.EXIT_BEFORE, Action.EXIT_WITHIN)):
                shutil.rmtree(child.path)
                what = f"{name}, {read_path}, call {k}: {action.name}"
                problems = exit_once_or_twice(child, script, Fault(k, k, action), 1 + k * 7919 % reopening, tally)
                if problems:
                    tally.fail(f"{what}: {'; '.join(problems[:3])}")
                tally.count += 1
                tick(1)
            shutil.rmtree(child.path)
    return tally


def exit_once_or_twice(child: Child, script: Script, fault: Fault, second: int, tally: Tally) -> list[str]:
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
    life = Life(child.path, child.faults, child.read_path, after(script, done))
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
    """Runs scripts in forked processes. `path` is the store's directory."""

    def __init__(self, path: Path, read_path: str) -> None:
        self.path, self.read_path = path, read_path
        self.faults = Faults(path)
        self._progress = mmap.mmap(-1, 8)

    def count(self, script: Sequence[Step]) -> int:
        """How many calls a script makes from what lies in the directory now."""
        life = Life(self.path, self.faults, self.read_path)
        self.faults.plan()
        life.run(script)
        self.faults.off()
        return self.faults.calls

    def run(self, script: Sequence[Step], fault: Fault) -> tuple[int, int]:
        """Run the script in a child; return its exit code and the step that it was in.

        A negative exit code is a signal's number.
        """
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(CHILD_PATIENCE_S)
                self.faults.plan(fault)
                life = Life(self.path, self.faults, self.read_path)
                for index, step in enumerate(script):
                    self._progress[:] = index.to_bytes(8, "little")
                    life.do(step)
                code = 2 if life.complaints else 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), int.from_bytes(self._progress[:], "little")


PROOF = Proof(
    claim="the process ends before or within every system call of fixed scripts, and again while reopening: nothing "
    "wrong is served, nothing else is lost",
    unit="exits",
    quick=1_000,
    full=1_000,
    run=run,
)
