"""The table of what was proved.

Rows come from runs; the table is kept in a JSON file, printed, and written into docs/reliability.md.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.reliability.proof import Proof
from tests.reliability.running import Result

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: python -m tests.reliability --table -->", "<!-- end of table -->"
HEADINGS = ("claim", "cases", "hits compared", "wrong", "found", "seconds", "seed", "command")
ON_THE_RIGHT = {"cases", "hits compared", "wrong", "seconds", "seed"}


@dataclass(frozen=True)
class Row:
    """One proof, as it was run."""

    name: str
    claim: str
    unit: str
    command: str
    seed: int
    asked: int
    count: int
    hits: int
    wrong: int
    found: dict[str, int]
    first_wrong: str
    skipped: tuple[str, ...]
    seconds: float
    commit: str
    machine: str
    python: str

    def cells(self) -> tuple[str, ...]:
        """By `HEADINGS`."""
        found = ", ".join(f"{what} {n:,}" for what, n in self.found.items())
        not_done = "".join(f"; not done: {reason}" for reason in self.skipped)
        cases = f"{self.count:,} {self.unit}"
        numbers = (f"{self.hits:,}" if self.hits else "", f"{self.wrong:,}", (found + not_done).removeprefix("; "))
        return self.claim, cases, *numbers, f"{self.seconds:,.0f}", str(self.seed), f"`{self.command}`"


def row(result: Result, proof: Proof) -> Row:
    """The row of one run."""
    task, tally = result.task, result.tally
    return Row(
        task.name, proof.claim, proof.unit, f"python -m tests.reliability {_options(result, proof)}", task.seed,
        task.count, tally.count, tally.hits, tally.wrong, dict(sorted(tally.found.items())), tally.first_wrong,
        tuple(tally.skipped), round(result.seconds, 1), _commit(), _machine(), platform.python_version(),
    )  # fmt: skip


def _options(result: Result, proof: Proof) -> str:
    task = result.task
    count = {proof.quick: "", proof.full: " --full"}.get(task.count, f" --count {task.count}")
    return f"--only {task.name}{count} --seed {task.seed}"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return f"{os.cpu_count()} cores of {model}, {platform.system()} {platform.release()}"


def kept(path: Path) -> dict[str, Row]:
    """The rows of a file, by the name of the proof; none if there is no file."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())
    return {name: Row(**{**row, "name": name, "skipped": tuple(row["skipped"])}) for name, row in rows.items()}


def keep(rows: list[Row], path: Path) -> None:
    """Put rows into a file, in place of older ones of the same proofs; the others stay."""
    merged = kept(path) | {row.name: row for row in rows}
    plain = {name: {k: v for k, v in asdict(merged[name]).items() if k != "name"} for name in sorted(merged)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n")


def markdown(rows: list[Row]) -> str:
    """The table, and a line about where and from which source each row came."""
    lines = [_line(HEADINGS), _line(tuple("---:" if name in ON_THE_RIGHT else "---" for name in HEADINGS))]
    lines += [_line(tuple(cell.replace("|", "\\|") for cell in row.cells())) for row in rows]
    places = sorted({(row.commit, row.machine, row.python) for row in rows})
    for commit, machine, python in places:
        of = [row.name for row in rows if (row.commit, row.machine, row.python) == (commit, machine, python)]
        whose = "" if len(places) == 1 else f" ({', '.join(of)})"
        lines += ["", f"Commit {commit or 'unknown'}, {machine}, Python {python}{whose}."]
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def write_between_marks(text: str, table: str) -> str:
    """`text` with `table` between its two marks.

    Raises
    ------
    ValueError
        The marks are not there, once each and in order, or the table has no row.
    """
    if table.count("\n|") < 2:  # its heading and the line below that
        raise ValueError("a table without rows would empty the page: run proofs with --json first")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the table goes between the lines {BEGIN} and {END}, once each")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
