"""Which lane has each extent of a store, judged by the headers that a crash may have left.

A store that is opened and the tools that read one follow this rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers.disk.format import Geometry

NO_LANE = -1

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Settlement:
    """The lane of each extent, and the live headers that do not count because of it.

    Attributes
    ----------
    owners : int8 [extents], the lane that wrote there last; NO_LANE where none did.
    latest : uint64 [extents], the generation of that write; 0 where there was none.
    lost : by lane, slots whose live headers lie in an extent of another lane or of none.
    torn : by lane, slots of an extent of this lane with a lost header of another lane inside: their pages are broken.
    """

    owners: NDArray[np.int8]
    latest: NDArray[np.uint64]
    lost: tuple[Slots, ...]
    torn: tuple[Slots, ...]


def settle(
    slots: Sequence[Slots], generations: Sequence[NDArray[np.uint64]], sizes: Sequence[Geometry], next_generation: int
) -> Settlement:
    """Give each extent to the lane of its newest header.

    A header with a generation that no write has had decides nothing.

    Parameters
    ----------
    slots, generations : of the live headers of each lane.
    sizes : of each lane.
    next_generation : every write so far had a lower one.
    """
    latest = np.zeros(sizes[0].num_blocks // sizes[0].extent_slots, np.uint64)
    owners = np.full(latest.size, NO_LANE, np.int8)
    for lane, (own, given, size) in enumerate(zip(slots, generations, sizes, strict=True)):
        was_given, newest = given < next_generation, np.zeros_like(latest)
        np.maximum.at(newest, own[was_given] // size.extent_slots, given[was_given])
        owners[newest > latest] = lane
        latest = np.maximum(latest, newest)
    is_own = [owners[own // size.extent_slots] == lane for lane, (own, size) in enumerate(zip(slots, sizes))]
    lost = tuple(own[~mine] for own, mine in zip(slots, is_own))
    torn = []
    for lane, (own, mine, size) in enumerate(zip(slots, is_own, sizes)):
        hit = [_slots_at(lost[other], sizes[other], size) for other in range(len(sizes)) if other != lane]
        torn.append(np.intersect1d(own[mine], np.concatenate(hit)))
    return Settlement(owners, latest, lost, tuple(torn))


def _slots_at(slots: Slots, of: Geometry, size: Geometry) -> Slots:
    """Slots of one size in which the headers of slots of another size begin.

    Where such a header ends in a further slot, that one has no header any more.
    """
    extents, places = np.divmod(slots, of.extent_slots)
    index = places * of.slot_bytes // size.slot_bytes
    found: Slots = (extents * size.extent_slots + index)[index < size.extent_slots]  # behind the last one is no slot
    return found
