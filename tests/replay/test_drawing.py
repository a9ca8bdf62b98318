"""Plots of the lab: axes, labels and headlines that can be checked without looking at them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.lab.replay.drawing import APART, label_ends, number, rows, spans_decades
from pagedkv.lab.simulate.plot import finding, plot_results

pytest.importorskip("matplotlib")


@pytest.fixture
def axes() -> Any:
    from pagedkv.lab.replay.plot import require_matplotlib

    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(6, 4))
    yield axes
    pyplot.close(figure)


@pytest.mark.parametrize(
    ("values", "wanted"), [([1, 29], False), ([1, 30], True), ([0, 1000], False), ([6.41, 1535.8], True), ([5], False)]
)
def test_an_axis_is_logarithmic_where_values_span_decades(values: list[float], wanted: bool) -> None:
    assert spans_decades(values) is wanted


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1535.76, "1,536"), (99.4, "99"), (6.41, "6.4"), (0.0542, "0.054"), (1126, "1,126"), (1e-5, "1.0e-05")],
)
def test_numbers_are_short_and_without_exponents_where_they_can_be(value: float, text: str) -> None:
    assert number(value) == text


def test_bars_are_thin_with_their_values_beside_them_and_no_legend(axes: Any) -> None:
    rows(axes, ["a", "b"], [1535.76, 6.41], title="wait", less_is_better=True, beyond=[2880.1, 25.8], said="p99")
    assert axes.get_legend() is None
    assert [patch.get_height() for patch in axes.patches] == pytest.approx([0.36, 0.36])
    texts = {text.get_text(): text.get_fontweight() for text in axes.texts}
    assert texts == {"1,536  (p99 2,880)": "normal", "6.4  (p99 26)": "bold"}
    assert axes.get_xscale() == "log"
    assert axes.get_title(loc="left") == "wait  (less is better)"
    for text in axes.texts:  # inside the picture
        assert text.get_window_extent().x1 < axes.get_window_extent().x1


def test_equal_values_are_said_to_be_equal_and_none_is_the_best(axes: Any) -> None:
    rows(axes, ["a", "b", "c"], [100.0, 101.0, 100.5], title="speed", less_is_better=False)
    assert axes.get_title(loc="left") == "speed  (more is better, equal within 2 %)"
    assert {text.get_fontweight() for text in axes.texts} == {"normal"}
    assert axes.get_xlim()[0] == 0


def test_labels_at_the_ends_of_lines_do_not_touch(axes: Any) -> None:
    axes.set_ylim(0, 10)
    ends = [(1.0, y, f"line {i}", "black") for i, y in enumerate([5.0, 5.0, 5.01, 9.99, 10.0, 10.0])]
    label_ends(axes, ends)
    height = axes.get_window_extent().height * 72 / axes.figure.dpi
    placed = sorted((text.xyann[1] * height, text.get_text()) for text in axes.texts)
    assert len(placed) == len(ends)
    for (lower, _), (upper, _) in itertools.pairwise(placed):
        assert upper - lower >= APART - 0.01
    assert placed[-1][0] <= height + 0.01
    assert placed[0] == (pytest.approx(height / 2), "line 0")  # nothing pushes it
    assert {name for _, name in placed[3:]} == {"line 3", "line 4", "line 5"}


def result(system: str, wait: float) -> Any:
    return SimpleNamespace(system=system, ttft_s={"p50": wait})


@pytest.mark.parametrize(
    ("hits", "waste", "drawn", "below"),
    [
        ((0.0, 0.5), (0.5, 0.9), ["time", "generated", "sequences", "prompt", "slots"], "a trace"),
        ((0.0, 0.0), (0.5, 0.9), ["time", "generated", "sequences", "slots"],
         "a trace; 0 in every system: prompt tokens from the cache, %"),
        ((0.0, 0.0), (1.0, 1.0), ["time", "generated", "sequences"],
         "a trace; 0 in every system: prompt tokens from the cache, %, slots held that hold no token, %"),
    ],
)  # fmt: skip
def test_a_panel_of_zeros_is_left_out_and_named(
    hits: tuple[float, float], waste: tuple[float, float], drawn: list[str], below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *where, **options: saved.append(figure))
    results: list[Any] = [
        SimpleNamespace(
            system=name, ttft_s={"p50": 1.0, "p99": 2.0}, output_tokens_per_s=9.0, mean_running=3.0, most_running=4,
            hit_rate={"total": hit}, tokens_per_slot=tokens,
        )
        for name, hit, tokens in zip(("paged", "shared"), hits, waste, strict=True)
    ]  # fmt: skip
    plot_results(results, "a trace", "out.png")
    (figure,) = saved
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left").partition(" ")[0] for axes in panels] == drawn
    assert all(any(patch.get_width() for patch in axes.patches) for axes in panels)
    assert all(axes.yaxis.get_inverted() for axes in panels), "the first system is at the top"
    assert figure.get_supxlabel() == below


def test_the_headline_names_the_shortest_waits_and_the_longest() -> None:
    told = finding([result("contiguous", 1535.8), result("shared", 1.13), result("tiered", 1.13)])
    assert told == "shared, tiered: first token after 1.1 s (median); contiguous: 1,536 s"
    assert finding([result("a", 2.0), result("b", 2.01)]) == "Every system's first token comes after 2 s (median)"
