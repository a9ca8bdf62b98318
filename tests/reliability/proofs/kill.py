"""kill -9 at random times.

Whatever a cache or a tier was doing, what is served after reopening is right.

The page cache survives a kill, so this shows that recovery is sound, not that the commit protocol is; power loss is
another proof.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np

import pagedkv as pk
from tests.reliability import churn
from tests.reliability import small_store as small
from tests.reliability.fork_server import ForkServer
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.token_kv import SPEC, wrong_in_pages, wrong_tokens

KILLS_PER_STORE = 50  # then a new one: a store that has seen many kills is one case, a young one another

ENOUGH = 20  # kills after which some must have left something to be found


def check_cache(path: Path, versions: list[int], by_group: bool, how: str, tally: Tally) -> None:
    """Reopen and ask for everything that may be there.

    Each block that the disk names must hold what its name says.
    """
    with churn.open_cache(str(path), by_group=by_group) as cache:
        for tenant in range(len(churn.TENANTS)):
            for prompt in churn.PROMPTS:
                with cache.sequence(prompt, pk.Namespace(tenant=churn.TENANTS[tenant])) as seq:
                    weights = churn.source(tenant, versions[tenant])
                    if wrong_in_pages(cache, seq, weights) if by_group else wrong_tokens(seq, weights):
                        tally.fail(f"{how}: wrong KV for tenant {tenant}, version {versions[tenant]}, prompt {prompt}")
                    tally.hits += seq.num_computed // SPEC.block_size
                    for tier, count in seq.hit_tokens.items():
                        tally.add(f"hit tokens, {tier}{' by groups' * by_group}", count)
        try:
            cache.check_integrity()
        except AssertionError as problem:
            tally.fail(f"{how}: the books do not agree after reopening: {problem}")


def check_tier(path: Path, how: str, tally: Tally) -> None:
    """Reopen and read every block that is there."""
    with churn.open_tier(str(path)) as tier:
        found = list(tier.records())
        if found:
            records = [block.record for block in found]
            wanted = small.payloads(records, 0, tier.block_bytes)
            arena = np.empty_like(wanted)
            hit = tier.read([block.block for block in found], records, arena, np.arange(len(found)))
            wrong = hit & (arena != wanted).any(1)
            if wrong.any():
                tally.fail(f"{how}: wrong bytes in slots {[found[i].block for i in np.flatnonzero(wrong)]}")
            tally.hits += int(hit.sum())
            tally.add("blocks named but torn", int((~hit).sum()))


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Kill, reopen, verify.

    Of four kills two hit a whole cache, one a cache over groups of layers, one a tier that several threads use.
    """
    tally, choose = Tally(), random.Random(seed)
    with small.quiet(), small.scratch() as folder, ForkServer() as server:
        versions_of: dict[str, list[int]] = {}
        for number in range(count):
            store = folder / str(number // KILLS_PER_STORE)
            if number % KILLS_PER_STORE == 0:
                store.mkdir(mode=0o700)
                versions_of = {kind: [0] * len(churn.TENANTS) for kind in ("cache", "groups", "tier")}
            kind = ("cache", "groups", "tier", "cache")[number % 4]
            versions = versions_of[kind]
            opening = choose.random() < 0.2
            how = f"seed {seed}, kill {number} ({kind})"
            ran = server.call(
                "tests.reliability.churn:kill_one", kind=kind, path=str(store / kind), seed=seed * 1_000_003 + number,
                wait_s=choose.uniform(0, 0.02 if opening else 0.1), opening=opening, versions=versions,
            )  # fmt: skip
            for line in ran["heard"]:
                if line.startswith("purged "):
                    versions[int(line.split()[1])] += 1
                    tally.add("namespaces purged for good")
                elif line != "open":
                    tally.fail(f"{how}: {line}")
            if ran["ended"] != -signal.SIGKILL:
                tally.fail(f"{how}: ended with {ran['ended']} instead of being killed")
            tally.add("killed while opening" if "open" not in ran["heard"] else "killed under load")
            if kind != "tier":
                check_cache(store / kind, versions, kind == "groups", how, tally)
            else:
                check_tier(store / kind, how, tally)
            tally.count += 1
            tick(1)
    if count >= ENOUGH and not tally.hits:
        tally.fail(
            f"{tally.count} kills, and nothing was ever found again: a cache that forgets everything proves nothing"
        )
    if count >= ENOUGH:
        tally.require("hit tokens, disk", "hit tokens, disk by groups")
    return tally


PROOF = Proof(
    claim="kill -9 at random times under load (three tiers, several threads, purges, groups of layers), reopen: every "
    "hit is right, and what was purged stays away",
    unit="kills",
    quick=100,
    full=1000,
    run=run,
)
