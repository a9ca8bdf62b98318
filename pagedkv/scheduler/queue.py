"""Who waits, tenant by tenant, and whose turn it is.

Start-time fair queueing over tokens of service.

Time here is service: `now` grows by the tokens of each step over the weights of the tenants that have work. A tenant's
`finish` is when, at its share, it would have received all that was charged to it so far. A request's turn is

    rank = max(when it came, its tenant's finish) - priority * priority_tokens

and of the tenants' first requests the one of the lowest rank goes first; once it has begun, a request keeps its rank.
Within a tenant the turn is ``key``, the same without `finish`. No request starves: while one waits, service goes on
and `now` passes every bound, so only finitely many requests, those that come before `now` has passed its rank by the
head start of the highest priority (twice that, where one of its own tenant's is before it), can ever go before it. A
request is charged the most that it can come to take; the rest is given back when it ends.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Iterable
from operator import attrgetter

from pagedkv.scheduler.request import Request

by_key = attrgetter("key", "id")
by_rank = attrgetter("rank", "id")
MANY_TENANTS = 64  # before the first look for those that can be forgotten


class Tenant:
    """One tenant's requests and its account.

    Attributes
    ----------
    weight : its share of the service, relative to the others'.
    finish : in tokens of service.
    waiting : list of Request, by turn
    live : requests that have not ended.
    """

    __slots__ = ("finish", "live", "waiting", "weight")

    def __init__(self, weight: float, finish: float) -> None:
        self.weight, self.finish = weight, finish
        self.waiting: list[Request] = []
        self.live = 0


class FairQueue:
    """Requests that have not begun, and the accounts of all tenants.

    Parameters
    ----------
    priority_tokens : head start of one level of priority, in tokens of service.

    Attributes
    ----------
    now : time, in tokens of service.
    num_waiting : requests that have not begun.
    aside : set of Request
        Requests whose turn does not come, although they may wait here.
    """

    def __init__(self, priority_tokens: int) -> None:
        self._head_start = priority_tokens
        self._tenants: dict[str, Tenant] = {}
        self._weights: dict[str, float] = {}
        self._active_weight = 0.0
        self._sweep_at = MANY_TENANTS
        self.now = 0.0
        self.num_waiting = 0
        self.aside: set[Request] = set()

    def set_weight(self, tenant: str, weight: float) -> None:
        """A tenant's share from now on."""
        self._weights[tenant] = weight
        known = self._tenants.get(tenant)
        if known is not None:
            if known.live:
                self._active_weight += weight - known.weight
            known.weight = weight

    def add(self, request: Request) -> None:
        """A new request waits."""
        tenant = self._tenants.get(request.tenant) or self._new(request.tenant)
        if not tenant.live:
            self._active_weight += tenant.weight
        tenant.live += 1
        request.arrived = self.now
        request.key = self.now - request.priority * self._head_start
        bisect.insort(tenant.waiting, request, key=by_key)
        self.num_waiting += 1

    def next(self, passed: Collection[Request] = ()) -> Request | None:
        """Whose turn it is, but for those that were passed; its rank is set."""
        best: Request | None = None
        for tenant in self._tenants.values():
            if tenant.waiting:
                head = tenant.waiting[0]
                if head in self.aside or head in passed:
                    turn = [one for one in tenant.waiting if one not in self.aside and one not in passed]
                    if not turn:
                        continue
                    head = turn[0]
                request = self._ranked(head, tenant)
                if best is None or request.rank < best.rank or (request.rank == best.rank and request.id < best.id):
                    best = request
        return best

    def waiting(self) -> list[Request]:
        """All that have not begun, in no order."""
        return [request for tenant in self._tenants.values() for request in tenant.waiting]

    def first(self, n: int) -> list[Request]:
        """Those `n` whose turn is next, in order; their ranks are set."""
        aside, found = self.aside, []
        for tenant in self._tenants.values():
            turn = tenant.waiting[: n + len(aside)]
            found += [self._ranked(request, tenant) for request in turn if request not in aside]
        return heapq.nsmallest(n, found, key=by_rank)

    def _ranked(self, request: Request, tenant: Tenant) -> Request:
        late = request.arrived < tenant.finish
        request.rank = tenant.finish - request.priority * self._head_start if late else request.key
        return request

    def begin(self, request: Request, charge: int) -> None:
        """A request that waited runs, at its rank; its tenant is charged so many tokens."""
        self._take_out(request)
        tenant = self._tenants[request.tenant]
        request.charge = charge / tenant.weight
        tenant.finish = max(tenant.finish, self.now) + request.charge

    def end(self, request: Request, taken: int) -> None:
        """A request is over and has taken so many tokens: give back the charge beyond them."""
        tenant = self._tenants[request.tenant]
        if not request.admitted:
            self._take_out(request)
        else:
            tenant.finish -= max(0.0, request.charge - taken / tenant.weight)
        tenant.live -= 1
        if not tenant.live:
            self._active_weight -= tenant.weight

    def serve(self, num_tokens: int) -> None:
        """So many tokens were computed."""
        self.now += num_tokens / max(self._active_weight, 1e-9)

    def make_anew(self, requests: Iterable[Request]) -> None:
        """These are all requests that have not ended; those that have not begun wait here.

        Debts stay as they are.
        """
        for tenant in self._tenants.values():
            tenant.waiting, tenant.live = [], 0
        self._active_weight, self.num_waiting, self.aside = 0.0, 0, set()
        for request in requests:
            tenant = self._tenants.get(request.tenant) or self._new(request.tenant)
            if not tenant.live:
                self._active_weight += tenant.weight
            tenant.live += 1
            if not request.admitted:
                bisect.insort(tenant.waiting, request, key=by_key)
                self.num_waiting += 1

    def _take_out(self, request: Request) -> None:
        waiting = self._tenants[request.tenant].waiting
        at = bisect.bisect_left(waiting, by_key(request), key=by_key)
        assert waiting[at] is request
        del waiting[at]
        self.num_waiting -= 1

    def _new(self, name: str) -> Tenant:
        if len(self._tenants) >= self._sweep_at:  # who has no work and no debts is as new
            self._tenants = {n: t for n, t in self._tenants.items() if t.live or t.finish > self.now}
            self._sweep_at = max(MANY_TENANTS, 2 * len(self._tenants))
        tenant = self._tenants[name] = Tenant(self._weights.get(name, 1.0), self.now)
        return tenant
