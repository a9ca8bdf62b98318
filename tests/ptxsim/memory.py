"""Memory spaces, addressed by the active lanes' byte addresses.

All move whole elements of 1, 2, 4, 8 or 16 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes
from tests.ptxsim.errors import Misaligned, OutOfBounds, ReadOnlyWrite
from tests.ptxsim.types import UNSIGNED

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Addresses = NDArray[np.int64]
Values = NDArray[Any]

WINDOW = 48  # generic addresses: the bits above say which space
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = 1 << WINDOW, 2 << WINDOW, 3 << WINDOW
SHARED_START = 1024  # shared offsets start here, as on Hopper: address 0 belongs to no array


SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


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
        return (addresses + lanes * self.stride) >> SHIFT[width]

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
        return self.views[width].take(addresses >> SHIFT[width])

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
                lane = int(active.index[first])
                raise OutOfBounds(f"out of bounds: generic address {int(addresses[first]):#x} by {m.describe(lane)}")
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
