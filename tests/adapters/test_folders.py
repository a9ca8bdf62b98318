"""Folders of many models under one budget: who gets what, and who goes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.adapters.folders import Folder, open_folder
from pagedkv.adapters.probe import Probe
from pagedkv.adapters.store import PrefixStore
from pagedkv.cache.parts import SMALL_FILES_BYTES
from pagedkv.errors import TierError
from pagedkv.tiers.disk import file_system

MIB = 2**20


def opened(root: Path, name: str, size: str = "64MiB", **options: object) -> Folder:
    folder = open_folder(pk.Disk(str(root), size), name, f"model {name}", **options)  # type: ignore[arg-type]
    store = Path(folder.store)
    store.mkdir(exist_ok=True)
    with open(store / "DATA", "ab") as file:
        file.truncate(folder.num_bytes - SMALL_FILES_BYTES)
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def age(root: Path, *from_oldest: str) -> None:
    for seconds, name in enumerate(from_oldest):
        os.utime(root / name / "IN_USE", (1000 + seconds, 1000 + seconds))


def test_a_new_model_gets_half_of_what_is_free(tmp_path: Path) -> None:
    sizes = []
    for name in "abc":
        folder = opened(tmp_path, name)
        sizes.append(folder.num_bytes // MIB)
        folder.close()
    assert sizes == [32, 16, 8]
    assert opened(tmp_path, "a").num_bytes == 32 * MIB  # and keeps it


def test_a_lock_whose_close_fails_is_not_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = opened(tmp_path, "a")
    close = os.close

    def closes_and_fails(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", closes_and_fails)
        folder.close()
    other = os.open(tmp_path, os.O_RDONLY)  # gets the number that the lock had
    folder.close()
    os.fstat(other)
    os.close(other)
    opened(tmp_path, "a").close()


def test_the_least_recently_opened_goes_first_and_as_a_whole(tmp_path: Path) -> None:
    for name in "abcd":  # 32, 16, 8, 8 MiB
        opened(tmp_path, name).close()
    assert names(tmp_path) == ["a", "b", "c", "d"]
    age(tmp_path, "c", "a", "b", "d")
    folder = opened(tmp_path, "e")
    assert names(tmp_path) == ["a", "b", "d", "e"]
    assert folder.num_bytes == 8 * MIB
    folder.close()
    age(tmp_path, "a", "b", "d", "e")
    assert opened(tmp_path, "f").num_bytes == 16 * MIB  # half of the 32 MiB that a had
    assert names(tmp_path) == ["b", "d", "e", "f"]


def test_a_folder_that_is_open_does_not_go(tmp_path: Path) -> None:
    held = [opened(tmp_path, name) for name in "abcd"]
    with pytest.raises(pk.TierError, match=r"models that are in use have 64.* a new one needs 8"):
        opened(tmp_path, "e")
    assert {"a", "b", "c", "d"} <= set(names(tmp_path))
    age(tmp_path, "a", "b", "c", "d")
    held[1].close()
    opened(tmp_path, "e").close()
    assert names(tmp_path) == ["a", "c", "d", "e"]


def test_another_process_counts_too(tmp_path: Path) -> None:
    script = f"""
import sys, pagedkv as pk
from pagedkv.adapters.folders import open_folder
folder = open_folder(pk.Disk({str(tmp_path)!r}, "64MiB"), "a", "model a")
print("open", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(pk.TierError, match="in use by another process"):
            opened(tmp_path, "a")
        opened(tmp_path, "b").close()
        process.kill()
    assert opened(tmp_path, "a").num_bytes == 24 * MIB  # a killed process holds nothing, and had no store yet


def test_a_full_store_grows_at_a_later_opening(tmp_path: Path) -> None:
    folder = opened(tmp_path, "a")
    folder.note_use(51, 100)
    folder.close()
    folder = opened(tmp_path, "a")
    assert (folder.kept_bytes, folder.num_bytes) == (32 * MIB, 48 * MIB)
    folder.note_use(40, 100)
    folder.close()
    assert opened(tmp_path, "a").num_bytes == 48 * MIB


def test_a_store_that_cannot_grow_goes_on(tmp_path: Path) -> None:
    folder = opened(tmp_path, "a")
    folder.note_use(51, 100)
    folder.close()
    folder = open_folder(pk.Disk(str(tmp_path), "64MiB"), "a", "model a")
    assert folder.num_bytes == 48 * MIB
    folder.keep_size()
    folder.close()
    (tmp_path / "a" / "FULL").unlink()
    assert opened(tmp_path, "a").num_bytes == 32 * MIB


def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(pk.TierError, match=r"photo\.jpg"):
        opened(tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_the_directory_of_one_cache_is_refused(tmp_path: Path) -> None:
    spec = pk.KVSpec(1, 1, 8, model="m@1")
    pk.KVCache(spec, memory="1MiB", disk=pk.Disk(str(tmp_path / "kv"), "1MiB")).close()
    with pytest.raises(pk.TierError, match="disk tier of one cache"):
        opened(tmp_path / "kv", "a")


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(fd: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(file_system, "lock", none)
    with pytest.raises(TierError, match="No locks available"):
        opened(tmp_path, "a")


def test_a_size_in_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pk.WrongType, match="20GiB"):
        open_folder(pk.Disk(str(tmp_path), pk.Blocks(10)), "a", "")


def test_on_mismatch_is_checked(tmp_path: Path) -> None:
    with pytest.raises(pk.InvalidArgument, match="beside"):
        opened(tmp_path, "a", on_mismatch="ignore")


def test_a_folder_that_was_made_halfway_is_made_anew(tmp_path: Path) -> None:
    opened(tmp_path, "a").close()
    (tmp_path / "a" / "ABOUT").unlink()
    folder = open_folder(pk.Disk(str(tmp_path), "64MiB"), "a", "model a")
    assert folder.kept_bytes == 0
    assert not (tmp_path / "a" / "store").exists()


def test_a_damaged_probe_is_another_models(tmp_path: Path) -> None:
    probe = Probe(np.ones((2, 3)), np.ones((2, 3)))
    opened(tmp_path, "a", probe=probe).close()
    (tmp_path / "a" / "PROBE").write_bytes(b"PK")
    folder = opened(tmp_path, "a", probe=probe)
    assert (folder.path.name, "cannot be read" in folder.note) == ("a.1", True)


def test_two_models_use_one_directory_and_each_finds_its_own(tmp_path: Path) -> None:
    disk, text = pk.Disk(str(tmp_path), "8MiB"), np.arange(320)
    kv = np.ones((1, 320, 1, 8), np.uint8)
    for turn in range(2):
        for model in ("one@1", "two@1"):
            spec = pk.KVSpec.of([pk.Rows(8, 8)], model=model)
            with PrefixStore(spec, "1MiB", disk) as store:
                assert store.find(text) == 320 * turn
                store.save(text, lambda start, stop: (kv[:, start:stop], kv[:, start:stop]))


def test_what_is_not_a_models_folder_is_never_removed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    opened(root, "a").close()
    elsewhere.mkdir()
    (elsewhere / "IN_USE").touch()
    (elsewhere / "photo").write_text("x")
    (root / "link").symlink_to(elsewhere)
    (root / "notes").mkdir()
    (root / "notes" / "thesis.txt").write_text("x")
    (root / "c").symlink_to(elsewhere)
    opened(root, "b", "1MiB").close()  # no room beside `a`, which goes
    assert names(root) == ["b", "c", "link", "notes"]
    assert (elsewhere / "photo").exists()
    assert (root / "notes" / "thesis.txt").exists()
    for name in ("c", "notes"):
        with pytest.raises(TierError, match="is not a model's folder"):
            opened(root, name)
