"""Plots of a run: bandwidth of the core set, of the block sizes, of the skewed batch.

Prefill; the cascade.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.attention.ceilings import COPY, HEAD_READ, MATMUL, READ, ceilings_of
from pagedkv import extras

Row = Mapping[str, Any]


def require_pyplot() -> Any:
    """``matplotlib.pyplot`` with a backend that needs no display.

    Raises
    ------
    ImportError
        It is not installed; names the extra that brings it.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise ImportError(f"--plot needs matplotlib: {extras.command('bench')}") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def plot(rows: Sequence[Row], folder: Path, title: str) -> list[Path]:
    """Write a PNG for every section that has figures; the files written.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    pyplot = require_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    ceilings = ceilings_of(rows)
    memory = {name: ceilings[name] for name in (READ, HEAD_READ, COPY) if name in ceilings}
    product = {name: ceilings[name] for name in (MATMUL,) if name in ceilings}
    plans: dict[str, tuple[Callable[..., None], str, str, dict[str, float]]] = {
        "core": (_bars, "tb_per_s", "TB/s", memory),
        "paging": (_bars, "tb_per_s", "TB/s", memory),
        "skew": (_bars, "tb_per_s", "TB/s", memory),
        "blocks": (_sweep, "tb_per_s", "TB/s", memory),
        "small": (_bars, "us", "us per call", {}),
        "prefill": (_bars, "tflop_per_s", "TFLOP/s", product),
        "cascade": (_bars, "us", "us per call", {}),
        "fp8": (_bars, "us", "us per call", {}),
    }
    written = []
    for name, (draw, figure, label, lines) in plans.items():
        chosen = [row for row in rows if row["section"] == name and row.get(figure) is not None]
        if not chosen:
            continue
        canvas, axes = pyplot.subplots(figsize=(14, 5.5), layout="constrained")
        try:
            draw(axes, chosen, figure)
            for (what, height), style in zip(lines.items(), ("--", ":", "-."), strict=False):
                axes.axhline(height, linestyle=style, color="black", linewidth=1, label=f"{what} {height:.2f}")
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{name}: {title}")
            axes.grid(axis="y", alpha=0.3)
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.005, 1))
            written.append(folder / f"attention_{name}.png")
            canvas.savefig(written[-1], dpi=130)
        finally:
            pyplot.close(canvas)
    return written


def _bars(axes: Any, rows: Sequence[Row], figure: str) -> None:
    """A cluster of bars per case, a colour per system."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        own = [row for row in rows if row["system"] == system]
        lefts = [cases.index(row["case"]) + number * width - 0.4 for row in own]
        axes.bar(lefts, [row[figure] for row in own], width, align="edge", label=system)
    axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right", fontsize=8)


def _sweep(axes: Any, rows: Sequence[Row], figure: str) -> None:
    """A curve over the block size per system."""
    for system in dict.fromkeys(row["system"] for row in rows):
        points = sorted((row["block_size"], row[figure]) for row in rows if row["system"] == system)
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=system)
    sizes = sorted({row["block_size"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("block size, tokens")
