"""``python -m tests.mutants``: try mutants, and keep and draw which were killed.

Runs the tests that try mutants, of the catalogue and of the CUDA kernels, and writes their outcomes to
``bench/results/mutants.json``, with the commit. Hours on 2 cores; ``--room NAME`` tries one room, and keeps the other
rooms' outcomes of the file. ``--table`` only draws the table.
"""

from __future__ import annotations

import argparse
import sys

import pytest

from tests.mutants.kills import PAGE, RESULTS, Recorder, drawn, files_of, kept, written
from tests.mutants.rooms import NAMES


def main(argv: list[str]) -> int:
    """Run, write and draw; 1 if a mutant survived or was not tried, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--room", action="append", choices=sorted(NAMES), help="only this one; may be repeated")
    parser.add_argument("--table", action="store_true", help="run nothing, draw the table from the file")
    asked = parser.parse_args(argv)
    if not asked.table:
        rooms = asked.room or list(NAMES)
        recorder = Recorder(rooms)
        # the names of CUDA mutants come with their test modules, and Hypothesis with those, before pytest has begun
        early = "ignore::pytest.PytestAssertRewriteWarning"
        pytest.main([*files_of(rooms), "-m", "", "-q", "-W", early], plugins=[recorder])
        written(RESULTS, {**kept(RESULTS), **recorder.outcomes()})
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8"), kept(RESULTS)), encoding="utf-8")
    return int(any(room.survived or room.untried for room in kept(RESULTS).values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
