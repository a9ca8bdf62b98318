"""When requests came, began and got their tokens: what dashboards and Retry-After go by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from pagedkv.observe.latency import Histogram, Latency
from pagedkv.scheduler.plan import Plan
from pagedkv.scheduler.request import Request

RECENT = 64  # requests that began last say how fast the queue moves


class Timing:
    """Latencies of a scheduler's requests.

    Parameters
    ----------
    clock : callable
        Seconds.

    Attributes
    ----------
    new_tokens : generated so far, of all requests.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue, self._first, self._token = Histogram(), Histogram(), Histogram()
        self._began: deque[float] = deque(maxlen=RECENT)
        self._paused: dict[Request, float] = {}  # suspended, or back without a token so far: when they got their last
        self._reported_s = clock()
        self.new_tokens = 0

    def came(self, request: Request) -> None:
        """A request was queued."""
        request.submitted_s = self._clock()

    def began(self, requests: Iterable[Request]) -> None:
        """These requests run, for the first time."""
        now = self._clock()
        for request in requests:
            request.began_s = now
            self._queue.observe(now - request.submitted_s)
            self._began.append(now)

    def suspended(self, requests: Iterable[Request]) -> None:
        """These requests do not run now; each got its last token by the last report at the latest."""
        for request in requests:
            if request.first_token_s is not None:
                self._paused.setdefault(request, self._reported_s)

    def ended(self, request: Request) -> None:
        """A request gets no more tokens."""
        self._paused.pop(request, None)

    def reported(self, plan: Plan) -> None:
        """A plan was reported: its lanes have their tokens.

        A lane got the token before by the last report, unless its request was suspended meanwhile: one look at the
        clock is enough for all of them. Tokens that came together share the time since the one before.
        """
        now = self._clock()
        since, self._reported_s = now - self._reported_s, now
        if isinstance(plan.told, tuple) and not self._paused:
            self.new_tokens += len(plan.lanes)
            if plan.from_prompt:
                self._token.observe(since, plan.from_prompt)
            for branch in plan.lanes[plan.from_prompt :]:
                if branch.request.first_token_s is None:
                    self._told_first(branch.request, now)
                else:
                    self._token.observe(since)
            return
        first: set[Request] = set()
        for branch, tokens, _ in plan.new_tokens:
            request, count = branch.request, len(tokens)
            self.new_tokens += count
            if request.first_token_s is None:
                self._told_first(request, now)
                first.add(request)
            elif request not in first:  # other samples of it have their first token, too
                passed = now - self._paused[request] if request in self._paused else since
                self._token.observe(passed / count, count)
        for branch in plan.lanes:
            self._paused.pop(branch.request, None)

    def _told_first(self, request: Request, now: float) -> None:
        request.first_token_s = now
        self._first.observe(now - request.submitted_s)

    def retry_after_s(self, num_waiting: int) -> float | None:
        """Seconds in which so many requests begin at the rate of late; None before two have begun."""
        if len(self._began) < 2:
            return None
        return num_waiting * max(0.0, self._clock() - self._began[0]) / len(self._began)

    def read(self) -> Mapping[str, Latency]:
        """``"queue"``, ``"first_token"`` and ``"token"``."""
        return {"queue": self._queue.read(), "first_token": self._first.read(), "token": self._token.read()}
