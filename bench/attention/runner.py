"""Runs sections against the clock.

Every result is checked before it is timed, what time does not allow is listed.

For each entry of a group: prepare, run once on poisoned outputs, compare with float64; record a graph of calls that
rotate through the copies of KV, launch it on poisoned outputs, compare again. Then the graphs of the group are launched
in turn. One that fails does not stop the others; what an entry came to is one row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.attention.ceilings import ceilings_of, shares
from bench.attention.device import Device, Recording
from bench.attention.scales import Scale
from bench.attention.systems import Entry, Group, Prepared, Section, Unsupported
from pagedkv.errors import UnsupportedVariant

Row = dict[str, Any]
LONGEST_GRAPH_S = 0.25  # a graph of slower calls has fewer of them
LONGEST_TIMING_S = 2.0  # of a group, beyond the fewest rounds
MESSAGE = 300  # characters of an error kept in a row


class DeviceLost(Exception):
    """The device takes no more work in this process.

    A new process may go on with what has no row yet.
    """


class Watcher:
    """Told of each action and its result, so that a crash or hang can be attributed."""

    def begin(self, section: str, keys: Sequence[tuple[str, str]], doing: str) -> None:
        """Entries are about to do something that could crash or hang."""

    def done(self, row: Row) -> None:
        """An entry has its row."""


@dataclass(slots=True)
class Ready:
    """An entry that was checked and can be timed."""

    entry: Entry
    prepared: Prepared
    recording: Recording
    calls: int
    error: float


class Runner:
    """Measures sections.

    Parameters
    ----------
    device, scale
    deadline : when everything has to be over, by ``clock``.
    watcher : told of every step.
    known : rows of earlier processes of the same run: not measured again, ceilings among them.
    clock : seconds.
    """

    def __init__(
        self,
        device: Device,
        scale: Scale,
        deadline: float,
        *,
        watcher: Watcher | None = None,
        known: Sequence[Row] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.scale, self.deadline, self.clock = device, scale, deadline, clock
        self.watcher = watcher or Watcher()
        self.rows: list[Row] = list(known)
        self._known = {(row["section"], row["case"], row["system"]) for row in known}

    def run(self, sections: Sequence[Section]) -> list[Row]:
        """All rows, those known before included.

        A section may use its own seconds and what earlier ones left, but nothing of what later ones need.
        """
        open_sections = [section for section in sections if self._unknown(section)]
        needed = [section.seconds for section in open_sections]
        squeeze = min(1.0, max(0.0, self.deadline - self.clock()) / max(sum(needed), 1e-9))
        for number, section in enumerate(open_sections, start=1):
            until = self.deadline - sum(needed[number:]) * squeeze
            for group in section.groups:
                self._group(section.name, group, until)
        return self.rows

    def _unknown(self, section: Section) -> bool:
        """Whether an entry has no row yet."""
        entries = (entry for group in section.groups for entry in group.entries)
        return any((section.name, *entry.key) not in self._known for entry in entries)

    def _group(self, section: str, group: Group, until: float) -> None:
        ready: list[Ready] = []
        for entry in group.entries:
            if (section, *entry.key) in self._known:
                continue
            if entry.absence:
                status, _, note = entry.absence.partition(": ")
                self._done(section, entry, status=status, note=note)
            elif self.clock() >= until:
                self._done(section, entry, status="out of time")
            else:
                self._ready(section, entry, ready)
        if not ready:
            return
        self.watcher.begin(section, [one.entry.key for one in ready], "timing")
        try:
            measured = self._timed([one.recording for one in ready])
        except Exception as problem:
            for one in ready:
                self._failed(section, one.entry, problem)
            self._check_alive(problem)
            return
        for one, times in zip(ready, measured, strict=True):
            self._done(section, one.entry, **self._figures(section, one, times), status="measured")

    def _timed(self, recordings: Sequence[Recording]) -> list[list[float]]:
        least, most = self.scale.rounds
        if self.device.unit == "s":
            once = self.device.time(recordings, 1)  # warms up, too
            most = max(least, min(most, int(LONGEST_TIMING_S / max(sum(times[0] for times in once), 1e-6))))
        return self.device.time(recordings, most)

    def _ready(self, section: str, entry: Entry, ready: list[Ready]) -> None:
        """Prepare, check, record and check again; an entry that fails gets its row here."""
        try:
            self.watcher.begin(section, [entry.key], "preparing")
            prepared = entry.prepare()
            self.watcher.begin(section, [entry.key], "first run")
            prepared.poison()
            prepared.call(0)
            error = prepared.error()
            if not error <= prepared.bound:
                self._done(section, entry, status="wrong", error=error, note=prepared.note)
                return
            calls = self._calls(prepared)
            order = [index % prepared.copies for index in reversed(range(calls))]  # copy 0 last: it is checked
            work = [lambda copy=copy: prepared.call(copy) for copy in order]
            self.watcher.begin(section, [entry.key], "recording")
            recording = (prepared.record or self.device.record)(work)
            self.watcher.begin(section, [entry.key], "first launch")
            prepared.poison()
            recording.launch()
            again = prepared.error()
            if not again <= prepared.bound:
                self._done(section, entry, status="wrong", error=again, note=f"launched as a graph; {prepared.note}")
                return
            ready.append(Ready(entry, prepared, recording, calls, max(error, again)))
        except (Unsupported, UnsupportedVariant, MemoryError) as problem:
            self._done(section, entry, status="unsupported", note=_short(problem))
        except Exception as problem:  # a peer may raise anything
            self._failed(section, entry, problem)
            self._check_alive(problem)

    def _failed(self, section: str, entry: Entry, problem: Exception) -> None:
        self._done(section, entry, status="failed", note=f"{type(problem).__name__}: {_short(problem)}")

    def _check_alive(self, problem: Exception) -> None:
        """Raise DeviceLost if the error has stayed with the device, as an illegal address does."""
        try:
            self.device.synchronize()
        except Exception:
            raise DeviceLost(_short(problem)) from problem

    def _calls(self, prepared: Prepared) -> int:
        """Calls of the graph: enough to touch every copy, fewer where they are slow."""
        wanted = max(self.scale.calls, prepared.copies if self.scale.calls > 1 else 1)
        if self.device.unit != "s":
            return wanted
        begin = time.perf_counter()
        prepared.call(prepared.copies - 1)
        self.device.synchronize()
        return max(1, min(wanted, int(LONGEST_GRAPH_S / max(time.perf_counter() - begin, 1e-9))))

    def _figures(self, section: str, one: Ready, times: Sequence[float]) -> Row:
        row: Row = {"error": one.error, "rounds": len(times), "calls": one.calls, "copies": one.prepared.copies}
        if one.prepared.note:
            row["note"] = one.prepared.note
        if self.device.unit != "s":
            return {**row, "steps": statistics.median(times) / one.calls}
        median = statistics.median(times) / one.calls
        row |= {"us": median * 1e6, "us_min": min(times) / one.calls * 1e6, "us_max": max(times) / one.calls * 1e6}
        row["tb_per_s"] = one.entry.num_bytes / median / 1e12
        if one.entry.flops:
            row["tflop_per_s"] = one.entry.flops / median / 1e12
        return row if section == "ceilings" else {**row, **shares(row, ceilings_of(self.rows))}

    def _done(self, section: str, entry: Entry, **figures: Any) -> None:
        row = {"section": section, "case": entry.case, "system": entry.system, "own": entry.own}
        row |= {**entry.fields, **figures}
        self.rows.append(row)
        self.watcher.done(row)


def _short(problem: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text if len(text) <= MESSAGE else text[: MESSAGE - 3] + "..."
