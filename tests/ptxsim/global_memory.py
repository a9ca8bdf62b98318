"""Global memory: the host arrays of a launch, found by address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes
from tests.ptxsim.errors import OutOfBounds, ReadOnlyWrite, UninitialisedRead
from tests.ptxsim.memory import SHIFT, WINDOW, Addresses, Values, check_alignment
from tests.ptxsim.shadow import Shadow
from tests.ptxsim.types import UNSIGNED

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

_ORIGIN = 4096


def _address_space(width: int) -> Values:
    """All of this process's memory as one array of elements; only checked indices may be used."""
    shape = ((1 << WINDOW) // width,)
    holder = type("Everything", (), {})()
    typestr = "<c16" if width == 16 else f"<u{width}"
    holder.__array_interface__ = {"data": (_ORIGIN, False), "shape": shape, "typestr": typestr, "version": 3}
    return np.asarray(holder)


_EVERYTHING = {width: _address_space(width) for width in UNSIGNED}


class GlobalMemory:
    """The arrays of a launch, found by address.

    Parameters
    ----------
    m : the machine.
    extents : (first address, end, writeable, initialised bytes or None) of each array.
    granule : bytes per granule of the race checker, None without one.
    """

    space = "global"

    def __init__(
        self, m: Machine, extents: list[tuple[int, int, bool, NDArray[np.uint8] | None]], granule: int | None
    ) -> None:
        self.m, self.granule = m, granule
        merged: list[list[Any]] = []
        for start, end, writeable, written in sorted(extents, key=lambda extent: extent[:2]):
            if merged and start < merged[-1][1]:  # strided views of one allocation
                merged[-1][1] = max(end, merged[-1][1])
                merged[-1][2] |= writeable
            else:
                merged.append([start, end, writeable, written])
        self.starts = np.array([extent[0] for extent in merged], np.int64)
        self.ends = np.array([extent[1] for extent in merged], np.int64)
        self.writeable = [bool(extent[2]) for extent in merged]
        self.written: list[NDArray[np.uint8] | None] = [extent[3] for extent in merged]
        self.shadows: list[Shadow | None] = [None] * len(merged)
        self.reads: list[list[tuple[Addresses, int, Lanes, int, bool]]] = [[] for _ in merged]
        self._last = 0

    def find(self, addresses: Addresses, width: int, active_lanes: Lanes) -> int | NDArray[np.int64]:
        """The array that all addresses lie in, or one array number per address.

        Raises
        ------
        OutOfBounds
            Some address lies in none, or runs past an end.
        """
        low, high = int(addresses.min()), int(addresses.max()) + width
        last = self._last
        if len(self.starts) and self.starts[last] <= low and high <= self.ends[last]:
            return last
        number = self.starts.searchsorted(addresses, "right") - 1
        good = (number >= 0) & (addresses + width <= self.ends[number]) if len(self.starts) else number > 0
        if not good.all():
            first = int(np.argmin(good))
            self._out_of_bounds(int(addresses[first]), width, int(active_lanes[first]))
        if number.min() == number.max():
            self._last = int(number[0])
            return self._last
        return number

    def _out_of_bounds(self, address: int, width: int, lane: int) -> None:
        near = ""
        if len(self.starts):
            before = max(0, int(self.starts.searchsorted(address, "right")) - 1)
            candidates = [before, min(before + 1, len(self.starts) - 1)]
            closest = min(
                candidates, key=lambda i: min(abs(address - int(self.starts[i])), abs(address - int(self.ends[i])))
            )
            start, end = int(self.starts[closest]), int(self.ends[closest])
            where = (
                f"{address - end} bytes past the end" if address >= end else f"{start - address} bytes before the start"
            )
            if start <= address < end:
                where = f"{end - address} bytes before the end, too few,"
            near = f"; the nearest array has {end - start} bytes, and this is {where} of it"
        raise OutOfBounds(f"out of bounds: {self.m.describe(lane)} accesses {width} bytes at global {address:#x}{near}")

    def load(self, addresses: Addresses, width: int, active: Active, strong: bool = False) -> Values:
        """One element per active lane."""
        m = self.m
        lanes = active.index
        check_alignment(m, addresses, width, lanes, "global")
        number = self.find(addresses, width, lanes)
        if m.stats is not None:
            m.stats.global_access(m, addresses, width, lanes)
        if self.granule is not None:
            self.each(number, addresses, lanes, lambda i, a, who: self.read_check(i, a, width, who, strong))
        index = addresses - _ORIGIN
        return _EVERYTHING[width].take(index >> SHIFT[width] if width > 1 else index)

    def store(self, addresses: Addresses, width: int, values: Values, active: Active, strong: bool = False) -> None:
        """One element per active lane."""
        m = self.m
        lanes = active.index
        check_alignment(m, addresses, width, lanes, "global")
        self.prepare_store(addresses, width, lanes, strong)
        if m.stats is not None:
            m.stats.global_access(m, addresses, width, lanes)
        _EVERYTHING[width][(addresses - _ORIGIN) >> SHIFT[width]] = values

    def prepare_store(self, addresses: Addresses, width: int, lanes: Lanes, strong: bool) -> None:
        """All checks of a store; the caller then writes."""
        number = self.find(addresses, width, lanes)
        self.m.progress += 1
        self.each(number, addresses, lanes, lambda i, a, who: self._write_check(i, a, width, who, strong))

    def raw(self, addresses: Addresses, width: int) -> Values:
        """Elements at checked addresses, unchecked."""
        return _EVERYTHING[width].take((addresses - _ORIGIN) >> SHIFT[width])

    def raw_store(self, addresses: Addresses, width: int, values: Values) -> None:
        """Write at checked addresses, unchecked."""
        _EVERYTHING[width][(addresses - _ORIGIN) >> SHIFT[width]] = values

    def each(self, number: int | NDArray[np.int64], addresses: Addresses, lanes: Lanes, check: Any) -> None:
        """Call ``check(array number, addresses, lanes)`` for each array."""
        if isinstance(number, int):
            check(number, addresses, lanes)
            return
        for i in np.unique(number).tolist():
            here = number == i
            check(i, addresses[here], lanes[here])

    def _rows(self, i: int, addresses: Addresses, width: int) -> tuple[NDArray[np.int64], int]:
        """Shadow rows of accesses to an array, and granules per access."""
        assert self.granule is not None
        return (addresses - (int(self.starts[i]) & -16)) >> SHIFT[width], width // self.granule

    def read_check(self, i: int, addresses: Addresses, width: int, lanes: Lanes, strong: bool) -> None:
        """Check and log a read that lies within one array."""
        written = self.written[i]
        if written is not None:
            offsets = (addresses - self.starts[i])[:, None] + np.arange(width)
            bad = ~written.take(offsets).astype(bool).all(axis=1)
            if bad.any():
                lane = int(lanes[int(np.argmax(bad))])
                raise UninitialisedRead(
                    f"uninitialised read: {self.m.describe(lane)} reads global memory nothing has written"
                )
        if not self.writeable[i]:
            return
        shadow = self.shadows[i]
        if shadow is None:
            self.reads[i].append((addresses.copy(), width, lanes, self.m.clocks.now, strong))
        else:
            shadow.read(*self._rows(i, addresses, width), lanes, strong)

    def _write_check(self, i: int, addresses: Addresses, width: int, lanes: Lanes, strong: bool) -> None:
        if not self.writeable[i]:
            raise ReadOnlyWrite(
                f"{self.m.describe(int(lanes[0]))} writes {width} bytes at global {int(addresses[0]):#x}, "
                "into an array that is read-only"
            )
        written = self.written[i]
        if written is not None:
            written[(addresses - self.starts[i])[:, None] + np.arange(width)] = 1
        if self.granule is None:
            return
        shadow = self.shadows[i]
        if shadow is None:
            shadow = self.shadows[i] = self._make_shadow(i)
        shadow.write(*self._rows(i, addresses, width), lanes, strong)

    def _make_shadow(self, i: int) -> Shadow:
        """A shadow for an array about to be written, with the reads it has seen."""
        start, granule = int(self.starts[i]) & -16, self.granule
        assert granule is not None
        base = int(self.starts[i])
        blocks = -(-(int(self.ends[i]) - start) // 16)
        shadow = Shadow(
            blocks * 16 // granule, granule, self.m.clocks, False,
            lambda g: f"byte {start + g * granule - base} of a {int(self.ends[i]) - base}-byte array", self.m.describe,
        )  # fmt: skip
        now = self.m.clocks.now
        for addresses, width, lanes, time, strong in self.reads[i]:
            self.m.clocks.now = time
            shadow.log_read(*self._rows(i, addresses, width), lanes, strong)
        self.m.clocks.now = now
        self.reads[i].clear()
        return shadow


def extent_of(array: NDArray[Any]) -> tuple[int, int, bool]:
    """First address, end and writeability of the memory that an array's elements lie in."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high), bool(array.flags.writeable)
