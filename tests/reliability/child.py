"""A program in a process of its own that answers with a Tally.

A signal, a hang or a report there is a wrong case here.

The program prints a line ``done N`` now and then, and at last its Tally (`answer`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.reliability.proof import Tally, Tick

ROOT = Path(__file__).parents[2]
TALLY = "tally "


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Its tally if it told one, its exit code (negative: a signal), and what it wrote to stderr.
    """

    tally: Tally | None
    exit_code: int
    errors: str

    def tally_or_wrong(self) -> Tally:
        """The child's tally, or one wrong case that says how it ended without one."""
        if self.tally is not None and self.exit_code == 0:
            return self.tally
        tally = self.tally or Tally()
        tally.fail(f"its process ended with exit code {self.exit_code}:\n{self.errors[-4000:]}")
        return tally


def run(
    module: str,
    *arguments: object,
    tick: Tick = lambda n: None,
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``python -m module arguments`` from `root` to its end.

    The child imports the packages of `root`.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    tally = None
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("done "):
                    tick(int(line.split()[1]))
                elif line.startswith(TALLY):
                    tally = Tally(**json.loads(line.removeprefix(TALLY)))
        errors.seek(0)
        return Ended(tally, process.returncode, errors.read())


def add(tally: Tally, found: Tally) -> None:
    """Add what a child found to the whole."""
    tally.count += found.count
    tally.hits += found.hits
    tally.wrong += found.wrong
    tally.first_wrong = tally.first_wrong or found.first_wrong
    for what, count in found.found.items():
        tally.add(what, count)


def done(count: int) -> None:
    """In the child: so many more cases are done."""
    print("done", count, flush=True)


def answer(tally: Tally) -> None:
    """In the child: this came of it."""
    print(TALLY + json.dumps(asdict(tally)), flush=True)
