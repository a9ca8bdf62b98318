"""The block that a prompt shares in part behind its cached prefix, for a partial hit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.held import Hold, own_partial
from pagedkv._core.placement import Placement


class Remainder:
    """At most one such block of a load: a partly filled one, or the first tokens of a full one.

    A second owner holds the path that ends with it.

    Parameters
    ----------
    placement : Placement
    worth : whether to load it, by the tokens that agree, those before them, and its tier.

    Attributes
    ----------
    num_blocks : 1 where there is one, else 0.
    """

    __slots__ = ("_held", "_placement", "_worth", "num_blocks")

    def __init__(self, placement: Placement, worth: Callable[[int, int, int], bool]) -> None:
        self._placement, self._worth = placement, worth
        self._held: Hold | None = None
        self.num_blocks = 0

    def own(self, prefix: Hold, prompt: NDArray[np.int32]) -> None:
        """Own one below the device that begins as the rest of the prompt, if it pays."""
        start = prefix.num_blocks * self._placement.tree.block_size
        common = min(prefix.partial_tokens, len(prompt) - 1 - start)  # the last token is left to compute
        if prefix.partial_tier > 0 and common > 0 and self._worth(common, start, prefix.partial_tier):
            self._held, _, _ = own_partial(self._placement, prefix, prompt[start:-1], below=True)
            self.num_blocks = int(self._held is not None)

    def let_go(self) -> None:
        """Own none. Twice is fine."""
        held, self._held, self.num_blocks = self._held, None, 0
        if held is not None:
            held.release()

    def path(self, prefix: Hold) -> int:
        """The owner of the longest path: that which ends with it, or the prefix."""
        return prefix.handle if self._held is None else self._held.handle

    def settle(self) -> None:
        """Its promotion is over; its device block stays until this is let go of."""
        if self._held is not None:
            self._placement.settle(self._held.handle)
