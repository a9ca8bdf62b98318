"""A request as its caller sees it, and its branches.

The sequences that it runs or has finished.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.sequence import Sequence
from pagedkv.spec.namespace import Namespace

Tokens: TypeAlias = NDArray[np.int32]
State: TypeAlias = Literal["waiting", "running", "suspended", "finished", "aborted", "expired"]

NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


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
    def tokens(self) -> Tokens:
        """Prompt and output, int32 [num_tokens], without what is only proposed."""
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
    """What was asked of a scheduler, and what has come of it. Made by :meth:`Scheduler.submit`.

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
    state : ``"waiting"``, ``"running"``, ``"suspended"``, ``"finished"``, ``"aborted"`` or ``"expired"``
    branches : list of Branch
        Those that run, wait with it, or are done; a beam that was dropped is not among them.
    hit_tokens : mapping of tier name to int
        Prompt tokens that came from the cache when it first began.
    num_preemptions : int
    preempted_by : ``"swap"``, ``"recompute"`` or None
        How it was suspended last.
    """

    __slots__ = (
        *("admitted", "arrived", "beams", "branches", "charge", "deadline", "hit_tokens", "id", "key"),
        *("max_new_tokens", "n", "namespace", "num_preemptions", "overtaken", "owner", "preempted_by", "priority"),
        *("prompt", "rank", "session", "state", "stop_tokens", "tenant", "width", "worst_blocks"),
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
    ) -> None:
        self.owner = owner  # the scheduler it was submitted to
        self.id, self.prompt, self.max_new_tokens, self.tenant, self.priority = (
            number, prompt, max_new_tokens, tenant, priority,
        )  # fmt: skip
        self.namespace, self.session, self.stop_tokens = namespace, session, stop_tokens
        self.n, self.beams, self.deadline = n, beams, deadline
        self.width = max(n, beams)
        self.state: State = "waiting"
        self.branches = [Branch(self, prompt)]
        self.hit_tokens: dict[str, int] = {}
        self.num_preemptions = 0
        self.preempted_by: Literal["swap", "recompute"] | None = None
        # The scheduler's own notes: when it came and its turn within its tenant (in tokens of service), its turn among
        # all, what its tenant was charged for it, how often it was overtaken, and the most blocks it can come to hold.
        self.arrived = self.key = self.rank = self.charge = 0.0
        self.overtaken = self.worst_blocks = 0
        self.admitted = False

    @property
    def outputs(self) -> list[Tokens]:
        """Tokens of each branch so far, int32 [n] each."""
        return [branch.output for branch in self.branches]

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
