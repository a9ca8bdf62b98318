"""The sequences that decode, as arrays: most steps change none of them, so a step asks and counts them all at once.

What each lane may still generate is counted down lazily: as long as fewer steps have passed than the shortest of them
has left, no lane can end by its length, and one number says how many steps are not taken off yet.
"""

from __future__ import annotations

import numpy as np

from pagedkv.scheduler.request import Branch, Tokens
from pagedkv.sequence import Sequence

NO_STOP = 2**40  # no token: they are int32


class Lanes:
    """Branches that have one token to compute and want the next; entry i of every array is branch i's.

    Attributes
    ----------
    branches : list of Branch
    sequences : list of Sequence
    rows : int64 [num_lanes], a view
    num_beams : how many of them are beams.
    """

    def __init__(self, capacity: int) -> None:
        self.branches: list[Branch] = []
        self.sequences: list[Sequence] = []
        self._rows = np.empty(capacity, np.int64)
        self._left = np.empty(capacity, np.int64)  # tokens that may still come, before the `_passed` steps
        self._passed, self._shortest = 0, 0  # steps since then; the least of `_left`
        self._stops = np.full((1, capacity), NO_STOP, np.int64)
        self.rows = self._rows[:0]
        self.num_beams = 0

    def __len__(self) -> int:
        return len(self.branches)

    def add(self, branch: Branch) -> None:
        """A branch decodes from now on."""
        seq, n, stops = branch.seq, len(self.branches), branch.request.stop_tokens
        assert seq is not None
        if len(stops) > len(self._stops):
            wider = np.full((len(stops), self._stops.shape[1]), NO_STOP, np.int64)
            wider[: len(self._stops)] = self._stops
            self._stops = wider
        self._rows[n] = seq.row
        left = branch.request.max_new_tokens - branch.num_output
        self._left[n] = left + self._passed
        self._shortest = min(self._shortest, left + self._passed) if n else left + self._passed
        self._stops[:, n] = NO_STOP
        self._stops[: len(stops), n] = stops
        self.branches.append(branch)
        self.sequences.append(seq)
        self.num_beams += branch.request.beams > 1
        self.rows = self._rows[: n + 1]

    def add_unless_over(self, branch: Branch, ended: list[Branch]) -> None:
        """A branch whose first token has just been appended decodes from now on, unless that was its last."""
        request = branch.request
        if branch.num_output >= request.max_new_tokens or int(branch.output[-1]) in request.stop_tokens:
            ended.append(branch)
        else:
            self.add(branch)

    def remove(self, branch: Branch) -> None:
        """It does not any more; those after it move up."""
        self.remove_at(self.branches.index(branch))

    def remove_at(self, i: int) -> None:
        """As `remove`, by place."""
        n = len(self.branches)
        for array in (self._rows, self._left):
            array[i : n - 1] = array[i + 1 : n]
        self._stops[:, i : n - 1] = self._stops[:, i + 1 : n]
        self.num_beams -= self.branches[i].request.beams > 1
        del self.branches[i], self.sequences[i]
        self.rows = self._rows[: n - 1]

    def left(self, i: int) -> int:
        """Tokens that branch i may still generate."""
        return int(self._left[i]) - self._passed

    def take(self, tokens: Tokens) -> list[int]:
        """Every lane got its token, int32 [num_lanes]; which of them end with it, ascending."""
        n = len(self.branches)
        assert len(tokens) == n
        ended = tokens == self._stops[0, :n]
        for stops in self._stops[1:]:
            ended |= tokens == stops[:n]
        self._passed += 1
        if self._passed >= self._shortest:
            left = self._left[:n]
            left -= self._passed
            self._passed = 0
            ended |= left <= 0
            self._shortest = int(left.min(initial=NO_STOP, where=left > 0))
        found: list[int] = ended.nonzero()[0].tolist() if np.count_nonzero(ended) else []
        return found

    def count(self, i: int, num_tokens: int) -> None:
        """Branch i got so many tokens."""
        self._left[i] -= num_tokens
        self._shortest = min(self._shortest, int(self._left[i]))

    def check_integrity(self) -> None:
        """The arrays agree with the branches."""
        assert len(self.branches) == len(self.sequences) == len(self.rows)
        assert self.num_beams == sum(branch.request.beams > 1 for branch in self.branches)
        for i, branch in enumerate(self.branches):
            assert branch.seq is self.sequences[i]
            assert branch.seq is not None
            assert branch.seq.row == self.rows[i]
            assert self.left(i) == branch.request.max_new_tokens - branch.num_output > 0
            assert self._shortest <= self._left[i]
            stops = tuple(int(token) for token in self._stops[:, i] if token != NO_STOP)
            assert stops == branch.request.stop_tokens
