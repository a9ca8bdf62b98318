"""Counters of a remote tier."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

State: TypeAlias = Literal["ok", "off"]

MISS_REASONS = ("absent", "length", "format", "integrity", "fingerprint", "key", "sum", "seal", "late")
FAILURES = ("connect", "timeout", "closed", "protocol", "hang")


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Counters since the tier was opened.

    Attributes
    ----------
    state : ``"ok"``, or ``"off"`` while the store is not asked.
    lookups, lookup_blocks : times that the store was asked which blocks it has, and blocks that it has named.
    lookups_spared : that the memory of recent misses has answered.
    refused_off : lookups, reads and writes that were not made because the tier was off.
    read_blocks, read_bytes, written_blocks, written_bytes : served and stored; bytes with heads.
    deduplicated : blocks not sent because the store had them.
    refused : blocks that the store would not store, by its word, such as ``"OOM"``.
    misses : blocks that did not come, by one of `MISS_REASONS`.
    failures : calls that the store did not answer, by one of `FAILURES`.
    left_behind : wrong values that could not be deleted.
    """

    state: State
    lookups: int
    lookup_blocks: int
    lookups_spared: int
    refused_off: int
    read_blocks: int
    read_bytes: int
    written_blocks: int
    written_bytes: int
    deduplicated: int
    left_behind: int
    refused: Mapping[str, int]
    misses: Mapping[str, int]
    failures: Mapping[str, int]


class Counts:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plain: Counter[str] = Counter()
        self._by: dict[str, Counter[str]] = {"refused": Counter(), "misses": Counter(), "failures": Counter()}

    def add(self, name: str, count: int = 1) -> None:
        """Count one of the attributes of RemoteStats."""
        with self._lock:
            self._plain[name] += count

    def add_by(self, name: str, reason: str, count: int = 1) -> None:
        """Count `refused`, `misses` or `failures` by a reason."""
        with self._lock:
            self._by[name][reason] += count

    def read(self, state: State) -> RemoteStats:
        """All of them."""
        with self._lock:
            counted: dict[str, Any] = {name: dict(counts) for name, counts in self._by.items()}
            for field in fields(RemoteStats):
                if field.name not in ("state", *counted):
                    counted[field.name] = self._plain[field.name]
        return RemoteStats(state=state, **counted)
