"""Every error pagedkv raises on purpose.

Each names the request and the limit it met, and says what to do.

A call that raises one of these has changed nothing.
"""

from __future__ import annotations

import os

from pagedkv._core.tier import Tier

_POOL = "pool"  # the name of a pool that belongs to no cache


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
    tier : Tier or None
        The tier whose pool it is; None for a `BlockPool` of the core that belongs to no cache.

    Parameters
    ----------
    tier : also a tier's name, or ``"pool"`` for None.
    """

    def __init__(self, asked: int, free: int, evictable: int, held: int, tier: Tier | str = Tier.DEVICE) -> None:
        self.asked, self.free, self.evictable, self.held = asked, free, evictable, held
        name = str(tier)
        self.tier = None if name == _POOL else Tier[name.upper()]
        super().__init__(
            f"asked for {asked} blocks on tier {name!r}: {free} free, {evictable} evictable, {held} held by live "
            f"sequences, pins or moves; release sequences or pins, or give the tier more memory"
        )

    def __reduce__(self) -> tuple[type[OutOfBlocks], tuple[int, int, int, int, Tier | str]]:
        tier = _POOL if self.tier is None else self.tier
        return type(self), (self.asked, self.free, self.evictable, self.held, tier)


class RequestTooLarge(PagedKVError):
    """A request could not run even if it had the whole device to itself; it was not queued.

    Attributes
    ----------
    asked, capacity : int
        Blocks that the request may need, and blocks available.
    what : of which.
    """

    finish_reason = "refused"

    def __init__(self, asked: int, capacity: int, what: str, advice: str) -> None:
        self.asked, self.capacity, self.what, self.advice = asked, capacity, what, advice
        super().__init__(f"the request can come to need {asked} {what}, and there are {capacity} in all; {advice}")

    def __reduce__(self) -> tuple[type[RequestTooLarge], tuple[int, int, str, str]]:
        return type(self), (self.asked, self.capacity, self.what, self.advice)


class QueueFull(PagedKVError):
    """As many requests wait as a scheduler lets wait; this one was not queued. Come back later.

    Attributes
    ----------
    waiting, max_waiting : int
        Requests that wait, and that may wait (``SchedulerOptions.max_waiting``).
    retry_after_s : float or None
        Seconds in which the requests that wait now begin, at the rate of late: for an HTTP ``Retry-After``. None before
        the scheduler has begun two requests.
    """

    finish_reason = "refused"

    def __init__(self, waiting: int, max_waiting: int, retry_after_s: float | None) -> None:
        self.waiting, self.max_waiting, self.retry_after_s = waiting, max_waiting, retry_after_s
        soon = "" if retry_after_s is None else f", in {retry_after_s:.3g} s at the rate of late"
        super().__init__(
            f"{waiting} requests wait, and max_waiting = {max_waiting}: submit it again when some have begun{soon}"
        )

    def __reduce__(self) -> tuple[type[QueueFull], tuple[int, int, float | None]]:
        return type(self), (self.waiting, self.max_waiting, self.retry_after_s)


class StepFailed(PagedKVError, RuntimeError):
    """The step that computed a request raised, and the request was aborted.

    Its cause is the exception itself.

    Attributes
    ----------
    kind, said : the name and the text of that exception.
    """

    def __init__(self, kind: str, said: str) -> None:
        self.kind, self.said = kind, said
        super().__init__(f"the step that computed this request raised {kind}: {said}; the request was aborted")

    def __reduce__(self) -> tuple[type[StepFailed], tuple[str, str]]:
        return type(self), (self.kind, self.said)


class SlowReader(PagedKVError):
    """A request was aborted because its tokens were not read.

    Attributes
    ----------
    unread, max_unread : int
        Tokens that lay unread, and that may.
    """

    def __init__(self, unread: int, max_unread: int) -> None:
        self.unread, self.max_unread = unread, max_unread
        super().__init__(
            f"{unread} tokens of this request lay unread, and max_unread = {max_unread}: it was aborted; read faster, "
            f"or allow more"
        )

    def __reduce__(self) -> tuple[type[SlowReader], tuple[int, int]]:
        return type(self), (self.unread, self.max_unread)


class StaleHandle(PagedKVError):
    """A handle names something that has been released and perhaps reused since."""


class DoubleRelease(PagedKVError):
    """A reference was given back more often than it was taken."""


class PinBudgetExceeded(PagedKVError):
    """Pinning would hold more blocks than the pin budget allows."""


class NotSupported(PagedKVError, ValueError):
    """A runtime's KV cannot be taken out of it, or put back: an adapter was not attached.

    The runtime's object goes on without a cache, as it was unless the message names a loss.

    Parameters
    ----------
    what : the model, or the setting.
    reason : why not.
    state : of the runtime's object.
    """

    def __init__(self, what: str, reason: str, state: str = "it is unchanged") -> None:
        self.what, self.reason, self.state = what, reason, state
        super().__init__(f"{what} cannot have a prefix cache: {reason}; {state} and works without one")

    def __reduce__(self) -> tuple[type[NotSupported], tuple[str, str, str]]:
        return type(self), (self.what, self.reason, self.state)


class LayoutMismatch(PagedKVError, ValueError):
    """An array, file or tier does not have the layout that the KVSpec describes."""


class ExchangeRefused(PagedKVError, BufferError):
    """An array cannot be exchanged with another framework as asked.

    Also a BufferError, as DLPack wants it.
    """


class NamespaceRequired(PagedKVError):
    """The cache was opened with ``require_namespace=True`` and a call named none."""


class KernelsUnavailable(PagedKVError, ImportError):
    """CUDA kernels were asked for, and something they need is not installed or does not run.

    The message says how to install it, or what failed.
    """


class UnsupportedVariant(PagedKVError, ValueError):
    """No kernel takes this combination of dtype, head dim, block size or attention variant."""


class CompileError(PagedKVError):
    """The CUDA compiler refused a kernel.

    Parameters
    ----------
    name : the kernel.
    options : of the compiler.
    log : the compiler's output.
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


class RanksDisagree(TierError):
    """A rank and the deciding process do not fit together; no cache was opened.

    They differ in the version, the secret, the spec, the number of ranks, the blocks of a tier, or two processes say
    that they are one rank.

    Attributes
    ----------
    rank : int or None
        The rank concerned; None where it could not be told.
    """

    def __init__(self, rank: int | None, problem: str) -> None:
        self.rank, self.problem = rank, problem
        super().__init__(problem if rank is None else f"rank {rank}: {problem}")

    def __reduce__(self) -> tuple[type[RanksDisagree], tuple[int | None, str]]:
        return type(self), (self.rank, self.problem)


class RankLost(TierError):
    """A process of a tensor-parallel cache ended, was silent too long, or never came.

    Without its part of the KV nothing can be computed: close the cache, and open another with new ranks.

    Attributes
    ----------
    rank : int or None
        The rank that was lost; None for the deciding process.
    """

    def __init__(self, rank: int | None, problem: str) -> None:
        self.rank, self.problem = rank, problem
        super().__init__(f"{'the deciding process' if rank is None else f'rank {rank}'} {problem}")

    def __reduce__(self) -> tuple[type[RankLost], tuple[int | None, str]]:
        return type(self), (self.rank, self.problem)


class AddressInUse(PagedKVError, OSError):
    """Another socket listens at the address where this one was to listen.

    Attributes
    ----------
    endpoint : the address.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        super().__init__(f"another socket listens at {endpoint}: stop its process, or name another port")

    def __reduce__(self) -> tuple[type[AddressInUse], tuple[str]]:
        return type(self), (self.endpoint,)


class ClosedError(PagedKVError):
    """The object was closed (or released) and can no longer be used."""


class FileFormatError(PagedKVError, ValueError):
    """A file is not in its claimed format.

    Parameters
    ----------
    path : path of the file.
    where : the line or field, such as ``"line 12"`` or ``"field hash_ids"``.
    problem : the mistake there.
    """

    def __init__(self, path: str | os.PathLike[str], where: str, problem: str) -> None:
        self.path, self.where, self.problem = os.fspath(path), where, problem
        super().__init__(f"{self.path}: {where}: {problem}" if where else f"{self.path}: {problem}")

    def __reduce__(self) -> tuple[type[FileFormatError], tuple[str, str, str]]:
        return type(self), (self.path, self.where, self.problem)


class TraceFormatError(FileFormatError):
    """A trace file is not in its claimed format."""


class RecordingFormatError(FileFormatError):
    """A recording cannot be read, or contradicts itself; see :mod:`pagedkv.lab.recording`."""
