"""Shared memory of all CTAs, with its race checker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes
from tests.ptxsim.errors import OutOfBounds
from tests.ptxsim.memory import SHARED_START, SHIFT, Addresses, Values, check_alignment
from tests.ptxsim.shadow import Shadow
from tests.ptxsim.types import UNSIGNED

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine


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
        return flat >> SHIFT[width], width // self.granule

    def load(self, addresses: Addresses, width: int, active: Active, strong: bool = False) -> Values:
        """One element per active lane."""
        flat = self.flat(addresses, width, active)
        if self.m.stats is not None:
            self.m.stats.shared_access(self.m, addresses, width, active.index)
        if self.shadow is not None:
            self.shadow.read(*self.rows(flat, width), active.index, strong)
        return self.views[width].take(flat >> SHIFT[width])

    def store(self, addresses: Addresses, width: int, values: Values, active: Active, strong: bool = False) -> None:
        """One element per active lane."""
        flat = self.flat(addresses, width, active)
        if self.m.stats is not None:
            self.m.stats.shared_access(self.m, addresses, width, active.index)
        self.m.progress += 1
        if self.shadow is not None:
            self.shadow.write(*self.rows(flat, width), active.index, strong)
        self.views[width][flat >> SHIFT[width]] = values
