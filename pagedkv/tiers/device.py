"""The hottest tier, where attention reads.

A NumPy arena, or a CuPy arena when a GPU is asked for.

CuPy is imported only when a GPU is named. Both arenas have the same layout, so everything above runs without
a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv import extras
from pagedkv.errors import KernelsUnavailable, TierError
from pagedkv.observe.callbacks import Log
from pagedkv.spec.place import cuda_number
from pagedkv.streams import external_stream, stream_address
from pagedkv.tiers.base import check_size
from pagedkv.tiers.memory import ArenaTier, anonymous_arena

HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
NULL_STREAMS = (0, 1)  # never captured, and CUDA refuses to be asked while a blocking stream is

log = Log(logging.getLogger("pagedkv.tiers"))


class BlockKernel(Protocol):
    """What copies blocks by a kernel."""

    def __call__(
        self, src: Any, src_blocks: NDArray[np.int32], dst: Any, dst_blocks: NDArray[np.int32], stream: Any
    ) -> None:
        """Launch copies of blocks ``src_blocks[i] -> dst_blocks[i]`` on a stream.

        Each arena is on the GPU or in page-locked memory. The thread waits for the stream before its next call.
        """


class DeviceTier(ArenaTier):
    """Blocks that attention reads and writes.

    Parameters
    ----------
    num_blocks, block_bytes : int
        Most blocks there can ever be, and bytes of one.
    device : str
        Where the arena lies: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. Memory on a GPU is taken at once, memory on the CPU
        when it is first written.

    Raises
    ------
    WrongType, InvalidArgument
        A size is not a positive int, or `device` is no place.
    TierError
        The memory cannot be had.
    ImportError
        A GPU was asked for and CuPy is missing; the message names the extra.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, device: str = "cpu") -> None:
        check_size(num_blocks, block_bytes)
        gpu = cuda_number(device)
        if gpu is None:
            arena: Any = anonymous_arena(num_blocks, block_bytes, "device")
        else:
            cupy = import_cupy()
            try:
                with cupy.cuda.Device(gpu):
                    arena = cupy.zeros((num_blocks, block_bytes), dtype=np.uint8)
                    cupy.cuda.get_current_stream().synchronize()  # other streams may write it from now on
            except cupy.cuda.memory.OutOfMemoryError as problem:
                raise TierError(
                    f"cannot allocate {num_blocks * block_bytes} bytes ({num_blocks} blocks of "
                    f"{block_bytes}) on GPU {gpu}: {problem}; give the device a smaller budget"
                ) from problem
        super().__init__("device", arena, gpu)
        self._cupy: Any = None if gpu is None else cupy
        if gpu is not None:
            self._current_device: Callable[[], int] = cupy.cuda.runtime.getDevice
            self._current_stream: Callable[[], Any] = cupy.cuda.get_current_stream
            self._is_captured: Callable[[int], Any] = cupy.cuda.runtime.streamIsCapturing
        self._used: dict[int, Any] = {}
        self._untold_graph = False  # captured over the arena, and no launch has been told since
        self._ahead: set[int] = set()  # pointers of streams whose use no later one has waited for
        self._using = threading.Lock()
        self.kernel: BlockKernel | None = None

    def copy_small_by(self, kernel: BlockKernel) -> None:
        """Let a kernel copy small blocks from and to page-locked memory.

        Not on a device that reaches such memory by other addresses than the host.
        """
        if self.gpu is not None and self._cupy.cuda.runtime.deviceGetAttribute(HOST_POINTERS, self.gpu):
            self.kernel = kernel

    def used_by(self, stream: Any = None) -> None:
        """Make copies wait for kernels or graphs that the caller launched on a stream.

        They read or write the arena. The host does not wait. Parameters as :meth:`launched_on`.
        """
        if self.launched_on(stream):
            self._untold_graph = False

    def launched_on(self, stream: Any = None) -> bool:
        """Make copies wait for a step's kernels on a stream; False while they are being captured.

        The host does not wait.

        Parameters
        ----------
        stream : a CuPy stream, an object with ``__cuda_stream__``, or a pointer as an int; None for the current one.
            On the CPU nothing is asynchronous.
        """
        if self.gpu is None:
            return True
        if self._current_device() == self.gpu:  # no context manager for nearly all calls
            return self._note_use(stream)
        with self._cupy.cuda.Device(self.gpu):
            return self._note_use(stream)

    def _note_use(self, stream: Any) -> bool:
        """As :meth:`launched_on`, with the tier's GPU as the current one."""
        with self._using:
            stream = self._current_stream() if stream is None else _as_stream(self._cupy, stream)
            pointer = stream.ptr
            if pointer not in NULL_STREAMS and self._is_captured(pointer):
                self._untold_graph = True  # no event outside the graph: tell after its launches
                return False
            self._record(stream)
        return True

    def _record(self, stream: Any) -> None:
        """Note the launches on a stream so far; the caller holds the lock."""
        pointer = stream.ptr
        event = self._used.get(pointer)
        if event is None:
            event = self._used[pointer] = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        self._ahead.add(pointer)

    def before_use(self, stream: Any = None) -> Any:
        """Make kernels launched next on a stream wait for earlier ones on another stream.

        Parameters
        ----------
        stream : as in :meth:`used_by`.

        Returns
        -------
        That stream, for the launches and :meth:`launched_on`, which need not ask for the current one again.
        """
        if self.gpu is None:
            return stream
        if self._current_device() == self.gpu:
            return self._await_use(stream)
        with self._cupy.cuda.Device(self.gpu):
            return self._await_use(stream)

    def _await_use(self, stream: Any) -> Any:
        """As :meth:`before_use`, with the tier's GPU as the current one."""
        stream = self._current_stream() if stream is None else _as_stream(self._cupy, stream)
        pointer, ahead = stream.ptr, self._ahead
        if not ahead or (len(ahead) == 1 and pointer in ahead):
            return stream
        with self._using:
            others = self._ahead - {pointer}  # none once the tier is closed
            if others and (pointer in NULL_STREAMS or not self._is_captured(pointer)):
                for other in others:
                    stream.wait_event(self._used[other])
                self._record(stream)  # which is behind them, even where nothing is launched now
                self._ahead -= others
        return stream

    def close(self) -> None:
        """Let go of the arena once no kernel uses it: CuPy may hand its memory out again at once."""
        with self._using:
            used, self._used, self._ahead = list(self._used.values()), {}, set()
        if used:
            with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError):  # the device has failed already
                for event in used:
                    event.synchronize()
        super().close()

    def _complain(self) -> None:
        problem = (
            "a graph was captured over the cache's blocks on the device, and no launch of it was reported, so moves "
            "of blocks do not wait for it: call cache.used_on(stream) after each launch"
        )
        if os.environ.get("PAGEDKV_CHECK_GRAPHS") == "1":
            raise TierError(problem)
        self._untold_graph = False
        log.warning(problem)

    def wait_for_users(self, stream: Any) -> None:
        """Let a stream wait for the kernels that :meth:`used_by` was told of.

        Raises
        ------
        TierError
            With PAGEDKV_CHECK_GRAPHS=1: a graph was captured over the arena, and no launch of it was told. Without it
            that is logged once.
        """
        if self._untold_graph:
            self._complain()
        with self._using:
            for event in self._used.values():
                stream.wait_event(event)


class DeviceLane(ArenaTier):
    """Rows of a device tier's memory as blocks, such as the pages of a group of layers.

    Parameters
    ----------
    tier : DeviceTier
    rows : uint8 [num_rows, row_bytes], a view of its arena whose rows may be apart.
    """

    def __init__(self, tier: DeviceTier, rows: Any) -> None:
        super().__init__(tier.name, rows, tier.gpu)
        self.wait_for_users, self.kernel = tier.wait_for_users, tier.kernel


def import_cupy() -> Any:
    """The ``cupy`` module.

    Raises
    ------
    KernelsUnavailable
        CuPy is missing.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as problem:
        raise KernelsUnavailable(
            f"a GPU tier needs CuPy: {extras.command('cuda12')}, or the packages of the extra [cuda13], "
            "whichever your driver has"
        ) from problem


def _as_stream(cupy: Any, stream: Any) -> Any:
    """A caller's stream as one on which events can be recorded.

    Raises
    ------
    InvalidArgument
        It is no stream.
    """
    if hasattr(stream, "wait_event") and hasattr(stream, "ptr"):
        return stream
    return external_stream(cupy, stream_address(stream))
