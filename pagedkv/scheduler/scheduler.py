"""Scheduler: continuous batching over a KVCache.

It says what to run, its caller computes, and reports the tokens.
"""
# Over 400 lines: Scheduler's public methods, half of it their docstrings; the modules beside it do the work.

from __future__ import annotations

import bisect
import heapq
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pagedkv.cache.cache import KVCache
from pagedkv.cache.step import Step
from pagedkv.errors import InvalidArgument, OutOfBlocks, QueueFull, RequestTooLarge, WrongType
from pagedkv.observe.clock import Clock
from pagedkv.observe.stats import SchedulerStats
from pagedkv.scheduler.admission import Admission
from pagedkv.scheduler.aside import Aside
from pagedkv.scheduler.mending import end_all, set_down, whole
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.plan import Plan
from pagedkv.scheduler.planning import Planner
from pagedkv.scheduler.queue import FairQueue, by_rank
from pagedkv.scheduler.reporting import Reporter
from pagedkv.scheduler.request import AbortReason, Branch, FinishReason, Request, State, Tokens, abort_reason
from pagedkv.scheduler.room import NoSequences
from pagedkv.scheduler.running import Running
from pagedkv.scheduler.timing import Timing
from pagedkv.scheduler.waiting import Waiting
from pagedkv.spec.namespace import Namespace
from pagedkv.spec.sizes import check_plain, whole_number

LONGEST = 1 << 30  # tokens of a sequence
MANY_DEADLINES = 1024  # before those of requests that have ended are looked for


class Scheduler:
    """Says what to run in each step over a cache. For one thread at a time.

    ::

        scheduler.submit(prompt, max_new_tokens=100)
        while scheduler.has_work:
            plan = scheduler.schedule()
            if not plan:                                        # all that is left loads, or has expired
                scheduler.wait()
                continue
            with scheduler.step(plan) as step:                  # an exception in here commits nothing
                logits = model(step)
            for request in scheduler.report(plan, sample(logits[plan.last_tokens])):
                print(request.outputs)

    A plan that is not reported never was: its requests are in the next one. When blocks run out, the running request of
    the worst rank is suspended and goes on later; the one of the best rank never is, so there is always one that gets
    on, and a request that could not run even alone is refused when it is submitted.

    Parameters
    ----------
    cache : KVCache
        Other callers may use it, too; the scheduler cannot give away the blocks that they hold.
    options : SchedulerOptions
    clock : callable
        Seconds, for deadlines. While it fails, time stands still, and no deadline comes nearer.

    Raises
    ------
    WrongType, InvalidArgument
    """

    def __init__(
        self,
        cache: KVCache,
        options: SchedulerOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(cache, KVCache):
            raise WrongType(f"a scheduler is for a pagedkv.KVCache, not {type(cache).__name__}")
        options = SchedulerOptions() if options is None else options
        if not isinstance(options, SchedulerOptions):
            raise WrongType(f"options must be SchedulerOptions, not {type(options).__name__}")
        if options.max_running > cache.max_sequences:
            raise InvalidArgument(
                f"max_running = {options.max_running}, but the cache has max_sequences = {cache.max_sequences}: "
                f"open it with more, or run fewer"
            )
        self.cache, self.options, self._clock = cache, options, Clock(clock)
        self._claim = cache.moves.claim()
        self._queue = FairQueue(options.priority_tokens)
        self._running = Running(cache, options)
        self._admission = Admission(cache, self._queue, self._running, options)
        self._aside = Aside(self._queue, self._running, self._admission)
        self._planner = Planner(cache, self._running, options, self._claim)
        self._reporter = Reporter(cache, self._running)
        self._timing = Timing(self._clock)
        self._seen_suspensions = self._refused = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self._waiting = Waiting(cache, self._running, self._seconds_left)
        self._expired: tuple[Request, ...] = ()  # that no plan has told of yet
        self._forget_at = MANY_DEADLINES
        self._drafts: dict[Branch, Tokens] = {}
        self._plan: Plan | None = None
        self._going: list[Request] = []  # ended while a plan was out: their sequences may be in a step
        self._unended: dict[Request, int] = {}  # every request that has not ended, as they came; 1 for each
        self._untold: list[Request] = []  # finished, and not returned by a report yet
        self._telling: tuple[list[Request], tuple[Request, ...]] = [], ()  # finished, expired; by the last call
        self.torn = False  # a call is under way, or was interrupted
        self._num_submitted = 0
        self._counting: tuple[Request, FinishReason, int] | None = None  # the next to be counted, with its outcome
        self._ended: dict[FinishReason, int] = {"stop": 0, "length": 0, "aborted": 0, "deadline": 0}

    @property
    def is_half_done(self) -> bool:
        """Whether a refusal now would leave something half done.

        A report that has begun to change branches.
        """
        return self._reporter.before is not None

    # ---- requests

    @whole
    def submit(
        self,
        prompt: ArrayLike,
        max_new_tokens: int,
        *,
        tenant: str = "",
        priority: int = 50,
        namespace: Namespace | None = None,
        session: str | bytes | int | None = None,
        stop_tokens: Iterable[int] = (),
        n: int = 1,
        beams: int = 1,
        deadline_s: float | None = None,
        trace: object = None,
    ) -> Request:
        """Queue a request.

        Parameters
        ----------
        prompt : int32 [num_tokens], at least one
        max_new_tokens : tokens that each branch generates at most.
        tenant : who shares the service fairly with the others; not a namespace.
        priority : 0..100; higher goes first, see ``SchedulerOptions.priority_tokens``.
        namespace : requests of two namespaces never share KV.
        session : the conversation that it belongs to, as in :meth:`KVCache.sequence`.
        stop_tokens : tokens that end a branch; they are part of its output.
        n : parallel samples: the prompt is computed once, and its first report forks it.
        beams : beams of a search whose scores the caller keeps (:func:`expand_beams`).
        deadline_s : seconds from now until it is given up.
        trace : anything that names the request to hooks, such as a tracer's context: the spans of its work carry it.

        Raises
        ------
        RequestTooLarge
            It could not run even alone: more blocks or sequences than there are. It is not queued.
        QueueFull
            As many requests wait as ``SchedulerOptions.max_waiting`` lets wait. It is not queued.
        WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        cache = self.cache
        cache.check_request(namespace, session)
        tokens = self._tokens(prompt, "prompt")
        if not len(tokens):
            raise InvalidArgument("an empty prompt has no token to compute the first one from: send one at least")
        max_new_tokens = whole_number(max_new_tokens, "max_new_tokens", 1, LONGEST - len(tokens))
        priority = whole_number(priority, "priority", 0, 100)
        n, beams = whole_number(n, "n", 1, 1 << 20), whole_number(beams, "beams", 1, 1 << 20)
        if n > 1 and beams > 1:
            raise InvalidArgument(f"n = {n} samples and beams = {beams}: a request has one or the other")
        if not isinstance(tenant, str):
            raise WrongType(f"tenant must be a string, not {type(tenant).__name__}")
        deadline = None if deadline_s is None else self._clock() + _seconds(deadline_s)
        width, most = max(n, beams), self.options.max_running
        if width > most:
            self._refused += 1
            raise RequestTooLarge(width, most, "sequences (max_running)", "ask for fewer, or raise max_running")
        needs = self._running.needs
        worst = needs.at_most(len(tokens), max_new_tokens, width)
        if needs.as_blocks(worst) > needs.capacity:
            self._refused += 1
            fewer = f"ask for fewer than {width} branches, " if width > 1 else ""
            chunks = "" if isinstance(worst, int) else "lower max_batch_tokens, so that a step computes less of it, "
            raise RequestTooLarge(
                needs.as_blocks(worst), needs.capacity, "blocks on the device",
                f"shorten its {len(tokens)} + {max_new_tokens} tokens, {fewer}{chunks}or give "
                f"the device a larger budget",
            )  # fmt: skip
        try:
            given = list(stop_tokens)
        except TypeError:
            raise WrongType(f"stop_tokens must be a collection of tokens, not {type(stop_tokens).__name__}") from None
        stops = tuple(dict.fromkeys(self._tokens(given, "stop_tokens").tolist()))
        allowed = self.options.max_waiting
        if allowed is not None:
            waiting = self._queue.num_waiting + _waiting_again(self._running.suspended)
            if waiting >= allowed:
                self._refused += 1
                raise QueueFull(waiting, allowed, self._timing.retry_after_s(waiting))
        tokens.flags.writeable = False
        request = Request(
            self._num_submitted, tokens, max_new_tokens, tenant, priority, namespace, session, stops, n, beams,
            deadline, self, trace,
        )
        request.worst_blocks = worst
        self._timing.came(request)
        self._num_submitted += 1
        self._unended[request] = 1
        self._queue.add(request)
        self._waiting.is_news = True
        if deadline is not None:
            self._remember(deadline, request)
        self._admission.try_again()
        return request

    @whole
    def abort(self, request: Request, reason: AbortReason = "aborted") -> None:
        """End a request, whatever it is doing; its output so far stays readable.

        Nothing happens if it has ended.

        Inside a step its sequences are let go of when the step is over.

        Parameters
        ----------
        request
        reason : ``"aborted"`` or ``"stop"``
            The request's `finish_reason`, under which :meth:`stats` counts it, and that of the branches that this ends.
            ``"stop"`` where the caller has found the end of the output, as at a stop text.

        Raises
        ------
        WrongType, InvalidArgument
        """
        self._check_mine(request)
        given = abort_reason(reason)
        if not request.ended:
            request.abort_reason = given
            self._stop(request, "aborted")

    @whole
    def draft(self, branch: Branch | Request, tokens: ArrayLike) -> None:
        """Propose tokens to be verified in the next step, after the last one reported.

        As many as fit in the step and in the rest of the request's output are part of its plan; none, if the branch
        does not decode in it. The report then gives the accepted ones, and the token after them; the others are
        forgotten. (A rejected draft that had filled a block costs its block's tokens once more.)

        Raises
        ------
        InvalidArgument
            The branch has ended, is another scheduler's or one of several beams, or a plan is out.
        WrongType
        """
        if isinstance(branch, Request):
            self._check_mine(branch)
            live = branch.live()
            if len(live) != 1:
                raise InvalidArgument(f"{branch} has {len(live)} branches that run: say which")
            branch = live[0]
        if not isinstance(branch, Branch):
            raise WrongType(f"a draft is for a Branch or a Request, not {type(branch).__name__}")
        self._check_mine(branch.request)
        if self._plan is not None:
            raise InvalidArgument("a plan is out: propose drafts after its report, or cancel it")
        if branch.done or branch.request.ended or branch.request.beams > 1:
            raise InvalidArgument(f"{branch} cannot take a draft: it has ended, or is a beam")
        self._drafts[branch] = self._tokens(tokens, "draft")

    @whole
    def set_weight(self, tenant: str, weight: float) -> None:
        """A tenant's share of the service against the others', 1 unless said.

        Raises
        ------
        WrongType, InvalidArgument
        """
        if not isinstance(tenant, str):
            raise WrongType(f"tenant must be a string, not {type(tenant).__name__}")
        check_plain(weight, "weight")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise WrongType(f"weight must be a number, not {type(weight).__name__}")
        if not 1e-3 <= weight <= 1e3:
            raise InvalidArgument(f"weight must be in 0.001..1000, not {weight}")
        self._queue.set_weight(tenant, float(weight))

    # ---- steps

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or its end was not returned.

        The latter after an interrupted call.
        """
        return bool(self._unended or self._untold or self.torn)

    @whole
    def schedule(self) -> Plan:
        """What to run now.

        A plan that is out and was not reported is taken back first: it never was.

        Raises
        ------
        OutOfBlocks
            No request fits beside what others than the scheduler hold. They wait; ask again when there is room.
        InvalidArgument
            The same, where others hold the cache's sequences.
        ClosedError
        """
        self._waiting.is_news = False
        if self._plan is not None:
            self._take_back(self._plan)
        if self._going:
            self._let_go()
        if self._deadlines:
            self._expire()
        if self._queue.aside:
            self._aside.look_again()
        failed: set[Request] = set()
        while True:
            try:
                plan = self._planned()
                break
            except (OutOfBlocks, NoSequences):
                if not self._aside.make_way(failed):
                    self._claim.blocks = 0
                    raise
        if not self._running.loading:
            self._claim.ahead = 0
        if self._running.begun or self._running.suspended:
            self._note_turns()
        if plan:
            self._plan = plan
        else:  # no report comes that would return them
            plan.finished = tuple(self._untold)
            self._plan = None
        self._drafts = {}
        self._telling = list(plan.finished), self._expired
        self._expired = ()
        if self._plan is None:
            self._untold = []
        return plan

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until calling :meth:`schedule` is worth it.

        For after an empty plan, while all that is left loads. Returns at once where something can run or was submitted
        since; else when a load is over, a request's deadline comes, or another thread calls :meth:`wake`.

        Parameters
        ----------
        timeout_s : float, optional
            Seconds at most.

        Returns
        -------
        bool
            False: nothing of that has happened within `timeout_s` seconds.

        Raises
        ------
        WrongType, InvalidArgument, ClosedError
        """
        limit_s = None if timeout_s is None else _seconds(timeout_s, "timeout_s")
        if self.torn or self._plan is not None or self._expired or self._untold:
            return True
        return self._waiting.until_worth_it(limit_s)

    def wake(self) -> None:
        """Have a :meth:`wait` in another thread return. Any thread may call this."""
        self._waiting.wake()

    def step(self, plan: Plan) -> Step:
        """The step of a plan, for ``with``: as ``cache.step`` with the plan's sequences.

        Raises
        ------
        InvalidArgument
            The plan is not the last one, or was reported.
        """
        if self.torn:
            self.mend()
        self._check_out(plan)
        return self.cache.step(plan.batch, q_lens=plan.q_lens, lookahead=plan.lookahead)

    @whole
    def cancel(self, plan: Plan) -> None:
        """This plan is not going to be reported, as after a step that raised.

        The next schedule() says so by itself.

        Raises
        ------
        InvalidArgument
            The plan is not the last one, or was reported.
        """
        self._check_out(plan)
        self._take_back(plan)
        self._let_go()

    @whole
    def report(self, plan: Plan, tokens: Any) -> list[Request]:
        """The tokens that a step's lanes go on with, after its step was committed.

        Parameters
        ----------
        plan : the last one.
        tokens : int32 [num_lanes], or a list with an entry for each of ``plan.lanes``
            An entry is the next token, or an array of tokens: with a draft, those of it that were accepted and the one
            after them; for the first tokens of parallel samples, `n` of them; for a beam, those it goes on with, none
            to drop it; for any other lane, the one next token. Tokens are 0 or more.

        Returns
        -------
        list of Request
            Those that are finished with this, and those of a report before that was interrupted after that.

        Raises
        ------
        InvalidArgument
            The plan is not the last one, its step was not committed, or the tokens do not fit it. Nothing was changed.
        WrongType
        """
        self._check_out(plan)
        if self.cache.table.info(plan.batch.rows[0]).num_computed != plan.expected:
            raise InvalidArgument(
                "the step of this plan was not committed: report after `with scheduler.step(plan)`, and after a step "
                "that raised, ask for a new plan"
            )
        finished = [request for request in self._reporter.apply(plan, tokens) if not request.ended]
        self._plan = None
        self._claim.blocks = 0
        self._queue.serve(plan.num_tokens)
        self._timing.reported(plan)
        self._running.sharing.shared_tokens += plan.shared_tokens
        for request in finished:
            self._finish(request)
        if self._going:
            self._let_go()
        self._telling = self._untold, ()
        self._untold = []
        return list(self._telling[0])

    def stats(self) -> SchedulerStats:
        """Counts and latencies of requests. Any thread may ask, also while another one steps."""
        running, ended, suspended = self._running, self._ended, list(self._running.suspended)
        again = _waiting_again(suspended)
        return SchedulerStats(
            waiting=self._queue.num_waiting + again,
            loading=len(running.loading.requests),
            running=len(running.requests),
            suspended=len(suspended) - again,
            sequences=len(running.lanes) + len(running.computing),
            finished=ended["stop"] + ended["length"],
            aborted=ended["aborted"],
            expired=ended["deadline"],
            preempted_by_swap=running.preemptions["swap"],
            preempted_by_recompute=running.preemptions["recompute"],
            clock_failures=self._clock.failures,
            ended=dict(ended.items(), refused=self._refused),
            new_tokens=self._timing.new_tokens,
            latency=self._timing.read(),
            shared_tokens=running.sharing.shared_tokens,
        )

    def check_integrity(self) -> None:
        """The scheduler's books and its cache's agree; AssertionError where they do not.

        For tests and doubts.
        """
        self._running.check_integrity()
        self.cache.check_integrity()

    # ---- inside

    def _planned(self) -> Plan:
        """What to run now, with requests begun or suspended for it."""
        running = self._running
        running.short_since = None
        if running.computing or running.suspended or self._queue.num_waiting:
            running.sharing.catch_up(running.computing)
        if running.loading:
            self._claim.ahead = running.promised() + len(running.lanes)
            if running.run_loaded():
                self._admission.try_again()
        if running.held:
            running.open_held()
        if running.suspended or self._queue.num_waiting:
            self._admission.admit()
        suspended = len(running.suspended)
        if running.width > len(running.lanes.branches) + len(running.computing):
            running.keep_sequences()
        plan = self._planner.plan(self._drafts, self._expired)
        if len(running.suspended) != suspended:
            self._admission.hold_back()
        return plan

    def _note_turns(self) -> None:
        """Note when the requests began that have since the last plan, and which were suspended."""
        if self._running.begun:
            begun, self._running.begun = self._running.begun, {}
            self._timing.began(begun)
        suspensions = sum(self._running.preemptions.values())
        if suspensions != self._seen_suspensions:
            self._seen_suspensions = suspensions
            self._timing.suspended(self._running.suspended)

    def _tokens(self, given: ArrayLike, name: str) -> Tokens:
        """A copy as int32 [n]; tokens are 0 or more."""
        tokens = self.cache.placement.tree.tokens(given).copy()
        if np.minimum.reduce(tokens, initial=0) < 0:
            at = int(np.argmax(tokens < 0))
            raise InvalidArgument(f"{name}[{at}] = {tokens[at]} is no token: they are 0 or more")
        return tokens

    def _remember(self, deadline: float, request: Request) -> None:
        """Keep a deadline; those of requests that have ended are forgotten when there are too many."""
        if len(self._deadlines) >= self._forget_at:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
            heapq.heapify(self._deadlines)
            self._forget_at = max(MANY_DEADLINES, 2 * len(self._deadlines))
        heapq.heappush(self._deadlines, (deadline, request.id, request))

    def _seconds_left(self) -> float:
        """Until the next deadline of a request that has not ended."""
        while self._deadlines and self._deadlines[0][2].ended:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] - self._clock() if self._deadlines else math.inf

    def _expire(self) -> None:
        """End those whose deadlines are over; they are kept until a plan says so."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.ended:
                if request not in self._expired:
                    self._expired += (request,)
                self._stop(request, "expired")

    def _stop(self, request: Request, state: State) -> None:
        """End a request before it is finished."""
        if request.state == "running" and self._plan is not None:
            self._going.append(request)
            request.state = state
            return
        self._account(request)
        output = [(branch, branch.output) for branch in request.live()]
        for branch, _ in output:
            branch.known = branch.tokens  # while nothing holds them
        if request.state == "running":
            self._running.leave(request, state)
        elif request.state == "loading":
            self._running.loading.leave(request).cancel()
        elif request.state == "suspended" or request.admitted:
            del self._running.suspended[bisect.bisect_left(self._running.suspended, by_rank(request), key=by_rank)]
        request.state = state
        for branch, tokens in output:
            branch.end(tokens)
            branch.known = None
        self._forget(request)

    def _let_go(self) -> None:
        """Those that ended while a plan was out let go of their sequences."""
        going, self._going = self._going, []
        for request in going:
            state, request.state = request.state, "running"
            if request in self._running.requests:
                self._stop(request, state)

    def _finish(self, request: Request) -> None:
        self._account(request)
        self._running.leave(request, "finished")
        self._untold.append(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """It has ended, and is counted, once whatever interrupts this."""
        reason = request.finish_reason
        if request in self._unended and reason is not None:
            self._counting = request, reason, self._ended[reason] + 1
            self._count()
            self._timing.ended(request)

    def _count(self) -> None:
        """To be done again where it was interrupted."""
        if self._counting is not None:
            request, reason, number = self._counting
            self._ended[reason] = number
            self._unended.pop(request, None)
            self._counting = None

    def heard(self) -> None:
        """The caller has the result of the last call."""
        self._telling = [], ()

    def mend(self) -> None:
        """Repair the state that an interrupted call left.

        Every call does this by itself before it begins.

        All requests that had begun are suspended, with the tokens that they have; a plan that was out is taken back,
        and a report that was interrupted never was.
        """
        self._count()
        if self._reporter.before is not None:
            self._reporter.before.restore()
            self._reporter.before = None
        finished, expired = self._telling
        self._untold = [*(one for one in finished if one not in self._untold), *self._untold]
        self._expired = (*(one for one in expired if one not in self._expired), *self._expired)
        self._telling = [], ()
        self._plan, self._drafts, self._going = None, {}, []
        self._claim.blocks = 0
        for request in list(self._unended):
            if not request.ended and not request.live():
                request.state = "finished"
            if request.ended:
                end_all(request)
                if request.state == "finished" and request not in self._untold:
                    self._untold.append(request)
                self._forget(request)
            else:
                set_down(request)
        unended = list(self._unended)
        self._running.make_anew(unended)
        self._queue.make_anew(unended)
        self._deadlines = [(one.deadline, one.id, one) for one in unended if one.deadline is not None]
        heapq.heapify(self._deadlines)
        self._timing.suspended(self._running.suspended)
        self._aside.one_ended = True
        self._admission.try_again()
        self.torn = False

    def _account(self, request: Request) -> None:
        outputs = [branch.num_output for branch in request.branches]
        served = sum(outputs)
        if request.beams > 1:  # those that were dropped ran, too
            served = request.beams * max(outputs, default=0)
        taken = len(request.prompt) + served
        self._queue.end(request, taken)
        self._aside.one_ended = True
        self._admission.try_again()

    def _take_back(self, plan: Plan) -> None:
        """The plan was not reported: drafts are forgotten.

        If it was committed, last tokens are computed again.
        """
        self._plan = None
        self._claim.blocks = 0
        for branch in plan.lanes:
            if branch.seq is None:
                continue
            self._planner.forget_draft(branch)
            if self._running.pending(branch) == 0:
                branch.known = branch.seq.tokens
                branch.seq.truncate(len(branch.known) - 1)
                branch.seq.append(branch.known[-1:])
                branch.known = None
        for branch in plan.lanes:
            going_on = branch.seq is not None and branch not in self._running.computing
            if going_on and self._running.pending(branch) > 1:
                self._running.back_to_computing(branch)

    def _check_out(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise WrongType(f"a Plan is needed, not {type(plan).__name__}")
        if plan is not self._plan:
            raise InvalidArgument("this plan is not the last one, is empty or was reported: schedule() makes a new one")

    def _check_mine(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise WrongType(f"a Request is needed, not {type(request).__name__}")
        if request.owner is not self:
            raise InvalidArgument(f"{request} was submitted to another scheduler")


def _waiting_again(suspended: list[Request]) -> int:
    """How many of these have not run yet: their loads were given up."""
    return sum(request.state == "waiting" for request in suspended)


def _seconds(value: float, name: str = "deadline_s") -> float:
    check_plain(value, name, "a number of seconds")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongType(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgument(f"{name} must be a number of seconds, 0 or more, not {value}")
    return float(value)
