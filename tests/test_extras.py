"""Errors about a missing package give a command that works wherever pagedkv came from."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pagedkv import extras

ROOT = Path(__file__).parents[1]
# asks an index that has no pagedkv, or another project's: pip install pagedkv, 'pagedkv[cpu]', -U pagedkv==1
FROM_AN_INDEX = re.compile(r"""pip3? install\s+(?:[^`\n&|;()]*\s)?['"]?pagedkv(?:\[[\w,-]+\])?(?=['"`\s,.;:)=<>~]|$)""")
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs", "pagedkv", "examples", "bench", "tests")


def test_the_command_names_the_packages_of_the_extra_and_not_pagedkv() -> None:
    command = extras.command("valkey")
    words = shlex.split(command.partition(" (")[0])
    assert words[:2] == ["pip", "install"]
    assert [Requirement(word).name for word in words[2:]] == ["redis"]
    assert command.endswith("(pagedkv's extra [valkey])")


def test_every_extra_has_its_command_and_takes_no_package_of_another_one() -> None:
    names = metadata.metadata("pagedkv").get_all("Provides-Extra") or []
    assert "valkey" in names
    for name in names:
        wanted = {
            requirement.name
            for requirement in map(Requirement, metadata.requires("pagedkv") or [])
            if requirement.marker and f'extra == "{name}"' in str(requirement.marker)
        }
        words = shlex.split(extras.command(name).partition(" (")[0])[2:]
        assert {Requirement(word).name for word in words} == wanted, name
        assert words, name


def test_without_metadata_the_extra_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    assert extras.command("valkey") == "install pagedkv's extra [valkey]"


@pytest.mark.checkout
def test_no_text_sends_people_to_an_index_for_pagedkv() -> None:
    """Nothing is published: the name there is free, or another project's."""
    wrong, seen = [], 0
    for top in TEXTS:
        for path in [ROOT / top] if (ROOT / top).is_file() else sorted((ROOT / top).rglob("*")):
            if path.suffix in {".py", ".pyx", ".md", ".txt", ".js", ".html", ".toml"} and path != Path(__file__):
                seen += 1
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    if FROM_AN_INDEX.search(line):
                        wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert seen > 500
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install pagedkv", True),
        ("`pip install 'pagedkv[cuda12]'`", True),
        ("pip install -U pagedkv", True),
        ("pip install numpy pagedkv==0.1", True),
        ("pip install ./pagedkv-0.1-cp311-cp311-linux_x86_64.whl", False),
        ("pip install -e '.[test]' && pagedkv replay", False),
        ("pip install 'matplotlib>=3.8' (pagedkv's extra [bench])", False),
    ],
)
def test_an_order_to_ask_an_index_is_recognised(text: str, found: bool) -> None:
    assert bool(FROM_AN_INDEX.search(text)) is found
