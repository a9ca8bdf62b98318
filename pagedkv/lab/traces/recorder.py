"""The trace recorder: a hook that writes a live cache's requests as a trace file.

The caller's thread copies the tokens and puts them in a queue; a thread of the recorder's hashes and writes them.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.block_table import BlockTable
from pagedkv.cache.cache import KVCache
from pagedkv.errors import InvalidArgument, PagedKVError, WrongType
from pagedkv.lab.traces.block_ids import MAX_KEY_BYTES, MIN_KEY_BYTES, BlockIds
from pagedkv.lab.traces.rows import Ordered, Row
from pagedkv.lab.traces.whole_lines import WholeLines
from pagedkv.observe.callbacks import Log, came_from_signal
from pagedkv.observe.hooks import Span
from pagedkv.spec.paths import path_text
from pagedkv.spec.sizes import number_of_seconds, parse_size, whole_number

log = Log(logging.getLogger("pagedkv.traces"))

KEY_BYTES = 32
MAX_QUEUED_TOKENS = 1 << 24  # 64 MiB of int32
MAX_QUEUED_REQUESTS = 1 << 14
GATHER_S = 0.02  # the writer pauses so long: waking it costs the caller's thread more than adding to its queue
MIN_WAITING = 1 << 12  # ended requests that wait for one which came before them


@dataclass(frozen=True, slots=True)
class TraceStats:
    """The counts of a recorder so far.

    Attributes
    ----------
    requests : lines in the file.
    bytes : size of the file.
    dropped : requests that came faster than they could be hashed and written, or that the recorder failed at.
    failed_writes : requests whose lines could not be written, for instance because the disk was full.
    over_limit : requests left out because the file had reached `max_bytes`.
    cut : lines written before their request had ended, with the output so far.
    """

    requests: int = 0
    bytes: int = 0
    dropped: int = 0
    failed_writes: int = 0
    over_limit: int = 0
    cut: int = 0


@dataclass(frozen=True, slots=True)
class _Began:
    handle: int
    t_ms: int
    tokens: NDArray[np.int32]
    namespace: bytes
    session: int | None
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class _Ended:
    handle: int
    num_tokens: int


class TraceRecorder:
    """Writes the requests of a live cache to a file that ``pagedkv replay`` reads.

    It records from its making until :meth:`close`; ``with TraceRecorder(cache, path): ...`` closes it. A line holds the
    time, the lengths of prompt and output, a number for each whole block of the prompt, and a number for the session.
    The numbers are hashes with a secret key that is not stored, and differ from one recording to the next; requests of
    different namespaces never share one. No token is written.

    Recording fails no request and waits for none: one that cannot be recorded is left out, counted in :meth:`stats` and
    logged once. Calls may come from any thread. The caller's thread spends about 50 us of CPU more on a request of 513
    tokens (docs/replay.md), of which the copy of the tokens is less than one: the rest are the spans and their hook.

    Parameters
    ----------
    cache : KVCache
        Of a Scheduler too: a request is recorded each time that it is admitted, so one that was suspended has a line
        for each time that it was taken up, with the tokens that it had by then as its prompt.
    path : of the file; an existing one is emptied. Only its owner may read it. ``~`` is the user's home.
    max_bytes : int or str, such as ``"1GiB"``
        The file grows no further.
    key : 16..64 bytes, optional
        Recordings with the same key give the same numbers to the same tokens, and a reader who has the key
        can check guesses of tokens against them. Default: a random one.
    clock : callable, optional
        Seconds, a number that never falls. Default: the system's.

    Raises
    ------
    InvalidArgument, WrongType
        Also where the file cannot be opened.
    """

    def __init__(
        self,
        cache: KVCache,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str = "1GiB",
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(cache, KVCache):
            hint = ": give it the scheduler's cache" if hasattr(cache, "schedule") else ""
            raise WrongType(f"a TraceRecorder records a KVCache, not a {type(cache).__name__}{hint}")
        file = path_text(path, "path")
        if key is not None and not isinstance(key, bytes):
            raise WrongType(f"key must be bytes, not {type(key).__name__}")
        if key is not None and not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise InvalidArgument(f"key must have {MIN_KEY_BYTES}..{MAX_KEY_BYTES} bytes, got {len(key)}")
        if not callable(clock):
            raise WrongType(f"clock must be callable, and a {type(clock).__name__} is not")
        most = whole_number(parse_size(max_bytes), "max_bytes", 1, 2**63 - 1)
        ids = BlockIds(os.urandom(KEY_BYTES) if key is None else key, cache.spec.block_size)
        self._cache, self._clock = cache, clock
        self._lock = threading.RLock()
        self._began_at, self._last_ms = clock(), 0
        self._queued: queue.SimpleQueue[_Began | _Ended | None] = queue.SimpleQueue()
        self._open: set[int] = set()  # handles of requests whose end is of interest
        self._queued_tokens = self._dropped = 0
        self._closed = False
        waiting = max(MIN_WAITING, cache.max_sequences)
        self._writer = _Writer(cache.table, WholeLines(file), ids, most, waiting, self._queued)
        self._writer.start()
        self._at_exit = weakref.finalize(self, _finish, self._writer, self._queued, os.getpid())
        try:
            cache.hooks.add(self)
        except BaseException:
            self._at_exit()
            raise

    # ---- as a hook

    def begin(self, span: Span) -> None:
        """A sequence that is about to be released has all its tokens now."""
        if span.name == "release":
            self._noting(self._ends, span)

    def end(self, span: Span, state: Any) -> None:
        """The cache has done something."""
        if span.name == "request" and span.error is None:
            self._noting(self._begins, span)

    def _noting(self, note: Callable[[Span], None], span: Span) -> None:
        try:
            note(span)
        except Exception as problem:  # MemoryError too: the request needs none of this
            if came_from_signal(problem):
                raise
            self._drop("a request could not be recorded", problem)

    def _begins(self, span: Span) -> None:
        sequence, table = span.subject, self._cache.table
        handle = sequence.row
        namespace = self._cache.placement.tree.name(int(table.roots([handle])[0]))
        tokens = table.tokens(handle)
        hits = sum(count for name, count in sequence.hit_tokens.items() if name != "partial")
        with self._lock:
            if self._closed:
                return
            waiting = self._queued_tokens - self._writer.taken_tokens
            if waiting + len(tokens) > MAX_QUEUED_TOKENS or self._queued.qsize() >= MAX_QUEUED_REQUESTS:
                self._drop("requests come faster than they can be recorded")
                return
            self._last_ms = max(self._last_ms, int(1000 * (self._clock() - self._began_at)))
            self._queued_tokens += len(tokens)
            self._open.add(handle)
            self._queued.put(_Began(handle, self._last_ms, tokens, namespace, sequence._session, hits))

    def _ends(self, span: Span) -> None:
        handle = int(span.attributes["row"])
        with self._lock:
            if handle not in self._open:  # a fork's, or of before the recording
                return
            self._open.discard(handle)
            self._queued.put(_Ended(handle, self._cache.table.info(handle).num_tokens))

    def _drop(self, what: str, problem: BaseException | None = None) -> None:
        self._dropped += 1
        if self._dropped == 1:
            log.warning("%s: the trace %s lacks some", what, self._writer.path, exc_info=problem)

    # ---- what there is

    @property
    def path(self) -> str:
        """The file's path."""
        return self._writer.path

    def stats(self) -> TraceStats:
        """Counters so far."""
        w = self._writer
        return TraceStats(w.requests, w.size, self._dropped + w.failed, w.failed_writes, w.over_limit, w.cut)

    def close(self, timeout_s: float = 60.0) -> None:
        """Stop recording, and write the requests that wait for it. A second call does nothing.

        Requests that are still running are written with their output so far.

        Parameters
        ----------
        timeout_s : how long to wait for a disk that hangs.
        """
        seconds = number_of_seconds(timeout_s, "timeout_s")
        with self._lock:
            if not self._closed:
                self._closed = True
                self._cache.hooks.remove(self)
        self._at_exit.detach()
        _finish(self._writer, self._queued, os.getpid(), seconds)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _finish(
    writer: _Writer, queued: queue.SimpleQueue[_Began | _Ended | None], pid: int, timeout_s: float = 60.0
) -> None:
    """End the writer's thread. A forked child has none, and leaves the file to its parent."""
    if pid != os.getpid() or writer.pid != pid:
        return
    queued.put(None)
    writer.hurry()
    writer.join(timeout_s)
    if writer.is_alive():
        log.warning("the trace %s could not be finished in %g s: its disk does not answer", writer.path, timeout_s)


class _Writer(threading.Thread):
    """Hashes and writes, beside the requests.

    Attributes
    ----------
    requests, failed_writes, over_limit, size : as in TraceStats.
    taken_tokens : of the requests that were taken from the queue.
    failed : requests that could not be hashed.
    """

    def __init__(
        self,
        table: BlockTable,
        file: WholeLines,
        ids: BlockIds,
        max_bytes: int,
        waiting: int,
        queued: queue.SimpleQueue[_Began | _Ended | None],
    ) -> None:
        super().__init__(name="pagedkv-trace", daemon=True)
        self.pid, self.path = os.getpid(), file.path
        self._table, self._file, self._ids, self._max_bytes, self._queued = table, file, ids, max_bytes, queued
        self._rows = Ordered(self._write, self._so_far, waiting)
        self._closing = threading.Event()
        self.requests = self.failed_writes = self.over_limit = self.taken_tokens = self.failed = 0

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._file.size

    @property
    def cut(self) -> int:
        """Lines written before their request had ended."""
        return self._rows.cut

    def run(self) -> None:
        """Take from the queue until it says that all is over."""
        try:
            while (item := self._queued.get()) is not None:
                self._try(item)
                if self._queued.empty():
                    self._closing.wait(GATHER_S)
            self._rows.finish()
        finally:
            self._file.close()

    def hurry(self) -> None:
        """Wait no longer for more work."""
        self._closing.set()

    def _try(self, item: _Began | _Ended) -> None:
        try:
            self._take(item)
        except Exception as problem:  # no memory, for one: the next request may be shorter
            self.failed += 1
            if self.failed == 1:
                log.warning("a request could not be hashed: the trace %s lacks some", self.path, exc_info=problem)

    def _take(self, item: _Began | _Ended) -> None:
        if isinstance(item, _Ended):
            self._rows.end(item.handle, item.num_tokens)
            return
        tokens, size = item.tokens, self._ids.block_size
        self.taken_tokens += len(tokens)
        session = None
        if item.session is not None:
            session = self._ids.session(item.session.to_bytes(8, "little"), item.namespace)
        block_ids = self._ids.of(tokens, item.namespace)
        self._rows.begin(item.handle, Row(item.t_ms, len(tokens), size, block_ids, item.hit_tokens, session))

    def _so_far(self, handle: int, row: Row) -> int:
        try:
            return self._table.info(handle).num_tokens - row.input_tokens
        except PagedKVError:  # its last reference went without a release
            return 0

    def _write(self, row: Row) -> None:
        line = row.line()
        if self._file.size + len(line) > self._max_bytes:
            self.over_limit += 1
            if self.over_limit == 1:
                log.warning("the trace %s has reached max_bytes = %d: it grows no further", self.path, self._max_bytes)
            return
        try:
            self._file.write(line)
        except OSError as problem:
            self.failed_writes += 1
            if self.failed_writes == 1:
                log.warning("the trace %s cannot be written, and lacks requests from now on: %s", self.path, problem)
            return
        self.requests += 1
