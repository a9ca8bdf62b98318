"""Pictures of a run.

What each policy closes of the way from LRU to MIN, by capacity, one picture for each trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.attention.plots import require_pyplot as require_pyplot
from bench.policies.serving import STRICT, UNBOUNDED
from pagedkv.lab.replay.drawing import headline, label_ends, quiet

Row = Mapping[str, Any]

STYLES: Mapping[str, Mapping[str, Any]] = {
    "hazard": {"color": "tab:red", "linewidth": 2.5, "marker": "o"},
    STRICT: {"color": "tab:red", "linestyle": "--", "marker": "v"},
    UNBOUNDED: {"color": "tab:red", "linestyle": ":", "marker": "^"},
    "arc": {"color": "tab:blue", "marker": "s"},
    "s3fifo": {"color": "tab:green", "marker": "s"},
    "LHD": {"color": "tab:orange", "marker": "x"},
}
TICKS = ("1%", "2%", "5%", "10%", "20%", "50%")
LEAST, MOST = -60, 105  # what lies below is drawn at the edge: far behind LRU is far behind


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a PNG for every trace; the files written.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    pyplot = require_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        canvas, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
        try:
            mine = [row for row in rows if row["trace"] == trace]
            headline(canvas, finding(trace, mine), "bench.policies; LHD as published, all others replayed")
            _draw(axes, mine)
            written.append(folder / f"policies_{trace}.png")
            canvas.savefig(written[-1], dpi=110)
        finally:
            pyplot.close(canvas)
    return written


def finding(trace: str, rows: Sequence[Row]) -> str:
    """The sentence above the picture: hazard's least and most beside the best other policy's."""

    def span(policy: str) -> tuple[float, float]:
        found = [row["gap_pct"] for row in rows if row["policy"] == policy and row["gap_pct"] is not None]
        return (min(found), max(found)) if found else (float("-inf"), float("-inf"))

    low, high = span("hazard")
    other = max((name for name in STYLES if "hazard" not in name), key=lambda name: span(name)[0])
    least, most = span(other)
    return f"{trace}: hazard closes {low:.0f} to {high:.0f} % of the gap, {other} {least:.0f} to {most:.0f} %"


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    ends = []
    for policy, style in STYLES.items():
        found = [row for row in rows if row["policy"] == policy and row["gap_pct"] is not None]
        found.sort(key=lambda row: int(row["blocks"]))
        if found:
            heights = [max(LEAST, row["gap_pct"]) for row in found]
            axes.plot([row["blocks"] for row in found], heights, **{"markersize": 5, **style})
            ends.append((found[-1]["blocks"], heights[-1], policy, style["color"]))
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xscale("log")
    ticks = {row["blocks"]: f"{row['blocks']:,}\n{row['capacity']}" for row in rows if row["capacity"] in TICKS}
    axes.set_xticks([*ticks], [*ticks.values()], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(LEAST - 3, MOST)
    axes.set_xlabel("capacity: blocks, and share of the unique blocks")
    axes.set_title("hits gained, % of the way from LRU (0) to MIN (100) (more is better)", loc="left", fontsize=10)
    quiet(axes)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.figure.draw_without_rendering()
    label_ends(axes, ends)
