"""Finds the proofs and runs them, each in a process of its own.

A process that dies is a wrong case and not the end.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import pkgutil
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from tests.reliability.proof import Proof, Tally, Tick

PROOFS = "tests.reliability.proofs"
TELL_EVERY_S = 0.2  # ticks are told to the parent together


@dataclass(frozen=True)
class Task:
    """One proof to be run. `package` holds its module."""

    name: str
    count: int
    seed: int
    package: str = PROOFS


@dataclass(frozen=True)
class Result:
    """What came of a task."""

    task: Task
    tally: Tally
    seconds: float

    @property
    def problem(self) -> str:
        """Why this is no proof; empty if it is one."""
        return problem(self.tally, self.task.count)


def problem(tally: Tally, count: int) -> str:
    """Why a run that was asked for `count` cases proves nothing; empty where all is well."""
    if tally.wrong:
        return f"{tally.wrong} wrong, first {tally.first_wrong}"
    if tally.count < count and not tally.skipped:
        return f"only {tally.count} of {count} cases, and nothing says why"
    return ""


def names(package: str = PROOFS) -> list[str]:
    """Modules of the package that are proofs, in order."""
    return sorted(found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__))


def load(name: str, package: str = PROOFS) -> Proof:
    """The proof that a module is."""
    proof = importlib.import_module(f"{package}.{name}").PROOF
    assert isinstance(proof, Proof), f"{package}.{name}.PROOF is no Proof"
    return proof


def run_all(tasks: Iterable[Task], jobs: int, tick: Callable[[Task, int], object]) -> list[Result]:
    """Run the tasks, `jobs` at a time; return results in the order of their ends.

    `tick(task, n)` says that n more of a task's cases are done.
    """
    waiting, results = list(tasks), []
    running: dict[Connection, tuple[Task, SpawnProcess, float]] = {}
    context = multiprocessing.get_context("spawn")
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop(0)
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(task, theirs), name=task.name)
                process.start()
                theirs.close()
                running[mine] = task, process, time.perf_counter()
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                task, process, started = running[connection]
                try:
                    told = connection.recv()
                except EOFError:
                    process.join()
                    told = Tally(wrong=1, first_wrong=f"its process ended with exit code {process.exitcode}")
                if isinstance(told, int):
                    tick(task, told)
                else:
                    results.append(Result(task, told, time.perf_counter() - started))
                    del running[connection]
                    connection.close()
                    process.join()
    finally:
        for _, process, _ in running.values():
            process.terminate()
    return results


def _run(task: Task, connection: Connection) -> None:
    tick = _together(connection)
    logging.getLogger("pagedkv").addHandler(logging.NullHandler())  # injected faults are no news
    try:
        tally = load(task.name, task.package).run(task.count, task.seed, tick)
    except Exception as error:
        traceback.print_exc()
        tally = Tally(wrong=1, first_wrong=f"{type(error).__name__}: {error}")
    connection.send(tally)


def _together(connection: Connection) -> Tick:
    done, told_at = 0, time.monotonic()

    def tick(n: int) -> None:
        nonlocal done, told_at
        done += n
        if time.monotonic() - told_at > TELL_EVERY_S:
            connection.send(done)
            done, told_at = 0, time.monotonic()

    return tick
