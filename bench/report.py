"""``python -m bench.report``: draw the committed results into the tables of the pages.

The pages of ``WRITTEN`` are written by hand; a table stands between ``<!-- table: FILE VIEW -->`` and ``<!-- end -->``,
where FILE is in ``bench/results/``. Views:
``environment`` (one line), ``rows`` (every row as it is), for the core bench ``bars`` and the letters of its workloads,
for the attention bench ``all`` (a heading and a table for each part) or the name of a part, for attention on the CPU
``problems``, for counted instructions ``cases``, for hooks ``costs``, for the remote tier ``wait`` and ``claims``, for
groups of layers ``stranded``, for kernels' machine code ``loops``, for quantised KV ``errors``, for the policies those
of ``bench/policies/views.py``.
Attention needs a GPU: where its file does not exist yet, the page says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.attention.views import page as attention_page
from bench.attention.views import view as attention_view
from bench.core.bars import compare
from bench.core.workloads import WORKLOADS
from bench.cpu_attention.views import by_problem
from bench.policies.views import view as policies_view
from bench.results import ROOT, read_results
from bench.sass.views import table as hot_loops
from bench.table import format_value, render_table

WRITTEN = ("benchmarks.md", "kernels.md", "observability.md", "policies.md", "quantised.md")
PAGES = tuple(ROOT / "docs" / name for name in WRITTEN)
RESULTS = ROOT / "bench" / "results"
ATTENTION = "attention.json"
NO_RUN = "No run on a GPU has been made yet: there is no `bench/results/attention.json`, so there are no figures."
NO_TABLE = "No run, no table."
BLOCK = re.compile(r"(<!-- table: (?P<file>\S+) (?P<view>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render_view(document: Mapping[str, Any], view: str) -> str:
    """One view of a result file, as Markdown.

    Raises
    ------
    ValueError
        If the file has no such view.
    """
    rows: list[dict[str, Any]] = document["rows"]
    if document["bench"] == "attention" and document["device"]["kind"] != "cuda":
        raise ValueError("a run of the attention bench with no device has no figures: it is not for the page")
    if view == "environment":
        return render_environment(document)
    if document["bench"] == "attention_cpu" and view == "problems":
        return render_table(by_problem(rows), markdown=True)
    if document["bench"] == "policies":
        return policies_view(document, view)
    if document["bench"] == "instructions" and view == "cases":
        return render_table(beside(rows, document["beside"]), markdown=True)
    if document["bench"] == "hooks" and view == "costs":
        return render_table(by_hooks(rows), markdown=True)
    if document["bench"] == "groups" and view == "stranded":
        return render_table(document[view], ("system", "lengths", "mean %", "most %"), markdown=True)
    if document["bench"] == "remote" and view in ("wait", "claims"):
        return render_table(document[view], markdown=True)
    if document["bench"] == "quantised" and view == "errors":
        return render_table(document["errors"], markdown=True)
    if document["bench"] == "sass" and view == "loops":
        return render_table(hot_loops(rows), markdown=True)
    if view == "rows":
        return render_table(rows, markdown=True)
    if document["bench"] == "core" and view == "bars":
        return render_table(compare(rows), markdown=True)
    if document["bench"] == "core" and view in tuple(WORKLOADS):
        return render_table(by_system([row for row in rows if row["workload"] == view]), markdown=True)
    if document["bench"] == "attention" and view == "all":
        return attention_page(document)
    if document["bench"] == "attention":
        return render_table(attention_view(document, view), markdown=True)
    raise ValueError(f"no view {view!r} of a result of bench {document['bench']!r}")


def render_environment(document: Mapping[str, Any]) -> str:
    """One line: when, where and on what a result was measured."""
    env = document["environment"]
    commit = str(env["commit"])[:12] + (" with local changes" if env["dirty"] else "")
    peers = "".join(f", {name} {version}" for name, version in document.get("peers", {}).items())
    load = env["loadavg"][0]
    device = document.get("device", {})
    names = {"device": "", "driver": "driver for CUDA ", "nvrtc": "NVRTC ", "cupy": "CuPy "}
    machine = "".join(f"{what}{device[key]}, " for key, what in names.items() if key in device)
    return (
        f"`{env['command']}`, {env['date'][:10]}, commit {commit}; {machine}{env['cpu']}, {env['cores']} cores, "
        f"{env['memory_gib']} GiB, Python {env['python']}, NumPy {env['numpy']}{peers}; load {load}."
    )


def by_system(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn figures into one row per case, with a column for each system and variant."""
    columns = {(row["system"], row["variant"]): _heading(row) for row in rows if row["value"] is not None}
    cases = dict.fromkeys((row["case"], row["unit"]) for row in rows if row["value"] is not None)
    found = {(row["case"], row["system"], row["variant"]): row["value"] for row in rows}
    table: list[dict[str, Any]] = []
    for case, unit in cases:
        line: dict[str, Any] = {"case": case, "unit": unit}
        for (system, variant), heading in columns.items():
            line[heading] = found.get((case, system, variant))
        table.append(line)
    absent = [f"{row['system']} {row['variant']}" for row in rows if row["value"] is None]
    return [*table, *({"case": text} for text in absent)]


def by_hooks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per piece of work, with its CPU time in microseconds for each kind of hook."""
    headings = {"none": "no hook", "idle": "a hook that does nothing", "recorder": "a recorder"}
    works = dict.fromkeys(row["work"] for row in rows)
    return [
        {"work": work, **{headings[row["hooks"]]: row["us"] for row in rows if row["work"] == work}} for work in works
    ]


def beside(rows: Sequence[Mapping[str, Any]], commit: str | None) -> list[dict[str, Any]]:
    """Counted instructions, and how many more or fewer they are than those of the other tree."""
    if commit is None:
        return [{"case": row["case"], "now": row["now"]} for row in rows]
    return [
        {"case": row["case"], "now": row["now"], commit: row["beside"],
         "change": f"{100 * (row['now'] / row['beside'] - 1):+.1f} %"}
        for row in rows
    ]  # fmt: skip


def fill(page: str, results: Path = RESULTS) -> str:
    """`page` with every table drawn anew from the files in `results`.

    Raises
    ------
    FileNotFoundError
        If a table names a file that is not there; attention's may be missing, and the page then says so.
    ValueError
        If a file is not a result, or has no such view.
    """

    def draw(found: re.Match[str]) -> str:
        if found["file"] == ATTENTION and not (results / ATTENTION).exists():
            return f"{found[1]}\n{NO_RUN if found['view'] == 'environment' else NO_TABLE}\n\n{found[4]}"
        document = read_results(results / found["file"])
        return f"{found[1]}\n{render_view(document, found['view'])}\n\n{found[4]}"

    return BLOCK.sub(draw, page)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    options = parser.parse_args()
    before = {page: page.read_text() for page in PAGES}
    try:
        after = {page: fill(text) for page, text in before.items()}
    except (OSError, ValueError) as error:
        print(f"bench.report: {error}", file=sys.stderr)
        return 2
    if options.check:
        return int(after != before)
    unused = {path.name for path in RESULTS.glob("*.json")}
    for page, text in after.items():
        page.write_text(text)
        unused -= {m["file"] for m in BLOCK.finditer(text)}
        print(f"{page.name}: {format_value(len(BLOCK.findall(text)))} tables drawn")
    if unused:
        print(f"results without a table: {', '.join(sorted(unused))}")
    return 0


def _heading(row: Mapping[str, Any]) -> str:
    return f"{row['system']} {row['variant']}".strip()


if __name__ == "__main__":
    sys.exit(main())
