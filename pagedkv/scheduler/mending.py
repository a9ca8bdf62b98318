"""Repairs the state that an interrupted call of the scheduler left.

The next call repairs it before it does anything else.

An exception can come between any two lines (Ctrl-C, a timeout's signal, no memory). The lists of running, waiting and
suspended requests may then disagree; each branch's tokens are still right. So the scheduler makes the lists anew from
the tokens: a request that had begun is suspended with its tokens, one that had not waits. An interrupted report counts
as never made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pagedkv.observe.callbacks import is_refusal
from pagedkv.scheduler.plan import Plan
from pagedkv.scheduler.request import Branch, Request, Tokens

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Mendable(Protocol):
    """An object whose calls can be interrupted.

    Attributes
    ----------
    torn : whether one of them is under way, or was interrupted.
    """

    torn: bool

    @property
    def is_half_done(self) -> bool:
        """Whether a refusal now would leave something half done."""

    def heard(self) -> None:
        """The caller has the result of the last call."""

    def mend(self) -> None:
        """Repair the state that an interrupted call left.

        It may have been about to return a result; that is reported again.
        """


M = TypeVar("M", bound=Mendable)


def whole(
    call: Callable[Concatenate[M, Arguments], Result],
) -> Callable[Concatenate[M, Arguments], Result]:
    """A method that first repairs the state left by an interrupted call.

    It ends whole, or is repaired itself.
    """

    @functools.wraps(call)
    def wrapped(self: M, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if self.torn:
            self.mend()
        else:
            self.heard()
        self.torn = True
        try:
            result = call(self, *arguments, **options)
        except BaseException as problem:
            self.torn = self.is_half_done or not is_refusal(problem)
            raise
        self.torn = False
        return result

    return wrapped  # type: ignore[return-value]  # the name of its first argument


class Before:
    """The state that a report may change, as it was before.

    The branches of its requests, and what each has generated.

    Parameters
    ----------
    plan : that is reported.
    several : whether the report may be of more than one token for a lane, or end lanes that have none.
    """

    def __init__(self, plan: Plan, several: bool) -> None:
        self._plan = plan
        self._taken_back: list[tuple[Branch, Tokens]] | None = None  # lanes, with the tokens they go back to
        self._branches: list[tuple[Request, list[tuple[Branch, Tokens | None]]]] = []
        if several:
            for request in dict.fromkeys(branch.request for branch in plan.lanes):
                known = [(branch, None if branch.done else branch.tokens) for branch in request.branches]
                self._branches.append((request, known))

    def restore(self) -> None:
        """It is so again; no branch of the lanes holds a sequence.

        To be done again where it was interrupted.
        """
        self._plan.told = None
        for request, known in self._branches:
            before = {id(branch) for branch, _ in known}
            for branch in request.branches:
                if id(branch) not in before:
                    branch.let_go()
            for branch, tokens in known:
                if tokens is not None:
                    branch.reopen(tokens)
            request.branches = [branch for branch, _ in known]
        if not self._branches:
            if self._taken_back is None:  # at once, before any is changed: their state tells the one before
                self._taken_back = [(branch, tokens) for branch in self._plan.lanes
                                    if (tokens := _before_the_token(branch)) is not None]  # fmt: skip
            for branch, tokens in self._taken_back:
                branch.reopen(tokens)


def _before_the_token(branch: Branch) -> Tokens | None:
    """The tokens of before of a lane that got one token, or none yet.

    None where it holds nothing.
    """
    if branch.done:
        return branch.tokens[:-1]
    if branch.seq is None or branch.seq.is_released:
        return None
    tokens = branch.known_tokens()
    is_given = branch.seq.num_tokens > branch.seq.num_computed  # the plan's step had computed all that it had
    return tokens[:-1] if is_given else tokens


def set_down(request: Request) -> None:
    """A request that goes on later holds nothing but its tokens."""
    for branch in request.live():
        branch.reopen(branch.known_tokens())


def end_all(request: Request) -> None:
    """A request that was being ended has ended."""
    for branch in request.live():
        branch.end(branch.known_tokens()[len(request.prompt) :])

