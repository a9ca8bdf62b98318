"""Plots: waits, throughput, sequences at once, hits, waste by system. matplotlib, lazily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.lab.replay.drawing import headline, label_ends, number, quiet, rows, spans_decades
from pagedkv.lab.replay.plot import POLICY_STYLES, plain, require_matplotlib
from pagedkv.lab.simulate.result import SimResult
from pagedkv.lab.simulate.studies import Study


@dataclass(frozen=True)
class Panel:
    """One value of every system; parameters as :func:`~pagedkv.lab.replay.drawing.rows`."""

    title: str
    values: list[float]
    less_is_better: bool | None = None
    beyond: list[float] | None = None
    said: str = ""


def panels(results: Sequence[SimResult]) -> list[Panel]:
    """Waits, throughput, sequences at once, hits and waste."""
    return [
        Panel(
            "time to first token, s: median", [r.ttft_s["p50"] for r in results], less_is_better=True,
            beyond=[r.ttft_s["p99"] for r in results], said="p99",
        ),
        Panel("generated tokens per second", [r.output_tokens_per_s for r in results], less_is_better=False),
        Panel(
            "sequences running at once: mean", [r.mean_running for r in results],
            beyond=[float(r.most_running) for r in results], said="most",
        ),
        Panel("prompt tokens from the cache, %", [100 * r.hit_rate["total"] for r in results], less_is_better=False),
        Panel(
            "slots held that hold no token, %", [100 * max(0.0, 1 - r.tokens_per_slot) for r in results],
            less_is_better=True,
        ),
    ]  # fmt: skip


def plot_results(results: Sequence[SimResult], title: str, out: str) -> None:
    """Write bars to `out`, a row per system; its suffix names the format.

    A panel whose values are all 0, such as hits without a cache, is left out and named at the bottom.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    pyplot = require_matplotlib()
    names = [plain(r.system) for r in results]
    first, *others = panels(results)
    shown = [first, *(panel for panel in others if any(panel.values))]
    zero = ", ".join(panel.title for panel in others if not any(panel.values))
    height = -(-len(shown) // 2)
    figure, axes = pyplot.subplots(
        height, 2, figsize=(11, 0.6 + height * (0.3 + 0.39 * len(results))), layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    try:
        for place, panel in zip(axes.flat, shown, strict=False):
            rows(
                place, names, panel.values, title=panel.title, less_is_better=panel.less_is_better,
                beyond=panel.beyond, said=panel.said,
            )  # fmt: skip
        for place in axes.flat[len(shown) :]:
            place.set_axis_off()
        headline(figure, plain(finding(results)), plain(f"{title}; 0 in every system: {zero}" if zero else title))
        figure.savefig(out, dpi=110)
    finally:
        pyplot.close(figure)


def finding(results: Sequence[SimResult]) -> str:
    """The sentence above the bars: the systems with the shortest waits, beside the longest."""
    waits = sorted(results, key=lambda r: r.ttft_s["p50"])
    a, b = waits[0].ttft_s["p50"], waits[-1].ttft_s["p50"]
    if b <= 1.02 * a:
        return f"Every system's first token comes after {number(a)} s (median)"
    equal = ", ".join(r.system for r in waits if r.ttft_s["p50"] <= 1.02 * a)
    return f"{equal}: first token after {number(a)} s (median); {waits[-1].system}: {number(b)} s"


def change(study: Study) -> str:
    """The sentence above a study's curves: the first one from end to end."""
    name, values = next(iter(study.curves.items()))
    whose = f" ({name})" if len(study.curves) > 1 else ""
    return f"{study.y_label}: {number(values[0])} to {number(values[-1])}{whose}"


def plot_study(study: Study, title: str, out: str) -> None:
    """Write a study's curve to `out`."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    try:
        ends = []
        for i, (name, values) in enumerate(study.curves.items()):
            marker, line = POLICY_STYLES[i % len(POLICY_STYLES)]
            (drawn,) = axes.plot(study.x, values, marker=marker, linestyle=line, markersize=4, linewidth=1.2)
            ends.append((study.x[-1], values[-1], plain(name), drawn.get_color()))
        axes.set_xlabel(study.x_label)
        axes.set_title(study.y_label, loc="left", fontsize=10)
        every = [value for values in study.curves.values() for value in values]
        if spans_decades(every):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        quiet(axes)
        axes.grid(axis="y", alpha=0.25, linewidth=0.6)
        if len(ends) > 1:
            figure.draw_without_rendering()
            label_ends(axes, ends)
        headline(figure, plain(change(study)), plain(title))
        figure.savefig(out, dpi=110)
    finally:
        pyplot.close(figure)
