"""Every guard has a mutant: a patch that removes it, and tests that then fail.

Under pytest they are tests.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.workshop import Outcome, trial
from tests.reliability.proof import Proof, Tally, Tick

AT_A_TIME = 2
SURVIVED, KILLED = 0, 1  # how pytest ends


def judge(mutant: Mutant) -> Outcome:
    """The named tests on a copy of the sources with the mistake in it."""
    modules = [mutant.module] if mutant.module else []
    with tempfile.TemporaryDirectory(prefix="pagedkv-mutant-") as folder:
        return trial(Path(folder) / "copy", [mutant], modules, mutant.killers, mutant.proof_count)


def run(count: int, seed: int, tick: Tick) -> Tally:
    """The first `count` mutants of the catalogue."""
    tally = Tally()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for mutant, outcome in zip(MUTANTS, pool.map(judge, MUTANTS[:count])):
            tally.count += 1
            if outcome.exit_code == KILLED:
                tally.add("killed")
            else:
                what = "survived" if outcome.exit_code == SURVIVED else f"ended pytest with {outcome.exit_code}"
                tally.fail(f"{mutant.name}: {what}")
            tick(1)
    return tally


PROOF = Proof(
    "every guard has a patch that takes it away, and tests that fail without it",
    "mutants",
    quick=0,  # tests/mutants runs them all
    full=len(MUTANTS),
    run=run,
)
