"""What a call of the scheduler that was interrupted left half done.

Put right before the next call does anything.

An exception can come between any two lines (Ctrl-C, a timeout's signal, no memory). The lists of who runs, waits and is
suspended may then disagree; what each branch's tokens are does not. So the lists are made anew from the tokens: a
request that had begun is suspended with those that it has, one that had not waits. A report that was interrupted never
was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pagedkv.observe.callbacks import is_refusal
from pagedkv.scheduler.request import Branch, Request, Tokens

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Mendable(Protocol):
    """What has calls that can be interrupted.

    Attributes
    ----------
    torn : whether one of them is under way, or was interrupted.
    """

    torn: bool

    @property
    def is_half_done(self) -> bool:
        """Whether a refusal now would leave something half done."""

    def heard(self) -> None:
        """The caller has what the last call returned."""

    def mend(self) -> None:
        """Repair what an interrupted call left half done.

        What it may have been about to return is reported again.
        """


M = TypeVar("M", bound=Mendable)


def whole(
    call: Callable[Concatenate[M, Arguments], Result],
) -> Callable[Concatenate[M, Arguments], Result]:
    """A method that first repairs what an interrupted call left.

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
    """What a report may change, as it was before.

    The branches of its requests, and what each has generated.

    Parameters
    ----------
    lanes : of the plan that is reported.
    several : whether the report may be of more than one token for a lane, or end lanes that have none.
    """

    def __init__(self, lanes: Iterable[Branch], several: bool) -> None:
        self._lanes = lanes
        self._taken_back: list[tuple[Branch, Tokens]] | None = None  # lanes, with what they go back to
        self._branches: list[tuple[Request, list[tuple[Branch, Tokens | None]]]] = []
        if several:
            for request in dict.fromkeys(branch.request for branch in lanes):
                known = [(branch, None if branch.done else branch.tokens) for branch in request.branches]
                self._branches.append((request, known))

    def restore(self) -> None:
        """It is so again; no branch of the lanes holds a sequence.

        To be done again where it was interrupted.
        """
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
            if self._taken_back is None:  # at once, and before any is changed: what they have now says what they had
                self._taken_back = [(branch, tokens) for branch in self._lanes
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

