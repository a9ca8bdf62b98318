"""Processes that want the same directory.

Openers at once, killed owners, forked and orphaned children.

Each function runs in the fork server, has a directory of its own, and returns what went wrong; empty lists are good.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.errors import TierError
from tests.reliability import small_store as small
from tests.reliability.fork_server import Child
from tests.reliability.small_store import ALL, NUM_BLOCKS

RIVALS = 8
PR_SET_CHILD_SUBREAPER = 36
RECORDS = [small.record_of(number) for number in range(NUM_BLOCKS)]


def _serves(tier: Any) -> bool:
    arena = np.zeros((NUM_BLOCKS, small.BLOCK_BYTES), np.uint8)
    return bool(tier.read(ALL, RECORDS, arena, ALL).all() and (arena == small.payloads(RECORDS)).all())


def _filled(path: str) -> Any:
    tier = small.open_store(Path(path))
    assert tier.write(ALL, RECORDS, small.payloads(RECORDS), ALL).all()
    return tier


def _try(path: str) -> str:
    """``"open"``, or the refusal."""
    try:
        small.open_store(Path(path)).close()
    except TierError as problem:
        return str(problem)
    return "open"


def one_of_eight(path: str) -> list[str]:
    """Let eight processes open at one instant, and then kill the one that got it.

    The others are told who has it. After the kill, the directory opens again.
    """
    start, go = os.pipe()

    def rival(say: Any) -> None:
        os.close(go)
        os.read(start, 1)  # until every writer has closed: then all at once
        try:
            tier = small.open_store(Path(path))
        except TierError as problem:
            say(f"refused: {problem}")
        else:
            assert tier.write(ALL, RECORDS, small.payloads(RECORDS), ALL).all()
            say("open")
            signal.pause()

    rivals = [Child(rival) for _ in range(RIVALS)]
    os.close(start)
    os.close(go)
    said = [child.line() for child in rivals]
    winners = [child for child, line in zip(rivals, said) if line == "open"]
    wrong = [] if len(winners) == 1 else [f"{len(winners)} of {RIVALS} got the directory: {said}"]
    if len(winners) == 1:
        owner = f"in use by pid {winners[0].pid}"
        wrong += [line for line in said if line != "open" and owner not in line and "in use by unknown" not in line]
    for child in rivals:
        child.kill()
        child.end()
    with small.open_store(Path(path)) as tier:
        if not _serves(tier):
            wrong.append("what the killed winner had written is not served")
    return wrong


def stale_lock(path: str) -> list[str]:
    """Kill an owner with the lock held, and LOCK naming it.

    The next opener gets the directory at once.
    """

    def owner(say: Any) -> None:
        tier = _filled(path)
        say(f"open {tier.was_clean}")
        signal.pause()

    child = Child(owner)
    child.line()
    held = _try(path)
    child.kill()
    child.end()
    wrong = [] if f"in use by pid {child.pid}" in held else [f"while it was held: {held}"]
    with small.open_store(Path(path)) as tier:
        if tier.was_clean or not _serves(tier):
            wrong.append(f"after the kill: clean {tier.was_clean}, serves {_serves(tier)}")
    return wrong


def forked_child(path: str) -> list[str]:
    """A fork of an owner is refused every call and disturbs nothing.

    It does not keep the lock when the owner closes.
    """
    tier = _filled(path)

    def use(say: Any) -> None:
        arena = np.zeros((1, small.BLOCK_BYTES), np.uint8)
        for call in (
            lambda: tier.read([0], RECORDS[:1], arena, [0]),
            lambda: tier.write([0], RECORDS[1:2], arena, [0]),
            lambda: tier.invalidate([0]),
            lambda: list(tier.records()),
            tier.flush,
        ):
            with contextlib.suppress(TierError):
                call()
                say("served in a fork")
        tier.close()
        say("done")
        signal.pause()

    child = Child(use)
    wrong = _until(child, "done")
    if not _serves(tier):
        wrong.append("the owner lost blocks to its fork")
    if "in use" not in _try(path):
        wrong.append("the fork's close gave the owner's lock away")
    tier.close()
    again = _try(path)  # the fork lives still
    if again != "open":
        wrong.append(f"the fork keeps the lock: {again}")
    child.kill()
    child.end()
    return wrong


def spawned_child(path: str) -> list[str]:
    """A program that the owner starts does not keep the lock.

    It inherits every descriptor that it can.
    """
    tier = _filled(path)
    program = subprocess.Popen(["sleep", "600"], close_fds=False)
    held = _try(path)
    tier.close()
    freed = _try(path)
    program.kill()
    program.wait()
    return [answer for answer, right in ((held, "in use" in held), (freed, freed == "open")) if not right]


def orphan(path: str) -> list[str]:
    """A fork that no hook of Python's saw outlives its owner with the lock.

    Openers get a clear refusal until it ends.
    """
    libc = ctypes.PyDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # the orphan becomes ours, so that its end can be waited for

    def owner(say: Any) -> None:
        tier = _filled(path)
        pid = libc.fork()
        if pid == 0:
            libc.pause()
        say(f"{pid}")
        signal.pause()
        tier.close()

    child = Child(owner)
    left = int(child.line())
    child.kill()
    child.end()
    held = _try(path)
    os.kill(left, signal.SIGKILL)
    os.waitpid(left, 0)
    wrong = [] if "in use" in held else [f"while an orphan held the lock: {held}"]
    with small.open_store(Path(path)) as tier:
        if not _serves(tier):
            wrong.append("what the owner had written is not served")
    return wrong


def _until(child: Child, last: str) -> list[str]:
    """What it says before its last word."""
    said = []
    while (line := child.line()) != last:
        if not line:
            return [*said, "ended before it was done"]
        said.append(line)
    return said


SCENARIOS = {
    function.__name__: function for function in (one_of_eight, stale_lock, forked_child, spawned_child, orphan)
}


def play(scenario: str, path: str) -> list[str]:
    """One round."""
    return SCENARIOS[scenario](path)
