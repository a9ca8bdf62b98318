"""The tables that ``docs/policies.md`` shows, out of the rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.policies.bars import best_published, verdict
from bench.policies.forms import OURS, Row, decimal, points, spaced
from bench.policies.serving import STRICT, UNBOUNDED, UNNAMED
from bench.table import render_table

Table = list[dict[str, Any]]

SHARES = ("1%", "2%", "5%", "10%", "20%", "50%")


def view(document: Mapping[str, Any], name: str) -> str:
    """One table as Markdown.

    ``traces``, ``weights``, ``worst``, ``prefix``, ``price``, ``sessions``, ``times``, ``memory`` or ``gap/TRACE``;
    ``verdict`` is a list of sentences.

    Raises
    ------
    ValueError
        There is no such view, or no such trace in the run.
    """
    what, _, trace = name.partition("/")
    rows: Sequence[Row] = document["rows"]
    if name == "traces":
        return render_table([{"trace": key, **described} for key, described in traces(document)], markdown=True)
    if name == "verdict":
        return "\n".join(f"- {sentence}" for sentence in verdict(by_size(rows)))
    if what == "gap":
        if trace not in document["traces"]:
            raise ValueError(f"no trace {trace!r} in this run; there are {', '.join(document['traces'])}")
        return render_table(gaps(rows, trace), markdown=True)
    tables: dict[str, Callable[[Sequence[Row]], Table]] = {
        "weights": weights, "worst": worst, "prefix": prefix, "price": price, "sessions": sessions, "times": times,
        "memory": memory,
    }  # fmt: skip
    if name not in tables:
        raise ValueError(f"no view {name!r} of a result of bench 'policies'")
    return render_table(tables[name](rows), markdown=True)


def traces(document: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What was replayed; of a hash the first digits."""
    found = []
    for key, described in document["traces"].items():
        line = {name.replace("_", " "): value for name, value in described.items() if name != "sha256"}
        found.append((key, line | {"SHA-256": described["sha256"][:12]}))
    return found


def gaps(rows: Sequence[Row], trace: str) -> Table:
    """Hits of LRU and MIN by size, and the gap each policy closes, in %.

    Hits are in % of accesses.
    """
    table: Table = []
    for key, policies in by_size(rows).items():
        if key[0] != trace:
            continue
        line: dict[str, Any] = {"capacity": spaced(key[1]), "blocks": policies["lru"]["blocks"]}
        line |= {name: decimal(policies[which]["block_pct"]) for name, which in (("LRU", "lru"), ("MIN", "min"))}
        line |= {which: points(policies[which]["gap_pct"]) for which in OURS}
        best = best_published(policies)
        if best is not None:
            line["LHD, published"] = points(policies["LHD"]["gap_pct"])
            line["best published"] = f"{points(best['gap_pct'])} {best['policy']}"
        table.append(line)
    return table


def weights(rows: Sequence[Row]) -> Table:
    """Hits weighted by blocks, tokens and prefill work: LRU / hazard / MIN."""
    table: Table = []
    for (trace, size), policies in of_shares(rows):
        line: dict[str, Any] = {"trace": trace, "capacity": spaced(size)}
        for heading, key in (("blocks", "block_pct"), ("tokens", "token_pct"), ("FLOPs", "flop_pct")):
            line[heading] = " / ".join(decimal(policies[name][key]) for name in ("lru", "hazard", "min"))
        table.append(line)
    return table


def worst(rows: Sequence[Row]) -> Table:
    """The worst window beside LRU, in points of its accesses."""
    return _policies_by_size(rows, "worst_window")


def prefix(rows: Sequence[Row]) -> Table:
    """Worst stretch and worst beginning of the trace, for hazard and its bounds.

    A stretch is a window at most.
    """
    table: Table = []
    for (trace, size), policies in by_size(rows).items():
        line: dict[str, Any] = {"trace": trace, "capacity": spaced(size)}
        for name in ("hazard", STRICT, UNBOUNDED):
            line[name] = " / ".join(decimal(policies[name][key], 2) for key in ("worst_stretch", "worst_prefix"))
        table.append(line)
    return table


def price(rows: Sequence[Row]) -> Table:
    """What each bound leaves of the gap closed, beside the best that is published."""
    table: Table = []
    for (trace, size), policies in of_shares(rows):
        best = best_published(policies)
        if best is None:
            continue
        table.append({
            "trace": trace, "capacity": spaced(size),
            **{name: points(policies[name]["gap_pct"]) for name in (UNBOUNDED, "hazard", STRICT)},
            "best published": f"{points(best['gap_pct'])} {best['policy']}",
        })  # fmt: skip
    return table


def sessions(rows: Sequence[Row]) -> Table:
    """What it is worth to be told whose request each one is.

    % of the gap closed with it and without.
    """
    table: Table = []
    for (trace, size), policies in of_shares(rows):
        if trace == "chat":  # which knows of none
            continue
        line: dict[str, Any] = {"trace": trace, "capacity": spaced(size)}
        line["gap, points"] = decimal(policies["min"]["block_pct"] - policies["lru"]["block_pct"], 2)
        for name in ("hazard", UNNAMED):
            line[name] = "-" if policies[name]["gap_pct"] is None else decimal(policies[name]["gap_pct"])
        table.append(line)
    return table


def times(rows: Sequence[Row]) -> Table:
    """Nanoseconds in the cache's calls per block asked for.

    And the longest call in which the policy hazard learned.
    """
    table: Table = []
    for (trace, size), policies in of_shares(rows):
        line: dict[str, Any] = {"trace": trace, "capacity": spaced(size)}
        line |= {f"{name}, ns": policies[name]["ns_per_access"] for name in ("lru", "hazard", "arc", "s3fifo")}
        table.append(line | {"longest study, us": policies["hazard"]["longest_study_us"]})
    return table


def memory(rows: Sequence[Row]) -> Table:
    """What the policy hazard remembers at the end of a replay."""
    table: Table = []
    for (trace, size), policies in of_shares(rows):
        ours = policies["hazard"]
        table.append({
            "trace": trace, "capacity": spaced(size), "blocks cached": ours["blocks"],
            "blocks remembered": ours["remembered_blocks"], "runs": ours["remembered_runs"],
            "MiB": ours["bytes"] / 2**20,
            "bytes by block remembered": ours["bytes"] / max(1, ours["remembered_blocks"]),
        })  # fmt: skip
    return table


def by_size(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Rows by trace and size, then by policy."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["trace"], row["capacity"]), {})[row["policy"]] = row
    return found


def of_shares(rows: Sequence[Row]) -> list[tuple[tuple[str, str], dict[str, Row]]]:
    """Only the sizes that are a share of a trace's unique blocks, smallest first."""
    return [(key, policies) for key, policies in by_size(rows).items() if key[1] in SHARES]


def _policies_by_size(rows: Sequence[Row], key: str) -> Table:
    return [
        {"trace": trace, "capacity": spaced(size)} | {name: decimal(policies[name][key], 2) for name in OURS}
        for (trace, size), policies in by_size(rows).items()
    ]
