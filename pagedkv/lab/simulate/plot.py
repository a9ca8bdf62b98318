"""Plots of results.

Time to first token, throughput, sequences at once and waste, by system. matplotlib, lazily.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedkv.lab.replay.plot import plain, require_matplotlib
from pagedkv.lab.simulate.result import SimResult
from pagedkv.lab.simulate.studies import Study


def plot_results(results: Sequence[SimResult], title: str, out: str) -> None:
    """Write four bar charts to `out`; its suffix names the format.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    names = [r.system for r in results]
    try:
        _bars(axes[0][0], names, {"p50": [r.ttft_s["p50"] for r in results], "p99": [r.ttft_s["p99"] for r in results]})
        if any(r.ttft_s["p50"] > 0 for r in results):
            axes[0][0].set_yscale("log")  # systems lie orders of magnitude apart
        axes[0][0].set_title("time to first token, s (less is better)")
        _bars(axes[0][1], names, {"output": [r.output_tokens_per_s for r in results]})
        axes[0][1].set_title("generated tokens per second (more is better)")
        _bars(axes[1][0], names, {"mean": [r.mean_running for r in results], "most": [r.most_running for r in results]})
        axes[1][0].set_title("sequences running at once")
        waste = [100 * max(0.0, 1 - r.tokens_per_slot) for r in results]
        hits = [100 * r.hit_rate["total"] for r in results]
        _bars(axes[1][1], names, {"slots held that hold no token": waste, "prompt tokens from the cache": hits})
        axes[1][1].set_title("waste and hits, %")
        figure.suptitle(plain(title))
        figure.savefig(out, dpi=110)
    finally:
        pyplot.close(figure)


def plot_study(study: Study, title: str, out: str) -> None:
    """Write a study's curve to `out`."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    try:
        for name, values in study.curves.items():
            axes.plot(study.x, values, marker="o", label=name)
        axes.set_xlabel(study.x_label)
        axes.set_ylabel(study.y_label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        axes.set_title(plain(title))
        figure.savefig(out, dpi=110)
    finally:
        pyplot.close(figure)


def _bars(axes: Any, names: Sequence[str], groups: dict[str, list[float]]) -> None:
    width = 0.8 / len(groups)
    for g, (label, values) in enumerate(groups.items()):
        axes.bar([i + g * width for i in range(len(names))], values, width, label=label)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(names))], names, rotation=20)
    if len(groups) > 1:
        axes.legend()
