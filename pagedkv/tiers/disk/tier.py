"""The disk tier: blocks in preallocated files, each with a header naming its content.

Any doubt is a miss.

A read fills the destination and then compares everything: store, slot, generation, epoch, fingerprint, key,
parent, namespace, every token, the header's sum and every shard's sum. What differs is counted by reason and
is ``False``; the destination then holds rubbish, which its owner must not show. Nothing that happens to the
files makes a read or write raise, or kills the process: it only loses blocks.

No order of writes and no sync is needed for correctness: they only decide how much is found again after a crash.
"""
# Over 400 lines: the public methods of one store, half of it their docstrings; slots, segments and files lie beside it.

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, TierError, WrongType
from pagedkv.observe.callbacks import Log, Told
from pagedkv.observe.clock import Clock
from pagedkv.spec.budgets import check_choice
from pagedkv.threads.crew import Errand
from pagedkv.tiers.base import DIGEST_BYTES, Record, block_ids, check_arena, check_size
from pagedkv.tiers.disk._rw_gate import ReadersWriterGate
from pagedkv.tiers.disk.circuit_breaker import CircuitBreaker, State
from pagedkv.tiers.disk.format import SlotFormat
from pagedkv.tiers.disk.scan import Scan
from pagedkv.tiers.disk.segments import PageCache, ReadPath
from pagedkv.tiers.disk.slots import DiskStats, Slots
from pagedkv.tiers.disk.store import OnMismatch, Store
from pagedkv.tiers.disk.superblock import MAX_PURGES
from pagedkv.tiers.mover.hangs import HANG_S

log = Log(logging.getLogger("pagedkv.tiers.disk"))


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
        Directory; made (mode 0700) with the folders above it if missing. There is no default, and it should not lie in
        a world-writable directory.
    num_blocks, block_bytes : int
        Size of the store. A store that exists and has fewer blocks grows; it must have been made with the same
        `block_bytes`, and not with more blocks.
    fingerprint : 32 bytes
        Digest of everything the bytes depend on (model, weights, dtype, layout). Another one is refused.
    block_tokens : int
        Tokens of a block.
    shards : int
        Equal parts of a block with a checksum each.
    segment_bytes : int
        Largest size of one file, rounded down to whole slots (one at least).
    read_path : ``"auto"``, ``"direct"``, ``"pread"`` or ``"mapping"``
        How bytes are read; all survive truncated files. ``"direct"`` goes past the page cache (O_DIRECT) where the file
        system takes that and blocks and arenas are whole pages, else it is ``"pread"``; ``"auto"`` is ``"direct"`` with
        ``page_cache="drop"``. Which is faster: ``python -m bench.tiers``.
    page_cache : ``"drop"`` or ``"keep"``
        Whether the kernel forgets the pages written or read, or keeps them in free memory.
    on_mismatch : ``"refuse"`` or ``"reset"``
        What becomes of a store there that is damaged or of another layout: an error, or an empty store in its place.
        Old bytes are never read as something they are not. A directory that belongs to another user, is open to
        others or in use is refused in any case.
    network_fs : bool
        Allow a directory on a network file system, where locks may not keep a second machine out.
    on_progress : callable, optional
        ``on_progress(done, total)``, in slots, while a store that exists is scanned. An Exception in it is logged once,
        and the scan goes on.
    clock : callable
        Monotonic seconds, for the rests of a tier that fails; while the clock fails, time stands still.

    Raises
    ------
    TierError
        The directory or a file in it cannot be used; says which and what to do.
    StoreDamaged
        A `TierError`: a file of the store is missing, cut or unreadable.
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
        read_path: ReadPath = "auto",
        page_cache: PageCache = "drop",
        on_mismatch: OnMismatch = "refuse",
        network_fs: bool = False,
        on_progress: Callable[[int, int], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_size(num_blocks, block_bytes)
        _check_arguments(fingerprint, block_tokens=block_tokens, shards=shards, segment_bytes=segment_bytes)
        check_choice("read_path", read_path, ("auto", "direct", "pread", "mapping"))
        check_choice("page_cache", page_cache, ("drop", "keep"))
        check_choice("on_mismatch", on_mismatch, ("refuse", "reset"))
        if not isinstance(network_fs, bool):
            raise WrongType(f"network_fs must be a bool, not {type(network_fs).__name__}")
        for what, function in (("on_progress", on_progress), ("clock", clock)):
            if not callable(function) and not (what == "on_progress" and function is None):
                raise WrongType(f"{what} must be callable, not {type(function).__name__}")
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
            page_cache=page_cache,
            on_mismatch=on_mismatch,
            network_fs=network_fs,
        )
        self._abandon = weakref.finalize(self, self._store.close)  # a tier dropped without close unlocks at least
        self._abandon.atexit = False  # a mover may still write then, to descriptors that were reused
        state = self._store.superblock
        form = SlotFormat(self._store.geometry, state.uuid, fingerprint, state.epoch)
        self._breaker = CircuitBreaker(self.path, self._store.never_writes, Clock(clock))
        self._slots = Slots(
            self._store.segments, form, self._store.first_generation, dict(state.purges), self._breaker, self.path
        )
        self._gate = ReadersWriterGate(f"disk tier {self.path}")
        self._purging = threading.Lock()
        self._ending: Errand | None = None  # the end of this tier, made by the first close
        self._is_left = False
        self._disowned = False
        self._on_progress = None if on_progress is None else Told(on_progress, "on_progress")
        try:
            if not self._store.made:
                self._take_over()
        except BaseException:
            self._store.close()
            raise
        _open_tiers.add(self)

    def _take_over(self) -> None:
        if not self._store.was_clean:  # pages of a refused sync differ from the device
            self._store.segments.forget_cached()
        self._slots.adopt(Scan(self._store.segments, self._slots.form).everything(self._on_progress))
        if self._store.superblock.purges and not self._store.never_writes:
            self._try_to_forget_purges()

    @property
    def path(self) -> str:
        """The directory."""
        return str(self._store.directory.path)

    @property
    def secret(self) -> bytes:
        """32 bytes of this store alone: the key of its chain keys, so that names cannot be guessed."""
        return self._store.secret

    @property
    def write_bytes(self) -> int:
        """Most bytes that writing one block takes: tombstone, header and payload."""
        return self._store.geometry.header_bytes + self._store.geometry.slot_bytes

    @property
    def was_clean(self) -> bool:
        """Whether the store is new or was closed properly.

        Only a statistic: reads check everything.
        """
        return self._store.was_clean

    @property
    def state(self) -> State:
        """``"ok"``, ``"read_only"`` (writes fail at once) or ``"off"`` (reads are misses, too)."""
        return self._breaker.state

    def write(
        self, blocks: Any, records: Sequence[Record], arena: NDArray[np.uint8], src_blocks: Any
    ) -> NDArray[np.bool_]:
        """Store rows of an arena under their names.

        Parameters
        ----------
        blocks : int32 [n]
            Slots to fill, each once; their old content is lost.
        records : n records
        arena : uint8 [*, block_bytes], C-contiguous, CPU memory
        src_blocks : int32 [n]
            Rows of `arena`.

        Returns
        -------
        bool [n]; a slot whose write failed (disk full, media error) holds nothing. All fail at once where `clear`, or a
        purge that needs the store for itself, is under way.

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
        with self._gate.inside(waits=False) as may:
            if not may:
                return self._slots.refuse_write(slots)
            self._check_owner()
            return self._slots.write(slots, records, arena, rows)

    def read(
        self, blocks: Any, expected: Sequence[Record], arena: NDArray[np.uint8], dst_blocks: Any
    ) -> NDArray[np.bool_]:
        """Fill rows of an arena with the blocks stored under the expected names.

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
        and the row's bytes mean nothing. All are misses at once where a write would fail at once.

        Raises
        ------
        WrongType, InvalidArgument, ClosedError, TierError
            As `write`.
        """
        slots, rows = self._check(blocks, expected, arena, dst_blocks, "dst_blocks")
        check_arena(arena, self.block_bytes, writeable=True)
        if np.unique(rows).size != rows.size:
            raise InvalidArgument("dst_blocks must differ from each other in one read")
        with self._gate.inside(waits=False) as may:
            return self._slots.read(slots, expected, arena, rows) if may else self._slots.refuse_read(slots)

    def invalidate(self, blocks: Any) -> None:
        """Make slots hold nothing, also after a reopen (if the tombstones can be written).

        Raises
        ------
        WrongType, InvalidArgument, ClosedError, TierError
        """
        slots = block_ids(blocks, self.num_blocks, "blocks")
        with self._gate.inside():
            self._slots.bury(slots)

    def records(self) -> Iterator[StoredBlock]:
        """Every block the store holds, by ascending block id, to rebuild an index after opening.

        Headers are read and checked here; payloads are checked when they are read.

        Raises
        ------
        ClosedError, TierError
        """
        with self._gate.inside():
            scan, slots = Scan(self._store.segments, self._slots.form), self._slots.live()
        for part in scan.parts(slots):
            with self._gate.inside():
                found = [entry for entry in scan.records(part) if self._slots.holds(*entry)]
            for slot, generation, record in found:
                yield StoredBlock(slot, record, generation)

    def purge(self, namespace: bytes) -> None:
        """Make everything stored for a namespace unreadable for ever, also across a crash.

        This includes blocks that are being written now.

        Blocks written afterwards count again. The bytes stay on the device until their slots are used again.

        Parameters
        ----------
        namespace : 32 bytes
            The namespace's digest, as in `Record.namespace`.

        Raises
        ------
        TierError
            It could not be written to the device. In this process the namespace is purged all the same; after a
            restart it may come back.
        WrongType, InvalidArgument, ClosedError
        """
        _check_digest("namespace", namespace)
        with self._gate.inside(), self._purging:  # one at a time: each writes the list of all
            self._slots.void(namespace)
            if len(self._slots.barriers()) <= MAX_PURGES:
                if not self._saved():
                    self._not_durable()
                return
        with self._gate.alone():
            if self._try_to_forget_purges():
                return
            if self._breaker.hangs:  # no reason to forget what others have stored
                self._not_durable()
            self._forget_all()

    def clear(self) -> None:
        """Let nothing that was stored ever be read again, crash or not.

        Raises
        ------
        TierError
            It could not be written to the device; as `purge`.
        ClosedError
        """
        with self._gate.alone():
            self._forget_all()

    def stats(self) -> DiskStats:
        """Counters since opening; also of a closed tier."""
        failures = 0 if self._on_progress is None else self._on_progress.failures
        return replace(self._slots.stats(), progress_failures=failures)

    def flush(self) -> bool:
        """Wait until the device has all written blocks.

        False, with a log line, if the device refused some of it.

        Raises
        ------
        ClosedError, TierError
        """
        with self._gate.inside():
            return self._sync()

    def call_hangs(self, num_blocks: int) -> None:
        """For the mover: a read or write of so many blocks hangs, and the mover gives it up.

        The tier is off until the call returns. Its later writes get no header, and so no name.
        """
        self._gate.lose_one()
        self._slots.count_hung(num_blocks)
        self._breaker.call_hangs()

    def call_came_back(self) -> None:
        """For the mover: such a call is over."""
        self._breaker.call_came_back()
        self._gate.find_one()

    def log_state(self) -> None:
        """For the mover: one line in the log if the state is another one than the log says."""
        self._breaker.log_state()

    @property
    def is_off(self) -> bool:
        """For the mover: whether reads are misses at once, whatever is stored."""
        return self._breaker.state == "off" or self._gate.is_kept

    def close(self) -> None:
        """Wait for calls in flight, sync, mark the store as clean, and unlock it. Twice is fine.

        Where the device does not answer, the files stay open and the directory locked until it does: a thread that
        comes back must not find other files under its descriptors. The last one to come back closes them.
        """
        if not self._gate.is_ours or self._is_left or self._store.is_closed:
            return
        self._gate.shut()
        is_empty = self._gate.is_empty(HANG_S, self._let_go)
        if self._ending is None or self._ending.has_failed:
            self._ending = Errand(self._end)
        if not is_empty or not self._ending.ends_within(HANG_S):
            self._is_left = True
            log.warning(
                "disk tier %s does not answer: it is left as it is, and its directory locked until it answers or this "
                "process ends", self.path,
            )  # fmt: skip

    def _end(self) -> None:
        try:
            if self._sync():
                self._saved(clean=True, next_generation=self._slots.next_generation)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._store.close()
        self._abandon.detach()

    def __reduce__(self) -> NoReturn:
        raise TierError(f"disk tier {self.path} belongs to one process; another one must open a directory of its own")

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
        if not isinstance(records, Sequence):
            raise WrongType(f"records must be a sequence of Record objects, not {type(records).__name__}")
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

    def _check_owner(self) -> None:
        """Stop writing once LOCK is not the file that was locked: another process may own it."""
        if not self._disowned and not self._store.never_writes and self._store.directory.lost_its_lock():
            self._disowned = True
            self._breaker.stop_writing("its LOCK was deleted or replaced; close the cache and open it again")

    def _sync(self) -> bool:
        if self._store.never_writes or self._breaker.hangs:
            return False
        try:
            self._store.segments.sync()
        except OSError as problem:
            log.warning("disk tier %s: sync failed: %s", self.path, problem)
            self._breaker.wrote(0, [problem.errno or errno.EIO])
            return False
        return True

    def _saved(self, **changes: Any) -> bool:
        """Save the superblock with all pending purges and clears; whether it is on the device."""
        self._check_owner()
        barriers = tuple(self._slots.barriers().items())
        if self._store.never_writes or self._breaker.hangs or len(barriers) > MAX_PURGES:
            return False
        try:
            self._store.update(epoch=self._slots.form.epoch, purges=barriers, **changes)
        except OSError as problem:
            log.warning("disk tier %s: the superblock could not be written: %s", self.path, problem)
            self._breaker.wrote(0, [problem.errno or errno.EIO])
            return False
        return True

    def _try_to_forget_purges(self) -> bool:
        """Bury all purged blocks, so that the superblock need not list them; whether it is durable."""
        try:
            if not self._slots.bury_void():
                return False
        except OSError as problem:
            log.warning("disk tier %s: purged blocks could not be buried: %s", self.path, problem)
            return False
        return self._saved()

    def _forget_all(self) -> None:
        self._slots.forget_all()
        if not self._saved():
            self._not_durable()

    def _not_durable(self) -> NoReturn:
        raise TierError(
            f"disk tier {self.path}: the purge holds in this process, but could not be written to the device; what was "
            f"purged may come back after a restart: delete the directory before that"
        )

    def _after_fork(self) -> None:
        self._abandon()


def _check_arguments(fingerprint: bytes, **counts: int) -> None:
    for what, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise WrongType(f"{what} must be an int, not {type(value).__name__}")
        if value < 1:
            raise InvalidArgument(f"{what} must be at least 1, not {value}")
    _check_digest("fingerprint", fingerprint)


def _check_digest(what: str, value: bytes) -> None:
    if not isinstance(value, bytes):
        raise WrongType(f"{what} must be bytes, not {type(value).__name__}")
    if len(value) != DIGEST_BYTES:
        raise InvalidArgument(f"{what} must have {DIGEST_BYTES} bytes, not {len(value)}")


_open_tiers: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a forked child's copies of the descriptors, or the lock would outlive the parent."""
    for tier in list(_open_tiers):
        tier._after_fork()
    _open_tiers.clear()


os.register_at_fork(after_in_child=_close_in_child)
