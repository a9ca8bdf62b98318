"""ZmqPublisher: numbered messages of a cache's changes, and their replay."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any

from pagedkv._core.events import KVEvent
from pagedkv.cache.cache import KVCache
from pagedkv.errors import ClosedError, InvalidArgument, WrongType
from pagedkv.events.sockets import Sockets, missing
from pagedkv.events.wire import BLOCKS, Event, Label, Translator, messages, num_blocks
from pagedkv.observe.callbacks import Log
from pagedkv.spec.sizes import number_of_seconds, whole_number
from pagedkv.threads.monitor import Monitor

LEAST_KEPT = 16
MAX_TOPIC_BYTES = 255
QUEUED = 100_000  # messages for one subscriber, as vLLM's
PAUSE_S = 0.05  # of the thread, after a failure

log = Log(logging.getLogger("pagedkv.events"))


class ZmqPublisher:
    """Publishes the changes of a cache as KV events, in vLLM's format.

    The first message, and one after any loss, clears a subscriber's knowledge and tells all that the cache has. The
    publisher takes the events of the cache: ``cache.events()`` beside it would take some away. Any thread may call it.

    Parameters
    ----------
    cache : KVCache
        Opened with ``event_words``, enough for the changes between two calls of :meth:`publish`; with fewer, messages
        tell all anew. A block takes ``block_size + 3`` words, and each event 12.
    endpoint : str
        Where subscribers connect. Every process that can connect can read the tokens of prompts; ``tcp://*:5557``
        admits all machines, without password and encryption.
    replay : str, optional
        Where a subscriber that missed messages asks for them.
    topic : str
        First frame of each message.
    keep : int
        Messages that are kept to be asked for. Who asks for an older one makes the publisher tell all anew.
    data_parallel_rank : int or None
        Stands in each message.
    label : callable, optional
        ``label(digest)`` returns the :class:`Labels` of the namespace with this ``Namespace.digest()``, or None: events
        of that namespace are not published. Default: all are, without labels.
    every_s : float, optional
        A thread publishes every so many seconds. Default: the host calls :meth:`publish`, after each step, say.
    first_sequence : int
        Number of the first message. Routers take a number below the last one for a restart, or ignore it: Dynamo's
        indexer 1.6 does so until the worker is registered again. ``int(1000 * time.time())`` rises with each restart.
    max_queued : int
        Messages that wait for one subscriber; more are dropped, and it finds a gap in the sequence.

    Attributes
    ----------
    endpoint, replay : str
        Where they listen; where a port was ``*``, with that of the system's choice.

    Raises
    ------
    ImportError
        pyzmq or msgspec is not installed.
    AddressInUse, InvalidArgument, WrongType
    """

    def __init__(
        self,
        cache: KVCache,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay: str | None = None,
        topic: str = "",
        keep: int = 10_000,
        data_parallel_rank: int | None = 0,
        label: Label | None = None,
        every_s: float | None = None,
        first_sequence: int = 0,
        max_queued: int = QUEUED,
    ) -> None:
        if not isinstance(cache, KVCache):
            raise WrongType(f"cache must be a KVCache, not {type(cache).__name__}")
        if not cache.placement.event_words:
            raise InvalidArgument("this cache has no events: open it with event_words, such as event_words=1 << 20")
        for name, value in {"endpoint": endpoint, "topic": topic, "replay": "" if replay is None else replay}.items():
            if not isinstance(value, str):
                raise WrongType(f"{name} must be text, not {type(value).__name__}")
        if not topic.isprintable() or len(topic.encode()) > MAX_TOPIC_BYTES:
            limit = f"printable text of at most {MAX_TOPIC_BYTES} bytes"
            raise InvalidArgument(f"topic must be {limit}, not {topic[:64]!r}")
        self._keep = whole_number(keep, "keep", LEAST_KEPT, 1 << 24)
        queued = whole_number(max_queued, "max_queued", 1, 1 << 24)
        self._rank = data_parallel_rank
        if data_parallel_rank is not None:
            self._rank = whole_number(data_parallel_rank, "data_parallel_rank", 0, 1 << 31)
        if label is not None and not callable(label):
            raise WrongType(f"label must be callable, not {type(label).__name__}")
        self._every_s = None if every_s is None else number_of_seconds(every_s, "every_s")
        if self._every_s == 0:
            raise InvalidArgument("every_s must be more than 0 seconds")
        try:
            self._encode = importlib.import_module("msgspec.msgpack").Encoder().encode
        except ImportError:
            raise ImportError(missing()) from None
        self._placement = cache.placement
        self._translate = Translator(cache.spec.block_size, label, by_group=cache.placement.num_groups > 1)
        self._lock, self._ending = Monitor(), threading.RLock()  # a label's and a signal handler's calls enter again
        self._pid, self._closed, self._publishing, self._ended = os.getpid(), False, False, False
        self._ends_in = 0  # the thread that closed it inside a call of its own, which ends it
        self._next, self._lost = whole_number(first_sequence, "first_sequence", 0, 1 << 62), 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_all = False  # the oldest message that is kept clears a subscriber's knowledge
        self._is_new = True  # subscribers have to begin anew
        self._counts = dict.fromkeys(("messages", "events", "blocks", "snapshots", "replays", "refused", "failures"), 0)
        self._sockets = Sockets(endpoint, replay, topic.encode(), queued, 2 * self._keep + 2)
        self.endpoint, self.replay = self._sockets.endpoint, self._sockets.replay
        self._due = time.monotonic()
        self._thread: threading.Thread | None = None
        if self._every_s is not None or replay is not None:
            self._thread = threading.Thread(target=self._serve, name="pagedkv-events", daemon=True)
            self._thread.start()

    # ---- public

    def publish(self) -> int:
        """Send the changes since the last call. Waits for no subscriber.

        Returns
        -------
        int
            Events sent.

        Raises
        ------
        ClosedError
            It was closed, or this process was forked off.
        WrongType
            `label` returned neither Labels nor None. Subscribers begin anew with the next call.
        """
        self._check_process()
        try:
            with self._lock:
                if self._closed:
                    raise ClosedError("this publisher is closed")
                return self._publish_all()
        finally:
            self._end_if_asked()

    def stats(self) -> dict[str, int]:
        """Counts so far.

        ``messages``, ``events`` and ``blocks`` sent; ``snapshots``: times that all was told anew; ``replays`` asked
        for; ``refused``: questions that could not be read; ``failures`` of the thread that publishes.
        """
        return dict(self._counts)

    def close(self) -> None:
        """Stop the thread and close the sockets; messages under way are dropped. Twice is fine.

        Called by `label`, or by a signal handler, inside a `publish`, it takes effect when that is over.
        """
        if self._pid != os.getpid():
            return
        is_inside = self._lock.is_mine()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._sockets.wake()
        if is_inside:
            self._ends_in = threading.get_ident()
        else:
            self._end()

    def __enter__(self) -> ZmqPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_if_asked(self) -> None:
        """End where this thread was told to inside a call that is over now."""
        if self._ends_in == threading.get_ident() and not self._lock.is_mine():
            self._end()

    def _end(self) -> None:
        """End thread and sockets, once; a second caller waits for the first.

        The publisher's own thread does not: the first may be waiting for its end.
        """
        is_own = self._thread is threading.current_thread()
        if not self._ending.acquire(blocking=not is_own):
            return
        try:
            if not self._ended:
                if self._thread is not None and not is_own:
                    self._thread.join()
                self._sockets.close()
                self._ended = True
        finally:
            self._ending.release()

    # ---- inside; the caller holds the lock

    def _publish_all(self) -> int:
        if self._publishing:
            raise InvalidArgument("this publisher is publishing: a label or a signal handler cannot publish, too")
        self._publishing = True
        try:
            return self._publish()
        finally:
            self._publishing = False

    def _publish(self) -> int:
        events: list[KVEvent] = []
        if not self._is_new:
            self._is_new = True  # until all are sent: an exception in between loses none of them
            events, lost = self._placement.take_events()
            if lost == self._lost:
                return self._send(self._translate(events), BLOCKS)
        return self._begin_anew()

    def _begin_anew(self) -> int:
        """Clear what subscribers know, and tell all. It replaces all messages that were kept."""
        self._is_new = True
        found, self._lost = self._placement.snapshot_events()
        told = [{"type": "AllBlocksCleared"}, *self._translate(found)]
        self._kept.clear()
        self._kept_all = True
        self._counts["snapshots"] += 1
        blocks = sum(map(num_blocks, told))
        return self._send(told, max(BLOCKS, 2 * blocks // self._keep + 1))

    def _send(self, events: list[Event], blocks: int) -> int:
        for part in messages(events, blocks):
            payload = self._encode([time.time(), part, self._rank])
            self._kept.append((self._next, payload))
            if len(self._kept) > self._keep:
                self._kept.popleft()
                self._kept_all = False
            self._next += 1
            self._sockets.send(self._next - 1, payload)
            self._counts["messages"] += 1
            self._counts["events"] += len(part)
            self._counts["blocks"] += sum(map(num_blocks, part))
        self._is_new = False
        return len(events)

    # ---- the thread

    def _serve(self) -> None:
        while not self._closed:
            self._turn()
        self._end_if_asked()

    def _turn(self) -> None:
        """Publish if it is time, and answer one question."""
        try:
            if self._every_s is not None and time.monotonic() >= self._due:
                self._due = time.monotonic() + self._every_s
                with self._lock:
                    if not self._closed:
                        self._publish_all()
            asked = self._sockets.asked(None if self._every_s is None else self._due - time.monotonic())
            if asked is not None:
                self._replay(*asked)
        except Exception:
            self._counts["failures"] += 1
            if self._counts["failures"] == 1:
                log.exception("publishing KV events failed; it is tried again")
            time.sleep(PAUSE_S)

    def _replay(self, who: bytes, first: int | None) -> None:
        if first is None:
            self._counts["refused"] += 1
            return
        with self._lock:
            if self._closed:
                return
            self._counts["replays"] += 1
            if self._kept and first < self._kept[0][0] and not self._kept_all:
                self._begin_anew()
            kept = [(number, payload) for number, payload in self._kept if number >= first]
        self._sockets.answer(who, kept)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(f"this publisher belongs to process {self._pid}; a forked child must open one of its own")

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<ZmqPublisher {self.endpoint}, {self._counts['messages']} messages{state}>"

    def __reduce__(self) -> Any:
        raise WrongType("a ZmqPublisher belongs to its process, and cannot be pickled or copied: open another like it")
