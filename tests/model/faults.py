"""Faults at the boundary of the disk tier and of the mover, for the next move to meet.

Each is something that a real device does within the contract of `StoreTier` and `Mover`: a read or a write that
raises, one that says no after it has filled the destination with rubbish, bytes that are damaged right after they
were written, moves that come too late or are cancelled.
"""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers import DiskTier, Mover, Record

READS = ("read raises", "read says no", "half a read says no")
WRITES = ("write raises", "write says no", "written bytes are damaged")
MOVES = ("late", "cancelled")
KINDS = READS + WRITES + MOVES
RUBBISH = 0xA5


class Faults:
    """A queue of faults per place; each is met once.

    Attributes
    ----------
    met : how often each kind happened.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, ...], deque[str]] = {kinds: deque() for kinds in (READS, WRITES, MOVES)}
        self.met: Counter[str] = Counter()

    def add(self, kind: str) -> None:
        """The next call that can meet it does."""
        next(queue for kinds, queue in self._waiting.items() if kind in kinds).append(kind)

    def clear(self) -> None:
        """None waits any more."""
        for queue in self._waiting.values():
            queue.clear()

    def _next(self, kinds: tuple[str, ...]) -> str:
        kind = self._waiting[kinds].popleft() if self._waiting[kinds] else ""
        if kind:
            self.met[kind] += 1
        return kind

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Every disk tier and mover meets them."""
        read, write, submit = DiskTier.read, DiskTier.write, Mover.submit

        def faulty_read(
            tier: DiskTier, blocks: Any, expected: Sequence[Record], arena: NDArray[np.uint8], rows: Any
        ) -> NDArray[np.bool_]:
            kind = self._next(READS)
            if kind == "read raises":
                arena[rows] = RUBBISH
                raise OSError(errno.EIO, "injected")
            ok = read(tier, blocks, expected, arena, rows)
            if kind:
                refused = slice(None) if kind == "read says no" else slice(0, None, 2)
                arena[np.asarray(rows)[refused]] = RUBBISH
                ok[refused] = False
            return ok

        def faulty_write(
            tier: DiskTier, blocks: Any, records: Sequence[Record], arena: NDArray[np.uint8], rows: Any
        ) -> NDArray[np.bool_]:
            kind = self._next(WRITES)
            if kind in ("write raises", "write says no"):
                tier.invalidate(blocks)  # a slot whose write failed holds nothing
                if kind == "write raises":
                    raise OSError(errno.ENOSPC, "injected")
                return np.zeros(len(records), np.bool_)
            ok = write(tier, blocks, records, arena, rows)
            if kind:
                damage(Path(tier.path), "overwrite", self.met[kind] * 7919)
            return ok

        def faulty_submit(
            mover: Mover, moves: NDArray[np.void], *, deadline_s: float | None = None, **others: Any
        ) -> Any:
            kind = self._next(MOVES)
            ticket = submit(mover, moves, deadline_s=0.0 if kind == "late" else deadline_s, **others)
            if kind == "cancelled":
                ticket.cancel()
            return ticket

        with (
            patch.object(DiskTier, "read", faulty_read),
            patch.object(DiskTier, "write", faulty_write),
            patch.object(Mover, "submit", faulty_submit),
        ):
            yield


DAMAGES = ("overwrite", "flip", "truncate", "swap", "replay")
PAGE = 4096


def damage(store: Path, how: str, where: int, old: dict[tuple[str, int], bytes] | None = None) -> None:
    """Change the bytes of a store's segments behind its back; `where` is any number.

    Parameters
    ----------
    how : ``"overwrite"`` 64 bytes, ``"flip"`` one bit, ``"truncate"`` a file, ``"swap"`` two pages, or ``"replay"``
        what a page held when it was noted in `old` (see `note_page`).
    """
    files = sorted(store.glob("data.*"))
    if not files:
        return
    path = files[where % len(files)]
    size = path.stat().st_size
    at = where // 7 % max(size, 1)
    if how == "truncate":
        with path.open("r+b") as file:
            file.truncate(at)
    elif how == "overwrite":
        _put(path, at, bytes([RUBBISH]) * 64)
    elif how == "flip":
        _put(path, at, bytes(byte ^ 1 << where % 8 for byte in _get(path, at, 1)))
    elif how == "swap":
        one, other = at // PAGE * PAGE, where // 3 % max(size, 1) // PAGE * PAGE
        pages = _get(path, one, PAGE), _get(path, other, PAGE)
        _put(path, one, pages[1])
        _put(path, other, pages[0])
    elif old:
        name, page = sorted(old)[where % len(old)]
        if (store / name).exists():
            _put(store / name, page, old[name, page])


def note_page(store: Path, where: int, old: dict[tuple[str, int], bytes]) -> None:
    """Remember what a page of a store holds now."""
    files = sorted(store.glob("data.*"))
    if files:
        path = files[where % len(files)]
        page = where // 7 % max(path.stat().st_size, 1) // PAGE * PAGE
        old[path.name, page] = _get(path, page, PAGE)


def _get(path: Path, at: int, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(count)


def _put(path: Path, at: int, data: bytes) -> None:
    """Never beyond the end of the file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data[: max(0, path.stat().st_size - at)])
