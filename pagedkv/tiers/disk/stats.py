"""Counters of a disk tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pagedkv.tiers.disk.circuit_breaker import State

MISS_REASONS = ("empty", "off", "io_error", "short", "header", "misplaced", "stale", "purged", "identity", "tokens",
                "payload")  # fmt: skip


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counters since the tier was opened, in blocks.

    Attributes
    ----------
    state : ``"ok"``, ``"read_only"`` or ``"off"``, see :mod:`pagedkv.tiers.disk.circuit_breaker`.
    blocks_read, blocks_written : served and stored.
    misses : by reason, one of `MISS_REASONS` each.
    write_errors : by the name of the errno.
    writes_refused : not tried, because the tier does not write in its state.
    hung : of calls that did not return in time and were given up.
    progress_failures : calls of ``on_progress`` that raised an Exception.
    """

    state: State
    blocks_read: int
    blocks_written: int
    misses: dict[str, int]
    write_errors: dict[str, int]
    writes_refused: int
    hung: int = 0
    progress_failures: int = 0


def stats_of(state: State, counts: Iterable[Counter[str]]) -> DiskStats:
    """The sum of the slots' counters (slots.py), in the tier's state."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return DiskStats(
        state=state,
        blocks_read=total["read"],
        blocks_written=total["written"],
        misses={reason: total[f"miss {reason}"] for reason in MISS_REASONS},
        write_errors={what.removeprefix("write "): n for what, n in total.items() if what.startswith("write ")},
        writes_refused=total["refused"],
        hung=total["hung"],
    )
