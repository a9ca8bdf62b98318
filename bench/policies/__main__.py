"""``python -m bench.policies``.

Every eviction policy on three real traces, at many sizes, between LRU and MIN.

Each replay drives the real tree, placement and policy from an empty cache of one tier. Hits do not depend on the
machine. ``lru`` and ``hazard`` are replayed several times in turn, and the median of their times is kept. ``min`` is
Belady's bound. What golden.json publishes of other policies stands beside them, with the source ``published``. The
traces are not part of the repository.

``python -m bench.policies --json bench/results/policies.json --plot docs/images && python -m bench.report`` draws
everything in ``docs/policies.md`` anew; with ``--drawn bench/results/policies.json`` in place of ``--json ...`` the
pictures alone, without a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.policies.cases import FILES, TRACES, MissingTraces, Size, load, require_traces
from bench.policies.measures import WINDOW, against_lru, rates
from bench.policies.plots import plot, require_pyplot
from bench.policies.progress import progress
from bench.policies.serving import POLICIES, Run, run
from bench.policies.views import gaps
from bench.timing import environment, gc_off, print_table, write_results
from pagedkv.lab.replay import References, Trace
from pagedkv.lab.replay.progress import Progress
from pagedkv.lab.replay.trace import Int32

TIMED = ("lru", "hazard")
Row = dict[str, Any]


def replays(rounds: int) -> list[str]:
    """Which policy is replayed when, at one size: those whose time is compared, in turn."""
    others = [policy for policy in POLICIES if policy not in TIMED]
    return [*TIMED * rounds, *others]


def rows_of(name: str, references: References, trace: Trace, size: Size, rounds: int, shown: Progress) -> list[Row]:
    """All policies at one size."""
    runs: dict[str, list[Run]] = {}
    for policy in replays(rounds):
        shown.start(f"{name}, {size.name}: {policy}", trace.num_requests)
        with gc_off():
            runs.setdefault(policy, []).append(run(trace, policy, size.blocks, shown))
    hits = {policy: runs[policy][0].hits for policy in POLICIES}
    hits["min"] = references.hits("min", size.blocks)
    found = [row(name, trace, size, policy, hits) for policy in hits]
    for line in found:
        line |= timings(runs.get(line["policy"], []))
    return found + published(name, trace, size, hits)


def row(name: str, trace: Trace, size: Size, policy: str, hits: dict[str, Int32]) -> Row:
    """One policy at one size, without its times."""
    accesses = np.diff(trace.offsets)
    return {
        **place(name, trace, size), "policy": policy, "source": "bound" if policy == "min" else "run",
        **scored(total(hits[policy]), hits), **rates(trace, hits[policy]),
        **against_lru(accesses, hits[policy], hits["lru"]),
    }  # fmt: skip


def published(name: str, trace: Trace, size: Size, hits: dict[str, Int32]) -> list[Row]:
    """What is published of other policies at this size."""
    found = []
    for policy, count in size.published.items():
        line = {**place(name, trace, size), "policy": policy, "source": "published", **scored(count, hits)}
        found.append(line | {"block_pct": 100 * count / trace.num_accesses})
    return found


def place(name: str, trace: Trace, size: Size) -> Row:
    """What the rows of one size have in common."""
    share = 100 * size.blocks / trace.num_unique
    return {"trace": name, "capacity": size.name, "blocks": size.blocks, "share_pct": share}


def scored(count: int, hits: dict[str, Int32]) -> Row:
    """Hits, and how much of the way from LRU to MIN they are; None where there is no way."""
    lru, best = total(hits["lru"]), total(hits["min"])
    return {"hit_blocks": count, "gap_pct": 100 * (count - lru) / (best - lru) if best > lru else None}


def timings(runs: Sequence[Run]) -> Row:
    """Median time and longest study over the replays of one policy.

    And what was remembered at the end.
    """
    if not runs:
        return {}
    found: Row = {"ns_per_access": statistics.median(each.ns_per_access for each in runs), "rounds": len(runs)}
    last = runs[-1].learned
    if last:
        found["longest_study_us"] = max(each.study_us for each in runs)
        found |= {key: last[key] for key in ("remembered_blocks", "remembered_runs", "bytes", "learned", "held_back")}
    return found


def total(hits: Int32) -> int:
    """Hit blocks in all."""
    return int(hits.sum(dtype=np.int64))


def main() -> int:
    """Run everything, print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="where the traces lie")
    parser.add_argument("--only", choices=[*FILES], action="append", help="this trace only; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="replays of lru and hazard (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="write plots there (needs matplotlib)")
    parser.add_argument("--drawn", metavar="FILE", type=Path, help="run nothing: draw the plots of these results")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} is less than 1")
    if options.drawn is not None and (options.plot is None or options.json or options.only):
        parser.error("--drawn FILE takes --plot DIR alone")
    try:
        if options.plot is not None:
            require_pyplot()
        if options.drawn is not None:
            return draw(json.loads(options.drawn.read_text())["rows"], options.plot)
        require_traces(options.traces)
    except (MissingTraces, ImportError) as error:
        print(f"bench.policies: {error}", file=sys.stderr)
        return 2
    env = environment()
    names = options.only or [*FILES]
    cases = [(name, *load(options.traces, name)) for name in names]
    found: list[Row] = []
    requests = sum(trace.num_requests * len(sizes) for _, trace, sizes in cases)
    with progress(requests * len(replays(options.rounds))) as shown:
        for name, trace, sizes in cases:
            references = References(trace)
            for size in sizes:
                found += rows_of(name, references, trace, size, options.rounds, shown)
    for name in names:
        print_table(gaps(found, name), title=f"\n{name}: % of the way from LRU to MIN")
    if options.json:
        described = {name: describe(trace) for name, trace, _ in cases}
        write_results(options.json, "policies", found, env=env, traces=described, window=WINDOW)
        print(f"wrote {options.json}")
    return draw(found, options.plot) if options.plot is not None else 0


def draw(rows: Sequence[Row], folder: Path) -> int:
    """Write the plots and name them."""
    for path in plot(rows, folder):
        print(f"wrote {path}")
    return 0


def describe(trace: Trace) -> Row:
    """A trace, so that it can be recognised."""
    return {
        "file": trace.name, "sha256": trace.sha256, "requests": trace.num_requests, "accesses": trace.num_accesses,
        "unique_blocks": trace.num_unique, "block_size": trace.block_size,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
