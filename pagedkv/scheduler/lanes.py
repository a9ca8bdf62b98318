"""The sequences that decode, as arrays.

Most steps change none of them, so a step asks and counts them all at once.

A lane's end by length is a step's number, written down once: a step compares it, and the stop tokens, over all lanes.
"""

from __future__ import annotations

import numpy as np

from pagedkv.cache.sequence import Batch, Sequence
from pagedkv.scheduler._lanes import drop, ended, put
from pagedkv.scheduler.request import Branch, Tokens

NO_STOP = -1  # no token: they are 0 or more
ROW, LAST, STOPS = 0, 1, 2  # lines of the table


class Lanes:
    """Branches that have one token to compute and want the next.

    Entry i of everything is branch i's.

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
        # Its row, the step that gives it its last token, and its stop tokens: a column for each lane.
        self._table = np.full((STOPS + 1, capacity), NO_STOP, np.int64)
        self._now = 0  # steps so far
        self.rows = self._table[ROW, :0]
        self.num_beams = 0
        self._planned: tuple[list[Branch], Batch] | None = None

    def __len__(self) -> int:
        return len(self.branches)

    def as_planned(self) -> tuple[list[Branch], Batch]:
        """The branches and their sequences as they are now, for a plan, which must not change them."""
        if self._planned is None:
            self._planned = self.branches[:], Batch(self.sequences[:], self.rows.copy())
        return self._planned

    def add(self, branch: Branch) -> None:
        """A branch decodes from now on."""
        self._add(branch, branch.request.max_new_tokens - branch.num_output)

    def add_unless_over(self, branch: Branch, token: int, ended: list[Branch]) -> None:
        """Start decoding a branch to which this token was appended.

        Not if that was its last.
        """
        left = branch.request.max_new_tokens - branch.num_output
        if left <= 0 or token in branch.request.stop_tokens:
            ended.append(branch)
        else:
            self._add(branch, left)

    def _add(self, branch: Branch, left: int) -> None:
        seq, n, request = branch.seq, len(self.branches), branch.request
        assert seq is not None
        self._planned = None
        missing = STOPS + len(request.stop_tokens) - len(self._table)
        if missing > 0:
            self._table = np.pad(self._table, ((0, missing), (0, 0)), constant_values=NO_STOP)
        put(self._table, n, seq.row, self._now + left, request.stop_tokens)
        self.branches.append(branch)
        self.sequences.append(seq)
        self.num_beams += request.beams > 1
        self.rows = self._table[ROW, : n + 1]

    def remove(self, branch: Branch) -> None:
        """It does not any more; those after it move up."""
        self.remove_at(self.branches.index(branch))

    def remove_at(self, i: int) -> None:
        """As `remove`, by place."""
        n = len(self.branches)
        self._planned = None
        drop(self._table, i, n)
        self.num_beams -= self.branches[i].request.beams > 1
        del self.branches[i], self.sequences[i]
        self.rows = self._table[ROW, : n - 1]

    def left(self, i: int) -> int:
        """Tokens that branch i may still generate."""
        return int(self._table[LAST, i]) - self._now

    def take(self, tokens: Tokens) -> list[int]:
        """Every lane got its token, int32 [num_lanes]; which of them end with it, ascending."""
        assert len(tokens) == len(self.branches)
        self._now += 1
        return ended(self._table, tokens, self._now)

    def count(self, i: int, num_tokens: int) -> None:
        """Branch i got so many tokens."""
        self._table[LAST, i] -= num_tokens

    def check_integrity(self) -> None:
        """The arrays agree with the branches."""
        assert len(self.branches) == len(self.sequences) == len(self.rows)
        branches, batch = self.as_planned()
        assert (branches, batch.sequences) == (self.branches, self.sequences)
        assert np.array_equal(batch.rows, self.rows)
        assert self.num_beams == sum(branch.request.beams > 1 for branch in self.branches)
        for i, branch in enumerate(self.branches):
            assert branch.seq is self.sequences[i]
            assert branch.seq is not None
            assert branch.seq.row == self.rows[i]
            assert self.left(i) == branch.request.max_new_tokens - branch.num_output > 0
            stops = tuple(int(token) for token in self._table[STOPS:, i] if token != NO_STOP)
            assert stops == branch.request.stop_tokens
