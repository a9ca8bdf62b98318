"""The k-th system call fails or does half its work.

Every k of fixed scripts, and random histories.
"""

from __future__ import annotations

import errno
import itertools
import shutil
from pathlib import Path

import numpy as np

from tests.reliability import group_life as groups
from tests.reliability.faults import ALWAYS, MAX_FAULTS, Action, Fault, Faults, preloaded
from tests.reliability.life import Life
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.scripts import FIXED, LIFE, Script, random_script
from tests.reliability.small_store import scratch
from tests.reliability.stores import READ_PATHS

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR, errno.EFBIG)
ONCE = (*((Action.FAIL, number) for number in ERRORS), (Action.TORN, errno.EIO), (Action.SHORT, 0))
FROM_THEN_ON = ((Action.FAIL, errno.ENOSPC), (Action.FAIL, errno.EIO), (Action.SHORT, 0))
OTHER_READ_PATH = ((Action.FAIL, errno.EIO), (Action.SHORT, 0))  # enough where only reads differ
LONGEST = 20  # calls that one random fault lasts
BY_GROUP = 5  # one of so many random histories is of a cache over groups of layers
ENOUGH = 50  # random histories after which some of these must have been served from disk


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Every call of the fixed scripts with every fault, and `count` random histories."""
    return preloaded(fail_calls, count, seed, tick)


def fail_calls(count: int, seed: int, tick: Tick) -> Tally:
    """In the worker."""
    tally = Tally()
    with scratch() as place:
        cases = Cases(place / "kv", tally, tick)
        fixed = [(name, script, READ_PATHS[0]) for name, script in FIXED.items()]
        for name, script, read_path in (*fixed, ("life", LIFE, READ_PATHS[1])):
            calls = cases.run(f"{name}, {read_path}, no fault", read_path, script)
            tally.add("calls in the fixed scripts", calls)
            first = read_path == READ_PATHS[0]
            for k in range(1, calls + 1):
                faults = [(k, *kind) for kind in (ONCE if first else OTHER_READ_PATH)]
                faults += [(ALWAYS, *kind) for kind in (FROM_THEN_ON if first else ())]
                for last, action, number in faults:
                    what = f"{name}, {read_path}, call {k}{' and all after' * (last > k)}: {describe(action, number)}"
                    cases.run(what, read_path, script, Fault(k, last, action, number))
        for history in range(count):
            rng = np.random.default_rng([seed, history])
            tally.add("random histories")
            if history % BY_GROUP == BY_GROUP - 1:
                cases.run_by_group(f"random history {history} of seed {seed}, by groups", rng)
                continue
            read_path = READ_PATHS[history % 2]
            script = random_script(rng, int(rng.integers(4, 16)), itertools.count())
            cases.run(f"random history {history} of seed {seed}", read_path, script, *random_faults(rng))
    tally.require("faults met", "openings refused", *([groups.HITS, "faults met by groups"] if count >= ENOUGH else ()))
    return tally


class Cases:
    """Runs cases in one directory, each from an empty one."""

    def __init__(self, path: Path, tally: Tally, tick: Tick) -> None:
        self.path, self.tally, self.tick = path, tally, tick
        self.faults = Faults(path)

    def run(self, what: str, read_path: str, script: Script, *faults: Fault) -> int:
        """One case; the number of calls that the script made."""
        life, tally = Life(self.path, self.faults, read_path), self.tally
        self.faults.plan(*faults)
        try:
            life.run(script)
            calls, fired, name = self.faults.calls, self.faults.fired, self.faults.last_call
            life.settle()
        except Exception as problem:
            calls, fired, name = self.faults.calls, self.faults.fired, self.faults.last_call
            life.complaints.append(f"raised {type(problem).__name__}: {problem}")
        self.faults.off()
        if life.complaints:
            tally.fail(f"{what} ({name if fired else 'none met'}): {'; '.join(life.complaints[:3])}")
        tally.count += 1
        tally.hits += life.hits
        tally.add("faults met", fired)
        tally.add("openings refused", life.refused)
        shutil.rmtree(self.path, ignore_errors=True)
        self.tick(1)
        return calls

    def run_by_group(self, what: str, rng: np.random.Generator) -> None:
        """One random history of a cache over groups of layers.

        Its threads make calls in another order each time.
        """
        room = int(rng.choice((groups.NARROW, groups.ROOMY)))
        script, faults = groups.random_script(rng, int(rng.integers(4, 25))), random_faults(rng)
        life, tally = groups.GroupLife(self.path, self.faults, room), self.tally
        self.faults.plan(*faults)
        try:
            life.run(script)
            fired = self.faults.fired
            life.settle()
        except Exception as problem:
            fired = self.faults.fired
            life.complaints.append(f"raised {type(problem).__name__}: {problem}")
        self.faults.off()
        if life.complaints:
            tally.fail(f"{what} ({fired} faults met): {'; '.join(life.complaints[:3])}")
        tally.count += 1
        tally.add("faults met by groups", fired)
        life.tell(tally)
        shutil.rmtree(self.path, ignore_errors=True)
        self.tick(1)


def random_faults(rng: np.random.Generator) -> list[Fault]:
    """One to five of them, some lasting."""
    kinds = (*ONCE, *FROM_THEN_ON)
    faults = []
    for _ in range(rng.integers(1, min(6, MAX_FAULTS))):
        action, number = kinds[rng.integers(len(kinds))]
        first = int(rng.integers(1, 150))
        lasts = int(rng.integers(LONGEST)) if rng.random() < 0.5 else 0
        faults.append(Fault(first, first + lasts, action, number))
    return faults


def describe(action: Action, number: int) -> str:
    """A fault in words."""
    return f"{action.name} {errno.errorcode.get(number, '')}".strip()


PROOF = Proof(
    claim="the k-th system call fails or stops halfway, for every k, and at random under caches over groups of layers: "
    "nothing raises, nothing wrong is served, nothing else is lost",
    unit="failing calls and random histories",
    quick=500,
    full=20_000,
    run=run,
)
