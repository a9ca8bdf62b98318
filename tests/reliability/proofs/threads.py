"""Threads: caches, tiers and the core under every call that hosts make at once."""

from __future__ import annotations

from tests.reliability import child
from tests.reliability.proof import Proof, Tally, Tick

SHARES = {"core_hammer": 0.75, "cache_hammer": 0.15, "tier_hammer": 0.1}


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Each hammer in a process of its own, for its share of the operations."""
    tally = Tally()
    for hammer, share in SHARES.items():
        found = child.run(f"tests.reliability.{hammer}", max(1, round(count * share)), seed, tick=tick).tally_or_wrong()
        tally.add(f"{hammer.partition('_')[0]} operations", found.count)
        child.add(tally, found)
    return tally


PROOF = Proof(
    "2 to 16 threads that change places as often as the interpreter lets them: on the core, on a cache of three tiers, "
    "on the disk tier and its mover; closed under them now and then; all books agree at every quiet point",
    "operations",
    quick=100_000,
    full=5_000_000,
    run=run,
)
