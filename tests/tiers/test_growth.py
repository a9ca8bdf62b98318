"""A store that is opened with a larger size grows; a smaller size is refused."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import LayoutMismatch, StoreDamaged, TierError
from pagedkv.tiers import DiskTier
from pagedkv.tiers.disk import growth

from .conftest import NUM_BLOCKS, bytes_of, name_of

Open = Callable[..., DiskTier]
STEPS = ("open", "posix_fallocate", "fsync", "fdatasync", "pwrite", "unlink", "ftruncate")
ARENA = np.stack([bytes_of(number) for number in range(40)])
SIZES = [13, 15, 16, 25, 31]  # 5 slots a file: within the last file, up to its end, beyond it


def files(path: Path) -> dict[str, int]:
    """Sizes of the files that are the store's data or say that it grows."""
    return {p.name: p.stat().st_size for p in path.iterdir() if p.name.startswith(("data.", "GROWING"))}


def check(tier: DiskTier, numbers: dict[int, int]) -> None:
    """It holds these numbers in these slots, and nothing else."""
    assert sorted((stored.block, stored.record.key) for stored in tier.records()) == sorted(
        (slot, name_of(number).key) for slot, number in numbers.items()
    )
    arena = np.zeros((len(numbers), tier.block_bytes), np.uint8)
    slots = np.array(list(numbers), np.int32)
    hit = tier.read(slots, [name_of(n) for n in numbers.values()], arena, np.arange(len(numbers), dtype=np.int32))
    assert hit.all()
    for row, number in zip(arena, numbers.values(), strict=True):
        assert np.array_equal(row, bytes_of(number))


def put(tier: DiskTier, numbers: dict[int, int]) -> None:
    """Store these numbers in these slots."""
    rows = np.array(list(numbers.values()), np.int32)
    assert tier.write(np.array(list(numbers), np.int32), [name_of(n) for n in numbers.values()], ARENA, rows).all()


@pytest.mark.parametrize("larger", SIZES)
def test_a_larger_size_keeps_every_block_and_gives_room_for_more(open_tier: Open, larger: int) -> None:
    first = open_tier()
    held = {slot: slot for slot in range(NUM_BLOCKS)}
    put(first, held)
    first.close()
    tier = open_tier(num_blocks=larger)
    assert tier.num_blocks == larger
    check(tier, held)
    more = {larger - 1: 30, NUM_BLOCKS: 31}
    put(tier, more)
    held |= more
    check(tier, held)
    tier.close()
    again = open_tier(num_blocks=larger)
    assert again.was_clean
    check(again, held)
    again.close()
    check(open_tier(num_blocks=2 * larger), held)


def test_a_smaller_size_is_refused_in_blocks_and_in_bytes(open_tier: Open) -> None:
    open_tier().close()
    with pytest.raises(LayoutMismatch, match=r"12 blocks \(96.0 KiB with headers\), asked was 11 blocks \(88.0 KiB"):
        open_tier(num_blocks=NUM_BLOCKS - 1)
    assert open_tier(num_blocks=NUM_BLOCKS - 1, on_mismatch="reset").num_blocks == NUM_BLOCKS - 1


@pytest.mark.parametrize("change", [{"shards": 2}, {"block_tokens": 8}, {"segment_bytes": 6 * 8192}])
def test_nothing_but_the_number_of_blocks_grows(open_tier: Open, change: dict[str, Any]) -> None:
    open_tier().close()
    with pytest.raises(LayoutMismatch):
        open_tier(num_blocks=NUM_BLOCKS + 8, **change)
    open_tier().close()


@pytest.mark.slow
@pytest.mark.parametrize("larger", [13, 25])
def test_a_store_that_is_killed_while_it_grows_has_either_size_and_every_block(
    open_tier: Open, tmp_path: Path, larger: int
) -> None:
    tier, held = open_tier(), {slot: slot for slot in range(NUM_BLOCKS)}
    put(tier, held)
    tier.close()
    shutil.copytree(tmp_path / "kv", tmp_path / "before")
    sizes, step = set(), 0
    while True:
        shutil.rmtree(tmp_path / "kv")
        shutil.copytree(tmp_path / "before", tmp_path / "kv")
        was_killed = killed_at(step, lambda: open_tier(num_blocks=larger))
        if step % 2:  # a second kill, while the next opening tidies up
            killed_at(step // 2, lambda: open_tier(num_blocks=larger))
        old = old_size_opens(open_tier)
        sizes.add(old)
        if old:
            tier = open_tier()
            check(tier, held)
            tier.close()
            assert files(tmp_path / "kv") == files(tmp_path / "before")
        with_room = open_tier(num_blocks=larger)
        check(with_room, held)
        put(with_room, {larger - 1: 30})
        check(with_room, held | {larger - 1: 30})
        assert "GROWING" not in files(tmp_path / "kv")
        with_room.close()
        if not was_killed:
            break
        step += 1
    assert step > 12
    assert sizes == {True, False}


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Whether a child that does `work` was ended before its file operation number `step`."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(name: str) -> Callable[..., Any]:
            real = getattr(os, name)

            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                if count == step:
                    os._exit(77)
                count += 1
                return real(*arguments, **options)

            return call

        try:
            for name in STEPS:
                setattr(os, name, counted(name))
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 77), "the child met an error"
    return status == 77


def old_size_opens(open_tier: Open) -> bool:
    """Whether the store still has its old size; if it has grown, that is refused."""
    try:
        open_tier().close()
    except LayoutMismatch:
        return False
    return True


@pytest.mark.parametrize("name", ["posix_fallocate", "fsync"])
@pytest.mark.parametrize("after", range(3))
def test_a_disk_that_refuses_leaves_the_old_size(
    open_tier: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    tier = open_tier()
    put(tier, {0: 0, 11: 1})
    tier.close()
    before, real, calls = files(tmp_path / "kv"), getattr(os, name), 0

    def refuse(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, name, refuse)
    with pytest.raises(TierError):
        open_tier(num_blocks=25)
    monkeypatch.undo()
    assert calls > after
    assert files(tmp_path / "kv") == before
    check(open_tier(), {0: 0, 11: 1})


def test_too_little_space_is_said_before_anything_is_written(
    open_tier: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_tier().close()
    monkeypatch.setattr("pagedkv.tiers.disk.directory.Directory.free_bytes", lambda self: 13 * 8192 - 1)
    monkeypatch.setattr(growth.Directory, "make_file", None)  # nothing is made
    with pytest.raises(TierError, match=f"needs {13 * 8192} bytes more to grow from 12 to 25 blocks"):
        open_tier(num_blocks=25)
    monkeypatch.undo()
    open_tier().close()


def test_what_is_damaged_does_not_grow(open_tier: Open, tmp_path: Path) -> None:
    open_tier().close()
    os.truncate(tmp_path / "kv" / "data.0002", 8192)
    for num_blocks in (NUM_BLOCKS, 25):
        with pytest.raises(StoreDamaged, match=r"data.0002.* has 8192 bytes instead of 16384"):
            open_tier(num_blocks=num_blocks)
    assert files(tmp_path / "kv")["data.0002"] == 8192


def test_files_that_are_too_large_without_a_growth_are_damage(open_tier: Open, tmp_path: Path) -> None:
    open_tier().close()
    os.truncate(tmp_path / "kv" / "data.0002", 3 * 8192)
    for num_blocks in (NUM_BLOCKS, 13):
        with pytest.raises(StoreDamaged, match=r"data\.0002"):
            open_tier(num_blocks=num_blocks)
