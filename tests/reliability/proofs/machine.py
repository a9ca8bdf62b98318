"""The whole cache under random histories beside the oracle.

Device, host and a real directory, faults included.
"""

from __future__ import annotations

from collections import Counter

from tests.model.cache_world import World
from tests.model.faults import DAMAGES, KINDS
from tests.reliability.proof import Proof, Tally, Tick

STEPS = 200  # of one history
SEEDS_APART = 1_000_000  # so that runs of two seeds share no history
ENOUGH = 40_000  # steps after which every kind of event must have happened
EXPECTED = {
    *(f"hits {tier}" for tier in ("device", "host", "disk", "partial")),
    *("promoted host", "promoted disk", "demoted device", "demoted host", "dropped disk", "adopted"),
    *("failed promotions", "failed demotions", "purges", "crashes", "closed and reopened", "reopening refused"),
    *("flushes", "refused by admission", "hits declined"),
    *(f"damage: {how}" for how in DAMAGES),
    *KINDS,
}


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Histories until so many steps are done."""
    tally, seen = Tally(), Counter[str]()
    for history in range(seed * SEEDS_APART, seed * SEEDS_APART + -(-count // STEPS)):
        world = World(history)
        try:
            world.run(STEPS)
        except AssertionError as error:
            tally.fail(str(error))
        seen.update(world.seen)
        tally.count += STEPS
        tick(STEPS)
    tally.hits = seen["tokens read"]
    if count >= ENOUGH and (never := sorted(kind for kind in EXPECTED if seen[kind] < 5)):
        tally.fail(f"these hardly ever happened: {', '.join(never)}")
    tally.found = {kind: seen[kind] for kind in sorted(EXPECTED)}
    return tally


PROOF = Proof(
    "stateful machine of a whole cache, all tiers, faults included: whatever is served was computed for exactly "
    "that namespace and prefix, and nothing raises",
    "steps",
    quick=50_000,
    full=1_000_000,
    run=run,
)
