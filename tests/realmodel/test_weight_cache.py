"""Converted weights on disk.

The loader uses them again when they are what they say, and makes them anew when in doubt.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from examples.llama_numpy import weight_cache
from examples.llama_numpy.folders import appearing, models_folder, sha256_of
from examples.llama_numpy.gguf_file import Model
from examples.llama_numpy.weight_cache import load_model
from examples.llama_numpy.weights import stored_shapes
from tests.realmodel import tiny


def same(one: Model, other: Model) -> bool:
    arrays = stored_shapes(one.weights.config)
    return (
        (one.name, one.sha256, one.vocabulary, one.weights.config)
        == (other.name, other.sha256, other.vocabulary, other.weights.config)
        and all(np.array_equal(getattr(one.weights, name), getattr(other.weights, name)) for name in arrays)
    )  # fmt: skip


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The GGUF files that were parsed."""
    parsed: list[Path] = []
    real = weight_cache.read_gguf

    def counted(path: Path) -> Model:
        parsed.append(path)
        return real(path)

    monkeypatch.setattr(weight_cache, "read_gguf", counted)
    return parsed


def test_the_second_load_parses_nothing(tiny_path: Path, tmp_path: Path, conversions: list[Path]) -> None:
    first, second = load_model(tiny_path, tmp_path), load_model(tiny_path, tmp_path)
    assert same(first, second)
    assert len(conversions) == 1
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith(sha256_of(tiny_path))
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_a_file_that_was_damaged_cut_or_swapped_is_made_anew(
    tiny_path: Path, tmp_path: Path, conversions: list[Path]
) -> None:
    first = load_model(tiny_path, tmp_path / "a")
    (kept,) = (tmp_path / "a").iterdir()
    whole = kept.read_bytes()
    other = tiny.write_gguf(tmp_path / "other.gguf", tiny.random_tensors(9))
    load_model(other, tmp_path / "b")
    (foreign,) = (tmp_path / "b").iterdir()
    damaged = [b"", whole[: len(whole) // 2], whole[:-1], b"x" * len(whole), foreign.read_bytes()]
    places = range(0, len(whole), len(whole) // 40)
    damaged += [whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :] for place in places]
    believed = 0
    for content in damaged:
        kept.write_bytes(content)
        before = len(conversions)
        assert same(load_model(tiny_path, tmp_path / "a"), first)
        believed += len(conversions) == before
        assert kept.read_bytes()[:4] == b"PK\3\4"
    assert believed <= 3, "only bits of the archive's bookkeeping that no content depends on may pass"


def test_another_gguf_at_the_same_path_is_another_model(tmp_path: Path, tensors: tiny.Tensors) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", tensors)
    first = load_model(path, tmp_path / "kept")
    tiny.write_gguf(path, tiny.random_tensors(1))
    assert not same(load_model(path, tmp_path / "kept"), first)


def test_a_folder_that_cannot_be_written_costs_time_and_no_more(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        model = load_model(tiny_path, tmp_path / "file" / "below")
    assert model.name == "tiny"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), appearing(path) as file:  # noqa: PT012
        file.write(b"half of the n")
        raise KeyError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_folder_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_folder() == tmp_path / "pagedkv" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert models_folder() == Path.home() / ".cache" / "pagedkv" / "models"
