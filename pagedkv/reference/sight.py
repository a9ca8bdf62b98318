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
    position : int64 [q_len], the queries' positions among the keys; negative where they outnumber the keys.
    begin, end : int64 [q_len], query ``i`` sees no keys but ``begin[i]..end[i] - 1``.
    mask : bool [q_len, seq_len], and of those only where this is True; None for all.
    """

    position: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    mask: NDArray[np.bool_] | None

    @staticmethod
    def of(q_len: int, seq_len: int, causal: bool, window: int | None, mask: NDArray[np.bool_] | None) -> Sight:
        """Sight of ``q_len`` queries over ``seq_len`` keys, aligned bottom-right.

        The last query stands at the last key.
        """
        position = seq_len - q_len + np.arange(q_len, dtype=np.int64)
        end = position + 1 if causal else np.full(q_len, seq_len, dtype=np.int64)
        begin = np.zeros(q_len, dtype=np.int64) if window is None else position + 1 - window
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
