"""Orders the work of one workspace: launches on another stream wait for the earlier ones.

Events are recorded only when the stream changes, so a stream must exist until a call outside captures on another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from pagedkv.errors import InvalidArgument
from pagedkv.kernels.captures import is_captured

Result = TypeVar("Result")


class InTurn:
    """The streams of one workspace, one after another.

    Parameters
    ----------
    cupy : the module.
    stream_of : a caller's stream, or None for the current one, as an object with ``ptr``.
    on_device : makes the workspace's device the current one.
    """

    def __init__(
        self, cupy: Any, stream_of: Callable[[Any], Any], on_device: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._cupy, self._stream_of, self._on_device = cupy, stream_of, on_device
        self._event: Any = None
        self._last: Any = None  # held: CuPy destroys a stream with its last reference
        self._pointer: int | None = None
        self._owed: dict[int, Any] = {}  # earlier streams that no graph could wait for; the next launch outside must
        self._launching = threading.RLock()

    def take(self, stream: Any, launch: Callable[..., Result], *arguments: Any) -> Result:
        """Return ``launch(*arguments)``; the stream waits for the earlier launches on others.

        A thread whose turn it is not waits until the other's launches are made.

        Parameters
        ----------
        stream : as a backend's launch takes it; `launch` launches on it alone. An object is one stream for ever.

        Raises
        ------
        InvalidArgument
            The launches so far are being captured, and this stream is not: it cannot wait for a graph.
        """
        with self._launching:
            if stream is None or stream is not self._last or self._owed:  # else nearly every launch
                given = self._stream_of(stream)
                pointer = int(given.ptr)
                if pointer != self._pointer or self._owed:
                    with self._on_device():
                        self._follow(pointer)
                self._last, self._pointer = given, pointer
            return launch(*arguments)

    def _follow(self, pointer: int) -> None:
        """Let a stream wait for the others; one that is being captured, for those of its graph."""
        runtime, latest, earlier = self._cupy.cuda.runtime, self._pointer, dict(self._owed)
        if latest is not None:
            earlier[latest] = self._last
        earlier.pop(pointer, None)
        if is_captured(runtime, pointer):  # a graph cannot wait for work outside; it runs when it is launched
            if latest is not None and latest != pointer and is_captured(runtime, latest):
                self._wait(pointer, latest)
            self._owed.update(earlier)
            return
        for last in earlier:
            if is_captured(runtime, last):
                raise InvalidArgument(
                    f"this attention is being captured into a graph on stream {last:#x}, and its workspace serves one "
                    f"stream at a time: end the capture before a run on stream {pointer:#x}, or make another attention"
                )
        for last in earlier:
            self._wait(pointer, last)
        self._owed.clear()

    def _wait(self, pointer: int, last: int) -> None:
        """Let a stream wait for all launches so far on another."""
        runtime = self._cupy.cuda.runtime
        if self._event is None:
            self._event = self._cupy.cuda.Event(disable_timing=True)
        runtime.eventRecord(self._event.ptr, last)
        runtime.streamWaitEvent(pointer, self._event.ptr)
