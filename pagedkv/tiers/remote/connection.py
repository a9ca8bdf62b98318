"""One RESP2 connection of redis-py, whose replies are read into the caller's memory.

redis-py's own reader copies a reply several times. This is the one file of the package that calls methods of a socket,
and it opens none. The protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP2).
"""

from __future__ import annotations

import time
from typing import Any

from pagedkv.tiers.remote.store import MISSING, UNUSABLE, Failure, Unreachable

BUFFER_BYTES = 16384  # the longest line; a read takes in as much
REPLIES = b"+-:$*"  # first bytes
SKIPPED = 4  # times the expected size: a longer value is no value of ours, and is not read to its end
VERSIONS = "redis 6 to 8"
WORDS = frozenset(  # of errors, as servers begin them; others do not become counters
    (
        *("ASK", "BUSY", "CLUSTERDOWN", "CROSSSLOT", "DENIED", "ERR", "LOADING", "MASTERDOWN", "MISCONF", "MOVED"),
        *("NOAUTH", "NOPERM", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN", "UNBLOCKED", "WRONGPASS", "WRONGTYPE"),
    )
)


class Refused(Unreachable):
    """The server answered with an error where a store has no use for one.

    Parameters
    ----------
    line : the error; the message has its first word alone, such as ``"NOAUTH"``.
    """

    def __init__(self, line: bytes) -> None:
        super().__init__("protocol", f"the server answered {word_of(line)}")
        self.line = line


class Wire:
    """A connection, from the moment that redis-py has opened it. One thread at a time.

    Where a call raises, the state of the connection is unknown: close it.

    Parameters
    ----------
    connection : of redis-py, connected, with ``protocol=2``.

    Raises
    ------
    ImportError
        This version of redis-py has no socket where it is expected.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._socket: Any = getattr(connection, "_sock", None)
        if not (all(hasattr(self._socket, name) for name in ("recv_into", "send", "settimeout"))):
            raise ImportError(f"this redis-py has no socket at Connection._sock: install {VERSIONS}")
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._at = self._end = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was read that no caller has asked for."""
        return self._at == self._end

    @property
    def is_quiet(self) -> bool:
        """Whether the server has sent nothing since its last answer, and is there."""
        if not self.is_clean:
            return False
        try:
            self._socket.settimeout(0)
            self._socket.recv_into(self._view[:1])
        except OSError as nothing:
            return type(nothing).__name__ in ("BlockingIOError", "SSLWantReadError")
        return False

    def send(self, data: Any, until: float) -> None:
        """Send bytes.

        Raises
        ------
        Unreachable
        """
        rest = memoryview(data)
        while rest.nbytes:  # not sendall: over TLS its limit begins anew with each piece
            self._limit(until)
            try:
                rest = rest[self._socket.send(rest) :]
            except OSError as problem:
                raise failed(problem) from None

    def line(self, until: float) -> bytes:
        """The next line, without its end.

        Raises
        ------
        Unreachable
        """
        while True:
            if self._at < self._end and self._buffer[self._at] not in REPLIES:
                raise Unreachable("protocol", "the server does not answer in Redis's protocol")
            if (stop := self._buffer.find(b"\r\n", self._at, self._end)) >= 0:
                break
            if self._at:
                self._view[: self._end - self._at] = bytes(self._view[self._at : self._end])
                self._at, self._end = 0, self._end - self._at
            if self._end == BUFFER_BYTES:
                raise Unreachable("protocol", "a line that does not end")
            self._end += self._receive(self._view[self._end :], until)
        line = bytes(self._view[self._at : stop])
        self._at = stop + 2
        return line

    def value(self, targets: list[memoryview], until: float) -> int:
        """Read the reply to a GET into `targets`, one after the other.

        Returns
        -------
        int
            Its size, that of all targets; MISSING; UNUSABLE where the key holds something else.

        Raises
        ------
        Unreachable
        Refused
            The server answers this question with an error, such as ``LOADING``: the value is not known to be wrong.
        """
        line = self.line(until)
        if line.startswith(b"-"):
            if word_of(line) == "WRONGTYPE":
                return UNUSABLE
            raise Refused(line)
        size = length_of(line)
        if size < 0:
            return MISSING
        expected = sum(map(len, targets))
        if size == expected:
            for target in targets:
                self._fill(target, until)
        elif size <= SKIPPED * expected:
            self._skip(size, until)
        else:
            raise Unreachable("protocol", "a value far longer than a block")
        end = bytearray(2)
        self._fill(memoryview(end), until)
        if end != b"\r\n":
            raise Unreachable("protocol", "a value that does not end where it should")
        return size if size == expected else UNUSABLE

    def text(self, until: float, longest: int = 1 << 20) -> bytes:
        """A bulk reply of at most so many bytes, such as that to INFO.

        Raises
        ------
        Unreachable
        Refused
            The server answered with an error.
        """
        line = self.line(until)
        if line.startswith(b"-"):
            raise Refused(line)
        size = length_of(line)
        if not 0 <= size <= longest:
            raise Unreachable("protocol", "a reply of no sensible length")
        text = bytearray(size + 2)
        self._fill(memoryview(text), until)
        return bytes(text[:size])

    def close(self) -> None:
        """End it."""
        self._connection.disconnect()

    def _limit(self, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise Unreachable("timeout", "no answer in time")
        self._socket.settimeout(left)

    def _receive(self, target: memoryview, until: float) -> int:
        self._limit(until)
        try:
            got: int = self._socket.recv_into(target)
        except OSError as problem:
            raise failed(problem) from None
        if not got:
            raise Unreachable("closed", "the server closed the connection")
        return got

    def _fill(self, target: memoryview, until: float) -> None:
        have = min(len(target), self._end - self._at)
        target[:have] = self._view[self._at : self._at + have]
        self._at += have
        while have < len(target):
            have += self._receive(target[have:], until)

    def _skip(self, size: int, until: float) -> None:
        rubbish = memoryview(bytearray(min(size, BUFFER_BYTES)))
        while size:
            part = rubbish[: min(size, len(rubbish))]
            self._fill(part, until)
            size -= len(part)


def bulk(word: bytes) -> bytes:
    """A word of a command."""
    return b"$%d\r\n%s\r\n" % (len(word), word)


def ask(*words: bytes) -> bytes:
    """A command."""
    return b"*%d\r\n" % len(words) + b"".join(map(bulk, words))


def length_of(line: bytes) -> int:
    """The length that begins a bulk reply; -1 where there is no value.

    Raises
    ------
    Unreachable
    """
    digits = line[1:]
    if not line.startswith(b"$") or not (digits == b"-1" or (digits.isdigit() and len(digits) < 16)):
        raise Unreachable("protocol", "the answer is no value")
    return int(digits)


def word_of(line: bytes) -> str:
    """The first word of an error reply if servers say it, such as ``"OOM"``; else ``"ERR"``."""
    word = printable(line[1:].split(b" ", 1)[0])
    return word if word in WORDS else "ERR"


def printable(text: bytes) -> str:
    """A server's text for people: each character that a terminal would obey is a question mark."""
    return "".join(one if one.isprintable() else "?" for one in text.decode("utf-8", "replace"))


def failed(problem: OSError) -> Unreachable:
    """The failure that a socket's error stands for."""
    kind: Failure = "timeout" if isinstance(problem, TimeoutError) else "closed"
    return Unreachable(kind, "no answer in time" if kind == "timeout" else f"the connection broke: {problem.strerror}")
