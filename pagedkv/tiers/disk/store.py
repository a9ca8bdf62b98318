"""Opens or makes a store's directory; slots.py reads and writes its blocks.

A refusal is one error that says why.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from pagedkv.errors import InvalidArgument, LayoutMismatch, StoreDamaged, TierError
from pagedkv.observe.callbacks import Log
from pagedkv.spec.sizes import format_size
from pagedkv.tiers.disk import file_system
from pagedkv.tiers.disk.descriptors import close_quietly, file_size_limit, read_start
from pagedkv.tiers.disk.directory import GROWING, KEY, RESTART, SUPER, SUPER_NEW, Directory
from pagedkv.tiers.disk.format import PAGE, Geometry
from pagedkv.tiers.disk.growth import cut, grow
from pagedkv.tiers.disk.lane import Lane, first_geometry, lane_geometries
from pagedkv.tiers.disk.segment_files import PageCache, ReadPath, SegmentFiles
from pagedkv.tiers.disk.segments import Segments
from pagedkv.tiers.disk.superblock import (
    MAJOR,
    MAJOR_WITH_LANES,
    RESERVED_GENERATIONS,
    Superblock,
    key_check,
    newest_copy,
    pack_super,
)

log = Log(logging.getLogger("pagedkv.tiers.disk"))

OnMismatch = Literal["refuse", "reset"]


class Store:
    """An open store.

    Parameters
    ----------
    path, network_fs : see `Directory`.
    num_blocks, block_bytes, block_tokens, shards, segment_bytes, fingerprint : of an existing store,
        which must match; or to make one with.
    lanes : groups of layers; then `num_blocks` counts extents, and `block_bytes` and `shards` are the lanes'.
    read_path, page_cache : see `Segments`.
    on_mismatch : ``"refuse"``, or ``"reset"`` to replace a store that is damaged or another one by a new, empty one.

    Attributes
    ----------
    made : whether the store is new.
    was_clean : whether it is new or was closed properly.
    first_generation : the next write's; none before had it or a higher one.
    never_writes : why the store can only be read; empty if it can be written.

    Raises
    ------
    TierError, LayoutMismatch, InvalidArgument
        A store that cannot be made leaves nothing behind; one that cannot be opened is left as it is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_blocks: int,
        block_bytes: int,
        *,
        fingerprint: bytes,
        block_tokens: int,
        shards: int,
        segment_bytes: int,
        read_path: ReadPath,
        page_cache: PageCache,
        on_mismatch: OnMismatch,
        network_fs: bool,
        lanes: tuple[Lane, ...] = (),
    ) -> None:
        if lanes:
            self.geometry = first_geometry(num_blocks, lanes, block_tokens, segment_bytes)
        else:
            one = Geometry(num_blocks, block_bytes, block_tokens, shards, 1)
            self.geometry = replace(one, segment_slots=max(1, segment_bytes // one.slot_bytes))
        self.lanes = lanes
        self._fingerprint, self._read_path, self._page_cache = fingerprint, read_path, page_cache
        self._super_fd = -1
        self._segments: tuple[Segments, ...] = ()
        self.directory = Directory(path, network_fs=network_fs)
        self.superblock: Superblock
        try:
            self.made = not self.directory.holds_store() or not self._opened(on_mismatch)
            if self.made:
                self._make()
            self.never_writes = self.directory.read_only or self._over_limit()
            self.was_clean = self.made or self.superblock.clean
            self.first_generation = self.superblock.next_generation
            if not self.never_writes:
                self.update(clean=False, next_generation=self.first_generation + RESERVED_GENERATIONS)
        except OSError as problem:
            self.close()
            raise TierError(f"cannot open disk tier {self.directory.path}: {problem}") from problem
        except BaseException:
            self.close()
            raise

    @property
    def segments(self) -> tuple[Segments, ...]:
        """The slots of each lane in the open segment files; one without lanes."""
        assert self._segments
        return self._segments

    @property
    def files(self) -> SegmentFiles:
        """The open segment files."""
        return self.segments[0].files

    def update(self, **changes: Any) -> None:
        """Change the superblock.

        Both copies, one after the other, each synced before the next is touched.

        Raises
        ------
        OSError
            It may or may not be changed after a crash.
        """
        state = replace(self.superblock, **changes)
        for _ in range(2):
            state = replace(state, seqno=state.seqno + 1)
            self._write_super(state)
            self.superblock = state  # the state on the device is built upon; a failed copy is the next to be written

    def close(self) -> None:
        """Close every descriptor; the directory is free for others."""
        try:
            self._close_files()
        finally:
            self.directory.close()

    @property
    def is_closed(self) -> bool:
        """Whether the directory is free for others."""
        return self.directory.fd < 0

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """As that of a Directory."""
        if not is_finalizing() and hasattr(self, "directory"):
            self.close()

    def _close_files(self) -> None:
        if self._segments:
            self._segments[0].files.close()
            self._segments = ()
        if self._super_fd >= 0:
            close_quietly(self._super_fd)
            self._super_fd = -1

    def _write_super(self, state: Superblock) -> None:
        if self.directory.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if not self.directory.is_still_ours():
            raise OSError(errno.ESTALE, "its LOCK was deleted or replaced")
        if file_size_limit() < 2 * PAGE:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if os.pwrite(self._super_fd, pack_super(state), state.seqno % 2 * PAGE) != PAGE:
            raise OSError(errno.EIO, "a write was cut short")
        file_system.sync_data(self._super_fd)

    def _over_limit(self) -> str:
        largest = max(2 * PAGE, self.geometry.segment_bytes(0))
        if largest <= file_size_limit():
            return ""
        return f"its files of {largest} bytes are over this process's limit (ulimit -f)"

    def _opened(self, on_mismatch: OnMismatch) -> bool:
        """Open the store that is there; False if it cannot be used and shall be replaced."""
        try:
            self._open()
        except (LayoutMismatch, StoreDamaged) as problem:
            self._close_files()
            if on_mismatch != "reset" or self.directory.read_only:
                raise
            log.warning("an empty store replaces what cannot be used, as on_mismatch='reset' asks for: %s", problem)
            return False
        return True

    def _make(self) -> None:
        try:
            self.directory.remove_store()  # an interrupted start, or what on_mismatch='reset' replaces
            self._super_fd = self.directory.make_file(SUPER_NEW, 2 * PAGE)
            self.secret = self.directory.make_secret()
            self._segments = self._open_segments(make=True)
            uuid = os.urandom(16)
            self.superblock = Superblock(
                self.geometry, self._fingerprint, uuid, seqno=1, epoch=1, clean=True, next_generation=1,
                created_at=int(time.time()), key_check=key_check(uuid, self.secret),
                major=MAJOR_WITH_LANES if self.lanes else MAJOR, lanes=self.lanes,
            )  # fmt: skip
            self.update()
            os.rename(SUPER_NEW, SUPER, src_dir_fd=self.directory.fd, dst_dir_fd=self.directory.fd)
            file_system.sync(self.directory.fd)
        except BaseException:
            self._close_files()
            self.directory.remove_store()
            self.directory.remove_if_made()
            raise

    def _open(self) -> None:
        self._super_fd = self.directory.open_file(SUPER)
        self.superblock = self._read_super()
        self._check_layout()
        self.secret = self.directory.read_secret()
        if key_check(self.superblock.uuid, self.secret) != self.superblock.key_check:
            raise StoreDamaged(
                f"{KEY} of disk tier {self.directory.path} is not the key this store was made with: {RESTART}"
            )
        self._undo_interrupted_growth()
        asked, self.geometry = self.geometry, self.superblock.geometry
        self._segments = self._open_segments(make=False)  # a damaged store must not grow
        if asked != self.geometry:
            self._segments[0].files.close()
            self._grow(asked)
            self._segments = self._open_segments(make=False)

    def _undo_interrupted_growth(self) -> None:
        if GROWING not in self.directory.names():
            return
        self._check_may_change("was growing when its process ended")
        cut(self.directory, self.superblock.geometry)

    def _grow(self, asked: Geometry) -> None:
        self._check_may_change(f"has {_size_of(self.geometry)}, and more is asked for")
        grow(self.directory, self.geometry, asked, lambda: self.update(geometry=asked))
        self.geometry = asked

    def _check_may_change(self, what: str) -> None:
        if self.directory.read_only:
            raise TierError(
                f"disk tier {self.directory.path} {what}, and it cannot be changed: {self.directory.read_only}; open "
                f"it once where it can be written"
            )

    def _open_segments(self, *, make: bool) -> tuple[Segments, ...]:
        files = SegmentFiles(
            self.directory, self.geometry, make=make, read_path=self._read_path, page_cache=self._page_cache
        )
        return tuple(Segments(files, geometry) for geometry in lane_geometries(self.geometry, self.lanes))

    def _read_super(self) -> Superblock:
        path = self.directory.path
        try:
            found = newest_copy(read_start(self._super_fd, 2 * PAGE))
        except InvalidArgument as problem:
            raise LayoutMismatch(f"disk tier {path}: {problem}: {RESTART}") from None
        if found is None:
            raise StoreDamaged(f"disk tier {path}: both copies of {SUPER} are damaged: {RESTART}")
        return found

    def _check_layout(self) -> None:
        found, path, ours = self.superblock, self.directory.path, self._fingerprint
        remedy = "use another directory, or start an empty cache in this one (on_mismatch='reset')"
        if not found.is_known:
            raise LayoutMismatch(
                f"disk tier {path} has format {found.major} (feature bits {found.incompat:#x}), this pagedkv "
                f"knows formats {MAJOR} and {MAJOR_WITH_LANES} and no feature bits; {remedy}"
            )
        if found.lanes != self.lanes:
            raise LayoutMismatch(f"disk tier {path} {_other_lanes(found.lanes, self.lanes)}; {remedy}")
        if found.fingerprint != ours:
            raise LayoutMismatch(
                f"disk tier {path} holds blocks of another model or layout (fingerprint "
                f"{found.fingerprint.hex()[:16]}, not {ours.hex()[:16]}); {remedy}"
            )
        for name, said in SAID_AS.items():
            there, asked = getattr(found.geometry, name), getattr(self.geometry, name)
            if there != asked:
                there, asked = (said(value, self.geometry.slot_bytes) for value in (there, asked))
                raise LayoutMismatch(f"disk tier {path} was made with {there}, asked was {asked}; {remedy}")
        if found.geometry.num_blocks > self.geometry.num_blocks:
            raise LayoutMismatch(
                f"disk tier {path} was made with {_size_of(found.geometry)}, asked was {_size_of(self.geometry)}: a "
                f"store can grow, not shrink; ask for as much as it has, or {remedy}"
            )


def _other_lanes(there: tuple[Lane, ...], asked: tuple[Lane, ...]) -> str:
    """How a store's groups of layers differ from those that are asked for."""
    if not there or not asked:
        kept = "all tokens of every layer", f"{len(there or asked)} groups of layers, each as far as it sees"
        holds, wants = kept if asked else reversed(kept)
        return f"keeps {holds}, asked was a store that keeps {wants} (by_group={bool(asked)})"
    for number, (one, other) in enumerate(zip(there, asked)):
        if one != other:
            return f"was made with another group {number} of layers: {one}; asked was: {other}"
    return f"was made with {len(there)} groups of layers, asked was {len(asked)}"


def _size_of(g: Geometry) -> str:
    """A store's size in blocks and in bytes, as callers may have said it."""
    if g.extent_slots:
        return f"{g.num_blocks // g.extent_slots} extents ({format_size(g.total_bytes)} with headers)"
    return f"{g.num_blocks} blocks ({format_size(g.num_blocks * g.slot_bytes)} with headers)"


SAID_AS: dict[str, Callable[[int, int], str]] = {  # by the name in a store's Geometry: value and slot_bytes, in words
    "block_bytes": lambda value, _: f"blocks of {value:,} bytes",
    "block_tokens": lambda value, _: f"block_size={value}",
    "shards": lambda value, _: f"shards={value}",
    "segment_slots": lambda value, slot_bytes: f"segments of {value} blocks ({format_size(value * slot_bytes)})",
}
