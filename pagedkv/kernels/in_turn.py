"""Orders the work of one workspace: launches on another stream wait for the earlier ones.

An event on the earlier stream is recorded only when the stream changes, so a stream must exist until a call on another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pagedkv.errors import InvalidArgument

Result = TypeVar("Result")


class InTurn:
    """The streams of one workspace, one after another.

    Parameters
    ----------
    cupy : the module.
    stream_of : a caller's stream, or None for the current one, as an object with ``ptr``.
    """

    def __init__(self, cupy: Any, stream_of: Callable[[Any], Any]) -> None:
        self._cupy, self._stream_of = cupy, stream_of
        self._event: Any = None
        self._last: Any = None  # held: CuPy destroys a stream with its last reference
        self._pointer: int | None = None
        self._launching = threading.RLock()

    def take(self, stream: Any, launch: Callable[..., Result], *arguments: Any) -> Result:
        """Return ``launch(*arguments)``; the stream waits for the earlier launches on others.

        A thread whose turn it is not waits until the other's launches are made.

        Parameters
        ----------
        stream : as a backend's launch takes it; `launch` launches on it alone.

        Raises
        ------
        InvalidArgument
            The launches so far are being captured, and this stream is not: it cannot wait for a graph.
        """
        given = self._stream_of(stream)
        pointer = int(given.ptr)
        with self._launching:
            if pointer != self._pointer:
                if self._pointer is not None:
                    self._wait(pointer, self._pointer)
                self._last, self._pointer = given, pointer
            return launch(*arguments)

    def _wait(self, pointer: int, last: int) -> None:
        runtime = self._cupy.cuda.runtime
        is_captured, was_captured = (bool(runtime.streamIsCapturing(one)) for one in (pointer, last))
        if was_captured and not is_captured:
            raise InvalidArgument(
                f"this attention is being captured into a graph on stream {last:#x}, and its workspace serves one "
                f"stream at a time: end the capture before a run on stream {pointer:#x}, or make another attention"
            )
        if is_captured and not was_captured:  # a graph cannot wait for work outside; it runs when it is launched
            return
        if self._event is None:
            self._event = self._cupy.cuda.Event(disable_timing=True)
        runtime.eventRecord(self._event.ptr, last)
        runtime.streamWaitEvent(pointer, self._event.ptr)
