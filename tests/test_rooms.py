"""The shape of the package: short files, few modules at the top, few folders beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pagedkv"
LONG, MOST_LONG = 400, 9  # lines; files above that, each with its reason
MODULES, FOLDERS = 6, 17  # of code at the top of the package, at most
NO_CODE = {"__init__.py", "__main__.py", "_version.py"}
pytestmark = pytest.mark.checkout


def test_few_files_are_long_and_each_says_why():
    files = (path for kind in ("py", "pyx", "pxd", "c", "h") for path in PACKAGE.rglob(f"*.{kind}"))
    long = [path for path in files if path.read_text().count("\n") > LONG]
    assert [path.name for path in long if f"# Over {LONG} lines: " not in path.read_text()] == []
    assert len(long) <= MOST_LONG


def test_the_top_of_the_package_is_easy_to_survey():
    modules = [path.name for path in PACKAGE.iterdir() if path.suffix in (".py", ".pyx") and path.name not in NO_CODE]
    folders = [path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(modules) <= MODULES, modules
    assert len(folders) <= FOLDERS, folders
