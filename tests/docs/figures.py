"""Figures in prose that name their source.

A mark looks like this: ``1,000<!-- figure: reliability.json kill.count -->``.

The comment stands right after the number; a rendered page does not show it. It names a file of ``bench/results`` and
a value in it:

``kill.count``
    keys, from the top of the file
``rows[case=decode_step_256,system=pagedkv].value``
    the only entry of a list that has these values, and a key of it. ``case=decode*`` is a pattern, ``case!=decode*``
    excludes one; values may hold commas.
``min rows[...].value``, ``max rows[...].value``, ``count rows[...].value >= 2``
    over all entries that a list has with these values
``rows[...].value / rows[...].value``, ``... * 100``
    a ratio of two values; a value in another unit

Where ``bench/results`` has no source, a comment ``<!-- figures: by hand -->`` or ``<!-- figures: computed -->`` covers
its section, or the whole page if it stands before the first section; the text then names the command.

The number has to be that value, rounded to as many decimals as the number has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MARK = re.compile(r"<!-- figure: (?P<file>\S+\.json) (?P<what>.*?) -->")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?$")
MEASURED = re.compile(
    r"(?<![\w.,-])(?P<number>\d[\d,]*(?:\.\d+)?)"
    r"(?:(?P<mark><!-- figure: .*? -->)?(?: ?(?:us|µs|ns|ms|GB/s|MB/s|GFLOP/s|tokens/s|points)\b| ?%| ?x\b| times\b))"
)
CELL = re.compile(r"(?<=\|) *(?P<cell>-?\d[\d,]*(?:\.\d+)?) *(?=\|)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
DRAWN = re.compile(r"<!-- (?:table|slow tests|kills|counts): .*?<!-- end[^>]*-->", re.DOTALL)
COVERED = re.compile(r"<!-- figures: (?:by hand|computed) -->")
SECTION = re.compile(r"^#{2,} ", re.MULTILINE)
KEY = re.compile(r"(?P<name>[^.\[]+)(?:\[(?P<only>[^\]]*)\])?(?:\.|$)")


@dataclass(frozen=True)
class Figure:
    """A number of a page and where it comes from."""

    line: int
    said: str
    file: str
    what: str


def figures(text: str) -> Iterator[Figure]:
    """All marked figures of a page.

    Raises
    ------
    ValueError
        No number stands right before a mark.
    """
    for mark in MARK.finditer(text):
        line = text.count("\n", 0, mark.start()) + 1
        number = NUMBER.search(text[: mark.start()])
        if number is None:
            raise ValueError(f"line {line}: no number right before {mark[0]}")
        yield Figure(line, number[0], mark["file"], mark["what"])


def wrong(figure: Figure, results: Path = RESULTS) -> str:
    """What the page should say instead; empty if the figure is right."""
    value = evaluate(json.loads((results / figure.file).read_text()), figure.what)
    decimals = len(figure.said.partition(".")[2])
    wanted = f"{value:,.{decimals}f}"
    if figure.said.replace(",", "") == wanted.replace(",", ""):
        return ""
    return f"line {figure.line} says {figure.said}, and {figure.file} has {wanted} for {figure.what}"


def bare(text: str, allowed: Set[str] = frozenset()) -> list[str]:
    """Measured figures of a page without a source.

    Numbers with a unit of time, rate or share, and cells of tables that are a number.

    Parameters
    ----------
    text : the page. Fenced code, and tables that a command draws or a test compares, do not count.
    allowed : figures that were not measured here: settings, limits and what others claim.
    """
    text = DRAWN.sub(_blank, FENCE.sub(_blank, text))
    head, *sections = SECTION.split(text)
    if COVERED.search(head):
        return []
    parts = [part for part in (head, *sections) if not COVERED.search(part)]
    found = [one[0] for part in parts for one in MEASURED.finditer(part) if not one["mark"]]
    found += [one["cell"] for part in parts for one in CELL.finditer(part)]
    return [one for one in found if one not in allowed]


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def evaluate(document: Any, what: str) -> float:
    """The value of a path, a ratio or product, or the least, most or number of several."""
    if " / " in what:
        first, second = what.split(" / ")
        return evaluate(document, first) / evaluate(document, second)
    if " * " in what:
        path, factor = what.split(" * ")
        return evaluate(document, path) * float(factor)
    if what.startswith("count "):
        path, least = what.removeprefix("count ").split(" >= ")
        return sum(value >= float(least) for value in values_at(document, path))
    for name, choose in (("min ", min), ("max ", max)):
        if what.startswith(name):
            return float(choose(values_at(document, what.removeprefix(name))))
    return float(value_at(document, what))


def value_at(document: Any, path: str) -> Any:
    """The value a path leads to.

    Raises
    ------
    KeyError, ValueError
        There is no such key; a list has none or several entries with the wanted values; the path cannot be read.
    """
    values = values_at(document, path)
    if len(values) != 1:
        raise ValueError(f"{path} leads to {len(values)} values, not to one")
    return values[0]


def values_at(document: Any, path: str) -> list[Any]:
    """All values a path leads to, at least one.

    Raises
    ------
    KeyError, ValueError
        There is no such key; a list has no entry with the wanted values; the path cannot be read.
    """
    at, found = 0, [document]
    while at < len(path):
        key = KEY.match(path, at)
        if key is None:
            raise ValueError(f"cannot read {path[at:]!r} of the path {path!r}")
        found, at = [one[key["name"]] for one in found], key.end()
        if key["only"] is not None:
            wanted = [pair.split("=", 1) for pair in re.split(r",(?=\w+!?=)", key["only"])]
            found = [entry for one in found for entry in one if _has(entry, wanted)]
            if not found:
                raise ValueError(f"no entry of {key['name']} is {wanted}")
    return found


def _has(entry: Any, wanted: list[list[str]]) -> bool:
    return all(fnmatchcase(str(entry[name.rstrip("!")]), value) != name.endswith("!") for name, value in wanted)
