"""A request as its caller sees it, and its branches.

The sequences that it runs or has finished.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.sequence import Sequence
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.namespace import Namespace

Tokens: TypeAlias = NDArray[np.int32]
State: TypeAlias = Literal["waiting", "loading", "running", "suspended", "finished", "aborted", "expired"]
FinishReason: TypeAlias = Literal["stop", "length", "aborted", "deadline"]
AbortReason: TypeAlias = Literal["stop", "aborted"]

NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


def abort_reason(reason: object) -> AbortReason:
    """The reason that a caller of abort gave.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if not isinstance(reason, str):
        raise WrongType(f"reason must be a string, not {type(reason).__name__}")
    if reason not in get_args(AbortReason):
        raise InvalidArgument(
            f"reason = {reason!r:.40}: give 'aborted', or 'stop' where the output has come to its end"
        )
    return cast(AbortReason, reason)


class Branch:
    """One continuation of a request's prompt.

    Most requests have one; parallel samples and beams are branches.

    Attributes
    ----------
    request : Request
    seq : Sequence or None
        Open while it runs.
    saved : int32 [num_tokens]
        Its tokens while it is suspended.
    draft : int32 [k]
        Tokens proposed for the next step, the last ones of `seq` while a plan that holds them is out.
    known : int32 [num_tokens] or None
        Its tokens while those of `seq` are being changed.
    """

    __slots__ = ("_output", "draft", "known", "request", "saved", "seq")

    def __init__(self, request: Request, saved: Tokens) -> None:
        self.request, self.saved, self.draft = request, saved, NO_TOKENS
        self.seq: Sequence | None = None
        self.known: Tokens | None = None
        self._output: Tokens | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended: its output is final."""
        return self._output is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; None while it has not.

        ``"stop"``: its last token is a stop token, or the caller of :meth:`Scheduler.abort` said so. ``"length"``: it
        has all tokens that it may generate. ``"aborted"``, ``"deadline"``: its request was ended before that.
        """
        if self._output is None:
            return None
        request = self.request
        if len(self._output) and int(self._output[-1]) in request.stop_tokens:
            return "stop"
        if len(self._output) >= request.max_new_tokens:
            return "length"
        return "deadline" if request.state == "expired" else request.abort_reason

    @property
    def tokens(self) -> Tokens:
        """Prompt and output, int32 [num_tokens], without proposed tokens."""
        if self._output is not None:
            return np.concatenate((self.request.prompt, self._output))
        if self.seq is None or self.seq.is_released:
            return self.saved if self.known is None else self.known
        tokens = self.seq.tokens
        return tokens[: len(tokens) - len(self.draft)] if len(self.draft) else tokens

    @property
    def output(self) -> Tokens:
        """Tokens generated so far, int32 [n], a stop token included."""
        return self._output if self._output is not None else self.tokens[len(self.request.prompt) :]

    @property
    def num_output(self) -> int:
        """How many."""
        if self._output is not None or self.seq is None or self.seq.is_released:
            return len(self.output)
        return self.seq.num_tokens - len(self.draft) - len(self.request.prompt)

    def known_tokens(self) -> Tokens:
        """Prompt and output, also in the middle of a call that was interrupted."""
        if self.known is not None:
            return self.known
        if self._output is None and self.seq is not None and self.seq.is_released:
            return self.saved
        return self.tokens

    def reopen(self, tokens: Tokens) -> None:
        """These are its tokens, it holds no sequence, and it has not ended."""
        self.saved = self.known = tokens
        self._output = None
        self.let_go()
        self.known = None

    def end(self, output: Tokens) -> None:
        """This is its output, and it runs no more."""
        self._output = output
        self.let_go()

    def let_go(self) -> None:
        """Release its sequence; whole blocks stay cached."""
        if self.seq is not None:
            self.seq.release()
            self.seq = None
        self.draft = NO_TOKENS

    def __repr__(self) -> str:
        return f"<Branch of request {self.request.id}, {self.num_output} tokens{', done' if self.done else ''}>"


class Request:
    """A request to a scheduler, and its state and output. Made by :meth:`Scheduler.submit`.

    Attributes
    ----------
    id : int
        Numbers requests in the order they came.
    prompt : int32 [n], read-only
    max_new_tokens : int
        Tokens that each branch generates at most.
    tenant : str
    priority : int, 0..100
    namespace : Namespace or None
    session : str, bytes, int or None
    stop_tokens : tuple of int
    n, beams : int
        Parallel samples, beams; 1 where there are none.
    width : int
        Sequences it runs at most.
    state : ``"waiting"``, ``"loading"``, ``"running"``, ``"suspended"``, ``"finished"``, ``"aborted"`` or ``"expired"``
    branches : list of Branch
        Those that run, wait with it, or are done; a beam that was dropped is not among them.
    hit_tokens : mapping of tier name to int
        Prompt tokens that came from the cache when it first began.
    num_preemptions : int
    preempted_by : ``"swap"``, ``"recompute"`` or None
        How it was suspended last.
    trace : object
        The caller's name for it, for hooks (docs/observability.md); None without one.
    submitted_s, began_s, first_token_s, deadline : float or None
        When it was submitted, first began to run, had its first token, and is given up: seconds of the scheduler's
        clock. None where that has not happened, and where there is no deadline.
    abort_reason : ``"aborted"`` or ``"stop"``
        What the caller of :meth:`Scheduler.abort` gave as `finish_reason`; it counts only in the state ``"aborted"``.
    admitted : bool
        Whether it has begun, ever.
    arrived, rank : float
        When it came and its turn, in tokens of service (:mod:`pagedkv.scheduler.queue`).
    """

    __slots__ = (
        *("abort_reason", "admitted", "arrived", "beams", "began_s", "branches", "charge", "deadline", "first_token_s"),
        *("hit_tokens", "id", "key", "kin", "max_new_tokens", "n", "namespace", "num_preemptions", "overtaken"),
        *("owner", "preempted_by", "priority", "prompt", "rank", "session", "state", "stop_tokens", "submitted_s"),
        *("tenant", "trace", "width", "worst_blocks"),
    )

    def __init__(
        self,
        number: int,
        prompt: Tokens,
        max_new_tokens: int,
        tenant: str,
        priority: int,
        namespace: Namespace | None,
        session: str | bytes | int | None,
        stop_tokens: tuple[int, ...],
        n: int,
        beams: int,
        deadline: float | None,
        owner: object,
        trace: object = None,
    ) -> None:
        self.owner = owner  # the scheduler it was submitted to
        self.id, self.prompt, self.max_new_tokens, self.tenant, self.priority = (
            number, prompt, max_new_tokens, tenant, priority,
        )  # fmt: skip
        self.namespace, self.session, self.stop_tokens = namespace, session, stop_tokens
        self.n, self.beams, self.deadline, self.trace = n, beams, deadline, trace
        self.submitted_s = 0.0
        self.began_s: float | None = None
        self.first_token_s: float | None = None
        self.width = max(n, beams)
        self.state: State = "waiting"
        self.abort_reason: AbortReason = "aborted"
        self.branches = [Branch(self, prompt)]
        self.hit_tokens: dict[str, int] = {}
        self.num_preemptions = 0
        self.preempted_by: Literal["swap", "recompute"] | None = None
        # The scheduler's own notes: when it came and its turn within its tenant (in tokens of service), its turn among
        # all, its tenant's charge for it, how often it was overtaken, and the most blocks it can come to hold.
        self.arrived = self.key = self.rank = self.charge = 0.0
        self.overtaken = self.worst_blocks = 0
        self.admitted = False
        self.kin: tuple[Namespace | None, bytes] | None = None  # see sharing.py; None until it is asked for

    @property
    def outputs(self) -> list[Tokens]:
        """Tokens of each branch so far, int32 [n] each."""
        return [branch.output for branch in self.branches]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; None while it has not.

        ``"aborted"``, ``"deadline"``: it was ended before all of its branches had; ``"stop"`` in place of ``"aborted"``
        if the caller of :meth:`Scheduler.abort` said so. Else ``"length"`` if one of them was cut off, and ``"stop"``
        if none was. A request that `submit` refuses is none; its error says ``"refused"``.
        """
        if self.state in ("aborted", "expired"):
            return "deadline" if self.state == "expired" else self.abort_reason
        if self.state != "finished":
            return None
        return "length" if any(branch.finish_reason == "length" for branch in self.branches) else "stop"

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in ("finished", "aborted", "expired")

    def live(self) -> list[Branch]:
        """Branches that are not done."""
        return [branch for branch in self.branches if not branch.done]

    def __repr__(self) -> str:
        made = max((branch.num_output for branch in self.branches), default=0)
        return f"<Request {self.id}, {self.state}, {made} of {self.max_new_tokens} tokens>"
