"""Paths that callers give: ``~`` is the user's home wherever one is taken."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cli import main
from pagedkv.spec.paths import nearest_existing, path_text

SPEC = pk.KVSpec(1, 1, 8, "float32", 4, model="m")


def replay(home: Path) -> None:
    assert main(["replay", "synthetic:chat:0:30", "--engine", "real", "--device-memory", "60 blocks", "--disk",
                 "90 blocks:~/a/b", "--policy", "lru", "--table-only"]) == 0  # fmt: skip
    assert list((home / "a").iterdir()) == [home / "a" / "b"]


def learned(home: Path) -> None:
    seconds, zeros = itertools.count(step=10.0), np.zeros((1, 12, 1, 8), np.float32)
    policy = pk.Hazard(learned="~/a/b")
    with pk.KVCache(SPEC, pk.Blocks(16), policy=policy, clock=lambda: next(seconds), partial_hits=False) as cache:
        for turn in range(80):
            with cache.sequence([turn % 3] * 12) as sequence:
                sequence.scatter(*[zeros[:, sequence.num_computed :]] * 2)
    assert [file.name for file in (home / "a" / "b").iterdir()] == ["learned.default"]


def recorder(home: Path) -> None:
    with pk.KVCache(SPEC, pk.Blocks(8)) as cache, pk.TraceRecorder(cache, "~/t.jsonl") as recording:
        assert recording.path == str(home / "t.jsonl")
    assert (home / "t.jsonl").exists()


def store(command: str) -> Callable[[Path], None]:
    def run(home: Path) -> None:
        pk.KVCache(SPEC, pk.Blocks(8), disk=pk.Disk("~/a/b", pk.Blocks(8))).close()
        assert (home / "a" / "b" / "SUPER").exists()
        assert main([command, "~/a/b"]) == 0

    run.__name__ = command
    return run


def doctor(home: Path) -> None:
    (home / "a").mkdir()
    assert main(["doctor", "--disk", "~/a", "--size", "32MiB"]) == 0  # the smallest


PLACES = [replay, learned, recorder, store("inspect"), store("verify"), doctor]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_tilde_is_the_users_home_wherever_a_path_is_taken(
    place: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    place(tmp_path / "home")
    assert os.listdir() == [], "nothing is named ~ here"


@pytest.mark.parametrize("path", [5, None, b"kv", "", "a\0b", ["kv"]], ids=repr)
def test_a_path_that_is_none_is_refused_with_the_name_of_its_argument(path: Any) -> None:
    with pytest.raises((pk.WrongType, pk.InvalidArgument), match=r"^folder must "):
        path_text(path, "folder")


def test_only_a_leading_tilde_is_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert [path_text(path, "p") for path in ("~", "~/a", "./~/a", "a~", Path("~/a"))] == [
        "/somewhere", "/somewhere/a", "./~/a", "a~", "/somewhere/a",
    ]  # fmt: skip


def test_the_home_of_no_user_is_refused_and_no_folder_is_named_after_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pk.InvalidArgument, match=r"path: ~absent-user is no user .*\./~absent-user/kv"):
        pk.Disk("~absent-user/kv", "8MiB")
    assert os.listdir() == []


def test_the_nearest_path_that_exists_is_the_path_itself_or_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("absent")
    monkeypatch.chdir(tmp_path)
    for path, there in (("file/a/b", "file"), ("a/b", ""), ("link/a", "link"), ("file", "file")):
        assert nearest_existing(path) == nearest_existing(tmp_path / path) == str(tmp_path / there).rstrip("/")
