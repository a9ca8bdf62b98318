"""Threads under a schedule: one client runs at a time.

A chooser decides which client and which event is next.

Clients are real threads that hand one baton round. A client gives it back where it waits, and where it says that
others may come first. Between two turns of clients, events happen: bytes are moved, moves are told to be over, time
passes. So a list of choices is a schedule, and the same choices give the same history.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

PATIENCE_S = 120.0  # of real time: a client not back by then waits for something that the schedule does not control
MOST_TURNS = 20_000  # of one schedule


class Chooser(Protocol):
    """Says what is next."""

    def __call__(self, weights: Sequence[int]) -> int:
        """An index into `weights`."""


class RandomChooser:
    """By weight, from a seed."""

    def __init__(self, seed: Any) -> None:
        self._rng = Random(seed)

    def __call__(self, weights: Sequence[int]) -> int:
        return self._rng.choices(range(len(weights)), weights)[0]


class Enumerator:
    """All schedules that differ in their first `depth` choices.

    Every later choice is the first option.

    Use it as the chooser of one run after the other, `advance` in between until it is False.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.path: list[int] = []
        self._options: list[int] = []
        self._at = 0

    def __call__(self, weights: Sequence[int]) -> int:
        if self._at >= self._depth:
            return 0
        if self._at == len(self.path):
            self.path.append(0)
            self._options.append(len(weights))
        self._at += 1
        return self.path[self._at - 1]

    def advance(self) -> bool:
        """To the next schedule; False where there is none."""
        while self.path and self.path[-1] + 1 == self._options[-1]:
            self.path.pop()
            self._options.pop()
        if not self.path:
            return False
        self.path[-1] += 1
        self._at = 0
        return True


class Deadlock(AssertionError):
    """Every client waits, and nothing can happen any more."""


class Abandoned(BaseException):
    """Ends a client whose schedule is over."""


class Client:
    """A thread that runs when it is given the baton."""

    def __init__(self, schedule: Schedule, body: Callable[[], object]) -> None:
        self.ready: Callable[[], bool] = lambda: True
        self.until = float("inf")
        self.error: BaseException | None = None
        self.over = False
        self.go = threading.Lock()
        self.go.acquire()
        self._schedule, self._body = schedule, body
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self._schedule.dead:
                self._body()
        except Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        if not self._schedule.dead:
            self._schedule.back.release()


class Schedule:
    """Clients and events, and a clock that stands still unless it is told to go on.

    Parameters
    ----------
    choose : what is next.
    events : events that are possible now, as (weight, what happens); asked before every choice.

    Attributes
    ----------
    now : virtual seconds.
    """

    def __init__(self, choose: Chooser, events: Callable[[], list[tuple[int, Callable[[], object]]]]) -> None:
        self.choose, self.events = choose, events
        self.now = 1000.0
        self.clients: list[Client] = []
        self.running: Client | None = None
        self.back = threading.Lock()
        self.back.acquire()
        self.dead = False

    def start(self, body: Callable[[], object]) -> Client:
        """A new client, which runs when it is chosen."""
        client = Client(self, body)
        self.clients.append(client)
        return client

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """For a client: give the baton back until `ready`.

        Or until that much virtual time has passed.

        Where no client runs (before and after the clients), events happen in order until it is so.
        """
        if self.dead:
            raise Abandoned
        client = self.running
        if client is None:
            while not ready():
                events = self.events()
                if not events:
                    raise Deadlock("no client runs, and nothing can happen")
                events[0][1]()
            return True
        client.ready = ready
        client.until = float("inf") if timeout_s is None else self.now + timeout_s
        self.back.release()
        client.go.acquire()
        if self.dead:
            raise Abandoned
        return ready()

    def give_way(self) -> None:
        """For a client: others may come first."""
        self.wait(lambda: True)

    def run(self) -> None:
        """Until every client is over.

        Raises
        ------
        Deadlock
        BaseException
            Whatever a client raised.
        """
        turns = 0
        try:
            while waiting := [client for client in self.clients if not client.over]:
                ready = [client for client in waiting if client.ready() or self.now >= client.until]
                options: list[tuple[int, Callable[[], object]]] = [(4, self._turn(client)) for client in ready]
                options += self.events()
                if not options:
                    times = [client.until for client in waiting if client.until < float("inf")]
                    if not times:
                        raise Deadlock(f"{len(waiting)} clients wait, and nothing can happen")
                    self.now = min(times)
                    continue
                options[self.choose([weight for weight, _ in options])][1]()
                turns += 1
                if turns > MOST_TURNS:
                    raise Deadlock("this goes on for ever")
        finally:
            self._end()

    def _turn(self, client: Client) -> Callable[[], None]:
        def turn() -> None:
            self.running = client
            client.go.release()
            if not self.back.acquire(timeout=PATIENCE_S):
                raise Deadlock("a client waits for something that the schedule does not control")
            self.running = None
            if client.error is not None:
                raise client.error

        return turn

    def _end(self) -> None:
        self.dead = True
        for client in self.clients:
            if not client.over and client is not self.running:
                client.go.release()
                client.thread.join(PATIENCE_S)
        self.dead = False
