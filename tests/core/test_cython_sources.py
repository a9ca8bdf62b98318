"""What the Cython sources must not say because of what Cython makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pagedkv

SOURCES = sorted(Path(pagedkv.__file__).parent.rglob("*.pyx"))
LIST_OF_NEW_OBJECTS = re.compile(
    r"(?<![\w)\]])\[(?!\s*name for)[^\[\]\n]*(\[[^\[\]\n]*\][^\[\]\n]*)*\bfor\b[^\[\]\n]*\bin\b"
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_list_comprehension_makes_new_objects(source: Path) -> None:
    """Cython 3.3.1 gives a new element back twice where the list cannot grow.

    Use `append` in a loop.
    """
    code = re.sub(r'"""(?s:.*?)"""|#.*', "", source.read_text())
    assert not LIST_OF_NEW_OBJECTS.search(code)


def test_the_pattern_knows_one_when_it_sees_it() -> None:
    for text in ("x = [f(i) for i in range(3)]", "tuple([a.b[i] for i in range(n)])", "[[0, 0] for _ in range(n)]"):
        assert LIST_OF_NEW_OBJECTS.search(text), text
    for text in ("for i in range(len(a[3])):", "a[i] = 3\nfor i in range(3):", "x[0] for", "[name for name in names]"):
        assert not LIST_OF_NEW_OBJECTS.search(text), text
