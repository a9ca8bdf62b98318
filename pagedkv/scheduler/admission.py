"""Who begins next, and when it is worth trying.

By rank or by cached blocks, as long as there is room.
"""

from __future__ import annotations

from pagedkv.cache.cache import KVCache
from pagedkv.scheduler.needs import Amount
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.queue import FairQueue, by_rank
from pagedkv.scheduler.request import Request
from pagedkv.scheduler.running import LOADS, NO_PLACE_IN_STEP, NO_ROOM, NO_ROOM_TO_LOAD, NO_SHARE, RUNS, Running

RETRY_EVERY = 32  # steps, before admission is tried again though nothing of the scheduler's own has changed


class Admission:
    """Begins requests that wait, and takes those up again that were suspended.

    Attributes
    ----------
    tried : Request or None
        Whose turn it was last.
    """

    def __init__(self, cache: KVCache, queue: FairQueue, running: Running, options: SchedulerOptions) -> None:
        self._cache, self._queue, self._running, self._options = cache, queue, running, options
        self._blocked_for = -1  # steps since there was no room; -1 where it is worth trying
        self.tried: Request | None = None
        self._runs_next: Request | None = None  # has nothing to load, and waits for its share of a step

    def try_again(self) -> None:
        """A request came or ended."""
        self._blocked_for = -1

    def hold_back(self) -> None:
        """A request was suspended: there is no room for others now."""
        self._blocked_for = 0

    def admit(self) -> None:
        """Begin requests in their turn while there is room.

        Those that run at once, while the step has a share for their prompts; those that load first, in any case. One
        that may not load yet is passed, at most `window` times; none behind it begins to load.

        Raises
        ------
        OutOfBlocks, NoSequences
            As :meth:`Running.start` and :meth:`Running.has_place`.
        """
        running, most = self._running, self._options.max_batch_tokens
        if self._blocked_for >= 0 and running.requests:
            self._blocked_for += 1
            if self._blocked_for % RETRY_EVERY:
                return
        promised: Amount | None = None  # looked up once, and again where more has changed than one that began
        passed: list[Request] = []
        while True:
            is_full = bool(running.computing) and running.fills(most - len(running.lanes))
            if is_full and (passed or not self._options.loading_share):
                self._blocked_for = -1
                return
            request = self.tried = self._next(passed)
            if request is None or (is_full and request is self._runs_next):
                self._blocked_for = 0 if passed else -1
                return
            took = NO_ROOM
            if running.has_place(request):
                promised = running.promised() if promised is None else promised
                took, fresh = running.start(request, promised, may_run=not is_full, may_load=not passed)
                if took == NO_PLACE_IN_STEP:  # nor need it be looked at again before there is one
                    self._runs_next = request
                    self._blocked_for = -1
                    return
                if took in (RUNS, LOADS):
                    self._began(request, passed)
                    if request.state not in ("running", "loading"):  # there was no room for its other branches
                        self._blocked_for = 0
                        return
                    promised = None if request.width > 1 or took == LOADS else promised + fresh
                    continue
            if not (took == NO_SHARE and passed) and self._make_way(request, only_loads=took == NO_SHARE):
                promised = None
                continue
            if took not in (NO_ROOM_TO_LOAD, NO_SHARE) or request.overtaken >= self._options.window:
                self._blocked_for = -1 if running.is_room_coming() else 0
                return
            passed.append(request)

    def _make_way(self, request: Request, only_loads: bool) -> bool:
        """Give up a load or a request of lower priority and worse rank than one without room.

        Whether there is any.
        """
        running = self._running
        loads = running.loading.victim(request)
        if loads is not None and loads.priority < request.priority:
            running.stop_loading(loads)
            return True
        worst = running.requests[-1] if running.requests and not only_loads else None
        if worst is None or worst.priority >= request.priority or by_rank(worst) <= by_rank(request):
            return False
        if not running.wait(alone=False):
            if running.is_room_coming():  # nor is anything suspended for what comes anyway
                return False
            running.suspend(worst)
        return True

    def _began(self, request: Request, passed: list[Request]) -> None:
        self._runs_next = None
        for other in passed:
            other.overtaken += 1
        if not request.admitted:
            self._queue.begin(request, len(request.prompt) + request.width * request.max_new_tokens)
            request.admitted = True
        if request in self._running.held:
            self._running.open_held()

    def _next(self, passed: list[Request]) -> Request | None:
        """Whose turn it is: of those suspended and those that wait, by rank.

        Or, if so wanted, by their cached blocks. None that was passed, and none at all where one was too often.
        """
        alone = self._running.alone
        if alone is not None and not alone.ended:
            return alone if alone in self._running.suspended and alone not in passed else None
        suspended, window, aside = self._running.suspended, self._options.window, self._queue.aside
        if any(request.overtaken >= window for request in passed):
            return None
        if aside or passed:
            suspended = [request for request in suspended if request not in aside and request not in passed]
        if self._options.order == "first_come":
            waits = self._queue.next(passed)
            if suspended and (waits is None or by_rank(suspended[0]) < by_rank(waits)):
                return suspended[0]
            return waits
        waiting = [one for one in self._queue.first(window + len(passed)) if one not in passed]
        if suspended and (not waiting or by_rank(suspended[0]) <= by_rank(waiting[0])):
            return suspended[0]
        if not waiting or waiting[0].overtaken >= window:
            return waiting[0] if waiting else None
        best = max(waiting, key=self._cached_tokens)
        for request in waiting[: waiting.index(best)]:
            request.overtaken += 1
        return best

    def _cached_tokens(self, request: Request) -> int:
        return self._cache.explain(request.prompt, request.namespace).cached_tokens
