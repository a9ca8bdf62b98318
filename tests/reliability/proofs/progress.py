"""Liveness: every request that `submit` takes ends with the right tokens.

Whatever comes between.
"""

from __future__ import annotations

import contextlib
import threading

from tests.reliability import small_store as small
from tests.reliability.crowd import restless
from tests.reliability.progress_world import World
from tests.reliability.proof import Proof, Tally, Tick

REQUESTS = 150  # of a world
HANGS_S = 60.0  # only tells a hang
WITH_DISK = 7  # one world of so many has a disk tier, restless or not
WITH_VISITOR = 8  # in one of so many another thread opens sequences all the time; in the others, as the seed says
RESTLESS = 4  # in one of so many threads change places as often as they can
ENOUGH = 2_000  # requests in which all of these happen
MUST_HAPPEN = (
    *(f"finished, {kind}" for kind in ("single", "samples", "beams")), "suspensions", "prefetches", "purges", "pins",
    "quotas", "drafts", "sequences of others", "requests of several branches that were suspended",
    "refused by schedule: OutOfBlocks", "refused by submit", "sequences of the other thread",
    "plans with loads beside them",
    *(f"{end}, {kind}" for end in ("expired", "aborted") for kind in ("single", "samples", "beams")),
)  # fmt: skip


def one_world(seed: int, count: int, tally: Tally, has_visitor: bool = False) -> None:
    """A world to its end; `has_visitor` forces another thread into it."""
    with contextlib.ExitStack() as stack:
        if seed % RESTLESS == 0:
            stack.enter_context(restless())
        disk = None if seed % WITH_DISK else str(stack.enter_context(small.scratch()) / "kv")
        World(seed, tally, disk, has_visitor=has_visitor).run(count)


def run(count: int, seed: int, tick: Tick) -> Tally:
    """World after world; what is in each follows from its own seed, which a failure names."""
    tally, number = Tally(found={"unjust refusals": 0}), 0
    with small.quiet():
        while tally.count < count:
            before, raised = tally.count, list[BaseException]()
            arguments = (seed * 1_000_003 + number, tally, number % WITH_VISITOR == 0, raised)
            thread = threading.Thread(target=_guarded, args=arguments, daemon=True)
            thread.start()
            thread.join(HANGS_S)
            if thread.is_alive():
                tally.fail(f"world of seed {seed * 1_000_003 + number} hangs")
                return tally
            for error in raised:
                tally.fail(f"world of seed {seed * 1_000_003 + number}: {type(error).__name__}: {error}")
            tick(tally.count - before)
            number += 1
    if tally.count >= ENOUGH:
        tally.require(*MUST_HAPPEN)
    return tally


def _guarded(seed: int, tally: Tally, has_visitor: bool, raised: list[BaseException]) -> None:
    try:
        one_world(seed, REQUESTS, tally, has_visitor)
    except BaseException as error:
        raised.append(error)


PROOF = Proof(
    "every request that submit takes ends with the tokens it comes to alone, through quotas, purges, pins, prefetches, "
    "other callers and suspensions, as soon as others leave room for it; only submit refuses others",
    "requests",
    quick=5_000,
    full=1_000_000,
    run=run,
)
