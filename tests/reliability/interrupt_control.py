"""The control of the proof *interrupts*: it gives up moves that are still queued.

The library once did so itself.

An interruption then frees blocks that a copy is still to write, and the proof has to find wrong bytes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.tiers import Mover


class OldOrder:
    """Remembers what movers were given, so that it can be given up behind their backs.

    Attributes
    ----------
    given_up : moves that were, so far.
    """

    def __init__(self) -> None:
        self._submitted: list[int] = []
        self.given_up = 0

    def submitted(self, moves: Any) -> None:
        """A mover was given these moves."""
        self._submitted.extend(np.unique(moves["transfer"]).tolist())

    def after(self, cache: pk.KVCache) -> None:
        """Give up whatever this cache has queued, once an interruption came out of a call."""
        transfers, self._submitted = self._submitted, []
        never = np.zeros(1, np.bool_)
        for transfer in transfers:
            with suppress(pk.PagedKVError):  # over already
                cache.placement.complete(np.array([transfer], np.int64), never, never)
                self.given_up += 1


def plant_old_order() -> OldOrder:
    """Plant the old order: give up queued moves wherever a call is interrupted.

    It holds for the rest of this process.
    """
    order, real = OldOrder(), Mover.submit

    def submit(self: Mover, moves: Any, **options: Any) -> Any:
        order.submitted(moves)
        return real(self, moves, **options)

    Mover.submit = submit  # type: ignore[method-assign]
    return order
