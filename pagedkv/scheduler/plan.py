"""What to run in one step.

Decided by the scheduler, computed by its caller, reported back once or never.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.sequence import Batch, Sequence
from pagedkv.scheduler.request import Branch, Request, Tokens


class NewTokens(NamedTuple):
    """The tokens that a report gave one branch.

    Attributes
    ----------
    branch : Branch
        Whose tokens they are. It may have ended with them: `branch.finish_reason`.
    tokens : int32 [n]
        One, or with a draft those of it that were accepted and the one after them; nothing behind a stop token.
    parent : Branch
        The lane that they continue: `branch` itself, or the one that it came from by this report, at a beam or at the
        first token of a parallel sample.
    """

    branch: Branch
    tokens: Tokens
    parent: Branch


Told: TypeAlias = list[NewTokens] | tuple[Seq[Branch], Tokens]  # as they are, or one token for each of these branches


class Plan:
    """One step's work. False where there is nothing to run.

    The first ``len(lanes)`` sequences of the batch want a token; the rest are chunks of prompts that do not end here.

    Attributes
    ----------
    batch : Batch
        For ``cache.step(plan.batch, q_lens=plan.q_lens, lookahead=plan.lookahead)``, or :meth:`Scheduler.step`.
    q_lens : int32 [num_seqs]
        Tokens of each sequence to compute.
    lookahead : int
    lanes : sequence of Branch
        Who wants a token, in the order of the batch.
    num_tokens : int
    shared_tokens : int
        Prompt tokens that sequences of the batch take from others of it, instead of computing them.
    expired : tuple of Request
        Those whose deadline passed before this step.
    finished : tuple of Request
        Those whose last report was interrupted before it returned them. Only a plan with nothing to run has any: else
        the next report returns them.
    told : for :attr:`new_tokens`; None before the report.
    from_prompt, has_drafts, expected
        For the report: lanes from here on end their prompt with this step; whether a lane verifies a draft; tokens of
        the first sequence that are computed once the step is committed.
    """

    __slots__ = (
        *("batch", "expected", "expired", "finished", "from_prompt", "has_drafts", "lanes"),
        *("lookahead", "num_tokens", "q_lens", "shared_tokens", "told"),
    )

    def __init__(
        self,
        batch: Batch,
        q_lens: NDArray[np.int32],
        num_tokens: int,
        lookahead: int,
        lanes: Seq[Branch],
        expired: tuple[Request, ...],
        from_prompt: int,
        has_drafts: bool,
        expected: int,
    ) -> None:
        self.batch, self.q_lens, self.num_tokens, self.lookahead = batch, q_lens, num_tokens, lookahead
        self.lanes, self.expired = lanes, expired
        self.finished: tuple[Request, ...] = ()
        self.shared_tokens = 0
        self.from_prompt, self.has_drafts, self.expected = from_prompt, has_drafts, expected
        self.told: Told | None = None

    @property
    def sequences(self) -> Seq[Sequence]:
        """The batch's sequences."""
        return self.batch.sequences

    @property
    def last_tokens(self) -> NDArray[np.int64]:
        """For each lane, the index of its last token in the step: int64 [num_lanes].

        That token's logits give the next one.
        """
        return np.cumsum(self.q_lens[: len(self.lanes)], dtype=np.int64) - 1

    @property
    def num_drafts(self) -> NDArray[np.int64]:
        """For each lane, how many of its tokens are a draft to be verified: int64 [num_lanes]."""
        return np.array([len(branch.draft) for branch in self.lanes], np.int64)

    @property
    def new_tokens(self) -> list[NewTokens]:
        """The tokens that the report of this plan gave each branch, in the order of the lanes.

        Empty before the report. Samples of a prompt come in the order in which the report gave them. A token is in one
        plan's list only, whatever is suspended, computed again, rolled back or refused. After a report that was
        interrupted, call the scheduler before you look: it takes back tokens that did not count.
        """
        if isinstance(self.told, tuple):
            branches, tokens = self.told
            return [NewTokens(branch, tokens[i : i + 1], branch) for i, branch in enumerate(branches)]
        return list(self.told or ())

    def __bool__(self) -> bool:
        return len(self.batch) > 0

    def __repr__(self) -> str:
        return f"<Plan, {self.num_tokens} tokens of {len(self.batch)} sequences, {len(self.lanes)} want the next>"
