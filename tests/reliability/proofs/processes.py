"""Several processes and one directory.

One owner, clear refusals for the others, no lock that outlives its owner.
"""

from __future__ import annotations

import shutil

from tests.reliability import rivals
from tests.reliability import small_store as small
from tests.reliability.fork_server import ForkServer
from tests.reliability.proof import Proof, Tally, Tick


def run(count: int, seed: int, tick: Tick) -> Tally:
    """The scenarios of `rivals` in turn, each in a directory of its own."""
    tally, names = Tally(), list(rivals.SCENARIOS)
    with small.scratch() as folder, ForkServer() as server:
        for number in range(count):
            scenario, path = names[(number + seed) % len(names)], folder / str(number)
            for line in server.call("tests.reliability.rivals:play", scenario=scenario, path=str(path)):
                tally.fail(f"round {number}, {scenario}: {line}")
            shutil.rmtree(path)
            tally.add(scenario.replace("_", " "))
            tally.count += 1
            tick(1)
    return tally


PROOF = Proof(
    claim="eight openers at once, stale locks, forked, spawned and orphaned children: one owner, clear refusals, "
    "nothing lost",
    unit="rounds",
    quick=100,
    full=1000,
    run=run,
)
