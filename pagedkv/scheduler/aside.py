"""Requests that do not fit beside other holders step aside, so that others go on.

Other holders are users of the cache besides the scheduler.
"""

from __future__ import annotations

from pagedkv.scheduler.admission import Admission
from pagedkv.scheduler.queue import FairQueue
from pagedkv.scheduler.request import Request
from pagedkv.scheduler.running import Running


class Aside:
    """Decides which requests step aside, and for how long.

    They do when the one request that is left does not fit.

    A request that steps aside keeps its rank. It takes its turn again as soon as others than the scheduler leave room
    for its worst case, or when no other request could run either.
    """

    def __init__(self, queue: FairQueue, running: Running, admission: Admission) -> None:
        self._queue, self._running, self._admission = queue, running, admission
        self.one_ended = False  # since a request stepped aside

    def look_again(self) -> None:
        """Let requests that fit by now take their turn again.

        Only if one has ended since they stepped aside.

        Blocks that a running request shares with others count as its own, so more seems to be left than there is.
        Without an end in between, requests could step aside and come back for ever, and none would get on.
        """
        queue, room = self._queue, self._running.left_by_others()
        aside = {request for request in queue.aside if not request.ended}
        if self.one_ended:
            aside = {request for request in aside if not self._running.fits(request, room)}
        queue.aside = aside if len(self._unended()) > len(aside) else set()

    def make_way(self, failed: set[Request]) -> bool:
        """The one request that was left did not fit, and is added to those that `failed` now.

        Whether to try again.

        If its branches share less than they could, it is suspended, and they come back sharing. If its pages are
        scattered, it is suspended, and computes all its tokens again, by itself. Otherwise it steps aside with all
        others that do not fit, if there is one that fits. If there is none, all have their turns again.
        """
        running = self._running
        if running.loading:  # the loads may hold the blocks that it needs
            while running.give_up_load(None):
                pass
            return True
        left = running.requests[0] if running.requests else None
        if left is not None and len(left.live()) > 1 and running.is_beyond(left):
            running.suspend(left)
            return True
        if left is not None and running.is_scattered(left):
            running.begin_alone(left)
            return True
        failed.update(one for one in (left or self._admission.tried,) if one is not None)
        if running.alone in failed:  # not even by itself, beside what others hold
            running.alone = None
        unended = set(self._unended())
        fitting = self._fitting(unended - failed)
        while not fitting and running.wait(alone=True):  # moves under way may leave the room that they need
            fitting = self._fitting(unended - failed)
        self._queue.aside = unended - fitting if fitting else set()
        self.one_ended = False
        if fitting and left is not None:
            running.suspend(left)
        return bool(fitting)

    def _fitting(self, requests: set[Request]) -> set[Request]:
        room = self._running.left_by_others()
        return {request for request in requests if self._running.fits(request, room)}

    def _unended(self) -> list[Request]:
        running = self._running
        return [*running.requests, *running.suspended, *running.loading.requests, *self._queue.waiting()]
