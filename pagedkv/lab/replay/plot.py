"""Plots with the bounds: hit rate over capacity, or by tier at one capacity.

matplotlib is imported on use.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from pagedkv.lab.replay.capacity import TIER_NAMES
from pagedkv.lab.replay.references import BOUNDS, References
from pagedkv.lab.replay.result import Result
from pagedkv.lab.replay.trace import Trace

BOUND_STYLES = {"min": "--", "min-bypass": ":", "infinite": "-."}


def require_matplotlib() -> Any:
    """``matplotlib`` with a backend that needs no display.

    Raises
    ------
    ImportError : it is not installed; names the extra that brings it.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'pagedkv[bench]'") from None
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
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    try:
        if len({r.capacity.blocks for r in results}) > 1:
            _sweep(trace, results, references, axes)
        else:
            _bars(trace, results, references, axes)
        held = "" if references.generating is None else f", {references.generating:g} ms per output token"
        axes.set_title(f"{trace.name}: {trace.num_requests:,} requests, {trace.num_unique:,} unique blocks{held}")
        figure.savefig(out, dpi=150)
    finally:
        pyplot.close(figure)


def _sweep(trace: Trace, results: Sequence[Result], references: References, axes: Any) -> None:
    sizes = {r.capacity.total: r.capacity for r in sorted(results, key=lambda r: r.capacity.total)}
    capacities = list(sizes)
    for policy in dict.fromkeys(r.policy for r in results if r.policy not in BOUNDS):
        points = sorted((r.capacity.total, 100 * r.block_hit_rate) for r in results if r.policy == policy)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=policy)
    for name in BOUNDS:
        best = [100 * references.total(name, size) / trace.num_accesses for size in sizes.values()]
        axes.plot(capacities, best, BOUND_STYLES[name], color="black", linewidth=1, label=name)
    axes.set_xscale("log")
    axes.set_xticks(capacities, [f"{c:,}\n{100 * c / trace.num_unique:.3g} %" for c in capacities], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("capacity of all tiers: blocks, and share of the unique blocks")
    axes.set_ylabel("block hits, % of accesses")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _bars(trace: Trace, results: Sequence[Result], references: References, axes: Any) -> None:
    shown = [r for r in results if r.policy not in BOUNDS] or list(results)
    names = [r.policy for r in shown]
    left = [0.0] * len(shown)
    for tier in TIER_NAMES:
        widths = [100 * r.hit_blocks[tier] / r.block_accesses for r in shown]
        if any(widths):
            axes.barh(names, widths, left=left, label=tier)
            left = [a + w for a, w in zip(left, widths, strict=True)]
    for name in BOUNDS:
        best = 100 * references.total(name, shown[0].capacity) / trace.num_accesses
        axes.axvline(best, linestyle=BOUND_STYLES[name], color="black", linewidth=1, label=f"{name} {best:.1f} %")
    axes.invert_yaxis()
    tiers = ", ".join(f"{name} {blocks:,}" for name, blocks in shown[0].capacity.tiers())
    axes.set_xlabel(f"block hits, % of accesses ({tiers} blocks)")
    axes.legend(loc="lower right")
