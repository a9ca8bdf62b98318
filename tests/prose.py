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
SCANNED = (".py", ".pyx", ".pxd", ".pyi")
VAGUE = re.compile(r"\b(?:nobody|somebody|whoever|everybody)\b", re.IGNORECASE)
LONGEST = 90  # characters of a docstring's first line, less one
DOCSTRING = re.compile(r'^[ \t]*[rR]?"""(.*?)"""', re.MULTILINE | re.DOTALL)  # and C code inside a .pyx
WORD = re.compile(r"[a-z][a-z'-]*[.,;)]?")
COMMENT = re.compile(r"^\s*(# |// |/\* |\* )")
FULL = 40  # characters of a line before which one word was left by reflowing, and is no entry of a list
CLAUSE = re.compile(
    r"\bwhat (?:is|are|was|were|it|its|they|the|an?|this|that|has|have|had|can|cannot|may|must|would|could|does|did)\b",
    re.IGNORECASE,
)  # a relative clause as a noun; questions are rare enough to count with it
BANNED = re.compile(r"\bwaited for no longer\b", re.IGNORECASE)  # say who gives up
TEXT = {*SCANNED, ".c", ".h", ".cu", ".cuh", ".md"}
RESULTS = ("bench", "results")  # JSON with sentences that pages quote


class Counts(NamedTuple):
    """What was found in a part of the tree.

    Attributes
    ----------
    vague : words that name no actor
    long : first lines of docstrings that are too long
    scars : lines of one word, left by reflowing, in comments and docstrings
    clauses : relative clauses as nouns, beginning with "what is", "what the" and so on
    banned : phrases that hide their actor
    """

    vague: int
    long: int
    scars: int
    clauses: int
    banned: int


PRODUCT = ("pagedkv", "kernels_cu", "bench", "examples", "setup.py")
DOCUMENTS = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
BARS = {PRODUCT: Counts(1, 0, 0, 356, 0), DOCUMENTS: Counts(0, 0, 0, 52, 0), ("tests",): Counts(0, 0, 0, 546, 0)}


def files(parts: tuple[str, ...]) -> Iterator[Path]:
    """Texts of these parts that people write, without this file, its test and docs/style.md."""
    for part in parts:
        path = ROOT / part
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            is_text = file.suffix in TEXT or (file.suffix == ".json" and file.parts[-3:-1] == RESULTS)
            if is_text and file.name not in ("prose.py", "test_prose.py", "style.md"):
                yield file


def vague_words(text: str) -> int:
    """Words that name no actor."""
    return len(VAGUE.findall(text))


def clauses(text: str) -> int:
    """Relative clauses that stand for a noun."""
    return len(CLAUSE.findall(text))


def banned(text: str) -> int:
    """Phrases that have a better wording, across the ends of lines."""
    return len(BANNED.findall(re.sub(r"\s+(?:# |// |\* )?", " ", text)))


def long_first_lines(source: str, suffix: str = ".py") -> int:
    """Docstrings of Python or Cython source whose first line is too long."""
    if suffix == ".py":
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    else:
        found = [text[1] for text in DOCSTRING.finditer(source)]
    return sum(len(text.partition("\n")[0].strip()) >= LONGEST for text in found)


def scars(source: str) -> int:
    """Lines of one word after another line of the same comment, or after a full line of a docstring."""
    found, in_docstring = 0, False
    lines = source.split("\n")
    for before, line in zip(["", *lines], lines):
        text, mark = _without_mark(line)
        above, mark_above = _without_mark(before)
        if WORD.fullmatch(text):
            if mark:
                found += bool(mark_above and above)
            elif in_docstring and _indent(line) == _indent(before):
                found += len(above) >= FULL
        in_docstring ^= line.count('"""') % 2 == 1
    return found


def _without_mark(line: str) -> tuple[str, str]:
    """A line's text without the signs that begin and end a comment or docstring, and the sign that began it."""
    mark = COMMENT.match(line)
    text = line[mark.end() :] if mark else line
    return text.strip().removesuffix("*/").strip('"').strip(), mark[1] if mark else ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def count(parts: tuple[str, ...]) -> Counts:
    """What these parts of the tree have."""
    vague = long = scarred = relative = phrases = 0
    for file in files(parts):
        text = file.read_text(encoding="utf-8")
        vague += vague_words(text)
        long += long_first_lines(text, file.suffix) if file.suffix in SCANNED else 0
        scarred += scars(text) if file.suffix not in (".md", ".json") else 0
        relative += clauses(text)
        phrases += banned(text)
    return Counts(vague, long, scarred, relative, phrases)


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
