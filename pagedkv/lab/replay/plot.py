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
from pagedkv.lab.replay.references import BOUNDS, References
from pagedkv.lab.replay.result import Result
from pagedkv.lab.replay.trace import Trace

BOUND_STYLES = {"min": "--", "min-bypass": ":", "infinite": "-."}
POLICY_STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"))  # not by colour alone


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
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    try:
        if len({r.capacity.blocks for r in results}) > 1:
            _sweep(trace, results, references, axes)
        else:
            _bars(trace, results, references, axes)
        held = "" if references.generating is None else f", {references.generating:g} ms per output token"
        axes.set_title(
            f"{plain(trace.name)}: {trace.num_requests:,} requests, {trace.num_unique:,} unique blocks{held}\n"
            "prompt blocks found in the cache (more is better)"
        )
        figure.savefig(out, dpi=150)
    finally:
        pyplot.close(figure)


def plain(text: str) -> str:
    """Text as matplotlib shows it as it is: a dollar sign would begin a formula."""
    return printable(text).replace("$", r"\$")


def _share(capacity: int, unique: int) -> str:
    """Such as 1 %: what was asked for, though it was rounded down to whole blocks."""
    return f"{100 * capacity / unique:.2g} %"


def _sweep(trace: Trace, results: Sequence[Result], references: References, axes: Any) -> None:
    sizes = {r.capacity.total: r.capacity for r in sorted(results, key=lambda r: r.capacity.total)}
    capacities = list(sizes)
    policies = dict.fromkeys(r.policy for r in results if r.policy not in BOUNDS)
    for policy, (marker, line) in zip(policies, itertools.cycle(POLICY_STYLES), strict=False):
        points = sorted((r.capacity.total, 100 * r.block_hit_rate) for r in results if r.policy == policy)
        axes.plot(
            *zip(*points, strict=True), marker=marker, linestyle=line, linewidth=1.2, markersize=5, label=plain(policy)
        )
    bounds = {name: tuple(references.total(name, size) for size in sizes.values()) for name in BOUND_STYLES}
    for names, hits in _joined(bounds):
        best = [100 * count / trace.num_accesses for count in hits]
        axes.plot(capacities, best, BOUND_STYLES[names[0]], color="black", linewidth=1, label=", ".join(names))
    axes.set_xscale("log")
    axes.set_xticks(capacities, [f"{c:,}\n{_share(c, trace.num_unique)}" for c in capacities], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("capacity of all tiers: blocks, and share of the unique blocks")
    axes.set_ylabel("block hits, % of accesses")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _bars(trace: Trace, results: Sequence[Result], references: References, axes: Any) -> None:
    shown = [r for r in results if r.policy not in BOUNDS] or list(results)
    names = [plain(r.policy) for r in shown]
    left = [0.0] * len(shown)
    for tier in TIER_NAMES:
        widths = [100 * r.hit_blocks[tier] / r.block_accesses for r in shown]
        if any(widths):
            axes.barh(names, widths, left=left, label=tier)
            left = [a + w for a, w in zip(left, widths, strict=True)]
    for name, r in zip(names, shown, strict=True):
        axes.annotate(
            f" {100 * r.block_hit_rate:.1f} %", (100 * r.block_hit_rate, name), va="center", ha="left", fontsize=9
        )
    bounds = {name: (references.total(name, shown[0].capacity),) for name in BOUND_STYLES}
    for joined, (count,) in _joined(bounds):
        best = 100 * count / trace.num_accesses
        told = f"{', '.join(joined)} {best:.1f} %"
        axes.axvline(best, linestyle=BOUND_STYLES[joined[0]], color="black", linewidth=1, label=told)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    tiers = ", ".join(f"{name} {blocks:,}" for name, blocks in shown[0].capacity.tiers())
    axes.set_xlabel(f"block hits, % of accesses ({tiers} blocks)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=6, frameon=False)  # beside no bar


def _joined(bounds: Mapping[str, tuple[int, ...]]) -> list[tuple[list[str], tuple[int, ...]]]:
    """Bounds with their hits; those with equal ones together: their lines hide each other."""
    same: dict[tuple[int, ...], list[str]] = {}
    for name, hits in bounds.items():
        same.setdefault(hits, []).append(name)
    return [(names, hits) for hits, names in same.items()]
