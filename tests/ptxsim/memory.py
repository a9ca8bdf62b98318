"""Memory spaces. All take byte addresses of the active lanes and move whole elements of 1, 2, 4, 8 or 16 bytes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes
from tests.ptxsim.errors import Misaligned, OutOfBounds, ReadOnlyWrite, UninitialisedRead
from tests.ptxsim.shadow import Shadow
from tests.ptxsim.types import UNSIGNED

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Addresses = NDArray[np.int64]
Values = NDArray[Any]

WINDOW = 48  # generic addresses: the bits above say which space
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = 1 << WINDOW, 2 << WINDOW, 3 << WINDOW
SHARED_START = 1024  # shared offsets start here, as on Hopper: address 0 is nobody's
_ORIGIN = 4096


def _address_space(width: int) -> Values:
    """All of this process's memory as one array of elements; only checked indices may be used."""
    shape = ((1 << WINDOW) // width,)
    holder = type("Everything", (), {})()
    typestr = "<c16" if width == 16 else f"<u{width}"
    holder.__array_interface__ = {"data": (_ORIGIN, False), "shape": shape, "typestr": typestr, "version": 3}
    return np.asarray(holder)


_EVERYTHING = {width: _address_space(width) for width in UNSIGNED}
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


def check_alignment(m: Machine, addresses: Addresses, width: int, lanes: Lanes, space: str) -> None:
    """Raise unless all addresses are multiples of the width."""
    if width > 1:
        low = addresses & (width - 1)
        if low.any():
            first = int(np.argmax(low != 0))
            raise Misaligned(
                f"misaligned {width}-byte access to {space} memory at {int(addresses[first]):#x} by "
                f"{m.describe(int(lanes[first]))}"
            )


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
        return _EVERYTHING[width].take(index >> _SHIFT[width] if width > 1 else index)

    def store(self, addresses: Addresses, width: int, values: Values, active: Active, strong: bool = False) -> None:
        """One element per active lane."""
        m = self.m
        lanes = active.index
        check_alignment(m, addresses, width, lanes, "global")
        self.prepare_store(addresses, width, lanes, strong)
        if m.stats is not None:
            m.stats.global_access(m, addresses, width, lanes)
        _EVERYTHING[width][(addresses - _ORIGIN) >> _SHIFT[width]] = values

    def prepare_store(self, addresses: Addresses, width: int, lanes: Lanes, strong: bool) -> None:
        """All checks of a store; the caller then writes."""
        number = self.find(addresses, width, lanes)
        self.m.progress += 1
        self.each(number, addresses, lanes, lambda i, a, who: self._write_check(i, a, width, who, strong))

    def raw(self, addresses: Addresses, width: int) -> Values:
        """Elements at checked addresses, unchecked."""
        return _EVERYTHING[width].take((addresses - _ORIGIN) >> _SHIFT[width])

    def raw_store(self, addresses: Addresses, width: int, values: Values) -> None:
        """Write at checked addresses, unchecked."""
        _EVERYTHING[width][(addresses - _ORIGIN) >> _SHIFT[width]] = values

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
        return (addresses - (int(self.starts[i]) & -16)) >> _SHIFT[width], width // self.granule

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
                f"{self.m.describe(int(lanes[0]))} writes {width} bytes at global {int(addresses[0]):#x}, into an array that is read-only"
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


class SharedMemory:
    """Shared memory of all CTAs, one row each.

    Parameters
    ----------
    m : the machine.
    size : bytes per CTA.
    granule : bytes per granule of the race checker, None without one.
    """

    space = "shared"

    def __init__(self, m: Machine, size: int, granule: int | None) -> None:
        self.m, self.size, self.granule = m, size, granule
        self.stride = -(-max(size, 1) // 128) * 128
        self.bytes = np.full(m.ctas * self.stride + 16, 0xFF, np.uint8)
        skip = -self.bytes.ctypes.data % 16
        self.bytes = self.bytes[skip : skip + m.ctas * self.stride]
        self.views: dict[int, Values] = {width: self.bytes.view(UNSIGNED[width]) for width in UNSIGNED}
        self.lane_base = np.arange(m.lanes, dtype=np.int64) // m.threads * self.stride - SHARED_START
        self.shadow: Shadow | None = None
        if granule is not None:
            self.shadow = Shadow(m.ctas * self.stride // granule, granule, m.clocks, True, self._describe, m.describe)

    def _describe(self, granule: int) -> str:
        assert self.granule is not None
        return f"shared byte {granule * self.granule % self.stride}"

    def flat(self, addresses: Addresses, width: int, active: Active) -> Addresses:
        """Byte index into ``bytes`` for each active lane's address, checked."""
        return self._checked(addresses, width, active.index) + active.take(self.lane_base)

    def flat_of(self, addresses: Addresses, width: int, lanes: Lanes) -> Addresses:
        """The same for any list of addresses and the lanes they belong to."""
        return self._checked(addresses, width, lanes) + self.lane_base[lanes]

    def _checked(self, addresses: Addresses, width: int, lanes: Lanes) -> Addresses:
        check_alignment(self.m, addresses, width, lanes, "shared")
        if len(addresses) and (
            int(addresses.min()) < SHARED_START or int(addresses.max()) + width > SHARED_START + self.size
        ):
            bad = (addresses < SHARED_START) | (addresses + width > SHARED_START + self.size)
            first = int(np.argmax(bad))
            raise OutOfBounds(
                f"out of bounds: {self.m.describe(int(lanes[first]))} accesses {width} bytes at shared offset "
                f"{int(addresses[first]) - SHARED_START} of {self.size}"
            )
        return addresses

    def rows(self, flat: Addresses, width: int) -> tuple[NDArray[np.int64], int]:
        """Shadow rows of accesses at flat bytes, and granules per access."""
        assert self.granule is not None
        return flat >> _SHIFT[width], width // self.granule

    def load(self, addresses: Addresses, width: int, active: Active, strong: bool = False) -> Values:
        """One element per active lane."""
        flat = self.flat(addresses, width, active)
        if self.m.stats is not None:
            self.m.stats.shared_access(self.m, addresses, width, active.index)
        if self.shadow is not None:
            self.shadow.read(*self.rows(flat, width), active.index, strong)
        return self.views[width].take(flat >> _SHIFT[width])

    def store(self, addresses: Addresses, width: int, values: Values, active: Active, strong: bool = False) -> None:
        """One element per active lane."""
        flat = self.flat(addresses, width, active)
        if self.m.stats is not None:
            self.m.stats.shared_access(self.m, addresses, width, active.index)
        self.m.progress += 1
        if self.shadow is not None:
            self.shadow.write(*self.rows(flat, width), active.index, strong)
        self.views[width][flat >> _SHIFT[width]] = values


class LocalMemory:
    """Each thread's own memory (``.local``): spilled arrays."""

    space = "local"

    def __init__(self, m: Machine, size: int) -> None:
        self.m, self.size = m, size
        self.stride = -(-max(size, 1) // 16) * 16
        self._views: dict[int, Values] | None = None

    def _view(self, width: int) -> Values:
        if self._views is None:
            words = np.full(self.m.lanes * self.stride // 16, 0, np.complex128)
            self._views = {w: words.view(UNSIGNED[w]) for w in UNSIGNED}
            self._views[1][...] = 0xFF
        return self._views[width]

    def _index(self, addresses: Addresses, width: int, active: Active) -> NDArray[np.int64]:
        lanes = active.index
        check_alignment(self.m, addresses, width, lanes, "local")
        bad = (addresses < 0) | (addresses + width > self.size)
        if bad.any():
            first = int(np.argmax(bad))
            raise OutOfBounds(
                f"out of bounds: {self.m.describe(int(lanes[first]))} accesses {width} bytes at local offset "
                f"{int(addresses[first])} of {self.size}"
            )
        return (addresses + lanes * self.stride) >> _SHIFT[width]

    def load(self, addresses: Addresses, width: int, active: Active, strong: bool = False) -> Values:
        """One element per active lane."""
        return self._view(width).take(self._index(addresses, width, active))

    def store(self, addresses: Addresses, width: int, values: Values, active: Active, strong: bool = False) -> None:
        """One element per active lane."""
        self._view(width)[self._index(addresses, width, active)] = values


class ParamMemory:
    """The kernel's parameters: one block of bytes that all threads read."""

    space = "param"

    def __init__(self, m: Machine, block: bytes) -> None:
        self.m, self.size = m, len(block)
        padded = np.zeros(-(-max(len(block), 1) // 16) * 16, np.uint8)
        padded[: len(block)] = np.frombuffer(block, np.uint8)
        words = np.zeros(len(padded) // 16, np.complex128)
        words.view(np.uint8)[...] = padded
        self.views: dict[int, Values] = {width: words.view(UNSIGNED[width]) for width in UNSIGNED}

    def load(self, addresses: Addresses, width: int, active: Active, strong: bool = False) -> Values:
        """One element per active lane."""
        check_alignment(self.m, addresses, width, active.index, "param")
        if int(addresses.min()) < 0 or int(addresses.max()) + width > self.size:
            raise OutOfBounds(f"out of bounds: a parameter at {int(addresses.max())} of {self.size} bytes")
        return self.views[width].take(addresses >> _SHIFT[width])

    def store(self, addresses: Addresses, width: int, values: Values, active: Active, strong: bool = False) -> None:
        """Parameters are constant."""
        raise ReadOnlyWrite(f"{self.m.describe(int(active.index[0]))} writes a kernel parameter")


class GenericMemory:
    """Generic addresses: the window bits choose the space, lane by lane."""

    space = "generic"

    def __init__(self, m: Machine) -> None:
        self.m = m

    def _parts(self, addresses: Addresses, active: Active) -> list[tuple[Any, Addresses, Active, Any]]:
        m = self.m
        spaces: list[Any] = [m.global_memory, m.shared, m.local, m.param]
        top = addresses >> WINDOW
        low, high = int(top.min()), int(top.max())
        if low == high:
            if not 0 <= low <= 3:
                raise OutOfBounds(
                    f"out of bounds: generic address {int(addresses[0]):#x} by {m.describe(int(active.index[0]))}"
                )
            return [(spaces[low], addresses - (low << WINDOW) if low else addresses, active, slice(None))]
        parts = []
        for window in np.unique(top).tolist():
            if not 0 <= window <= 3:
                first = int(np.argmax(top == window))
                raise OutOfBounds(
                    f"out of bounds: generic address {int(addresses[first]):#x} by {m.describe(int(active.index[first]))}"
                )
            here = top == window
            mask = np.zeros(m.lanes, bool)
            mask[active.index[here]] = True
            parts.append((spaces[window], addresses[here] - (window << WINDOW), m.active(mask), here))
        return parts

    def load(self, addresses: Addresses, width: int, active: Active, strong: bool = False) -> Values:
        """One element per active lane."""
        parts = self._parts(addresses, active)
        if len(parts) == 1:
            return parts[0][0].load(parts[0][1], width, active, strong)
        out = np.empty(len(addresses), UNSIGNED[width])
        for space, local, some, here in parts:
            out[here] = space.load(local, width, some, strong)
        return out

    def store(self, addresses: Addresses, width: int, values: Values, active: Active, strong: bool = False) -> None:
        """One element per active lane."""
        for space, local, some, here in self._parts(addresses, active):
            space.store(local, width, values[here], some, strong)


def extent_of(array: NDArray[Any]) -> tuple[int, int, bool]:
    """First address, end and writeability of the memory that an array's elements lie in."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high), bool(array.flags.writeable)


def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    """A view of memory that somebody else keeps alive."""
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)
