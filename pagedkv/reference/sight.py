"""Which keys the queries of one sequence see: a range each, minus a custom mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sight:
    """Positions of one sequence's queries, and the tokens that they see.

    Parameters
    ----------
    position : int64 [q_len], the queries' positions, counted from key 0; negative where they outnumber the keys.
    begin, end : int64 [q_len], query ``i`` sees no keys but ``begin[i]..end[i] - 1``.
    mask : bool [q_len, seq_len], and of those only where this is True; None for all.
    """

    position: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    mask: NDArray[np.bool_] | None

    @staticmethod
    def of(
        position: NDArray[np.int64], seq_len: int, causal: bool, window: int | None, mask: NDArray[np.bool_] | None
    ) -> Sight:
        """Sight of queries at these positions over ``seq_len`` keys."""
        end = position + 1 if causal else np.full_like(position, seq_len)
        begin = np.zeros_like(position) if window is None else position + 1 - window
        end = np.clip(end, 0, seq_len)
        return Sight(position, np.clip(begin, 0, end), end, mask)

    def __getitem__(self, queries: slice) -> Sight:
        """The same of some of the queries."""
        mask = None if self.mask is None else self.mask[queries]
        return Sight(self.position[queries], self.begin[queries], self.end[queries], mask)

    def span(self) -> tuple[int, int]:
        """``(low, high)``: no query sees a key outside ``low..high - 1``, whatever the mask says."""
        return int(self.begin.min()), int(self.end.max())

    def sees(self, low: int, high: int) -> NDArray[np.bool_]:
        """Bool [q_len, high - low]: whether each query sees each of the keys ``low..high - 1``."""
        key = np.arange(low, high)
        seen = (self.begin[:, None] <= key) & (key < self.end[:, None])
        return seen if self.mask is None else seen & self.mask[:, low:high]
