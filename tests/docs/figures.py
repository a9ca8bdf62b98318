"""Figures in prose that name their source.

A mark looks like this: ``1,000<!-- figure: reliability.json kill.count -->``.

The comment stands right after the number; a rendered page does not show it. It names a file of ``bench/results`` and
a value in it:

``kill.count``
    keys, from the top of the file
``rows[case=decode_step_256,system=pagedkv].value``
    the only entry of a list that has these values, and a key of it
``rows[...].value / rows[...].value``, ``... * 100``
    a ratio of two values; a value in another unit

The number has to be that value, rounded to as many decimals as the number has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MARK = re.compile(r"<!-- figure: (?P<file>\S+\.json) (?P<what>.*?) -->")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?$")
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


def evaluate(document: Any, what: str) -> float:
    """The value of a path, of the ratio of two, or of one times a number."""
    if " / " in what:
        first, second = what.split(" / ")
        return evaluate(document, first) / evaluate(document, second)
    if " * " in what:
        path, factor = what.split(" * ")
        return evaluate(document, path) * float(factor)
    return float(value_at(document, what))


def value_at(document: Any, path: str) -> Any:
    """The value a path leads to.

    Raises
    ------
    KeyError, ValueError
        There is no such key; a list has none or several entries with the wanted values; the path cannot be read.
    """
    at, found = 0, document
    while at < len(path):
        key = KEY.match(path, at)
        if key is None:
            raise ValueError(f"cannot read {path[at:]!r} of the path {path!r}")
        found, at = found[key["name"]], key.end()
        if key["only"] is not None:
            wanted = dict(pair.split("=", 1) for pair in key["only"].split(","))
            entries = [one for one in found if all(str(one[name]) == value for name, value in wanted.items())]
            if len(entries) != 1:
                raise ValueError(f"{len(entries)} entries of {key['name']} are {wanted}, not one")
            (found,) = entries
    return found
