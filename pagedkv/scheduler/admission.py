"""Who begins next, and when it is worth trying.

By rank or by what is cached, as long as there is room.
"""

from __future__ import annotations

from pagedkv.cache.cache import KVCache
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.queue import FairQueue, by_rank
from pagedkv.scheduler.request import Request
from pagedkv.scheduler.running import Running

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

    def try_again(self) -> None:
        """A request came or ended."""
        self._blocked_for = -1

    def hold_back(self) -> None:
        """A request was suspended: there is no room for others now."""
        self._blocked_for = 0

    def admit(self) -> None:
        """Begin requests in their turn while there is room.

        And while the step has a share for their prompts.

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
        promised = -1  # blocks; looked up once, and again where more has changed than one that began
        while True:
            if running.computing and sum(map(running.wanted, running.computing)) >= most - len(running.lanes):
                self._blocked_for = -1
                return
            request = self.tried = self._next()
            if request is None:
                return
            if running.has_place(request):
                promised = running.promised() if promised < 0 else promised
                took = running.start(request, promised)
                if took >= 0:
                    self._began(request)
                    if request.state != "running":  # there was no room for its other branches
                        self._blocked_for = 0
                        return
                    promised = -1 if request.width > 1 else promised + took
                    continue
            worst = running.requests[-1]
            if worst.priority >= request.priority or by_rank(worst) <= by_rank(request):
                self._blocked_for = 0
                return
            if not running.wait():
                running.suspend(worst)
            promised = -1

    def _began(self, request: Request) -> None:
        if not request.admitted:
            self._queue.begin(request, len(request.prompt) + request.width * request.max_new_tokens)
            request.admitted = True
        if request in self._running.held:
            self._running.open_held()

    def _next(self) -> Request | None:
        """Whose turn it is: of those suspended and those that wait, by rank.

        Or, if so wanted, by what is cached.
        """
        suspended, window, aside = self._running.suspended, self._options.window, self._queue.aside
        if aside:
            suspended = [request for request in suspended if request not in aside]
        if self._options.order == "first_come":
            waits = self._queue.next()
            if suspended and (waits is None or by_rank(suspended[0]) < by_rank(waits)):
                return suspended[0]
            return waits
        waiting = self._queue.first(window)
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
