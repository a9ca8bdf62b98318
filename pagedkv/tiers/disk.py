"""The disk tier: blocks in preallocated files, each with a header naming its content. Any doubt is a miss.

A read fills the destination and then compares everything: store, slot, generation, epoch, fingerprint, key,
parent, namespace, every token, the header's sum and every shard's sum. What differs is counted by reason and
is ``False``; the destination then holds rubbish, which its owner must not show. Nothing that happens to the
files makes a read or write raise, or kills the process: it only loses blocks.

No order of writes and no sync is needed for correctness: they only decide how much is found again after a
crash.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ClosedError, InvalidArgument, TierError, WrongType
from pagedkv.tiers.base import DIGEST_BYTES, Record, block_ids, check_arena, check_size
from pagedkv.tiers.disk_format import SlotFormat
from pagedkv.tiers.disk_store import Store
from pagedkv.tiers.segments import ReadPath
from pagedkv.tiers.slots import DiskStats, Slots

log = logging.getLogger("pagedkv.tiers.disk")


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that an opened store holds; its payload has not been read yet."""

    block: int
    record: Record
    generation: int


class DiskTier:
    """Blocks in a directory that this process alone has open.

    Parameters
    ----------
    path : str or path
        Directory; made (mode 0700, not its parents) if missing. There is no default, and it should not lie in
        a world-writable directory.
    num_blocks, block_bytes : int
        Size of the store; a store that exists must have been made with the same.
    fingerprint : 32 bytes
        Digest of everything the bytes depend on (model, weights, dtype, layout). Another one is refused.
    block_tokens : int
        Tokens of a block.
    shards : int
        Equal parts of a block with a checksum each.
    segment_bytes : int
        Largest size of one file, rounded down to whole slots (one at least).
    read_path : ``"pread"`` or ``"mapping"``
        How bytes are read; both survive truncated files. Which is faster: ``python -m bench.tiers``.

    Raises
    ------
    TierError
        The directory or a file in it cannot be used; says which and what to do.
    LayoutMismatch
        The store there has another format version, fingerprint or size.
    WrongType, InvalidArgument
        An argument cannot be used.
    """

    name = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_blocks: int,
        block_bytes: int,
        *,
        fingerprint: bytes,
        block_tokens: int = 16,
        shards: int = 1,
        segment_bytes: int = 1 << 30,
        read_path: ReadPath = "pread",
    ) -> None:
        self._closed = True
        check_size(num_blocks, block_bytes)
        _check_arguments(fingerprint, read_path, block_tokens=block_tokens, shards=shards, segment_bytes=segment_bytes)
        self.num_blocks, self.block_bytes = int(num_blocks), int(block_bytes)
        self._block_tokens = block_tokens
        self._store = Store(
            path,
            self.num_blocks,
            self.block_bytes,
            fingerprint=fingerprint,
            block_tokens=block_tokens,
            shards=shards,
            segment_bytes=segment_bytes,
            read_path=read_path,
        )
        self._abandon = weakref.finalize(self, self._store.close)  # a tier dropped without close unlocks at least
        state = self._store.superblock
        form = SlotFormat(self._store.geometry, state.uuid, fingerprint, state.epoch)
        self._slots = Slots(self._store.segments, form, state.next_generation, self.path)
        if not self._store.made:
            try:
                self._slots.scan()
            except BaseException:
                self._store.close()
                raise
        self._pid = os.getpid()
        self._idle = threading.Condition()
        self._inside = 0
        self._closed = False
        _open_tiers.add(self)

    @property
    def path(self) -> str:
        """The directory."""
        return str(self._store.directory.path)

    @property
    def secret(self) -> bytes:
        """32 bytes of this store alone: the key of its chain keys, so that names cannot be guessed."""
        return self._store.secret

    @property
    def was_clean(self) -> bool:
        """Whether the store is new or was closed properly. Only a statistic: reads check everything."""
        return self._store.was_clean

    def write(
        self, blocks: Any, records: Sequence[Record], arena: NDArray[np.uint8], src_blocks: Any
    ) -> NDArray[np.bool_]:
        """Store rows of an arena under their names.

        Parameters
        ----------
        blocks : int32 [n]
            Slots to fill, each once; what they held is lost.
        records : n records
        arena : uint8 [*, block_bytes], C-contiguous, CPU memory
        src_blocks : int32 [n]
            Rows of `arena`.

        Returns
        -------
        bool [n]; a slot whose write failed (disk full, media error) holds nothing.

        Raises
        ------
        WrongType, InvalidArgument
            Before anything is written.
        ClosedError, TierError
            The tier is closed, or this process is a fork of the one that opened it.
        """
        slots, rows = self._check(blocks, records, arena, src_blocks, "src_blocks")
        if np.unique(slots).size != slots.size:
            raise InvalidArgument("blocks must differ from each other in one write")
        with self._inside_call():
            return self._slots.write(slots, records, arena, rows)

    def read(
        self, blocks: Any, expected: Sequence[Record], arena: NDArray[np.uint8], dst_blocks: Any
    ) -> NDArray[np.bool_]:
        """Fill rows of an arena with what was stored under the expected names.

        Parameters
        ----------
        blocks : int32 [n]
            Slots.
        expected : n records
        arena : uint8 [*, block_bytes], C-contiguous, CPU memory
        dst_blocks : int32 [n]
            Rows of `arena`, each once.

        Returns
        -------
        bool [n]: True means the row holds exactly the bytes stored under that record; False is a counted miss,
        and the row's bytes mean nothing.

        Raises
        ------
        WrongType, InvalidArgument, ClosedError, TierError
            As `write`.
        """
        slots, rows = self._check(blocks, expected, arena, dst_blocks, "dst_blocks")
        check_arena(arena, self.block_bytes, writeable=True)
        if np.unique(rows).size != rows.size:
            raise InvalidArgument("dst_blocks must differ from each other in one read")
        with self._inside_call():
            return self._slots.read(slots, expected, arena, rows)

    def invalidate(self, blocks: Any) -> None:
        """Make slots hold nothing, also after a reopen (if the tombstones can be written).

        Raises
        ------
        WrongType, InvalidArgument, ClosedError, TierError
        """
        slots = block_ids(blocks, self.num_blocks, "blocks")
        with self._inside_call():
            self._slots.bury(slots)

    def records(self) -> Iterator[StoredBlock]:
        """Every block the store holds, by ascending block id, for rebuilding an index after opening.

        Headers are read and checked here; payloads are checked when they are read.

        Raises
        ------
        ClosedError, TierError
        """
        for block in range(self.num_blocks):
            with self._inside_call():
                found = self._slots.name(block)
            if found is not None:
                yield StoredBlock(block, found[1], found[0])

    def stats(self) -> DiskStats:
        """Counters since opening; also of a closed tier."""
        return self._slots.stats()

    def flush(self) -> bool:
        """Wait until the device has what was written; False (and a log line) if it refused some of it.

        Raises
        ------
        ClosedError, TierError
        """
        with self._inside_call():
            return self._sync()

    def close(self) -> None:
        """Wait for calls in flight, sync, mark the store as closed properly, and unlock it. Twice is fine."""
        if self._closed or self._pid != os.getpid():
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._inside == 0)
        _open_tiers.discard(self)
        try:
            if self._sync():
                state = self._store.superblock
                self._store.update(replace(state, clean=True, next_generation=self._slots.next_generation))
        except OSError as problem:
            log.warning("disk tier %s: the superblock could not be written: %s", self.path, problem)
        finally:
            self._abandon()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(
        self, blocks: Any, records: Sequence[Record], arena: NDArray[np.uint8], rows: Any, what: str
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        slots = block_ids(blocks, self.num_blocks, "blocks")
        check_arena(arena, self.block_bytes)
        indices = block_ids(rows, arena.shape[0], what)
        if not slots.size == indices.size == len(records):
            sizes = f"{slots.size}, {len(records)}, {indices.size}"
            raise InvalidArgument(f"blocks, records and {what} differ in length: {sizes}")
        for record in records:
            if not isinstance(record, Record):
                raise WrongType(f"records must be Record objects, not {type(record).__name__}")
            if record.tokens.size != self._block_tokens:
                raise InvalidArgument(
                    f"a record has {record.tokens.size} tokens, a block of this tier {self._block_tokens}"
                )
        return slots, indices

    @contextmanager
    def _inside_call(self) -> Iterator[None]:
        """Keep `close` from taking descriptors away; refuse closed tiers and forked children."""
        if self._pid != os.getpid():  # before the lock: a thread that the fork left behind may hold it
            raise TierError(
                f"disk tier {self.path} belongs to process {self._pid}; a forked child must open a directory of its own"
            )
        with self._idle:
            if self._closed:
                raise ClosedError(f"disk tier {self.path} is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._idle:
                self._inside -= 1
                self._idle.notify_all()

    def _sync(self) -> bool:
        try:
            self._store.segments.sync()
        except OSError as problem:
            log.warning("disk tier %s: sync failed: %s", self.path, problem)
            return False
        return True

    def _after_fork(self) -> None:
        self._abandon()


def _check_arguments(fingerprint: bytes, read_path: str, **counts: int) -> None:
    for what, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise WrongType(f"{what} must be an int, not {type(value).__name__}")
        if value < 1:
            raise InvalidArgument(f"{what} must be at least 1, not {value}")
    if not isinstance(fingerprint, bytes):
        raise WrongType(f"fingerprint must be bytes, not {type(fingerprint).__name__}")
    if len(fingerprint) != DIGEST_BYTES:
        raise InvalidArgument(f"fingerprint must have {DIGEST_BYTES} bytes, not {len(fingerprint)}")
    if read_path not in ("pread", "mapping"):
        raise InvalidArgument(f"read_path must be 'pread' or 'mapping', not {read_path!r}")


_open_tiers: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child gives its copies of the descriptors back, or the lock would outlive the parent."""
    for tier in list(_open_tiers):
        tier._after_fork()
    _open_tiers.clear()


os.register_at_fork(after_in_child=_close_in_child)
