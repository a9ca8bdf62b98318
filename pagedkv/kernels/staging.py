"""Small arrays on their way to the GPU, through pinned memory.

The copy into pinned memory is made at once; the stream copies from there.

A copy from ordinary memory may make the host wait; a copy from pinned memory does not, but its source must stay as it
is until the copy has been made. So each piece of pinned memory has an event, and is used again after that.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument
from pagedkv.kernels.captures import is_barred

SMALLEST = 4096


@dataclass(slots=True)
class _Piece:
    memory: NDArray[np.uint8]  # pinned
    event: Any
    free: bool = False  # whether no launch is filling it now


class Staging:
    """Pinned memory of one device, as much as has ever been under way at once.

    Parameters
    ----------
    cupy : the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._pieces: list[_Piece] = []
        self._lock = threading.Lock()

    def copy(self, target: Any, source: NDArray[Any], stream: int) -> None:
        """Copy to a contiguous device array of as many bytes.

        The caller may change the source once this returns.

        Parameters
        ----------
        target : CuPy array.
        source : NumPy array.
        stream : pointer of the stream.

        Raises
        ------
        InvalidArgument
            The stream is being captured: a replay would copy whatever the pinned memory holds by then.
        """
        content = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        if not content.size:
            return
        runtime = self._cupy.cuda.runtime
        if is_barred(runtime, stream):
            raise InvalidArgument("arrays cannot be uploaded while the stream is captured into a graph: do it before")
        piece = self._take(content.size)
        try:
            piece.memory[: content.size] = content
            source_address = piece.memory.ctypes.data
            runtime.memcpyAsync(target.data.ptr, source_address, content.size, runtime.memcpyHostToDevice, stream)
            runtime.eventRecord(piece.event.ptr, stream)
        finally:
            piece.free = True

    def _take(self, size: int) -> _Piece:
        with self._lock:
            for piece in self._pieces:
                if piece.free and piece.memory.size >= size and piece.event.done:
                    piece.free = False
                    return piece
            room = max(SMALLEST, 1 << (size - 1).bit_length())
            pinned = self._cupy.cuda.alloc_pinned_memory(room)
            memory = np.frombuffer(pinned, np.uint8, room)
            piece = _Piece(memory, self._cupy.cuda.Event(disable_timing=True))
            self._pieces.append(piece)
            return piece
