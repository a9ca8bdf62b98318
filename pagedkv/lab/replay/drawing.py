"""Thin bars and lines with labels beside them instead of legends, for plots of the lab."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BEST, OTHER, PALE = "#0b6e4f", "#8a97a6", "#c9d1d9"  # dark enough on white; the best is bold as well
DECADES = 30  # of the largest to the smallest: from here on a linear axis hides the small ones
APART = 11  # points between the centres of two labels at the ends of lines


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values need a logarithmic axis: above zero, the largest 30 times the smallest."""
    return min(values) > 0 and max(values) >= DECADES * min(values)


def number(value: float) -> str:
    """Two digits or all before the point, without exponents: 0.0021, 3.4, 1,230."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2g}" if abs(value) >= 0.0001 else f"{value:.1e}"


def quiet(axes: Any) -> None:
    """No frame, a pale grid for the values, few ticks."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def rows(
    axes: Any,
    names: Sequence[str],
    values: Sequence[float],
    *,
    title: str,
    less_is_better: bool | None = None,
    beyond: Sequence[float] | None = None,
    said: str = "",
) -> None:
    """One thin bar per name, its value beside it; the best one in another colour and bold.

    Parameters
    ----------
    less_is_better : None if no value is better than another.
    beyond : second values, such as the 99th percentile, drawn as a thin line onwards from the bar.
    said : the name of the second values.
    """
    ends = values if beyond is None else [max(pair) for pair in zip(values, beyond, strict=True)]
    is_log = spans_decades([*values, *ends])
    if is_log:
        axes.set_xscale("log")
    same = max(values) - min(values) <= 0.02 * max(map(abs, values))
    best = None if less_is_better is None or same else (min if less_is_better else max)(values)
    left = 10 ** _below(min(values)) if is_log else 0.0
    for row, (value, end) in enumerate(zip(values, ends, strict=True)):
        colour = BEST if value == best else OTHER
        axes.barh(row, value - left, left=left, height=0.36, color=colour)
        if beyond is not None:
            axes.plot([value, end], [row, row], color=colour, linewidth=1.2)
            axes.plot([end], [row], marker="|", color=colour, markersize=8)
        text = number(value) if beyond is None else f"{number(value)}  ({said} {number(end)})"
        axes.annotate(
            text, (end, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9,
            fontweight="bold" if value == best else "normal",
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.yaxis.set_inverted(True)  # not invert_yaxis, which turns axes that share theirs back again
    quiet(axes)
    if is_log:
        axes.set_xlim(left, max(ends) * (max(ends) / left) ** 0.6)  # room for the labels
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
    else:
        axes.set_xlim(0, max([*ends, 0.0]) * 1.6 or 1)
        axes.locator_params(axis="x", nbins=4)
    direction = {None: "", True: "less is better", False: "more is better"}[less_is_better]
    note = ", ".join(
        part for part in (direction, "equal within 2 %" if same and less_is_better is not None else "") if part
    )
    axes.set_title(title + (f"  ({note})" if note else ""), loc="left", fontsize=10)


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, Any]]) -> None:
    """Write each line's name beside its end, moved until no two labels touch.

    Parameters
    ----------
    ends : x, y, name and colour of each.
    """
    height = axes.get_window_extent().height * 72 / axes.figure.dpi
    low, high = axes.get_ylim()
    wanted = sorted(ends, key=lambda end: end[1])
    places = [(y - low) / (high - low) * height for _, y, _, _ in wanted]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + APART)
    over = places[-1] - height if places else 0.0
    if over > 0:  # down again from the top
        places[-1] -= over
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - APART)
    for (x, y, name, colour), place in zip(wanted, places, strict=True):
        axes.annotate(
            name, (x, y), xytext=(1.02, place / height), textcoords=("axes fraction", "axes fraction"), color=colour,
            va="center", fontsize=9, arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5},
        )  # fmt: skip


def headline(figure: Any, text: str, below: str) -> None:
    """The finding, in bold, above; at the bottom, where it comes from."""
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold", fontsize=12)
    figure.supxlabel(below, x=0.01, ha="left", fontsize=8, color="#555555")


def _below(value: float) -> int:
    """The power of ten at or below a value, a little lower so that its bar can be seen."""
    exponent = 0
    while 10.0**exponent > value * 0.7:
        exponent -= 1
    while 10.0 ** (exponent + 1) <= value * 0.7:
        exponent += 1
    return exponent
