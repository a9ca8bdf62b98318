"""A store on a Valkey or Redis server, by redis-py.

A connection on which anything failed is closed and never used again: its next reply would answer the last question.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.tiers.remote.connecting import Attempt, Dialer, refusal
from pagedkv.tiers.remote.connection import Refused, Wire, ask, bulk, printable, word_of
from pagedkv.tiers.remote.store import Came, Unreachable, count_into

WINDOW_BYTES = 8 << 20  # sent at a time on one connection
AHEAD_BYTES = 2 << 20  # asked for before they are read: the server copies all of it before it sends any
WINDOW_KEYS = 4096
MOST_IDLE = 16  # connections
OLDEST = (7, 0)
MOST_FOUND = 1 << 16  # keys of one answer to SCAN; it is asked for 1,000


class ValkeyStore:
    """One server. Any thread may call it; each call takes a connection of its own.

    A replica serves, too: it answers reads, and refuses writes as ``"READONLY"``.

    Parameters
    ----------
    url : ``valkey://``, ``valkeys://`` (TLS), ``redis://``, ``rediss://`` or ``unix://``, with user, password and
        database, as redis-py takes it.
    connect_s : seconds that a call waits for a connection, within its own limit. The connection goes on being opened
        where that is less, and serves the next call.
    ttl_s : seconds until the server forgets a value; None for as long as it has room.
    ca_file : certificates to trust in place of the system's.

    Raises
    ------
    ImportError
        redis-py is not installed.
    InvalidArgument
        The URL is none, or has options that are not known, or `ca_file` cannot be read. The message does not repeat
        the URL.
    """

    def __init__(
        self, url: str, *, connect_s: float = 0.5, ttl_s: int | None = None, ca_file: str | None = None
    ) -> None:
        self._dialer = Dialer(url, connect_s, ca_file)
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._left: list[Attempt[Wire]] = []  # whose calls have given up
        self._pid = os.getpid()
        self._closed = False
        self._expire = b"" if ttl_s is None else b"$2\r\nEX\r\n" + bulk(b"%d" % ttl_s)
        self._words = 3 if ttl_s is None else 5

    # ---- a Store

    def open(self, until: float) -> None:
        """Connect and look what server it is; see :meth:`Store.open`."""
        try:
            facts = self.info(until)
        except Unreachable as problem:
            if problem.kind == "protocol":
                raise TierError(
                    f"this is no Valkey or Redis server ({problem}): is the port another service's, or its TLS port?"
                ) from None
            if problem.kind == "closed":
                raise Unreachable("closed", f"{problem}; is it a port with TLS, which valkeys:// is for?") from None
            raise
        version, numbers = version_of(facts)
        if numbers < OLDEST:
            raise TierError(
                f"the server is of version {version}; a remote store needs Valkey, or Redis 7.0 or newer"
            )
        if facts.get("cluster_enabled") == "1" or facts.get("redis_mode") == "cluster":
            raise TierError(
                "the server is a node of a cluster: pass cluster=True, or name a server that is in none"
            )

    def info(self, until: float) -> dict[str, str]:
        """See :meth:`Tells.info`."""
        with self._wire(until) as wire:
            wire.send(ask(b"INFO"), until)
            try:
                return facts_of(wire.text(until))
            except Refused as problem:
                raise refusal(problem.line, "INFO") from None

    def exists(self, keys: Sequence[str], until: float) -> list[bool]:
        """See :meth:`Store.exists`."""
        found: list[bool] = []
        with self._wire(until) as wire:
            for start in range(0, len(keys), WINDOW_KEYS):
                part = keys[start : start + WINDOW_KEYS]
                wire.send(b"".join(ask(b"EXISTS", key.encode()) for key in part), until)
                for _ in part:
                    reply = wire.line(until)
                    if reply not in (b":0", b":1"):
                        _refuse(reply)
                    found.append(reply == b":1")
        return found

    def get_into(
        self,
        keys: Sequence[str],
        heads: NDArray[np.uint8],
        rows: Sequence[NDArray[np.uint8]],
        until: float,
        came: Came,
    ) -> None:
        """See :meth:`Store.get_into`."""
        if not keys:
            return
        ahead = max(2, AHEAD_BYTES // max(1, rows[0].nbytes + heads[0].nbytes))
        asked = 0
        with self._wire(until) as wire:
            for i in range(len(keys)):
                if asked - i <= ahead // 2 and asked < len(keys):
                    part = keys[asked : i + ahead]
                    wire.send(b"".join(ask(b"GET", key.encode()) for key in part), until)
                    asked += len(part)
                came(i, wire.value([heads[i].data, rows[i].data], until))

    def put(
        self, keys: Sequence[str], values: Iterable[tuple[bytes, NDArray[np.uint8]]], until: float
    ) -> list[str]:
        """See :meth:`Store.put`."""
        answers: list[str] = []
        unanswered = size = 0
        with self._wire(until) as wire:
            for key, (head, row) in zip(keys, values, strict=True):
                name, num_bytes = key.encode(), len(head) + row.nbytes
                ask = b"*%d\r\n$3\r\nSET\r\n" % self._words + bulk(name) + b"$%d\r\n" % num_bytes + head
                wire.send(ask, until)
                wire.send(row.data, until)
                wire.send(b"\r\n" + self._expire, until)
                unanswered, size = unanswered + 1, size + num_bytes
                if size >= WINDOW_BYTES or unanswered >= WINDOW_KEYS:
                    answers += [_stored(wire.line(until)) for _ in range(unanswered)]
                    unanswered = size = 0
            answers += [_stored(wire.line(until)) for _ in range(unanswered)]
        return answers

    def remove(self, keys: Sequence[str], until: float) -> None:
        """See :meth:`Store.remove`."""
        with self._wire(until) as wire:
            self._unlink(wire, list(keys), until)

    def remove_group(self, prefix: str, until: float) -> int:
        """See :meth:`Store.remove_group`."""
        with self._wire(until) as wire:
            return sum(self._unlink(wire, keys, until) for keys in self._scan(wire, prefix, until))

    def groups(self, prefix: str, until: float) -> dict[str, dict[str, int]]:
        """See :meth:`Lists.groups`."""
        found: dict[str, dict[str, int]] = {}
        with self._wire(until) as wire:
            for keys in self._scan(wire, prefix, until):
                wire.send(b"".join(ask(b"STRLEN", key) for key in keys), until)
                for key in keys:
                    reply = wire.line(until)
                    size = int(reply[1:]) if re.fullmatch(rb":\d{1,12}", reply) else 0
                    count_into(found, group_of(key, prefix), size)
        return found

    def close(self) -> None:
        """See :meth:`Store.close`."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            idle, left, self._idle, self._left = self._idle, self._left, [], []
        for wire in idle:
            wire.close()
        for attempt in left:
            attempt.abandon()

    # ---- inside

    @contextlib.contextmanager
    def _wire(self, until: float) -> Iterator[Wire]:
        """A connection for one call; it is kept only where the call has not raised."""
        wire = self._take(until)
        try:
            yield wire
        except BaseException:
            wire.close()
            raise
        if wire.is_clean:
            self._give_back(wire)
        else:
            wire.close()
            raise Unreachable("protocol", "the server sent more than it was asked for")

    def _give_back(self, wire: Wire) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < MOST_IDLE:
                self._idle.append(wire)
                return
        wire.close()

    def _take(self, until: float) -> Wire:
        """A connection, the caller's alone from now on."""
        if self._pid != os.getpid():
            raise Unreachable("closed", f"this store belongs to process {self._pid}; a forked child opens its own")
        while wire := self._pop_idle():
            if wire.is_quiet:
                return wire
            wire.close()
        with self._lock:
            attempt = self._left.pop() if self._left else None
        if attempt is None or attempt.has_failed:
            try:
                attempt = Attempt(self._dialer.connect)
            except RuntimeError:
                raise Unreachable("connect", "this process has no thread left for connecting") from None
        connected = None
        try:
            connected = attempt.wait(min(until, time.monotonic() + self._connect_s))
        finally:
            if connected is None and not attempt.has_failed:
                self._leave(attempt)
        if connected is None:
            raise self._dialer.late()
        return connected

    def _pop_idle(self) -> Wire | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _leave(self, attempt: Attempt[Wire]) -> None:
        with self._lock:
            if not self._closed:
                self._left.append(attempt)
                return
        attempt.abandon()

    def _scan(self, wire: Wire, prefix: str, until: float) -> Iterator[list[bytes]]:
        """Keys that begin with `prefix`, some at a time; each that is there from beginning to end."""
        pattern = escaped(prefix) + b"*"
        cursor = b""
        while cursor != b"0":
            wire.send(ask(b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", b"1000"), until)
            if (reply := wire.line(until)) != b"*2":
                _refuse(reply)
            cursor = wire.text(until, 40)
            reply = wire.line(until)
            if not (reply.startswith(b"*") and reply[1:].isdigit() and len(reply) < 10):
                _refuse(reply)
            if (count := int(reply[1:])) > MOST_FOUND:
                raise Unreachable("protocol", "the server found more keys than it was asked for")
            keys = [wire.text(until, 4096) for _ in range(count)]
            yield [key for key in keys if key.startswith(prefix.encode())]

    def _unlink(self, wire: Wire, keys: list[Any], until: float) -> int:
        removed = 0
        for start in range(0, len(keys), WINDOW_KEYS):
            part = keys[start : start + WINDOW_KEYS]
            wire.send(b"".join(ask(b"UNLINK", key if isinstance(key, bytes) else key.encode()) for key in part), until)
            for _ in part:
                reply = wire.line(until)
                if reply not in (b":0", b":1"):
                    _refuse(reply)
                removed += reply == b":1"
        return removed


def group_of(key: bytes, prefix: str) -> str:
    """The part of a key behind `prefix`, without characters that a terminal would obey."""
    return printable(key[len(prefix) :].split(b":", 1)[0])


def facts_of(text: bytes) -> dict[str, str]:
    """What INFO answers, by name."""
    lines = (printable(line) for line in text.splitlines())
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def version_of(facts: Mapping[str, str]) -> tuple[str, tuple[int, ...]]:
    """A server's version by its INFO: as it says it, and its first two numbers."""
    version = facts.get("valkey_version") or facts.get("redis_version") or "unknown"
    return version[:40], tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)[:2])


def escaped(prefix: str) -> bytes:
    """A pattern of SCAN that means these characters alone."""
    return re.sub(r"([*?\[\]^\\-])", r"\\\1", prefix).encode()


def _stored(reply: bytes) -> str:
    """Why a SET was refused; "" where it was not."""
    if reply == b"+OK":
        return ""
    if not reply.startswith(b"-"):
        _refuse(reply)
    return word_of(reply)


def _refuse(reply: bytes) -> NoReturn:
    if reply.startswith(b"-"):
        raise Refused(reply)
    raise Unreachable("protocol", "the server answered something else than was asked")
