"""Asynchronous moves under a virtual clock.

No schedule serves a block that is not ready, stale, or another sequence's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pagedkv as pk
from pagedkv.core import POLICIES
from tests.in_blocks import cache_options
from tests.model.toy_kv import SPEC
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.requests import SIZE, Requests, prompt, some_client
from tests.reliability.virtual import Chooser, Enumerator, RandomChooser
from tests.reliability.virtual_cache import Scene

DEPTH = 6  # choices that are enumerated
ENOUGH = 1_500  # schedules after which every kind of event must have happened
EXPECTED = {
    *("moved", "cancels", "waits past deadlines", "late or cancelled", "store says no", "store raises"),
    *("hits device", "hits host", "hits disk", "prefetched", "prefetches cancelled", "purges", "no room"),
}
A, B, C = ([first] * (2 * SIZE + 1) for first in range(3))  # two whole blocks each


@dataclass(frozen=True)
class Story:
    """The start of an enumeration.

    A cache, what was served before, and what its clients do at the same time.
    """

    options: dict[str, Any]
    before: tuple[list[int], ...]
    clients: tuple[Callable[[Requests], object], ...]
    failures: bool


def _serve(tokens: list[int]) -> Callable[[Requests], object]:
    return lambda requests: requests.serve(tokens, 0, 1)


def _prefetch(tokens: list[int]) -> Callable[[Requests], object]:
    return lambda requests: requests.prefetch(tokens, 0, True)


def _purge(requests: Requests) -> None:
    requests.purge(0)


def _stories() -> list[Story]:
    host = {"device": 5, "host": 4}
    disk = {"device": 5, "disk": pk.Disk("unused", pk.Blocks(8))}
    both = {"device": 4, "host": 2, "disk": pk.Disk("unused", pk.Blocks(4))}
    casts = [
        (_serve(A), _serve(A)),
        (_serve(A), _serve(B)),
        (_serve(A), _serve(C)),
        (_serve(A), _prefetch(B)),
        (_prefetch(A), _serve(A)),
        (_serve(A), _purge),
    ]
    return [
        Story({**options, "demotion": demotion}, (A, B, C), cast, failures)
        for failures in (False, True)
        for options in (host, disk, both)
        for demotion in ("leaf_first", "oldest_first")
        for cast in casts
    ]


def _random_options(rng: Random) -> dict[str, Any]:
    disk = rng.choice([None, 4, 8])
    return {
        "device": rng.randint(4, 9),
        "host": rng.choice([None, 2, 5]),
        "disk": disk and pk.Disk("unused", pk.Blocks(disk)),
        "policy": rng.choice(POLICIES),
        "demotion": rng.choice(["leaf_first", "oldest_first"]),
        "inclusive": rng.choice([None, tuple(rng.random() < 0.5 for _ in range(3))]),
        "partial_hits": rng.random() < 0.3,
        "deadline_s": rng.choice([None, 1.0]),
    }


def _play(
    choose: Chooser, options: dict[str, Any], failures: bool, cast: Callable[[Requests], None], tally: Tally
) -> None:
    """One schedule, from an empty cache to one in which no client holds anything."""
    scene = Scene(choose, failures=failures)
    cache = scene.open(SPEC, **cache_options(**options))
    requests = Requests(scene, cache)
    cast(requests)
    scene.schedule.run()
    cache.check_integrity()
    while cache.moves.run_moves():
        pass
    stats = cache.stats()
    assert not stats.placement["in_flight"], "a move that never ends"
    assert not any(counts["live"] for counts in stats.blocks.values()), "a leak"
    requests.check_store()
    cache.close()
    tally.hits += requests.reads
    for what, n in scene.seen.items():
        tally.add(what, n)


def _enumerate(number: int, story: Story, most: int, tally: Tally, tick: Tick) -> bool:
    """All schedules of a story; whether there were no more than `most`."""
    chooser = Enumerator(DEPTH)

    def cast(requests: Requests) -> None:
        for tokens in story.before:
            requests.serve(tokens, 0, 0)
        for client in story.clients:
            requests.scene.schedule.start(lambda client=client: client(requests))

    for _ in range(most):
        try:
            _play(chooser, story.options, story.failures, cast, tally)
        except Exception as error:
            tally.fail(f"story {number} with choices {chooser.path}: {type(error).__name__}: {error}")
        tally.count += 1
        tick(1)
        if not chooser.advance():
            return True
    return False


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Run half of the schedules from stories, the rest from chance.

    The first choices of a story are enumerated.
    """
    tally, stories = Tally(), _stories()
    for i, story in enumerate(stories):
        ended = _enumerate(i, story, max(1, (count // 2 - tally.count) // (len(stories) - i)), tally, tick)
        tally.add("stories enumerated to the end", int(ended))
    while tally.count < count:
        name = f"{seed} {tally.count}"

        def cast(requests: Requests, rng: Random) -> None:
            for _ in range(rng.randint(0, 6)):
                requests.serve(prompt(rng, rng.randint(SIZE, 5 * SIZE)), 0, 0)
            for _ in range(rng.randint(1, 4)):
                requests.scene.schedule.start(some_client(requests, rng))

        rng = Random(name)
        try:
            _play(RandomChooser(name), _random_options(rng), rng.random() < 0.7, lambda r, rng=rng: cast(r, rng), tally)
        except Exception as error:
            tally.fail(f"schedule {name!r}: {type(error).__name__}: {error}")
        tally.count += 1
        tick(1)
    if count >= ENOUGH:
        tally.require(*sorted(EXPECTED))
    return tally


PROOF = Proof(
    "asynchronous moves under a virtual clock, in any order, cancelled, failed and late: no schedule serves a block "
    "that is not ready, stale or another prompt's, and in the end every block is accounted for",
    "schedules",
    quick=2_000,
    full=100_000,
    run=run,
)
