"""Methods that pages name exist, and architecture.md names every module of two folders."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from pathlib import Path

import pytest

import pagedkv

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
METHOD = re.compile(r"`([A-Z]\w*)\.([A-Za-z_]\w*)")
OTHERS = {"KVCacheManager", "Proof", "RadixCache", "Tensor"}  # classes of other packages, and of the tests
TABLES = {"cache": "Inside `cache/`, from the bottom up:", "_core": "Inside `_core`, from the bottom up:"}

pytestmark = pytest.mark.checkout


def classes() -> dict[str, list[type]]:
    """All classes of the package by name, less those of modules whose extra is not installed."""
    found: dict[str, list[type]] = defaultdict(list)
    for module in pkgutil.walk_packages(pagedkv.__path__, "pagedkv."):
        if module.name.endswith("__main__"):
            continue
        try:
            members = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        except ImportError:
            continue
        for name, kind in members:
            if kind.__module__.split(".")[0] == "pagedkv" and kind not in found[name]:
                found[name].append(kind)
    return found


def attributes(kind: type) -> set[str]:
    """Attributes of the class, of its annotations, and those that its methods assign to self."""
    names = set(dir(kind))
    for base in kind.__mro__:
        names |= set(vars(base).get("__annotations__", {}))
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # a compiled class: its attributes are in dir()
            continue
        names |= set(re.findall(r"\bself\.(\w+)", source))
    return names


def unknown(text: str, known: dict[str, list[type]]) -> list[str]:
    """Names ``Class.method`` in the backticks of a page that the package does not have."""
    return [
        f"{name}.{attribute}"
        for name, attribute in METHOD.findall(text)
        if name not in OTHERS and not any(attribute in attributes(kind) for kind in known.get(name, ()))
    ]


def test_every_method_that_a_page_names_exists() -> None:
    known = classes()
    found = {page.name: names for page in PAGES if (names := unknown(page.read_text(encoding="utf-8"), known))}
    assert found == {}


def test_a_method_that_is_gone_is_found() -> None:
    known = classes()
    text = "`BlockTable.hint`, `Nothing.here`, `Requests.hint(row)`, `KVCache.stats()`, `StepArrays.number`"
    assert unknown(text, known) == ["BlockTable.hint", "Nothing.here"]


@pytest.mark.parametrize("folder", TABLES)
def test_the_page_of_architecture_names_every_module_of_a_folder(folder: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition(TABLES[folder])[2].lstrip().partition("\n\n")[0]
    named = set(re.findall(r"`([\w.]+)`", "\n".join(line.split("|")[1] for line in table.split("\n"))))
    named = {name.removesuffix(".pxd") for name in named}
    there = {path.stem for kind in ("py", "pyx", "pxd") for path in (ROOT / "pagedkv" / folder).glob(f"*.{kind}")}
    assert len(named) > 10
    assert there - named - {"__init__"} == set()
