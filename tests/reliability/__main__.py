"""Runs the proofs.

``python -m tests.reliability [--full | --count N] [--only a,b]``; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.reliability.proof import Proof
from tests.reliability.running import PROOFS, Task, load, names, run_all
from tests.reliability.table import DOCS, HEADINGS, Row, keep, kept, markdown, row, write_between_marks

JSON = Path(__file__).parents[2] / "bench" / "results" / "reliability.json"


def arguments(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--full", action="store_true", help="the full figures; default: those under pytest")
    much.add_argument("--count", type=int, metavar="N", help="so many cases of each")
    parser.add_argument("--only", metavar="A,B", help="only these proofs, in this order")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="proofs at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the rows into this file, beside others")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument(
        "--table", action="store_true", help=f"write the rows of --json (default: {JSON.name}) into {DOCS.name}"
    )
    parser.add_argument("--package", default=PROOFS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """The command. 0, 1 if anything is wrong, 2 if the question is."""
    asked = arguments(argv)
    if asked.table:
        path = asked.json or JSON
        rows = kept(path)
        if not rows:
            print(f"{path} has no rows for the table: run proofs with --json {path} first", file=sys.stderr)
            return 2
        DOCS.write_text(write_between_marks(DOCS.read_text(), markdown([rows[name] for name in sorted(rows)])))
        return 0
    there = names(asked.package)
    chosen = asked.only.split(",") if asked.only else there
    if unknown := sorted(set(chosen) - set(there)):
        print(f"no proof is called {', '.join(unknown)}; there are {', '.join(there)}", file=sys.stderr)
        return 2
    proofs = {name: load(name, asked.package) for name in chosen}
    if asked.list:
        for name, proof in proofs.items():
            print(f"{name:24} {proof.quick:>10,} {proof.full:>12,} {proof.unit:12} {proof.claim}")
        return 0
    tasks = []
    for name, proof in proofs.items():
        count = asked.count if asked.count is not None else proof.full if asked.full else proof.quick
        if count or asked.only:  # some are only worth their full run
            tasks.append(Task(name, count, asked.seed, asked.package))
    with progress(tasks, proofs) as tick:
        results = run_all(tasks, max(asked.jobs, 1), tick)
    rows = sorted((row(result, proofs[result.task.name]) for result in results), key=lambda row: row.name)
    if asked.json:
        keep(rows, asked.json)
    show(rows)
    problems = {result.task.name: result.problem for result in results if result.problem}
    for name, problem in sorted(problems.items()):
        print(f"WRONG {name}: {problem}", file=sys.stderr)
    return 1 if problems else 0


@contextlib.contextmanager
def progress(tasks: list[Task], proofs: dict[str, Proof]) -> Iterator[Callable[[Task, int], object]]:
    """A bar per proof where rich is installed and stderr is a terminal; else nothing."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda task, n: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as bars:
        bar = {
            task: bars.add_task(f"{task.name}, {proofs[task.name].unit}", total=task.count or None) for task in tasks
        }
        yield lambda task, n: bars.advance(bar[task], n)


def show(rows: list[Row]) -> None:
    """The table on the terminal."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(markdown(rows))
        return
    table = Table(*HEADINGS)
    for one in rows:
        table.add_row(*one.cells(), style="bold red" if one.wrong else None)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
