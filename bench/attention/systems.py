"""What is measured.

A system computes a problem, an entry is one line of the results, a group is timed in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from bench.attention.device import Call, Device, Recording

if TYPE_CHECKING:
    from bench.attention.problems import Problem
    from bench.attention.shapes import Shape

MAX_ERROR = 5e-3  # relative, of bfloat16 against float64


class Unsupported(Exception):
    """A system does not compute this problem; the message says why."""


@dataclass(slots=True)
class Prepared:
    """Work that is ready to run.

    Parameters
    ----------
    call : starts it on the device's stream, with one of ``copies`` copies of the data.
    copies : how many there are.
    poison : makes what a run before left unusable, so that only a run that happens passes the check.
    error : largest relative error of the last run, which took copy 0; waits for it.
    bound : of the error.
    record : records several calls as one graph, where the device's own :meth:`Device.record` cannot.
    note : stands in the results.
    """

    call: Callable[[int], None]
    copies: int
    poison: Callable[[], None]
    error: Callable[[], float]
    bound: float = MAX_ERROR
    record: Callable[[Sequence[Call]], Recording] | None = None
    note: str = ""


class System(Protocol):
    """Something that computes attention."""

    @property
    def name(self) -> str:
        """In the results."""

    def absence(self, device: Device) -> str:
        """Why it cannot run at all, ``"status: more"``; empty if it can. Imports nothing heavy."""

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        """Get ready for a problem.

        Raises
        ------
        Unsupported
            It does not compute this problem.
        """


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the results.

    Parameters
    ----------
    case : what is computed.
    system : who computes it.
    prepare : makes it ready.
    num_bytes : that a run moves at least.
    flops : operations of a run; 0 where bytes are what counts.
    own : whether it is ours.
    absence : why it cannot run, ``"not installed: what"``; empty if it can.
    compile : compiles its kernels ahead.
    fields : further fields of the row.
    """

    case: str
    system: str
    prepare: Callable[[], Prepared]
    num_bytes: int
    flops: float = 0.0
    own: bool = False
    absence: str = ""
    compile: Callable[[], None] | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What names it within its section."""
        return self.case, self.system


@dataclass(frozen=True, slots=True)
class Group:
    """Entries that are timed together.

    Launched in turn, so that the drift of clocks hits all of them.
    """

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the bench.

    Parameters
    ----------
    name, title
    seconds : its share of the time; what earlier sections left over adds to it.
    groups : in the order in which they are measured, the important ones first.
    """

    name: str
    title: str
    seconds: float
    groups: tuple[Group, ...]


def attention_entry(
    case: str,
    system: System,
    shape: Shape,
    device: Device,
    problem_of: Callable[[Shape], Problem],
    **fields: Any,
) -> Entry:
    """An entry for a system on a shape. Prefill is counted in operations, decode in bytes."""
    compile_ahead = getattr(system, "compile", None)  # ours compile; a peer's kernels are built or not
    return Entry(
        case,
        system.name,
        lambda: system.prepare(device, problem_of(shape)),
        shape.moved_bytes,
        0.0 if shape.is_decode else shape.flops,
        compile_ahead is not None,
        system.absence(device),
        None if compile_ahead is None else lambda: compile_ahead(device, shape),
        {"kv_mib": shape.kv_bytes / 2**20, **fields},
    )
