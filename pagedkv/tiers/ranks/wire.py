"""Frames over a unix socket, and the thread that reads and writes them.

The one file of the package that opens a socket; it opens unix sockets alone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from typing import NamedTuple, Protocol

from pagedkv.errors import AddressInUse, TierError
from pagedkv.threads import crew

MAGIC, VERSION = b"PKVk", 1
HEAD = struct.Struct("<4sBxHIQ")  # magic, kind, version, bytes of the payload, number of the call
MOST_HELLO, MOST_BYTES = 1 << 13, 1 << 28  # of a payload: before both sides have proved themselves, and after
RECEIVE = 1 << 18  # bytes of one read
AGAIN_S = 0.01  # until a thread without memory tries again
FLUSH_S = 1.0  # that the end of a loop may take


class Frame(NamedTuple):
    """One message."""

    kind: int
    call: int
    payload: bytes
    version: int = VERSION


class Broken(Exception):
    """A wire that cannot be used any more; its text says why. Never leaves this room."""


class Wire:
    """One end of a connection. Any thread may `put`; one thread does the rest.

    Parameters
    ----------
    end : connected socket.

    Attributes
    ----------
    most_bytes : of a payload that is accepted.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._coming = bytearray()
        self._going: deque[memoryview] = deque()
        self.most_bytes = MOST_HELLO

    def fileno(self) -> int:
        """For a selector."""
        return self._end.fileno()

    @property
    def has_more(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._going)

    def put(self, kind: int, call: int = 0, payload: bytes = b"") -> None:
        """Have a frame sent by the next `send`."""
        self._going.append(memoryview(HEAD.pack(MAGIC, kind, VERSION, len(payload), call) + payload))

    def send(self) -> None:
        """Send what waits, as far as the socket takes it. For the one thread that serves this wire.

        Raises
        ------
        Broken
        """
        try:
            while self._going:
                sent = self._end.send(self._going[0])
                self._going[0] = self._going[0][sent:]
                if not self._going[0]:
                    self._going.popleft()
        except BlockingIOError:
            return
        except OSError as problem:
            self._going.clear()
            raise Broken(f"has closed its connection ({problem.strerror})") from None

    def receive(self) -> list[Frame]:
        """Frames that are there.

        Raises
        ------
        Broken
            The other side is gone, or sent no frames of this version.
        """
        found: list[Frame] = []
        is_open = True
        while is_open and self._take():
            is_open = len(self._coming) < self.most_bytes
        while (frame := self._next()) is not None:
            if frame.version != VERSION:
                raise Broken(f"speaks version {frame.version}, and this process version {VERSION}")
            found.append(frame)
        return found

    def _take(self) -> bool:
        """Read once; whether bytes came."""
        try:
            part = self._end.recv(RECEIVE)
        except BlockingIOError:
            return False
        except OSError as problem:
            raise Broken(f"has closed its connection ({problem.strerror})") from None
        if not part:
            if self._is_whole():
                return False  # what came before counts; the next call finds the end
            raise Broken("has closed its connection")
        self._coming += part
        return True

    def _is_whole(self) -> bool:
        """Whether a whole frame has come that was not taken yet."""
        return len(self._coming) >= HEAD.size and len(self._coming) >= HEAD.size + HEAD.unpack_from(self._coming)[3]

    def _next(self) -> Frame | None:
        """The next frame that has come."""
        if len(self._coming) < HEAD.size:
            return None
        magic, kind, version, size, call = HEAD.unpack_from(self._coming)
        if magic != MAGIC or size > self.most_bytes:
            raise Broken("sent something that is no frame of ours")
        if len(self._coming) < HEAD.size + size:
            return None
        payload = bytes(memoryview(self._coming)[HEAD.size : HEAD.size + size])
        del self._coming[: HEAD.size + size]
        return Frame(kind, call, payload, version)

    def read(self, until: float) -> Frame:
        """Wait for one frame, of any version, until `until` of the monotonic clock.

        Raises
        ------
        Broken
            Also when the time is over.
        """
        with selectors.DefaultSelector() as ready:
            ready.register(self, selectors.EVENT_READ)
            while (frame := self._next()) is None:
                left = until - time.monotonic()
                if left <= 0:
                    raise Broken("did not answer in time")
                self.send()
                if ready.select(min(left, 0.05) if self.has_more else left):
                    self._take()
        return frame

    def close(self) -> None:
        """Close it. A second call does nothing."""
        self._end.close()


class Listener:
    """Waits for connections at a path, which only this user may use.

    Parameters
    ----------
    path : of the socket; made, and gone again after `close`.

    Raises
    ------
    AddressInUse, TierError
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._is_bound = False
        try:
            if _is_stale(path):
                os.unlink(path)
            self._end.bind(path)
            self._is_bound = True
            os.chmod(path, 0o600)
            self._end.listen(64)
            self._end.setblocking(False)
        except OSError as problem:
            self.close()
            if isinstance(problem, AddressInUse):
                raise
            raise TierError(f"cannot wait for ranks at {path}: {problem.strerror}") from problem

    def accept(self, until: float) -> Wire | None:
        """The next connection; None when the time is over."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._end, selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0:
                if ready.select(left):
                    with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                        return Wire(self._end.accept()[0])
        return None

    def close(self) -> None:
        """Accept no more, and remove the path."""
        self._end.close()
        if self._is_bound:
            self._is_bound = False
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def connect(path: str) -> Wire | None:
    """A connection to the listener at a path; None while there is none."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(path)
    except OSError:
        end.close()
        return None
    return Wire(end)


def _is_stale(path: str) -> bool:
    """Whether a socket lies at a path whose process is gone.

    Raises
    ------
    AddressInUse
        Its process is there.
    """
    if not os.path.lexists(path):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        try:
            end.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # no socket: to bind there fails, and says so
    raise AddressInUse(path)


class Handler(Protocol):
    """The calls of a loop, in its thread."""

    def frame(self, number: int, frame: Frame) -> None:
        """A frame came over the wire of that number."""

    def ended(self, number: int, why: str) -> None:
        """That wire is closed."""

    def tick(self) -> float:
        """Called before each wait; seconds that the wait may take at most."""


class Loop:
    """The thread that serves wires.

    Parameters
    ----------
    handler : Handler
    wires : by number.
    name : of the thread.
    """

    def __init__(self, handler: Handler, wires: dict[int, Wire], name: str) -> None:
        self._handler, self._wires = handler, dict(wires)
        self._near, self._far = socket.socketpair()
        for end in (self._near, self._far):
            end.setblocking(False)
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to call the handler."""
        crew.start(self.thread)

    def wake(self) -> None:
        """Have the thread look at its wires and its time again."""
        with contextlib.suppress(OSError):  # it was woken and has not looked yet, or is over
            self._far.send(b"w")

    def stop(self) -> None:
        """Have the thread send what waits, for a moment, close the wires, and end."""
        self._stopping = True
        self.wake()

    def is_mine(self) -> bool:
        """Whether the caller is the loop's thread."""
        return self.thread.ident == threading.get_ident()

    def drop(self, number: int, why: str) -> None:
        """Close one wire. For the handler, in the loop's thread."""
        wire = self._wires.pop(number, None)
        if wire is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._ready.unregister(wire)
            wire.close()
            self._handler.ended(number, why)

    def _run(self) -> None:
        with selectors.DefaultSelector() as self._ready:
            self._ready.register(self._near, selectors.EVENT_READ, None)
            for number, wire in self._wires.items():
                wire.most_bytes = MOST_BYTES
                self._ready.register(wire, selectors.EVENT_READ, number)
            for number, wire in list(self._wires.items()):
                self._serve(number, wire, selectors.EVENT_READ)  # what came with the last frame of the handshake
            while not self._stopping:
                self._turn(max(0.0, self._pause()))
            until = time.monotonic() + FLUSH_S
            while any(wire.has_more for wire in self._wires.values()) and time.monotonic() < until:
                self._turn(0.05)
            for number in list(self._wires):
                self.drop(number, "was closed")
            self._handler.tick()
            self._near.close()
            self._far.close()

    def _pause(self) -> float:
        """Seconds that the next wait may take."""
        try:
            return self._handler.tick()
        except MemoryError:  # the thread goes on
            return AGAIN_S

    def _turn(self, pause: float) -> None:
        """Wait for the wires once, and serve those that are ready."""
        for number, wire in self._wires.items():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.has_more else 0)
            if self._ready.get_key(wire).events != wanted:
                self._ready.modify(wire, wanted, number)
        for key, events in self._ready.select(pause):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._near.recv(RECEIVE)
            else:
                self._serve(key.data, self._wires.get(key.data), events)

    def _serve(self, number: int, wire: Wire | None, events: int) -> None:
        """Serve a ready wire, unless it was closed meanwhile."""
        if wire is None:
            return
        try:
            if events & selectors.EVENT_WRITE:
                wire.send()
            if events & selectors.EVENT_READ:
                for frame in wire.receive():
                    self._handler.frame(number, frame)
        except Broken as problem:
            self.drop(number, str(problem))
        except Exception as problem:  # the thread serves the other wires
            self.drop(number, f"sent something that could not be read ({type(problem).__name__}: {problem})")
