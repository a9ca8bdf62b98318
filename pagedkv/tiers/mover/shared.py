"""What the threads of a mover share: its queue, the calls under way and the counters."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedkv.observe.callbacks import Log
from pagedkv.threads.monitor import Monitor
from pagedkv.tiers.base import Record, Tier
from pagedkv.tiers.mover.hangs import Calls
from pagedkv.tiers.mover.ticket import Ticket

log = Log(logging.getLogger("pagedkv.tiers.mover"))


@dataclass(slots=True)
class DirectionStats:
    """Counters of one direction, in blocks except `bytes`.

    `failed` counts blocks that a tier could not write or did not have as named; `late` and `cancelled` blocks
    whose part never started; `left` those whose part was in a store that did not come back in time, or was not sent
    into one that hangs.
    """

    blocks: int = 0
    bytes: int = 0
    failed: int = 0
    late: int = 0
    cancelled: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one thread does at a time, in one direction."""

    ticket: Ticket
    src: int
    dst: int
    moves: NDArray[np.intp]
    src_blocks: NDArray[np.int32]
    dst_blocks: NDArray[np.int32]
    records: Sequence[Record]
    store: int | None  # whichever of the two it is; None between memories


@dataclass(eq=False)
class Shared:
    """What the threads share.

    They hold this and not the mover, so that a mover without references can be collected.
    """

    tiers: Mapping[int, Tier]
    clock: Callable[[], float]
    hang_s: float
    calls: Calls[Part] = field(default_factory=Calls)
    queue: deque[Part] = field(default_factory=deque)
    queued_blocks: int = 0
    busy: int = 0  # parts that threads are at
    closed: bool = False
    changed: Monitor = field(default_factory=Monitor)
    stats: dict[tuple[int, int], DirectionStats] = field(default_factory=dict)
    logged: set[tuple[int, int, type]] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)


def direction_of(shared: Shared, part: Part) -> DirectionStats:
    """The counters of a part's direction; to be used under ``shared.changed``."""
    return shared.stats.setdefault((part.src, part.dst), DirectionStats())


def count_untried(shared: Shared, part: Part, why: str) -> None:
    """Count a part that ended before anything was moved.

    `why` is ``"late"``, ``"cancelled"`` or ``"left"``.
    """
    part.ticket.not_tried(part.moves)
    with shared.changed:
        counts = direction_of(shared, part)
        setattr(counts, why, getattr(counts, why) + part.moves.size)


def log_once(shared: Shared, part: Part, kind: type, what: object) -> None:
    """Log one line for the first error of a kind in a direction."""
    with shared.changed:
        first = (part.src, part.dst, kind) not in shared.logged
        shared.logged.add((part.src, part.dst, kind))
    if first:
        src, dst = shared.tiers[part.src].name, shared.tiers[part.dst].name
        log.warning("%s to %s: %d blocks lost: %s (others of this kind are only counted)",
                    src, dst, part.moves.size, what)  # fmt: skip
