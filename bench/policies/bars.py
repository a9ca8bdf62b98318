"""What the figures say against what was to be reached, in sentences that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.policies.forms import OURS, Row, decimal, spaced

Key = tuple[str, str]  # a trace and a size
Cases = Mapping[Key, Mapping[str, Row]]  # by policy

HALF = 50  # % of the gap: the goal


def verdict(cases: Cases) -> list[str]:
    """What the figures say against the bars."""
    return [*_published(cases), *(_beside_lru(cases, name) for name in OURS)]


def best_published(policies: Mapping[str, Row]) -> Row | None:
    """Of what is published of other policies at this size, the most hits."""
    outside = [row for row in policies.values() if row["source"] == "published"]
    return max(outside, key=lambda row: int(row["hit_blocks"]), default=None)


def _published(cases: Cases) -> list[str]:
    best = {key: best_published(policies) for key, policies in cases.items()}
    known = {key: row["hit_blocks"] for key, row in best.items() if row is not None}
    missed = [key for key, hits in known.items() if cases[key]["hazard"]["hit_blocks"] < hits]
    half = [key for key in known if (cases[key]["hazard"]["gap_pct"] or 0) >= HALF]
    return [
        f"The best published policy of each size, chosen afterwards: `hazard` {_reached(len(known), missed)}.",
        f"Half of the gap: `hazard` reaches it at {len(half)} of {len(known)} sizes: {_titles(half) or 'none'}.",
    ]


def _beside_lru(cases: Cases, name: str) -> str:
    ahead = {key: policies[name]["block_pct"] - policies["lru"]["block_pct"] for key, policies in cases.items()}
    windows = {key: policies[name]["worst_window"] for key, policies in cases.items()}
    whole, window = min(ahead, key=ahead.__getitem__), min(windows, key=windows.__getitem__)
    return (
        f"Points beside LRU where it is worst: `{name}` {decimal(ahead[whole], 2)} over a whole trace "
        f"({_titles([whole])}), {decimal(windows[window], 2)} in a window of 10,000 requests ({_titles([window])})."
    )


def _reached(count: int, missed: Sequence[Key]) -> str:
    names = f"; not at {_titles(missed)}" if missed else ""
    return f"is at least as good at {count - len(missed)} of {count} sizes{names}"


def _titles(keys: Sequence[Key]) -> str:
    return ", ".join(f"{trace} {spaced(size)}" for trace, size in keys)
