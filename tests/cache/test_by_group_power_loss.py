"""The power fails under a cache by groups: any pages that were not synced are lost.

Each page of each file is that of an earlier moment or of the last one, by chance; extents change hands in between. Not
covered: sectors within a page (tests/reliability/proofs/power_loss.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tiers.disk.format import PAGE
from tests.reliability import churn
from tests.reliability.token_kv import GROUPED, serve, wrong_in_pages

TENANTS = [pk.Namespace(tenant=name) for name in "ab"]
ROUNDS, STEPS = 6, 60


def open_cache(path: Path) -> pk.KVCache:
    disk = pk.Disk(path, pk.Blocks(24), segment_size=pk.Bytes(16 * 8192), write="all", admission="all")
    return pk.KVCache(GROUPED, pk.Blocks(24), disk=disk, by_group=True)


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.name.startswith(("SUPER", "data"))}


@dataclass
class Outcome:
    """Counts over all openings after the power failures of one seed.

    Attributes
    ----------
    served : tokens found.
    freed : blocks and pages without the rest of their prefix.
    missed : reads that found something else than was expected. Whether one seed has any depends on which pages the
        threads had written by then.
    """

    served: int = 0
    freed: int = 0
    missed: int = 0


def power_fails(seed: int, path: Path) -> Outcome:
    """Tear the files of a cache in use `ROUNDS` times; compare all that the next one serves."""
    rng = np.random.default_rng(seed)
    versions, outcome = [0, 0], Outcome()
    for number in range(ROUNDS):
        cache, moments = open_cache(path), []
        for step in range(STEPS):
            tenant, prompt = int(rng.integers(2)), churn.PROMPTS[int(rng.integers(len(churn.PROMPTS)))]
            found = serve(cache, prompt, TENANTS[tenant], churn.source(tenant, versions[tenant]))
            assert found.wrong == 0, (seed, number, step)
            if rng.random() < 0.01:
                cache.purge(TENANTS[tenant])
                versions[tenant] += 1
                moments.clear()  # a purge is on the device before it returns
            if step % 10 == 0:
                moments.append(files_of(path))
        last = files_of(path)
        first = moments[int(rng.integers(len(moments)))] if moments else last
        cache.close()
        share = rng.choice([0.02, 0.1, 0.5])
        for name, data in last.items():
            pages = [place for place in range(0, len(data), PAGE) if rng.random() < share]
            mixed = bytearray(data)
            for place in pages:
                mixed[place : place + PAGE] = first[name][place : place + PAGE]
            (path / name).write_bytes(mixed)
        with open_cache(path) as cache:
            cache.check_integrity()
            for tenant, namespace in enumerate(TENANTS):
                for prompt in churn.PROMPTS:
                    with cache.sequence(prompt, namespace) as seq:
                        wrong = wrong_in_pages(cache, seq, churn.source(tenant, versions[tenant]))
                        assert not wrong, (seed, number, prompt)
                        outcome.served += seq.num_computed
            cache.check_integrity()
            stats = cache.stats()
            assert stats.disk is not None
            outcome.freed += stats.orphans
            outcome.missed += sum(stats.disk["misses"].values())
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(4), range(4, 16)], ids=["few", "more"])
def test_no_mixture_of_old_and_new_pages_serves_wrong_bytes_or_purged_ones(seeds: range, tmp_path: Path) -> None:
    outcomes = [power_fails(seed, tmp_path / str(seed)) for seed in seeds]
    assert all(outcome.served for outcome in outcomes)  # some of it was there
    assert all(outcome.freed for outcome in outcomes)  # and some torn
    assert sum(outcome.missed for outcome in outcomes)
