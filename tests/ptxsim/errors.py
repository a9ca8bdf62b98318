"""The errors that the simulator reports.

Each message names the thread, its CTA, the PTX instruction and the source line.
"""

from __future__ import annotations


class PtxsimError(RuntimeError):
    """A kernel did something wrong, or something the simulator does not model.

    Attributes
    ----------
    where : PTX text and source line; filled in by the scheduler, which knows what was running.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.where = ""

    def __str__(self) -> str:
        return super().__str__() + self.where


class UnsupportedPtx(PtxsimError):
    """An opcode, modifier or directive that the simulator does not model: never skipped."""


class OutOfBounds(PtxsimError):
    """An access outside every array of the launch.

    Or outside the CTA's shared memory or the thread's local memory.
    """


class Misaligned(PtxsimError):
    """An address that is no multiple of the access size."""


class ReadOnlyWrite(PtxsimError):
    """A store into an array whose ``writeable`` flag is off, or into constant memory."""


class UninitialisedRead(PtxsimError):
    """A load of bytes that nothing has written.

    Or that an asynchronous copy has not delivered yet.
    """


class DataRace(PtxsimError):
    """Two threads touch one location, one of them writes, and nothing orders them."""


class DivergentWarp(PtxsimError):
    """A ``.sync`` warp instruction without all the lanes its mask names."""


class BarrierError(PtxsimError):
    """A CTA barrier that cannot complete: exited threads, different barriers, wrong counts."""


class MbarrierError(PtxsimError):
    """An mbarrier used before its init, over-arrived, or damaged by an ordinary store."""


class Deadlock(PtxsimError):
    """No thread can go on; the message says who waits where."""


class AsyncCopyError(PtxsimError):
    """An asynchronous copy that is wrong, or unfinished when its threads have ended."""


class DeviceTrap(PtxsimError):
    """``trap``, ``brkpt`` or a failed device-side assert."""
