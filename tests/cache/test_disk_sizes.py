"""A disk that is given another size grows, or the refusal says sizes as they were given."""

from __future__ import annotations

from pathlib import Path

import pytest

import pagedkv as pk

from .conftest import SPEC, Toy, prompt


def open_with(path: Path, size: pk.Size) -> pk.KVCache:
    disk = pk.Disk(str(path), size, admission="all")
    return pk.KVCache(SPEC, "64KiB", disk=disk, partial_hits=False)  # whole blocks are counted


def disk_blocks(cache: pk.KVCache) -> int:
    return int(cache.stats().blocks["disk"]["capacity"])


def test_a_larger_disk_keeps_what_it_has_and_takes_more(tmp_path: Path) -> None:
    with open_with(tmp_path / "kv", "128KiB") as cache:
        small = disk_blocks(cache)
        Toy(cache).use(prompt(1))
        assert cache.flush() == 3
    with open_with(tmp_path / "kv", "1MiB") as cache:
        assert disk_blocks(cache) > small
        toy = Toy(cache)
        assert toy.use(prompt(1)) == {"disk": 12}
        for start in range(2, 9):
            toy.use(prompt(start))
        assert cache.flush() == 24 > small
    with open_with(tmp_path / "kv", "1MiB") as cache:
        toy = Toy(cache)
        assert all(toy.use(prompt(start)) == {"disk": 12} for start in range(1, 9))


def test_a_smaller_disk_is_refused_in_the_units_of_the_caller(tmp_path: Path) -> None:
    open_with(tmp_path / "kv", "3MiB").close()
    with pytest.raises(pk.LayoutMismatch, match=r"\(2\.98 MiB.*asked.*\(1\.98 MiB.*can grow, not shrink") as refused:
        open_with(tmp_path / "kv", "2MiB")
    assert " blocks (" in str(refused.value)
    open_with(tmp_path / "kv", "3MiB").close()


def test_a_disk_of_more_blocks_than_there_are_ids_is_refused_as_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(pk.InvalidArgument, match=r"size='100TiB' is 13421772797 blocks of 8.00 KiB .* 16.0 TiB here"):
        open_with(tmp_path / "kv", "100TiB")
    with pytest.raises(pk.InvalidArgument, match=r"size=Blocks\(3000000000\) is"):
        open_with(tmp_path / "kv", pk.Blocks(3 * 10**9))
    assert not (tmp_path / "kv").exists()
