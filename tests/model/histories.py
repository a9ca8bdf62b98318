"""The caches of the native driver (native_driver.pyx), and its whole histories.

One seed gives one history.
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from pagedkv._core.policies.hazard.face import HazardPolicy
from pagedkv.core import POLICIES, BlockPool, BlockTable, Placement, RadixTree, policy_needs_chain
from tests.core.hazard_requests import empty_tables
from tests.model.driver import closed_last

OPS_PER_SEED = 2000
MAX_ROWS = 6
OTHERS = [policy for policy in POLICIES if policy != "hazard"]
WEIGHTS = {
    "acquire": 14, "bring up": 10, "insert": 12, "release": 10, "share": 3, "pin": 3, "shorten": 3, "reserve": 6,
    "take": 4, "complete": 12, "finish": 2, "hold": 3, "look": 4, "open": 16, "extend": 12, "step": 34, "fork": 6,
    "truncate": 6, "end": 8, "retain": 2, "expire": 2, "quota": 3, "drop": 1, "race": 8, "copy": 8,
    "clear": 1,
}  # fmt: skip
ALWAYS = ("release", "complete", "end")  # without these, everything would soon be held


def weights(rng: Random) -> dict[str, int]:
    """Every seed does some operations more often than others, and some not at all."""
    return {name: usual * rng.choice([0, 1, 1, 2, 4]) + (name in ALWAYS) for name, usual in WEIGHTS.items()}


def world(rng: Random, seed: int) -> tuple[Placement, BlockTable]:
    """A cache of one to three tiers, nearly always tiny, so that everything is always short."""
    large = rng.random() < 0.05
    colder = [0, 60, 120, 240] if large else [0, 2, 4, 7, 12, 20]
    capacities = [rng.randint(60, 200) if large else rng.randint(3, 14)]
    capacities += [rng.choice(colder) for _ in range(rng.choice([0, 1, 2, 2]))]
    policy = rng.choice(OTHERS)
    if seed % 5 == 4:
        policy = "hazard"
    tree = RadixTree(
        rng.choice([1, 2]) if large else rng.choice([1, 1, 2, 3, 4]),
        len(capacities),
        max_run=rng.choice([1, 2, 256, 256]),
        keep_chain=policy_needs_chain(policy),
        keep_names=seed % 2 == 0,
        seed=rng.getrandbits(32),
    )
    placement = Placement(
        tree,
        [BlockPool(blocks) if blocks else None for blocks in capacities],
        policy=policy,
        demotion=rng.choice(["leaf_first", "oldest_first"]),
        inclusive=[rng.random() < 0.5 for _ in capacities],
        closed=closed_last(capacities, rng.random() < 0.7),
        write=rng.choice(["never", "evicted", "reused", "all"]),
        pin_budget=rng.choice([0, 4, 12]),
        event_words=rng.choice([0, 0, 64, 4096]),
    )
    if placement.hazard is not None:
        prejudice(placement.hazard, seed)
    return placement, BlockTable(placement, MAX_ROWS)


def prejudice(hazard: HazardPolicy, seed: int) -> None:
    """Let it choose victims by what they are like, at random and without a bound."""
    tables = empty_tables()
    tables[0] = np.random.default_rng(seed).normal(0, 0.5, tables.shape[1])
    hazard.load_tables(tables)
    hazard.set_bound(stake=math.inf)


def driver_of(module: ModuleType, seed: int) -> Any:
    """A NativeDriver at its start."""
    rng = Random(seed)
    placement, table = world(rng, seed)
    chosen = weights(rng)
    return module.NativeDriver(seed, placement, table, [chosen[name] for name in module.NAMES])


def drive(module: ModuleType, seed: int, num_ops: int = OPS_PER_SEED) -> Any:
    """Run the whole history of one seed.

    An error names the seed and the number of the operation.
    """
    driver = driver_of(module, seed)
    # A crash or a hang shows files and lines, but no values: so the seed is the name of a file.
    code = compile("driver.run(num_ops)\ndriver.close()", f"seed {seed}", "exec")
    exec(code, {"driver": driver, "num_ops": num_ops})
    return driver


def events(driver: Any) -> Counter[str]:
    """How often each kind of event happened to a driver."""
    seen = Counter(driver.seen_events)
    for name, value in driver.placement.stats().items():
        by_tier = value if isinstance(value, dict) else {"": value}
        seen.update({f"{name} {tier}".strip(): blocks for tier, blocks in by_tier.items()})
    return seen


EXPECTED = {
    *(f"{kind} {tier}" for kind in ("hit_blocks", "dropped", "trimmed") for tier in ("device", "host", "disk")),
    *("promoted host", "promoted disk", "demoted device", "demoted host", "failed_promotions", "failed_demotions"),
    *("late_promotions", "refused_demotions", "copied host", "copied disk", "failed_copies", "refused_copies"),
    *("adopted", "blocked_matches", "refused_by_quota", "expired", "pinned", "pin refused", "namespaces dropped"),
    *("steps", "steps cancelled", "step refused", "advanced", "advance refused", "forks", "copies on write"),
    *("partial hits", "no room", "promotion refused", "insertion ended early", "shortened", "shortening refused"),
    "truncated into a run in flight",
}
