"""What CUDA says of streams that are being captured into graphs."""

from __future__ import annotations

from typing import Any

from pagedkv.errors import InvalidArgument

NULL_STREAMS = (0, 1)  # handles of cudaStreamLegacy, which is never captured
_IMPLICIT = 906
_ERRORS = range(900, 909)  # cudaErrorStreamCapture...


class CaptureBroken(InvalidArgument):
    """A wait for the device met the capture of another stream."""


def is_captured(runtime: Any, stream: int) -> bool:
    """Whether a stream's launches become a graph.

    Those of the null stream never do, and CUDA refuses the question of it while a blocking stream is captured.
    """
    return stream not in NULL_STREAMS and bool(runtime.streamIsCapturing(stream))


def is_barred(runtime: Any, stream: int) -> bool:
    """Whether a stream can run nothing now.

    It is being captured, or it is the null stream and a blocking stream is.
    """
    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as error:
        if getattr(error, "status", None) != _IMPLICIT:
            raise
        return True


def wait_for_device(runtime: Any) -> None:
    """Wait for all work on the current device.

    Raises
    ------
    CaptureBroken (an InvalidArgument)
        A stream of the device, of whatever thread, is being captured. CUDA has broken that capture.
    """
    try:
        runtime.deviceSynchronize()
    except runtime.CUDARuntimeError as error:
        if getattr(error, "status", None) not in _ERRORS:
            raise
        raise CaptureBroken(
            "a graph is being captured on another stream, and the device cannot be waited for meanwhile: make the "
            "attention, and whatever else waits, before the capture"
        ) from error
