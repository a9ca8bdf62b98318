"""The CUDA stream that a caller names: CuPy's, another library's, or a pointer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class RawStream:
    """A stream by its pointer, in CUDA's protocol and as CuPy's launch reads it."""

    ptr: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the pointer."""
        return 0, self.ptr


def external_stream(cupy: Any, pointer: int) -> Any:
    """CuPy's own object for a stream of another library."""
    make = getattr(getattr(cupy.cuda, "Stream", None), "from_external", None)  # since 14, where ExternalStream warns
    return make(RawStream(pointer)) if make else cupy.cuda.ExternalStream(pointer)


def stream_address(stream: Any) -> int:
    """The pointer of a stream as CUDA counts it: 0 is the default stream.

    Parameters
    ----------
    stream : an object with ``ptr``, or with ``__cuda_stream__`` (a method or an attribute: version and pointer), or a
        pointer as an int.

    Raises
    ------
    InvalidArgument
        It is no stream.
    """
    pointer = getattr(stream, "ptr", stream)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        told = protocol() if callable(protocol) else protocol
        pointer = told[1] if isinstance(told, tuple | list) and len(told) == 2 else None
    if isinstance(pointer, bool) or not isinstance(pointer, int | np.integer) or pointer < 0:
        raise InvalidArgument(
            "stream must be a CuPy stream, an object with __cuda_stream__, a pointer as an int, or None, got "
            f"{stream!r:.60}"
        )
    return int(pointer)
