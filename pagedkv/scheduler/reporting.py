"""Applies a step's tokens: branches grow, fork, end.

Drafts are kept as far as they were right.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from pagedkv.cache.cache import KVCache
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.scheduler._lanes import are_tokens
from pagedkv.scheduler.mending import Before
from pagedkv.scheduler.plan import NewTokens, Plan
from pagedkv.scheduler.request import NO_TOKENS, Branch, Request, Tokens
from pagedkv.scheduler.running import Running


class Reporter:
    """Applies reports to what runs. All of a report is looked at before any of it counts.

    Attributes
    ----------
    before : the state before a report that is under way, or was interrupted.
    """

    def __init__(self, cache: KVCache, running: Running) -> None:
        self._cache, self._running = cache, running
        self._as_tokens = cache.placement.tree.tokens
        self.before: Before | None = None

    def apply(self, plan: Plan, tokens: Any) -> list[Request]:
        """The lanes of a committed plan go on with these.

        Requests none of whose branches runs any more.

        Raises
        ------
        WrongType, InvalidArgument
            They are no tokens, too many or too few, or contradict a draft. Nothing was changed.
        """
        if self._branches_or_drafts(plan):
            entries = self._entries(plan, tokens)
            self.before = Before(plan, True)
            finished = self._several(plan, entries)
        else:
            values = self._one_token_each(plan, tokens)
            self.before = Before(plan, False)
            finished = self._one_each(plan, values)
            plan.told = plan.lanes, values
        self.before = None
        return finished

    def _branches_or_drafts(self, plan: Plan) -> bool:
        """Whether a lane may be given something else than one token."""
        if plan.has_drafts or self._running.lanes.num_beams:
            return True
        return any(branch.request.width > 1 for branch in plan.lanes[plan.from_prompt :])

    # ---- one token each: arrays

    def _one_token_each(self, plan: Plan, tokens: Any) -> Tokens:
        """The tokens given to the lanes, int32 [num_lanes], checked."""
        try:
            values: Tokens = self._as_tokens(tokens)
            if len(values) == len(plan.lanes) and are_tokens(values):
                return values
        except (WrongType, InvalidArgument):
            pass  # each lane has its own error
        entries = self._entries(plan, tokens)  # arrays of one token each, or an error that names its lane
        return np.concatenate(entries) if entries else NO_TOKENS

    def _one_each(self, plan: Plan, values: Tokens) -> list[Request]:
        lanes, first = self._running.lanes, plan.from_prompt
        self._cache.table.append(plan.batch.rows[: len(values)], values)
        last = lanes.take(values[:first]) if first else []
        ended = [lanes.branches[i] for i in last]
        for i in reversed(last):
            lanes.remove_at(i)
        if first < len(values):
            for branch, token in zip(plan.lanes[first:], values[first:].tolist(), strict=True):
                self._running.computing.remove(branch)
                lanes.add_unless_over(branch, token, ended)
        return _end(ended)

    # ---- several tokens for some: lane by lane

    def _entries(self, plan: Plan, tokens: Any) -> list[Tokens]:
        """What each lane was given, as int32 [n], checked."""
        try:
            given = None if isinstance(tokens, Set | Mapping) else list(tokens)
        except TypeError:
            given = None
        if given is None:
            raise WrongType(f"a report is one entry per lane, in their order, not {type(tokens).__name__}")
        if len(given) != len(plan.lanes):
            raise InvalidArgument(f"{len(plan.lanes)} lanes want an entry each, got {len(given)}")
        entries = [self._entry(plan, i, entry) for i, entry in enumerate(given)]
        self._check(plan, entries)
        return entries

    def _entry(self, plan: Plan, i: int, entry: Any) -> Tokens:
        """A token or several, as int32 [n]."""
        try:
            tokens: Tokens = self._as_tokens(entry if _has_length(entry) else [entry])
        except (WrongType, InvalidArgument) as problem:
            raise type(problem)(f"{_lane(plan, i)}: {problem}") from None
        if len(tokens) and tokens.min() < 0:
            raise InvalidArgument(f"{_lane(plan, i)}: {int(tokens.min())} is no token: they are 0 or more")
        return tokens

    def _check(self, plan: Plan, entries: Seq[Tokens]) -> None:
        """Raise where entries do not fit what runs."""
        going_on: dict[Request, int] = {}
        new_rows = 0  # forks, less the branches that the same report ends
        for i, (branch, entry) in enumerate(zip(plan.lanes, entries, strict=True)):
            request = branch.request
            if _branches_out(branch):
                stops = sum(token in request.stop_tokens for token in entry.tolist())
                goes = len(entry) - stops
                going_on[request] = going_on.get(request, 0) + goes
                new_rows += -1 if _is_over(branch) else goes - 1
                if request.beams == 1 and len(entry) != request.n:
                    raise InvalidArgument(f"{_lane(plan, i)} wants {request.n} first tokens, got {len(entry)}")
            elif not 1 <= len(entry) <= 1 + len(branch.draft):
                most = f", after at most {len(branch.draft)} of its draft" if len(branch.draft) else ""
                raise InvalidArgument(f"{_lane(plan, i)} wants 1 token{most}, got {len(entry)}")
            elif entry[:-1].tolist() != branch.draft[: len(entry) - 1].tolist():
                raise InvalidArgument(
                    f"{_lane(plan, i)} accepted {entry[:-1].tolist()}, its draft was {branch.draft.tolist()}"
                )
        for request, goes in going_on.items():
            if goes > request.width:
                raise InvalidArgument(f"request {request.id} has {request.width} beams, {goes} go on")
        if new_rows > self._cache.max_sequences - self._cache.table.num_rows:
            raise InvalidArgument(
                f"{new_rows} sequences more are needed for the branches that fork off, and the cache has "
                f"{self._cache.table.num_rows} of at most {self._cache.max_sequences}: release others, or open it with "
                f"a larger max_sequences"
            )

    def _several(self, plan: Plan, entries: Seq[Tokens]) -> list[Request]:
        ended: list[Branch] = []
        told: list[tuple[Branch, int, NewTokens]] = []  # a lane, which of its tokens, and the outcome
        lanes = self._running.lanes
        forking: dict[Request, list[tuple[Branch, list[tuple[int, int]]]]] = {}
        for i, (branch, entry) in enumerate(zip(plan.lanes, entries, strict=True)):
            if _branches_out(branch):
                forking.setdefault(branch.request, []).append((branch, list(enumerate(entry.tolist()))))
                continue
            if i >= plan.from_prompt:
                self._running.computing.remove(branch)
                kept = self._extend(branch, entry)
                lanes.add_unless_over(branch, int(entry[-1]), ended)
            else:
                kept = self._extend(branch, entry)
                at = lanes.branches.index(branch)
                lanes.count(at, len(kept))
                if lanes.left(at) <= 0 or int(kept[-1]) in branch.request.stop_tokens:
                    lanes.remove_at(at)
                    ended.append(branch)
                elif self._running.pending(branch) > 1:
                    self._running.back_to_computing(branch)
            told.append((branch, 0, NewTokens(branch, kept, branch)))
        going = {request: self._drop(request, pairs, told) for request, pairs in forking.items()}
        finished = _end(ended)
        for request, pairs in going.items():  # all that ends has let go of its sequences by now
            self._fork(request, pairs, told)
        lane_of = {branch: i for i, branch in enumerate(plan.lanes)}
        plan.told = [new for _, _, new in sorted(told, key=lambda one: (lane_of[one[0]], one[1]))]
        return [*(request for request in going if not request.live()), *finished]

    def _extend(self, branch: Branch, entry: Tokens) -> Tokens:
        """Keep the draft's correct tokens and add the token after them; the tokens that count."""
        assert branch.seq is not None
        stops = [i for i, token in enumerate(entry.tolist()) if token in branch.request.stop_tokens]
        kept = entry[: stops[0] + 1] if stops else entry
        draft, branch.draft = branch.draft, NO_TOKENS
        if len(draft) > len(kept) - 1:
            branch.seq.truncate(branch.seq.num_tokens - len(draft) + len(kept) - 1)
        branch.seq.append(kept[-1:])
        return kept

    def _drop(
        self,
        request: Request,
        pairs: Seq[tuple[Branch, list[tuple[int, int]]]],
        told: list[tuple[Branch, int, NewTokens]],
    ) -> list[tuple[Branch, list[tuple[int, int]]]]:
        """Branches end with their last tokens, or without one.

        Those that go on, with the tokens they go on with and their places in the entry.
        """
        over = _is_over(pairs[0][0])
        going: list[tuple[Branch, list[tuple[int, int]]]] = []
        for branch, tokens in pairs:
            goes = [] if over else [placed for placed in tokens if placed[1] not in request.stop_tokens]
            for place, token in tokens if over else [one for one in tokens if one[1] in request.stop_tokens]:
                done = Branch(request, NO_TOKENS)
                output = np.append(branch.output, np.int32(token))
                done.end(output)
                request.branches.append(done)
                told.append((branch, place, NewTokens(done, output[-1:], branch)))
            if branch in self._running.computing:
                self._running.computing.remove(branch)
            elif not goes:
                self._running.lanes.remove(branch)
            if goes:
                going.append((branch, goes))
            else:
                request.branches.remove(branch)
                branch.let_go()
        return going

    def _fork(
        self,
        request: Request,
        pairs: Seq[tuple[Branch, list[tuple[int, int]]]],
        told: list[tuple[Branch, int, NewTokens]],
    ) -> None:
        """Each branch goes on with its tokens, those after the first in forks."""
        for branch, goes in pairs:
            assert branch.seq is not None
            forks = branch.seq.fork(len(goes) - 1)
            place, token = goes[0]
            branch.seq.append(token)
            told.append((branch, place, NewTokens(branch, np.array([token], np.int32), branch)))
            if branch in self._running.lanes.branches:
                at = self._running.lanes.branches.index(branch)
                self._running.lanes.count(at, 1)
            else:
                self._running.lanes.add(branch)
            for seq, (place, token) in zip(forks, goes[1:], strict=True):
                fork = Branch(request, NO_TOKENS)
                fork.seq = seq
                seq.append(token)
                request.branches.append(fork)
                self._running.lanes.add(fork)
                told.append((branch, place, NewTokens(fork, np.array([token], np.int32), branch)))


def _end(ended: Seq[Branch]) -> list[Request]:
    """These branches, which are no lanes any more, have their last token.

    Requests that have no others.
    """
    finished = []
    for branch in ended:
        branch.end(branch.output)
        if not branch.request.live():
            finished.append(branch.request)
    return finished


def _branches_out(branch: Branch) -> bool:
    """Whether its tokens are alternatives."""
    request = branch.request
    return request.beams > 1 or (request.n > 1 and branch.num_output == 0)


def _is_over(branch: Branch) -> bool:
    """Whether its next token is the last."""
    return branch.num_output + 1 >= branch.request.max_new_tokens


def _has_length(entry: Any) -> bool:
    try:
        len(entry)
    except TypeError:  # a number, or an array without dimensions
        return False
    return True


def _lane(plan: Plan, i: int) -> str:
    return f"lane {i} (request {plan.lanes[i].request.id})"
