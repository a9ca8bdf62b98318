"""The power fails under a cache by groups: any pages that were not synced are lost.

Each page of each file is that of an earlier moment or of the last one, by chance; extents change hands in between. Not
covered: sectors within a page (tests/reliability/proofs/power_loss.py, on stores without groups).
"""

from __future__ import annotations

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


@pytest.mark.parametrize("seed", range(8))
def test_no_mixture_of_old_and_new_pages_serves_wrong_bytes_or_purged_ones(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    versions, served, lost = [0, 0], 0, 0
    for number in range(ROUNDS):
        cache, moments = open_cache(tmp_path / "kv"), []
        for step in range(STEPS):
            tenant, prompt = int(rng.integers(2)), churn.PROMPTS[int(rng.integers(len(churn.PROMPTS)))]
            found = serve(cache, prompt, TENANTS[tenant], churn.source(tenant, versions[tenant]))
            assert found.wrong == 0
            if rng.random() < 0.01:
                cache.purge(TENANTS[tenant])
                versions[tenant] += 1
                moments.clear()  # a purge is on the device before it returns
            if step % 10 == 0:
                moments.append(files_of(tmp_path / "kv"))
        last = files_of(tmp_path / "kv")
        first = moments[int(rng.integers(len(moments)))] if moments else last
        cache.close()
        share = rng.choice([0.02, 0.1, 0.5])
        for name, data in last.items():
            pages = [place for place in range(0, len(data), PAGE) if rng.random() < share]
            mixed = bytearray(data)
            for place in pages:
                mixed[place : place + PAGE] = first[name][place : place + PAGE]
            (tmp_path / "kv" / name).write_bytes(mixed)
        with open_cache(tmp_path / "kv") as cache:
            cache.check_integrity()
            for tenant, namespace in enumerate(TENANTS):
                for prompt in churn.PROMPTS:
                    with cache.sequence(prompt, namespace) as seq:
                        assert not wrong_in_pages(cache, seq, churn.source(tenant, versions[tenant])), (number, prompt)
                        served += seq.num_computed
            cache.check_integrity()
            disk = cache.stats().disk
            assert disk is not None
            lost += sum(disk["misses"].values())
    assert served  # some of it was there
    assert lost  # and some torn
