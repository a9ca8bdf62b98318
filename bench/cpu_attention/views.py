"""The CPU bench's results as a table: a line for each problem, a column for each system."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OURS = "pagedkv"


def by_problem(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our time, our share of the ceiling, and the ratio of each peer's time to ours.

    The ceiling is of memory for decodes, of multiply-adds for prefills; ratios are medians over the rounds.
    """
    peers = list(dict.fromkeys(row["system"] for row in rows if row["system"] != OURS))
    table = []
    for ours in (row for row in rows if row["system"] == OURS):
        place = tuple(ours[key] for key in ("shape", "problem", "dtype"))
        same = {row["system"]: row for row in rows if tuple(row[key] for key in ("shape", "problem", "dtype")) == place}
        line: dict[str, Any] = dict(zip(("shape", "problem", "dtype"), place)) | {
            "ms": ours["ms"], "GB/s or GFLOP/s": ours["gb_per_s" if "decode" in ours["problem"] else "gflop_per_s"],
            "of the ceiling": ours["of_ceiling"],
        }  # fmt: skip
        table.append(line | {f"{peer}: times ours": same.get(peer, {}).get("ours_faster") for peer in peers})
    return table
