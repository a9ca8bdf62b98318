"""The disk tier: blocks in preallocated files, each with a header naming its content.

Any doubt is a miss.

A read fills the destination and then compares everything: store, slot, generation, epoch, fingerprint, key,
parent, namespace, every token, the header's sum and every shard's sum. What differs is counted by reason and
is ``False``; the destination then holds rubbish, which its owner must not show. Nothing that happens to the
files makes a read or write raise, or kills the process: it only loses blocks.

No order of writes and no sync is needed for correctness: they only decide how much is found again after a crash.
"""
# Over 400 lines: the public methods of a store and of a lane of it, half of it docstrings; slots and files lie apart.

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
from pagedkv.tiers.disk.ages import Ages
from pagedkv.tiers.disk.circuit_breaker import CircuitBreaker, State
from pagedkv.tiers.disk.format import Geometry, SlotFormat
from pagedkv.tiers.disk.lane import Lane, lane_fingerprint, pack_lanes, parse_lanes
from pagedkv.tiers.disk.lanes import Lanes
from pagedkv.tiers.disk.scan import Scan
from pagedkv.tiers.disk.segment_files import PageCache, ReadPath
from pagedkv.tiers.disk.stats import DiskStats
from pagedkv.tiers.disk.store import OnMismatch, Store
from pagedkv.tiers.disk.superblock import most_purges
from pagedkv.tiers.mover.hangs import HANG_S

log = Log(logging.getLogger("pagedkv.tiers.disk"))


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that an opened store holds; its payload has not been read yet."""

    block: int
    record: Record
    generation: int


class DiskLane:
    """One lane of a disk tier, as a tier (:class:`pagedkv.tiers.base.LeavableTier`)."""

    name = "disk"

    def __init__(self, tier: DiskTier, number: int, geometry: Geometry) -> None:
        self._tier, self._number = tier, number
        self.num_blocks, self.block_bytes = geometry.num_blocks, geometry.block_bytes
        self.call_hangs, self.call_came_back, self.log_state = tier.call_hangs, tier.call_came_back, tier.log_state

    @property
    def is_off(self) -> bool:
        """As :attr:`DiskTier.is_off`."""
        return self._tier.is_off

    def write(
        self, blocks: Any, records: Sequence[Record], arena: NDArray[np.uint8], src_blocks: Any
    ) -> NDArray[np.bool_]:
        """As :meth:`DiskTier.write`."""
        return self._tier.write(blocks, records, arena, src_blocks, lane=self._number)

    def read(
        self, blocks: Any, expected: Sequence[Record], arena: NDArray[np.uint8], dst_blocks: Any
    ) -> NDArray[np.bool_]:
        """As :meth:`DiskTier.read`."""
        return self._tier.read(blocks, expected, arena, dst_blocks, lane=self._number)

    def close(self) -> None:
        """Nothing: the tier closes its files."""


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
    lanes : sequence of Lane, optional
        For groups of layers, whose slots differ in size: `num_blocks` then counts extents, and `block_bytes` is the
        page of lane 0. A lane is another tier of the same directory, see `lane`.
        `segment_bytes` is then rounded down to whole extents, and `shards` are the lanes'.
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
        lanes: Sequence[Lane] = (),
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
        if lanes and parse_lanes(pack_lanes(lanes))[0].page_bytes != block_bytes:
            raise InvalidArgument(f"block_bytes {block_bytes} is not the page of lane 0, {lanes[0].page_bytes} bytes")
        self.block_bytes, self._block_tokens = int(block_bytes), block_tokens
        self._store = Store(
            path,
            int(num_blocks),
            self.block_bytes,
            fingerprint=fingerprint,
            block_tokens=block_tokens,
            shards=shards,
            segment_bytes=segment_bytes,
            read_path=read_path,
            page_cache=page_cache,
            on_mismatch=on_mismatch,
            network_fs=network_fs,
            lanes=tuple(lanes),
        )
        self._abandon = weakref.finalize(self, self._store.close)  # a tier dropped without close unlocks at least
        self._abandon.atexit = False  # a mover may still write then, to descriptors that were reused
        state = self._store.superblock
        self._breaker = CircuitBreaker(self.path, self._store.never_writes, Clock(clock))
        self._ages = Ages(self._store.first_generation, dict(state.purges))
        self._geometries = tuple(each.geometry for each in self._store.segments)
        forms = [SlotFormat(each, state.uuid, fingerprint, state.epoch) for each in self._geometries]
        if lanes:
            forms = [replace(form, fingerprint=lane_fingerprint(fingerprint, i)) for i, form in enumerate(forms)]
        self._lanes = Lanes(self._store.segments, forms, self._ages, self._breaker, self.path)
        self.num_blocks = self._geometries[0].num_blocks
        self._most_purges = most_purges(state.lanes)
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
            self._store.files.forget_cached()
        self._lanes.take_over(self._on_progress)
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
        return self.lane_write_bytes[0]

    @property
    def lane_write_bytes(self) -> tuple[int, ...]:
        """The same by lane."""
        return tuple(each.header_bytes + each.slot_bytes for each in self._geometries)

    @property
    def num_lanes(self) -> int:
        """Sizes of slots in the store, 1 without lanes."""
        return len(self._geometries)

    def lane(self, number: int) -> DiskLane:
        """The slots of one lane as a tier of their own, for a mover: open as long as this one."""
        return DiskLane(self, number, self._geometry(number))

    def _geometry(self, lane: int) -> Geometry:
        if not isinstance(lane, int) or not 0 <= lane < self.num_lanes:
            raise InvalidArgument(f"lane {lane!r} is not one of the {self.num_lanes} of disk tier {self.path}")
        return self._geometries[lane]

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
        self, blocks: Any, records: Sequence[Record], arena: NDArray[np.uint8], src_blocks: Any, *, lane: int = 0
    ) -> NDArray[np.bool_]:
        """Store rows of an arena under their names.

        Parameters
        ----------
        blocks : int32 [n]
            Slots to fill, each once; their old content is lost.
        records : n records
        arena : uint8 [*, block_bytes], CPU memory, the bytes of a row side by side
        src_blocks : int32 [n]
            Rows of `arena`.
        lane : of the slots.

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
        slots, rows = self._check(blocks, records, arena, src_blocks, "src_blocks", lane)
        if np.unique(slots).size != slots.size:
            raise InvalidArgument("blocks must differ from each other in one write")
        with self._gate.inside(waits=False) as may:
            if not may:
                return self._lanes.slots[lane].refuse_write(slots)
            self._check_owner()
            return self._lanes.write(lane, slots, records, arena, rows)

    def read(
        self, blocks: Any, expected: Sequence[Record], arena: NDArray[np.uint8], dst_blocks: Any, *, lane: int = 0
    ) -> NDArray[np.bool_]:
        """Fill rows of an arena with the blocks stored under the expected names.

        Parameters
        ----------
        blocks : int32 [n]
            Slots.
        expected : n records
        arena : uint8 [*, block_bytes], CPU memory, the bytes of a row side by side
        dst_blocks : int32 [n]
            Rows of `arena`, each once.
        lane : of the slots.

        Returns
        -------
        bool [n]: True means the row holds exactly the bytes stored under that record; False is a counted miss,
        and the row's bytes mean nothing. All are misses at once where a write would fail at once.

        Raises
        ------
        WrongType, InvalidArgument, ClosedError, TierError
            As `write`.
        """
        slots, rows = self._check(blocks, expected, arena, dst_blocks, "dst_blocks", lane)
        check_arena(arena, arena.shape[1], writeable=True)
        if np.unique(rows).size != rows.size:
            raise InvalidArgument("dst_blocks must differ from each other in one read")
        with self._gate.inside(waits=False) as may:
            of = self._lanes.slots[lane]
            return of.read(slots, expected, arena, rows) if may else of.refuse_read(slots)

    def invalidate(self, blocks: Any, *, lane: int = 0) -> None:
        """Make slots hold nothing, also after a reopen (if the tombstones can be written).

        Raises
        ------
        WrongType, InvalidArgument, ClosedError, TierError
        """
        slots = block_ids(blocks, self._geometry(lane).num_blocks, "blocks")
        with self._gate.inside():
            self._lanes.slots[lane].bury(slots)

    def records(self, *, lane: int = 0) -> Iterator[StoredBlock]:
        """Every block that a lane of the store holds, by ascending id, to rebuild an index.

        Headers are read and checked here; payloads are checked when they are read.

        Raises
        ------
        ClosedError, TierError
        """
        self._geometry(lane)
        of = self._lanes.slots[lane]
        with self._gate.inside():
            scan, slots = Scan(self._store.segments[lane], of.form), of.live()
        for part in scan.parts(slots):
            with self._gate.inside():
                found = [entry for entry in scan.records(part) if of.holds(*entry)]
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
            self._ages.void(namespace)
            if len(self._ages.purges()) <= self._most_purges:
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
        return replace(self._lanes.stats(), progress_failures=failures)

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
        self._lanes.slots[0].count_hung(num_blocks)
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
                self._saved(clean=True, next_generation=self._ages.next)
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
        self, blocks: Any, records: Sequence[Record], arena: NDArray[np.uint8], rows: Any, what: str, lane: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        geometry = self._geometry(lane)
        slots = block_ids(blocks, geometry.num_blocks, "blocks")
        check_arena(arena, geometry.block_bytes)
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
            self._lanes.sync()
        except OSError as problem:
            log.warning("disk tier %s: sync failed: %s", self.path, problem)
            self._breaker.wrote(0, [problem.errno or errno.EIO])
            return False
        return True

    def _saved(self, **changes: Any) -> bool:
        """Save the superblock with all pending purges and clears; whether it is on the device."""
        self._check_owner()
        barriers = tuple(self._ages.purges().items())
        if self._store.never_writes or self._breaker.hangs or len(barriers) > self._most_purges:
            return False
        try:
            self._store.update(epoch=self._lanes.epoch, purges=barriers, **changes)
        except OSError as problem:
            log.warning("disk tier %s: the superblock could not be written: %s", self.path, problem)
            self._breaker.wrote(0, [problem.errno or errno.EIO])
            return False
        return True

    def _try_to_forget_purges(self) -> bool:
        """Bury all purged blocks, so that the superblock need not list them; whether it is durable."""
        try:
            if not self._lanes.bury_void():
                return False
        except OSError as problem:
            log.warning("disk tier %s: purged blocks could not be buried: %s", self.path, problem)
            return False
        return self._saved()

    def _forget_all(self) -> None:
        self._lanes.forget_all()
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
