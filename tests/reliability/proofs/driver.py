"""Random operations at native speed on the real core.

The driver audits all contents and references after each operation.
"""

from __future__ import annotations

from collections import Counter

from tests.model.histories import EXPECTED, OPS_PER_SEED, drive, events
from tests.model.native import native_driver
from tests.reliability.proof import Proof, Tally, Tick

SEEDS_APART = 1_000_000  # so that runs of two seeds share no history
ENOUGH = 2_000_000  # operations after which every kind of event must have happened


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Histories of `OPS_PER_SEED` operations, each from a seed of its own."""
    tally, module = Tally(), native_driver()
    seen: Counter[str] = Counter()
    for history in range(seed * SEEDS_APART, seed * SEEDS_APART + -(-count // OPS_PER_SEED)):
        try:
            driver = drive(module, history)
        except AssertionError as error:
            tally.fail(str(error))
            tally.count += OPS_PER_SEED
        else:
            seen.update(events(driver))
            tally.count += driver.operations
            tally.hits += driver.reads
        tick(OPS_PER_SEED)
    if count >= ENOUGH and (never := sorted(kind for kind in EXPECTED if not seen[kind])):
        tally.fail(f"these events never happened: {', '.join(never)}")
    hits = {tier: seen[f"hit_blocks {tier}"] for tier in ("device", "host", "disk")}
    tally.found = {f"hits in {tier}": n for tier, n in hits.items()} | {
        "failed promotions": seen["failed_promotions"],
        "failed demotions": seen["failed_demotions"],
        "promotions given up": seen["late_promotions"],
        "demotions refused": seen["refused_demotions"],
        "dropped": sum(seen[f"dropped {tier}"] for tier in hits),
        "copies on write": seen["copies on write"],
    }
    return tally


PROOF = Proof(
    "random operations on block pool, prefix tree, placement and block table leave every block of every tier right",
    "operations",
    quick=2_000_000,
    full=50_000_000,
    run=run,
)
