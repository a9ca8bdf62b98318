"""A cache chooses the order of rows within its blocks where the spec leaves it open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache.row_order import with_row_order
from pagedkv.tiers.disk.peek import fingerprint_in
from tests.cache.conftest import BLOCK, Toy, prompt

OPEN: list[str | None] = [None, "auto"]


def spec_of(layout: str | None) -> pk.KVSpec:
    return pk.KVSpec(2, 2, 4, "float32", BLOCK, layout=layout, model="toy")


def chosen(layout: str | None, disk: pk.Disk | None = None, **options: Any) -> str | None:
    return with_row_order(spec_of(layout), **{"on_gpu": False, "disk": disk, "shares": False, **options}).layout


@pytest.mark.parametrize("layout", OPEN)
def test_rows_are_by_head_with_a_gpu_and_by_token_without(layout: str | None) -> None:
    assert chosen(layout) == "NHD"
    assert chosen(layout, on_gpu=True) == "HND"
    assert chosen(layout, on_gpu=True, owns_memory=False) == "NHD"


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_layout_that_is_named_stays(layout: str, on_gpu: bool) -> None:
    assert chosen(layout, on_gpu=on_gpu, shares=on_gpu) == layout


def test_blocks_that_other_processes_share_are_by_token_and_auto_is_refused() -> None:
    assert chosen(None, on_gpu=True, shares=True) == "NHD"
    with pytest.raises(pk.InvalidArgument, match="name layout='NHD' or layout='HND'"):
        chosen("auto", shares=True)
    with pytest.raises(pk.InvalidArgument, match="name layout="):
        pk.KVCache(spec_of("auto"), memory=pk.Blocks(4), remote=pk.Valkey("redis://127.0.0.1:1", secret=b"s" * 32))


def test_an_open_spec_stands_for_tokens_first_and_a_cache_names_its_choice() -> None:
    assert spec_of(None).fingerprint() == spec_of("auto").fingerprint() == spec_of("NHD").fingerprint()
    assert spec_of("auto").block_shape == spec_of("NHD").block_shape != spec_of("HND").block_shape
    with pk.KVCache(spec_of(None), memory=pk.Blocks(4)) as cache:
        assert cache.spec == spec_of("NHD")


@pytest.mark.parametrize("layout", OPEN)
@pytest.mark.parametrize("there", ["NHD", "HND"])
def test_a_directory_keeps_its_own_order_and_its_blocks_are_found(
    there: str, layout: str | None, tmp_path: Path
) -> None:
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(16), write="all", admission="all")
    with pk.KVCache(spec_of(there), pk.Blocks(8), disk=disk) as cache:
        Toy(cache).use(prompt(1, 2 * BLOCK))
        cache.checkpoint()
    assert fingerprint_in(disk.path) == spec_of(there).fingerprint()
    assert chosen(layout, disk, on_gpu=True) == chosen(layout, disk) == there
    with pk.KVCache(spec_of(layout), pk.Blocks(8), disk=disk) as cache:
        assert cache.spec.layout == there
        assert Toy(cache).use(prompt(1, 2 * BLOCK + 1)) == {"disk": 2 * BLOCK}


def test_a_named_layout_other_than_the_directorys_is_refused_as_ever(tmp_path: Path) -> None:
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(16))
    pk.KVCache(spec_of("HND"), pk.Blocks(8), disk=disk).close()
    with pytest.raises(pk.LayoutMismatch):
        pk.KVCache(spec_of("NHD"), pk.Blocks(8), disk=disk)


@pytest.mark.parametrize("damage", ["none", "empty", "one copy", "both copies", "a folder", "another model"])
def test_where_no_store_can_be_read_the_device_decides(damage: str, tmp_path: Path) -> None:
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(16))
    wanted = "NHD"
    if damage != "none":
        spec = pk.KVSpec(2, 2, 8, "float32", BLOCK, model="other") if damage == "another model" else spec_of("HND")
        pk.KVCache(spec, pk.Blocks(8), disk=disk).close()
        file = tmp_path / "kv" / "SUPER"
        pages = bytearray(file.read_bytes())
        if damage == "empty":
            pages.clear()
        elif damage == "one copy":
            pages[:4096] = np.random.default_rng(1).bytes(4096)
            wanted = "HND"  # the other one says so
        elif damage == "both copies":
            pages[:] = bytes(len(pages))
        if damage == "a folder":
            file.unlink()
            file.mkdir()
        elif damage != "another model":
            file.write_bytes(pages)
    assert chosen("auto", disk) == wanted


def test_a_layout_that_is_none_of_these_is_refused() -> None:
    with pytest.raises(pk.InvalidArgument, match="'NHD', 'HND' or 'auto'"):
        spec_of("NDH")
    with pytest.raises(pk.WrongType):
        spec_of(5)  # type: ignore[arg-type]
