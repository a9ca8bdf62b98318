"""Plots with the bounds: hit rate over capacity, or by tier at one capacity.

matplotlib is imported on use.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv import extras
from pagedkv.lab.replay.about import printable
from pagedkv.lab.replay.capacity import TIER_NAMES
from pagedkv.lab.replay.drawing import headline, label_ends, quiet
from pagedkv.lab.replay.references import BOUNDS, References
from pagedkv.lab.replay.result import Result
from pagedkv.lab.replay.trace import Trace

BOUND_STYLES = {"min": "--", "min-bypass": ":", "infinite": "-."}
TIER_COLOURS = {"device": "#0b6e4f", "host": "#5aa17f", "disk": "#b7d3c4"}  # from hot to cold, also in grey
POLICY_STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"))  # not by colour alone
FEW_BARS = 4  # the least that a plot of bars has room for


def require_matplotlib() -> Any:
    """``matplotlib`` with a backend that needs no display.

    Raises
    ------
    ImportError : it is not installed; names the extra that brings it.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise ImportError(f"--plot needs matplotlib: {extras.command('bench')}") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def plot(trace: Trace, results: Sequence[Result], out: str, references: References | None = None) -> None:
    """Write a plot to ``out``; its suffix names the format (png, svg, pdf).

    Raises
    ------
    ImportError : matplotlib is not installed.
    ValueError : matplotlib does not know the format.
    """
    pyplot = require_matplotlib()
    references = references or References(trace)
    sizes = {r.capacity.blocks for r in results}
    bars = [r for r in results if r.policy not in BOUNDS] or list(results)  # bounds are lines where there are others
    inches = 5.5 if len(sizes) > 1 else 2.2 + 0.4 * max(len(bars), FEW_BARS)
    figure, axes = pyplot.subplots(figsize=(9, inches), layout="constrained")
    try:
        if len(sizes) > 1:
            _sweep(trace, results, references, axes, figure)
        else:
            _bars(trace, bars, references, axes)
        held = "" if references.generating is None else f", {references.generating:g} ms per output token"
        axes.set_title("prompt blocks found in the cache, % of accesses (more is better)", loc="left", fontsize=10)
        below = f"{plain(trace.name)}: {trace.num_requests:,} requests, {trace.num_unique:,} unique blocks{held}"
        headline(figure, plain(finding(trace, results, references)), below)
        figure.savefig(out, dpi=150)
    finally:
        pyplot.close(figure)


def finding(trace: Trace, results: Sequence[Result], references: References) -> str:
    """The sentence above the plot: the best policy at the largest capacity, and its bound."""
    largest = max(r.capacity.total for r in results)
    there = [r for r in results if r.capacity.total == largest]
    best = max(there, key=lambda r: (r.policy not in BOUNDS, r.block_hit_rate))
    most = 100 * references.total("min", best.capacity) / trace.num_accesses
    equal = [r.policy for r in there if abs(r.block_hit_rate - best.block_hit_rate) < 0.0005 and r.policy not in BOUNDS]
    who = f"{', '.join(equal[:-1])} and {equal[-1]} find" if len(equal) > 1 else f"{best.policy} finds"
    return f"{who} {100 * best.block_hit_rate:.1f} % of the blocks; the best possible is {most:.1f} %"


def plain(text: str) -> str:
    """Text as matplotlib shows it as it is: a dollar sign would begin a formula."""
    return printable(text).replace("$", r"\$")


def _share(capacity: int, unique: int) -> str:
    """Such as 1 %: what was asked for, though it was rounded down to whole blocks."""
    return f"{100 * capacity / unique:.2g} %"


def _sweep(trace: Trace, results: Sequence[Result], references: References, axes: Any, figure: Any) -> None:
    sizes = {r.capacity.total: r.capacity for r in sorted(results, key=lambda r: r.capacity.total)}
    capacities = list(sizes)
    policies = dict.fromkeys(r.policy for r in results if r.policy not in BOUNDS)
    ends: list[tuple[float, float, str, Any]] = []
    for policy, (marker, line) in zip(policies, itertools.cycle(POLICY_STYLES), strict=False):
        points = sorted((r.capacity.total, 100 * r.block_hit_rate) for r in results if r.policy == policy)
        (drawn,) = axes.plot(*zip(*points, strict=True), marker=marker, linestyle=line, linewidth=1.2, markersize=5)
        ends.append((*points[-1], plain(policy), drawn.get_color()))
    bounds = {name: tuple(references.total(name, size) for size in sizes.values()) for name in BOUND_STYLES}
    for names, hits in _joined(bounds):
        best = [100 * count / trace.num_accesses for count in hits]
        axes.plot(capacities, best, BOUND_STYLES[names[0]], color="black", linewidth=1)
        ends.append((capacities[-1], best[-1], ", ".join(names), "black"))
    axes.set_xscale("log")
    axes.set_xticks(capacities, [f"{c:,}\n{_share(c, trace.num_unique)}" for c in capacities], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("capacity of all tiers: blocks, and share of the unique blocks")
    axes.set_ylim(bottom=0)
    quiet(axes)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    figure.draw_without_rendering()
    label_ends(axes, ends)


def _bars(trace: Trace, shown: Sequence[Result], references: References, axes: Any) -> None:
    from matplotlib.transforms import offset_copy

    names = [plain(r.policy) for r in shown]
    left = [0.0] * len(shown)
    for tier in TIER_NAMES:
        widths = [100 * r.hit_blocks[tier] / r.block_accesses for r in shown]
        if any(widths):
            axes.barh(names, widths, left=left, height=0.36, color=TIER_COLOURS[tier], label=tier)
            left = [a + w for a, w in zip(left, widths, strict=True)]
    for name, r in zip(names, shown, strict=True):
        axes.annotate(
            f" {100 * r.block_hit_rate:.1f} %", (100 * r.block_hit_rate, name), va="center", ha="left", fontsize=9
        )
    bounds = {name: (references.total(name, shown[0].capacity),) for name in BOUND_STYLES}
    for joined, (count,) in _joined(bounds):
        best = 100 * count / trace.num_accesses
        told = f"{', '.join(joined)} {best:.1f} %"
        axes.axvline(best, linestyle=BOUND_STYLES[joined[0]], color="black", linewidth=1)
        axes.annotate(told, (best, 0), xycoords=("data", "axes fraction"), xytext=(4, 3), textcoords="offset points",
                      ha="left", va="bottom", rotation=90, fontsize=8)  # fmt: skip
    axes.margins(x=0.15)
    quiet(axes)
    around = max(FEW_BARS - len(shown), 0) / 2  # as much room for each bar, however few there are
    axes.set_ylim(len(shown) - 0.5 + around, -0.5 - around)
    tiers = ", ".join(f"{name} {blocks:,}" for name, blocks in shown[0].capacity.tiers())
    axes.set_xlabel(f"blocks: {tiers}")
    below = offset_copy(axes.transAxes, axes.figure, y=-34, units="points")  # under the axis' name: over no bar
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, ncols=3, frameon=False)


def _joined(bounds: Mapping[str, tuple[int, ...]]) -> list[tuple[list[str], tuple[int, ...]]]:
    """Bounds with their hits; those with equal ones together: their lines hide each other."""
    same: dict[tuple[int, ...], list[str]] = {}
    for name, hits in bounds.items():
        same.setdefault(hits, []).append(name)
    return [(names, hits) for hits, names in same.items()]
