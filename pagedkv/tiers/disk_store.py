"""A store on disk from directory to segments: made or opened as one, refused with one error that says why."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from pagedkv.errors import InvalidArgument, LayoutMismatch, TierError
from pagedkv.tiers.directory import KEY, SUPER, SUPER_NEW, Directory
from pagedkv.tiers.disk_format import MAJOR, PAGE, Geometry, Superblock, key_check, pack_super, parse_super
from pagedkv.tiers.segments import ReadPath, Segments


class Store:
    """An open store. `made` tells whether it is new; `was_clean` whether it is new or was closed properly.

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
    ) -> None:
        one = Geometry(num_blocks, block_bytes, block_tokens, shards, 1)
        self.geometry = replace(one, segment_slots=max(1, segment_bytes // one.slot_bytes))
        self.directory = Directory(path)
        self._super_fd = -1
        self._segments: Segments | None = None
        try:
            self.made = SUPER not in self.directory.names()
            if self.made:
                self._make(fingerprint, read_path)
            else:
                self._open(fingerprint, read_path)
            self.was_clean = self.made or self.superblock.clean
            self.update(replace(self.superblock, clean=False))
        except OSError as problem:
            self.close()
            raise TierError(f"cannot open disk tier {self.directory.path}: {problem}") from problem
        except BaseException:
            self.close()
            raise

    @property
    def segments(self) -> Segments:
        """The open segment files."""
        assert self._segments is not None
        return self._segments

    def update(self, state: Superblock) -> None:
        """Write the superblock over the older of its two copies, and wait for the device.

        Raises
        ------
        OSError
        """
        state = replace(state, seqno=state.seqno + 1)
        os.pwrite(self._super_fd, pack_super(state), state.seqno % 2 * PAGE)
        os.fdatasync(self._super_fd)
        self.superblock = state

    def close(self) -> None:
        """Close every descriptor; the directory is free for others."""
        if self._segments is not None:
            self._segments.close()
        if self._super_fd >= 0:
            os.close(self._super_fd)
            self._super_fd = -1
        self.directory.close()

    def _make(self, fingerprint: bytes, read_path: ReadPath) -> None:
        foreign = self.directory.foreign_names()
        if foreign:
            raise TierError(
                f"{self.directory.path} is not empty and not a disk tier (it holds {foreign[0]!r}); "
                f"name an empty or a new directory"
            )
        self.directory.remove_store()  # no superblock, so never used: an interrupted start
        try:
            self.secret = self.directory.make_secret()
            self._segments = Segments(self.directory, self.geometry, make=True, read_path=read_path)
            uuid = os.urandom(16)
            self.superblock = Superblock(
                self.geometry, fingerprint, uuid, seqno=1, epoch=1, clean=True, next_generation=1,
                created_at=int(time.time()), key_check=key_check(uuid, self.secret),
            )  # fmt: skip
            self._super_fd = self.directory.make_file(SUPER_NEW, 2 * PAGE)
            self.update(self.superblock)
            os.rename(SUPER_NEW, SUPER, src_dir_fd=self.directory.fd, dst_dir_fd=self.directory.fd)
            os.fsync(self.directory.fd)
        except BaseException:
            self.directory.remove_store()
            self.directory.remove_if_made()
            raise

    def _open(self, fingerprint: bytes, read_path: ReadPath) -> None:
        self._super_fd = self.directory.open_file(SUPER)
        self.superblock = self._read_super(self.directory.path)
        self._check_layout(fingerprint)
        self.secret = self.directory.read_secret()
        if key_check(self.superblock.uuid, self.secret) != self.superblock.key_check:
            raise TierError(
                f"{KEY} of disk tier {self.directory.path} is not the key this store was made with; "
                f"put the right file back, or delete the directory to start an empty cache"
            )
        self._segments = Segments(self.directory, self.geometry, make=False, read_path=read_path)

    def _read_super(self, path: Path) -> Superblock:
        data = os.pread(self._super_fd, 2 * PAGE + 1, 0)
        try:
            copies = [parse_super(data[:PAGE]), parse_super(data[PAGE:])]
        except InvalidArgument as problem:
            raise LayoutMismatch(f"disk tier {path}: {problem}; delete the directory to start an empty cache") from None
        intact = [copy for copy in copies if copy is not None]
        if not intact:
            raise TierError(
                f"disk tier {path}: both superblocks are damaged; delete the directory to start an empty cache"
            )
        return max(intact, key=lambda copy: copy.seqno)

    def _check_layout(self, fingerprint: bytes) -> None:
        found, path = self.superblock, self.directory.path
        remedy = "use another directory, or delete this one to start an empty cache"
        if found.major != MAJOR or found.incompat:
            raise LayoutMismatch(
                f"disk tier {path} has format {found.major} (feature bits {found.incompat:#x}), this pagedkv "
                f"knows format {MAJOR} and no feature bits; {remedy}"
            )
        if found.fingerprint != fingerprint:
            raise LayoutMismatch(
                f"disk tier {path} holds blocks of another model or layout (fingerprint "
                f"{found.fingerprint.hex()[:16]}, not {fingerprint.hex()[:16]}); {remedy}"
            )
        for name in ("num_blocks", "block_bytes", "block_tokens", "shards", "segment_slots"):
            there, asked = getattr(found.geometry, name), getattr(self.geometry, name)
            if there != asked:
                raise LayoutMismatch(f"disk tier {path} was made with {name} {there}, asked was {asked}; {remedy}")
