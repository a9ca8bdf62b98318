"""The layout that a cache chooses for a KVSpec that names none, wherever specs meet."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.adapters.store import PrefixStore
from pagedkv.cache.layout import with_layout
from pagedkv.cache.tiered import TieredStorage
from pagedkv.errors import InvalidArgument, LayoutMismatch, StoreDamaged
from pagedkv.kernels.recorder import Recorder
from pagedkv.tiers.disk.peek import stored_fingerprint
from pagedkv.tools.store.reader import StoreReader
from pagedkv.tools.store.verify import verify
from tests.ptxsim.fixture import interpreted_backend

from .conftest import BLOCK, SPEC, Toy, prompt

backend = interpreted_backend()
OPEN = [None, "auto"]
NAMED = {layout: dataclasses.replace(SPEC, layout=layout) for layout in ("NHD", "HND")}


def left_open(layout: str | None) -> pk.KVSpec:
    return dataclasses.replace(SPEC, layout=layout)


def on_gpu() -> Recorder:
    """Stands for a GPU whose kernels a test does not run."""
    return Recorder((9, 0))


def disk_in(folder: Path, **options: Any) -> pk.Disk:
    return pk.Disk(folder / "kv", pk.Blocks(32), write="all", admission="all", **options)


def served(cache: pk.KVCache) -> dict[str, int]:
    """One prompt, read and checked or computed; then the cache is closed."""
    with cache:
        return Toy(cache).use(prompt(1))


@pytest.mark.parametrize("layout", OPEN)
def test_a_new_cache_takes_hnd_on_a_gpu_and_nhd_elsewhere(layout: str | None) -> None:
    with pk.KVCache(left_open(layout), pk.Blocks(4)) as cache:
        assert cache.spec == NAMED["NHD"]
    with pk.KVCache(left_open(layout), pk.Blocks(4), backend=on_gpu()) as cache:
        assert cache.spec == NAMED["HND"]
    with pk.KVCache(left_open(layout), pk.Blocks(4), storage=TieredStorage(backend=on_gpu())) as cache:
        assert cache.spec == NAMED["HND"]


@pytest.mark.parametrize("layout", NAMED)
def test_a_layout_that_is_named_stays(layout: str, tmp_path: Path) -> None:
    with pk.KVCache(NAMED[layout], pk.Blocks(4), backend=on_gpu()) as cache:
        assert cache.spec == NAMED[layout]
    with pk.KVCache(NAMED[layout], pk.Blocks(4), disk=disk_in(tmp_path)) as cache:
        assert cache.spec == NAMED[layout]


@pytest.mark.parametrize("layout", OPEN)
def test_a_directory_of_nhd_is_found_again_on_a_gpu(layout: str | None, tmp_path: Path, backend: Any) -> None:
    assert served(pk.KVCache(left_open(None), pk.Blocks(16), disk=disk_in(tmp_path))) == {}
    cache = pk.KVCache(left_open(layout), pk.Blocks(16), disk=disk_in(tmp_path), backend=backend)
    assert cache.spec == NAMED["NHD"]
    assert served(cache) == {"disk": 3 * BLOCK}


@pytest.mark.parametrize("layout", OPEN)
def test_a_directory_of_a_gpu_is_found_again_without_one(layout: str | None, tmp_path: Path, backend: Any) -> None:
    first = pk.KVCache(left_open(layout), pk.Blocks(16), disk=disk_in(tmp_path), backend=backend)
    assert first.spec == NAMED["HND"]
    assert served(first) == {}
    second = pk.KVCache(left_open(layout), pk.Blocks(16), disk=disk_in(tmp_path))
    assert second.spec == NAMED["HND"]
    assert served(second) == {"disk": 3 * BLOCK}


@pytest.mark.parametrize("there", NAMED)
def test_a_named_layout_other_than_the_directorys_is_refused_as_ever(there: str, tmp_path: Path) -> None:
    served(pk.KVCache(NAMED[there], pk.Blocks(16), disk=disk_in(tmp_path)))
    other = NAMED["HND" if there == "NHD" else "NHD"]
    with pytest.raises(LayoutMismatch, match="another model or layout"):
        pk.KVCache(other, pk.Blocks(16), disk=disk_in(tmp_path))
    assert served(pk.KVCache(left_open("auto"), pk.Blocks(16), disk=disk_in(tmp_path))) == {"disk": 3 * BLOCK}


def test_a_directory_of_another_model_is_refused_whichever_layout_it_has(tmp_path: Path) -> None:
    served(pk.KVCache(NAMED["HND"], pk.Blocks(16), disk=disk_in(tmp_path)))
    other = dataclasses.replace(SPEC, model="other")
    with pytest.raises(LayoutMismatch, match="another model or layout"):
        pk.KVCache(other, pk.Blocks(16), disk=disk_in(tmp_path))
    emptied = disk_in(tmp_path, on_mismatch="reset")
    with pk.KVCache(other, pk.Blocks(16), disk=emptied, backend=on_gpu()) as cache:
        assert cache.spec.layout == "HND"
        assert stored_fingerprint(str(tmp_path / "kv")) == cache.spec.fingerprint()


def test_a_failing_close_after_the_look_keeps_no_cache_from_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(pk.KVCache(NAMED["HND"], pk.Blocks(16), disk=disk_in(tmp_path)))
    close = os.close

    def closes_and_fails(fd: int) -> None:
        close(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", closes_and_fails)
        assert with_layout(left_open(None), disk_in(tmp_path), on_gpu=False, shared=False) == NAMED["HND"]


@pytest.mark.parametrize("copies", [[0], [1], [0, 1]])
def test_one_intact_copy_of_the_superblock_says_the_layout(copies: list[int], tmp_path: Path) -> None:
    served(pk.KVCache(NAMED["HND"], pk.Blocks(16), disk=disk_in(tmp_path)))
    with open(tmp_path / "kv" / "SUPER", "r+b") as file:
        for copy in copies:
            file.seek(copy * 4096 + 100)
            file.write(b"damage")
    if len(copies) == 1:
        assert served(pk.KVCache(left_open("auto"), pk.Blocks(16), disk=disk_in(tmp_path))) == {"disk": 3 * BLOCK}
    else:
        assert stored_fingerprint(str(tmp_path / "kv")) is None
        with pytest.raises(StoreDamaged):
            pk.KVCache(left_open("auto"), pk.Blocks(16), disk=disk_in(tmp_path))


@pytest.mark.parametrize("folder", ["nothing", "a file", "no store"])
def test_a_path_without_a_store_has_no_fingerprint(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    if folder == "a file":
        path.write_bytes(b"x")
    elif folder == "no store":
        path.mkdir()
        (path / "SUPER").mkdir()
    assert stored_fingerprint(str(path)) is None


def test_a_store_of_groups_keeps_its_layout(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, windows=(8, None), layout="HND")
    for layout in ("HND", None, "auto"):
        given = dataclasses.replace(spec, layout=layout)
        with pk.KVCache(given, pk.Blocks(32), disk=disk_in(tmp_path), by_group=True) as cache:
            assert cache.spec == spec


def test_the_tools_read_the_layout_that_was_chosen(tmp_path: Path, backend: Any) -> None:
    served(pk.KVCache(left_open(None), pk.Blocks(16), disk=disk_in(tmp_path), backend=backend))
    with StoreReader(tmp_path / "kv") as reader:
        assert reader.superblock.fingerprint == NAMED["HND"].fingerprint()
        assert verify(reader, lambda num_bytes: None).ok


def remote_at(folder: Path) -> pk.Objects:
    return pk.Objects(f"file://{folder}/shared", secret=b"a secret of ours", required=True)


def test_with_a_remote_store_the_default_stays_nhd(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install '.[objects]'")
    for options in ({}, {"backend": on_gpu()}):
        with pk.KVCache(left_open(None), pk.Blocks(4), remote=remote_at(tmp_path), **options) as cache:
            assert cache.spec == NAMED["NHD"]
        storage = TieredStorage(remote=remote_at(tmp_path), **options)
        with pk.KVCache(left_open(None), pk.Blocks(4), storage=storage) as cache:
            assert cache.spec == NAMED["NHD"]


def test_a_remote_store_and_ranks_want_the_layout_named(tmp_path: Path) -> None:
    ranks = pk.Ranks(str(tmp_path / "s"), 2, secret=b"a secret of ours")
    spec, at_remote = left_open("auto"), remote_at(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: pk.KVCache(spec, pk.Blocks(4), remote=at_remote),
        lambda: pk.KVCache(spec, pk.Blocks(4), storage=TieredStorage(remote=at_remote)),
        lambda: pk.KVCache(spec, pk.Blocks(4), ranks=ranks),
        lambda: pk.Rank(spec, pk.Blocks(4), ranks=ranks, rank=0),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match="name the layout, layout='NHD' or layout='HND'"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_processes_that_make_a_store_decides(tmp_path: Path) -> None:
    """The other one chose before the store was there: it is refused, and finds it later."""
    disk = disk_in(tmp_path)
    chosen = with_layout(left_open(None), disk, on_gpu=True, shared=False)
    served(pk.KVCache(left_open(None), pk.Blocks(16), disk=disk))
    with pytest.raises(LayoutMismatch, match="another model or layout"):
        pk.KVCache(chosen, pk.Blocks(16), disk=disk)
    assert with_layout(left_open(None), disk, on_gpu=True, shared=False) == NAMED["NHD"]


def test_until_a_cache_chooses_a_spec_counts_as_nhd() -> None:
    for layout in OPEN:
        spec = left_open(layout)
        assert spec.fingerprint() == NAMED["NHD"].fingerprint() != NAMED["HND"].fingerprint()
        assert spec.block_shape == NAMED["NHD"].block_shape
        assert pickle.loads(pickle.dumps(spec)) == spec
        assert spec != NAMED["NHD"]
    assert pk.KVSpec(2, 2, 4).layout is None
    assert pk.KVSpec.of([pk.Attention(2, 4)]).layout is None


def test_a_prefix_store_finds_its_folder_under_any_open_layout(tmp_path: Path) -> None:
    disk = pk.Disk(tmp_path / "kv", "8MiB")
    kv = np.ones((2, 3 * BLOCK, 2, 4), np.float32)
    for number, layout in enumerate((None, "auto", "NHD", None)):
        with PrefixStore(left_open(layout), "1MiB", disk, min_tokens=1) as store:
            assert store.spec == NAMED["NHD"]
            if number:
                assert store.find(prompt(1)[: 3 * BLOCK + 1]) == 3 * BLOCK
            else:
                store.save(prompt(1)[: 3 * BLOCK], lambda start, stop: (kv[:, start:stop], kv[:, start:stop]))
    assert len([path for path in (tmp_path / "kv").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("layout", ["", "Auto", "auto ", "NDH"])
def test_other_names_are_refused(layout: str) -> None:
    with pytest.raises(InvalidArgument, match="'NHD', 'HND' or 'auto'"):
        left_open(layout)
