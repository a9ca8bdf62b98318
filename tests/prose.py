"""Counts what docs/style.md asks writers to avoid; ``python -m tests.prose`` prints it.

The bars of a part of the tree are what it has today. They are here to be lowered.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
VAGUE = re.compile(r"\b(?:nobody|somebody|whoever|everybody)\b", re.IGNORECASE)
LONGEST = 90  # characters of a docstring's first line, less one
SCAR = re.compile(r"^\s*# [a-z]+[.,;:]?$")  # one word alone between other comment lines
TEXT = {".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ".cu", ".cuh", ".md"}


class Counts(NamedTuple):
    """What was found in a part of the tree.

    Attributes
    ----------
    vague : words that name no actor
    long : first lines of docstrings that are too long
    scars : comment lines of one word, left by reflowing
    """

    vague: int
    long: int
    scars: int


PRODUCT = ("pagedkv", "kernels_cu", "bench", "examples", "setup.py")
DOCUMENTS = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
BARS = {PRODUCT: Counts(2, 3, 0), DOCUMENTS: Counts(1, 0, 0), ("tests",): Counts(8, 0, 0)}


def files(parts: tuple[str, ...]) -> Iterator[Path]:
    """Texts of these parts that people write; this file, docs/style.md and what they quote are left out."""
    for part in parts:
        path = ROOT / part
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in TEXT and file.name not in ("prose.py", "test_prose.py", "style.md"):
                yield file


def vague_words(text: str) -> int:
    """Words that name no actor."""
    return len(VAGUE.findall(text))


def long_first_lines(source: str) -> int:
    """Docstrings of Python source whose first line is too long."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return sum(len(text.partition("\n")[0]) >= LONGEST for text in found if text)


def scars(source: str) -> int:
    """Comment lines of one word between two other lines of the same comment."""
    lines = source.split("\n")
    return sum(
        bool(SCAR.match(line)) and before.lstrip().startswith("# ") and after.lstrip().startswith("# ")
        for before, line, after in zip(lines, lines[1:], lines[2:])
    )


def count(parts: tuple[str, ...]) -> Counts:
    """What these parts of the tree have."""
    vague = long = scarred = 0
    for file in files(parts):
        text = file.read_text(encoding="utf-8")
        vague += vague_words(text)
        long += long_first_lines(text) if file.suffix == ".py" else 0
        scarred += scars(text) if file.suffix != ".md" else 0
    return Counts(vague, long, scarred)


def main() -> int:
    """Print each part's counts beside its bars; 1 if one is above."""
    worst = 0
    for parts, bars in BARS.items():
        found = count(parts)
        above = [name for name in Counts._fields if getattr(found, name) > getattr(bars, name)]
        worst |= bool(above)
        print(f"{', '.join(parts)}: {found}, bars {bars}{'  ABOVE: ' + ', '.join(above) if above else ''}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
