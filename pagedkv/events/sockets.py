"""The ZeroMQ sockets of a publisher: the one file that imports pyzmq.

PUB sends ``[topic, sequence, payload]`` and drops messages that a slow subscriber has no room for. A DEALER asks the
ROUTER with ``[b"", first sequence]`` and gets ``[b"", topic, sequence, payload]`` for each message, and at the end
sequence -1 with an empty payload. Sequences are 8 bytes, big-endian.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any

from pagedkv import extras
from pagedkv.errors import AddressInUse, InvalidArgument

LAST_PORT = 65_535
LONGEST_MS = 60_000  # of one look; ZeroMQ takes an int of milliseconds
END = (-1).to_bytes(8, "big", signed=True)


def missing() -> str:
    """What to do where a package of the extra is not installed."""
    return f"KV events need pyzmq and msgspec: {extras.command('events')}"


class Sockets:
    """A PUB, perhaps a ROUTER, and a pair that wakes the thread that waits for the ROUTER.

    PUB belongs to the caller that holds the publisher's lock, the others to the thread that serves.

    Parameters
    ----------
    endpoint, replay : where they listen, as ``tcp://127.0.0.1:5557`` or ``ipc:///run/kv``; the system chooses a port
        ``*``. None: no ROUTER.
    topic : first frame of each message.
    queued : messages that wait for one subscriber at most.
    replayed : messages that wait for one asker at most.

    Attributes
    ----------
    endpoint, replay : where they listen, with the port that the system chose.

    Raises
    ------
    ImportError
        pyzmq is not installed.
    AddressInUse, InvalidArgument
    """

    def __init__(self, endpoint: str, replay: str | None, topic: bytes, queued: int, replayed: int) -> None:
        try:
            import zmq
        except ImportError:
            raise ImportError(missing()) from None
        self._zmq, self._topic = zmq, topic
        self._context = zmq.Context()
        self.replay: str | None = None
        self._router: Any = None
        try:
            self._pub = self._open(zmq.PUB, queued)
            self.endpoint = self._listen(self._pub, endpoint)
            if replay is not None:
                self._router = self._open(zmq.ROUTER, replayed)
                self.replay = self._listen(self._router, replay)
            self._woken, self._waker = self._open(zmq.PAIR, 0), self._open(zmq.PAIR, 0)
            self._woken.bind("inproc://wake")
            self._waker.connect("inproc://wake")
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _open(self, kind: int, queued: int) -> Any:
        opened = self._context.socket(kind)
        opened.linger = 0
        opened.sndhwm = queued
        return opened

    def _listen(self, opened: Any, endpoint: str) -> str:
        port = endpoint.rpartition(":")[2]
        if endpoint.startswith("tcp:") and port.isdecimal() and int(port) > LAST_PORT:  # ZeroMQ would take another one
            raise InvalidArgument(f"cannot listen at {endpoint!r}: the last port is {LAST_PORT}")
        try:
            opened.bind(endpoint)
        except self._zmq.ZMQError as problem:
            if problem.errno == errno.EADDRINUSE:
                raise AddressInUse(endpoint) from None
            raise InvalidArgument(f"cannot listen at {endpoint!r}: {problem}; write tcp://127.0.0.1:5557") from None
        return str(opened.last_endpoint.rstrip(b"\0").decode())

    def send(self, number: int, payload: bytes) -> None:
        """One message to all subscribers; waits for none of them."""
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def asked(self, within_s: float | None) -> tuple[bytes, int | None] | None:
        """The next question: who asks, and from which message on, None if it cannot be read.

        None when the time is over, or :meth:`wake` was called.
        """
        poller = self._zmq.Poller()
        for one in (self._router, self._woken):
            if one is not None:
                poller.register(one, self._zmq.POLLIN)
        ready = dict(poller.poll(None if within_s is None else max(0, min(LONGEST_MS, round(1000 * within_s)))))
        if self._router is None or self._router not in ready or self._woken in ready:
            return None
        who, *frames = self._router.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            return who, None
        return who, int.from_bytes(frames[1], "big")

    def answer(self, who: bytes, kept: Iterable[tuple[int, bytes]]) -> None:
        """Messages for the one who asked, and the end. Those that he has no room for are dropped."""
        for number, payload in kept:
            self._router.send_multipart([who, b"", self._topic, number.to_bytes(8, "big"), payload])
        self._router.send_multipart([who, b"", self._topic, END, b""])

    def wake(self) -> None:
        """End the wait of the thread that serves. Not by two threads at once."""
        self._waker.send(b"")

    def close(self) -> None:
        """Close all; no thread uses them any more."""
        self._context.destroy(linger=0)
