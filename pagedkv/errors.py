"""Every error pagedkv raises on purpose.

Each says what was asked, what there is, and what to do.

A call that raises one of these has changed nothing.
"""

from __future__ import annotations

import os


class PagedKVError(Exception):
    """Base of all errors raised by pagedkv."""


class InvalidArgument(PagedKVError, ValueError):
    """An argument has the right type but a value that cannot be used."""


class WrongType(PagedKVError, TypeError):
    """An argument has a type (or dtype, or memory layout) that cannot be used."""


class OutOfBlocks(PagedKVError, MemoryError):
    """A pool cannot give the blocks that were asked for, even after eviction.

    A MemoryError, as CuPy's and RMM's are, so that code which gives memory back on MemoryError takes this one too.

    Attributes
    ----------
    asked, free, evictable, held : int
        Blocks asked for, free now, owned by the prefix tree alone, and held by
        live owners (sequences, pins, moves in flight).
    """

    def __init__(self, asked: int, free: int, evictable: int, held: int, tier: str = "device") -> None:
        self.asked, self.free, self.evictable, self.held, self.tier = asked, free, evictable, held, tier
        super().__init__(
            f"asked for {asked} blocks on tier {tier!r}: {free} free, {evictable} evictable, {held} held by live "
            f"sequences, pins or moves; release sequences or pins, or give the tier more memory"
        )

    def __reduce__(self) -> tuple[type[OutOfBlocks], tuple[int, int, int, int, str]]:
        return type(self), (self.asked, self.free, self.evictable, self.held, self.tier)


class RequestTooLarge(PagedKVError):
    """A request could not run even if it had the whole device to itself; it was not queued.

    Attributes
    ----------
    asked, capacity : int
        What it can come to need, and what there is.
    what : of which.
    """

    def __init__(self, asked: int, capacity: int, what: str, advice: str) -> None:
        self.asked, self.capacity, self.what, self.advice = asked, capacity, what, advice
        super().__init__(f"the request can come to need {asked} {what}, and there are {capacity} in all; {advice}")

    def __reduce__(self) -> tuple[type[RequestTooLarge], tuple[int, int, str, str]]:
        return type(self), (self.asked, self.capacity, self.what, self.advice)


class StaleHandle(PagedKVError):
    """A handle names something that has been released and perhaps reused since."""


class DoubleRelease(PagedKVError):
    """A reference was given back more often than it was taken."""


class PinBudgetExceeded(PagedKVError):
    """Pinning would hold more blocks than the pin budget allows."""


class LayoutMismatch(PagedKVError, ValueError):
    """An array, file or tier does not have the layout that the KVSpec describes."""


class ExchangeRefused(PagedKVError, BufferError):
    """An array cannot be exchanged with another framework as asked.

    Also a BufferError, as DLPack wants it.
    """


class NamespaceRequired(PagedKVError):
    """The cache was opened with ``require_namespace=True`` and a call named none."""


class KernelsUnavailable(PagedKVError, ImportError):
    """CUDA kernels were asked for, and something they need is not installed.

    The message says how to install it.
    """


class UnsupportedVariant(PagedKVError, ValueError):
    """No kernel takes this combination of dtype, head dim, block size or attention variant."""


class CompileError(PagedKVError):
    """The CUDA compiler refused a kernel.

    Parameters
    ----------
    name : the kernel.
    options : what the compiler was given.
    log : what it said.
    """

    def __init__(self, name: str, options: tuple[str, ...], log: str) -> None:
        self.name, self.options, self.log = name, options, log
        super().__init__(f"{name} does not compile with {' '.join(options) or 'no options'}:\n{log}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, tuple[str, ...], str]]:
        return type(self), (self.name, self.options, self.log)


class TierError(PagedKVError):
    """A tier cannot be opened or has failed for good; other tiers go on."""


class StoreDamaged(TierError):
    """A disk tier's own files are missing, cut or unreadable.

    ``on_mismatch="reset"`` starts an empty store instead.
    """


class ClosedError(PagedKVError):
    """The object was closed (or released) and can no longer be used."""


class FileFormatError(PagedKVError, ValueError):
    """A file cannot be read as what it claims to be.

    Parameters
    ----------
    path : path of the file.
    where : the line or field, such as ``"line 12"`` or ``"field hash_ids"``.
    problem : what is wrong there.
    """

    def __init__(self, path: str | os.PathLike[str], where: str, problem: str) -> None:
        self.path, self.where, self.problem = os.fspath(path), where, problem
        super().__init__(f"{self.path}: {where}: {problem}" if where else f"{self.path}: {problem}")

    def __reduce__(self) -> tuple[type[FileFormatError], tuple[str, str, str]]:
        return type(self), (self.path, self.where, self.problem)


class TraceFormatError(FileFormatError):
    """A trace file cannot be read as what it claims to be."""


class RecordingFormatError(FileFormatError):
    """A recording cannot be read, or contradicts itself; see :mod:`pagedkv.lab.recording`."""
