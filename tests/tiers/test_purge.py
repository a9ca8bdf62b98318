"""What was purged never comes back.

Not from memory, not after a crash, not from a write that was on its way.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument, TierError, WrongType
from pagedkv.tiers import DiskTier, Record
from pagedkv.tiers.disk.directory import Directory
from pagedkv.tiers.disk.segments import Segments
from pagedkv.tiers.disk.superblock import MAX_PURGES

from .conftest import BLOCK_BYTES, NUM_BLOCKS, name_of

RED, BLUE = b"r" * 32, b"b" * 32


def of(namespace: bytes, number: int) -> Record:
    """The record of a number in a namespace."""
    record = name_of(number)
    return Record(record.key, record.parent, namespace, record.tokens)


def abandon(tier: DiskTier) -> None:
    """What a crash leaves: closed files, an unlocked directory, nothing written."""
    tier._gate.shut()
    tier._is_left = True
    tier._store.close()


def read(tier: DiskTier, slots: list[int], records: list[Record]) -> list[bool]:
    return list(tier.read(slots, records, np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8), range(len(slots))))


def listed(tier: DiskTier) -> list[int]:
    return [found.block for found in tier.records()]


def test_a_purged_namespace_is_gone_at_once_and_others_stay(open_tier, arena):
    tier = open_tier()
    names = [of(RED, 0), of(BLUE, 1), of(RED, 2)]
    tier.write([0, 1, 2], names, arena, [0, 1, 2])
    tier.purge(RED)
    assert read(tier, [0, 1, 2], names) == [False, True, False]
    assert listed(tier) == [1]
    assert tier.stats().misses["purged"] == 2


@pytest.mark.parametrize("end", ["crash", "close"])
def test_a_purged_namespace_is_gone_after_reopening(open_tier, arena, end):
    tier = open_tier()
    names = [of(RED, 0), of(BLUE, 1)]
    tier.write([0, 1], names, arena, [0, 1])
    tier.purge(RED)
    abandon(tier) if end == "crash" else tier.close()
    for _ in range(2):
        tier = open_tier()
        assert listed(tier) == [1]
        assert read(tier, [0, 1], names) == [False, True]
        tier.close()


def test_what_is_written_after_a_purge_counts_and_survives_a_crash(open_tier, arena):
    tier = open_tier()
    tier.write([0], [of(RED, 0)], arena, [0])
    tier.purge(RED)
    tier.write([3], [of(RED, 3)], arena, [3])
    assert read(tier, [0, 3], [of(RED, 0), of(RED, 3)]) == [False, True]
    abandon(tier)
    tier = open_tier()
    assert listed(tier) == [3]
    assert read(tier, [3], [of(RED, 3)]) == [True]


def test_a_write_that_was_on_its_way_when_its_namespace_was_purged_stores_nothing(open_tier, arena, monkeypatch):
    tier = open_tier()
    begun, go_on = threading.Event(), threading.Event()
    real = Segments.write_payloads

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(Segments, "write_payloads", slow)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(tier.write([5], [of(RED, 5)], arena, [5])))
    thread.start()
    assert begun.wait(60)
    tier.purge(RED)
    go_on.set()
    thread.join(60)
    assert [bool(ok) for ok in answers[0]] == [False]
    assert read(tier, [5], [of(RED, 5)]) == [False]
    abandon(tier)
    assert listed(open_tier()) == []


def test_any_number_of_purges_holds_through_crashes(open_tier, arena):
    """More than the superblock can name: what they purged is buried, and the list starts anew."""
    tier = open_tier()
    digest = lambda number: number.to_bytes(32, "little")  # noqa: E731
    for number in range(2 * MAX_PURGES + 5):
        slot = number % 3
        tier.write([slot], [of(digest(number), number % NUM_BLOCKS)], arena, [number % NUM_BLOCKS])
        tier.purge(digest(number))
        assert listed(tier) == []
    tier.write([7], [of(BLUE, 7)], arena, [7])
    abandon(tier)
    tier = open_tier()
    assert listed(tier) == [7]
    for number in range(2 * MAX_PURGES + 5):
        assert read(tier, [number % 3], [of(digest(number), number % NUM_BLOCKS)]) == [False]


def test_purges_that_can_neither_be_named_nor_buried_forget_everything_rather_than_too_little(
    open_tier, arena, monkeypatch
):
    tier = open_tier()
    tier.write([1, 2], [of(RED, 1), of(BLUE, 2)], arena, [1, 2])
    for number in range(MAX_PURGES):
        tier.purge(number.to_bytes(32, "little"))
    monkeypatch.setattr(Segments, "write_headers", lambda self, slots, headers: np.full(slots.size, -5, np.int64))
    tier.purge(RED)
    monkeypatch.undo()
    assert read(tier, [1, 2], [of(RED, 1), of(BLUE, 2)]) == [False, False]
    tier.write([3], [of(BLUE, 3)], arena, [3])
    abandon(tier)
    assert listed(open_tier()) == [3]


@pytest.mark.parametrize("damaged", [0, 4096])
def test_one_damaged_copy_of_the_superblock_takes_no_purge_back(open_tier, arena, tmp_path, damaged):
    tier = open_tier()
    tier.write([0, 1], [of(RED, 0), of(BLUE, 1)], arena, [0, 1])
    tier.purge(RED)
    abandon(tier)
    with open(tmp_path / "kv" / "SUPER", "r+b") as file:
        file.seek(damaged + 200)
        file.write(b"\xff" * 16)
    assert listed(open_tier()) == [1]


def test_a_purge_that_cannot_be_written_says_so_and_holds_in_this_process(open_tier, arena, monkeypatch, caplog):
    tier = open_tier()
    tier.write([0, 1], [of(RED, 0), of(BLUE, 1)], arena, [0, 1])

    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(TierError, match="may come back after a restart"):
        tier.purge(RED)
    monkeypatch.undo()
    assert read(tier, [0, 1], [of(RED, 0), of(BLUE, 1)]) == [False, True]
    tier.purge(RED)
    abandon(tier)
    assert listed(open_tier()) == [1]


def test_clear_forgets_everything_for_good(open_tier, arena):
    tier = open_tier()
    tier.write([0, 1], [of(RED, 0), of(BLUE, 1)], arena, [0, 1])
    tier.purge(BLUE)
    tier.clear()
    assert listed(tier) == []
    tier.write([2], [of(BLUE, 2)], arena, [2])
    abandon(tier)
    tier = open_tier()
    assert listed(tier) == [2]
    assert read(tier, [0, 1, 2], [of(RED, 0), of(BLUE, 1), of(BLUE, 2)]) == [False, False, True]


def test_generations_do_not_repeat_after_a_crash(open_tier, arena):
    """A payload of the old write and a header of the new one would match each other otherwise."""
    seen: set[int] = set()
    for _ in range(4):
        tier = open_tier()
        tier.write([0], [of(RED, 0)], arena, [0])
        tier.write([0], [of(RED, 0)], arena, [0])
        generations = {found.generation for found in tier.records()}
        tier.invalidate([0])
        assert not generations & seen
        seen |= generations
        abandon(tier)


def test_purges_at_the_same_time_all_hold(open_tier, arena):
    tier = open_tier()
    digests = [bytes([number]) * 32 for number in range(NUM_BLOCKS)]
    tier.write(range(NUM_BLOCKS), [of(d, n) for n, d in enumerate(digests)], arena, range(NUM_BLOCKS))
    threads = [threading.Thread(target=tier.purge, args=(digest,)) for digest in digests[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    abandon(tier)
    assert listed(open_tier()) == [0]


def test_a_namespace_that_is_no_digest_is_refused(open_tier):
    tier = open_tier()
    with pytest.raises(WrongType):
        tier.purge("red")
    with pytest.raises(InvalidArgument, match="32 bytes"):
        tier.purge(b"red")


@pytest.mark.parametrize("end", ["close", "clear", "purge"])
def test_a_clear_that_could_not_be_written_is_written_with_the_next_thing_that_is(open_tier, arena, monkeypatch, end):
    """Its epoch must not be used for something else meanwhile."""
    tier = open_tier()
    tier.write([0], [of(RED, 0)], arena, [0])

    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", refuse)
        with pytest.raises(TierError):
            tier.clear()
        with pytest.raises(TierError):
            tier.purge(BLUE)
    tier.write([1, 2], [of(RED, 1), of(BLUE, 2)], arena, [1, 2])
    if end == "clear":
        tier.clear()
        abandon(tier)
    elif end == "purge":
        tier.purge(RED)
        abandon(tier)
    else:
        tier.close()
    assert listed(open_tier()) == {"close": [1, 2], "clear": [], "purge": [2]}[end]


def test_an_epoch_that_never_reached_the_superblock_does_not_come_true_later(open_tier, arena, monkeypatch):
    tier = open_tier()

    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", lambda *_: refuse(0))
        with pytest.raises(TierError):
            tier.clear()
    tier.write([1], [of(RED, 1)], arena, [1])  # in an epoch that only this process knows
    abandon(tier)
    tier = open_tier()
    assert listed(tier) == []
    tier.clear()
    abandon(tier)
    assert listed(open_tier()) == []


def test_a_superblock_is_not_written_once_the_lock_is_another_file(open_tier, arena, tmp_path, monkeypatch):
    """Where directories cannot be locked, deleting LOCK lets a second writer in.

    What the second writer says stays.
    """
    monkeypatch.setattr(Directory, "_lock_directory", lambda self: None)
    tier = open_tier()
    tier.write([0], [of(RED, 0)], arena, [0])
    (tmp_path / "kv" / "LOCK").unlink()
    second = open_tier()
    with pytest.raises(TierError, match="could not be written"):
        tier.purge(RED)
    second.purge(BLUE)
    tier.close()
    second.close()
    assert [digest for digest, _ in open_tier()._store.superblock.purges] in ([], [BLUE])
