"""Soak: a cache under churn and faults, for minutes or an hour.

Its process is killed and its directory reopened.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.reliability.child import ROOT
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.soak_worker import EPOCHS, Epoch, read

KILLED = 0.5  # of the processes
FLAT = 0.1  # by how much the hit rate may differ between the first quarter and the last
ENOUGH = 40  # epochs before rates mean anything


def run(count: int, seed: int, tick: Tick) -> Tally:
    """So many minutes."""
    tally, choose, epochs = Tally(), random.Random(seed), list[Epoch]()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        while tally.count < count:
            epochs += one_process(Path(folder, "kv"), seed * 100_000 + number, choose, tally)
            number += 1
            minutes = min(int((time.monotonic() - start) / 60), count)
            tick(minutes - tally.count)
            tally.count = minutes
            if tally.wrong > 10:
                break
    judge(epochs, seed, tally)
    return tally


def one_process(path: Path, seed: int, choose: random.Random, tally: Tally) -> list[Epoch]:
    """Its epochs; perhaps it is killed in the middle of one."""
    killed_in = choose.randrange(EPOCHS) if choose.random() < KILLED else EPOCHS + 1
    wait_s = choose.random() / 2
    epochs = []
    command = [sys.executable, "-m", "tests.reliability.soak_worker", str(path), str(seed)]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                epochs.append(read(line))
                if len(epochs) == killed_in:
                    break
            if len(epochs) == killed_in:
                time.sleep(wait_s)
                process.kill()
        errors.seek(0)
        if process.returncode not in (0, -9) or (process.returncode == -9 and len(epochs) != killed_in):
            tally.fail(f"process {seed} ended with exit code {process.returncode}:\n{errors.read()[-3000:]}")
    tally.add("processes")
    tally.add("killed", process.returncode == -9)
    for epoch in epochs:
        tally.hits += epoch.hits
        tally.add("operations", epoch.operations)
        tally.add(f"epochs of {epoch.fault}")
        if epoch.wrong or epoch.held:
            tally.fail(f"process {seed}, {epoch.fault}: {epoch.wrong or f'{epoch.held} blocks are held still'}")
    return epochs


def judge(epochs: list[Epoch], seed: int, tally: Tally) -> None:
    """The hit rate of the last quarter is that of the first."""
    quarter = len(epochs) // 4
    if not quarter:
        tally.fail(f"seed {seed}: only {len(epochs)} epochs")
        return
    first, last = rate(epochs[:quarter]), rate(epochs[-quarter:])
    tally.found |= {"hit rate first quarter, %": round(100 * first), "hit rate last quarter, %": round(100 * last)}
    if len(epochs) >= ENOUGH and abs(first - last) > FLAT:
        tally.fail(f"seed {seed}: the hit rate went from {first:.3f} to {last:.3f}")


def rate(epochs: list[Epoch]) -> float:
    """Share of the prompt tokens that came from the cache."""
    return sum(epoch.hit_tokens for epoch in epochs) / sum(epoch.prompt_tokens for epoch in epochs)


PROOF = Proof(
    "soak: churn with damaged bytes, truncations, failing writes, purges, reopening, kills; each served byte compared, "
    "no block held at the end of an epoch, the hit rate of the last quarter that of the first",
    "minutes",
    quick=1,
    full=60,
    run=run,
)
