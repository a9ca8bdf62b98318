"""``pagedkv inspect`` and ``verify`` on a store for groups of layers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tiers.disk.format import PAGE
from tests.cache import test_by_group_power_loss as power_loss
from tests.cache.test_by_group import compute, prompt
from tests.cache.test_by_group_on_disk import LENGTH, SPEC
from tests.reliability import churn
from tests.reliability.token_kv import serve, wrong_in_pages
from tests.slices import one_in
from tests.tools.conftest import Run

PROMPTS = 3
SPINE, PAGES = PROMPTS * (LENGTH // 4), PROMPTS * 2


@pytest.fixture
def store(tmp_path: Path) -> Path:
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(200), segment_size="256KiB", admission="all")
    with pk.KVCache(SPEC, pk.Blocks(60), disk=disk, by_group=True) as cache:
        for number in range(PROMPTS):
            with cache.sequence(prompt(number, LENGTH)) as seq:
                compute(cache, seq)
    return tmp_path / "kv"


def test_inspect_names_the_groups_and_their_pages(store: Path, run: Run) -> None:
    found = run("inspect", store, "--json").json
    assert found["superblock"]["format"] == 2
    assert [(group["layers"], group["window"]) for group in found["groups"]] == [(2, 0), (4, 2)]
    assert found["pages"] == [PAGES]
    assert found["slots"]["live"] == SPINE
    assert found["chains"] == {"whole_blocks": SPINE, "prefixes": PROMPTS, "orphans": 0, "doubled": 0, "wrong_key": 0}
    said = run("inspect", store).out
    assert "4 layers with a window of 2 blocks, pages of 2,048 bytes with 4 checksums each, 1 to an extent: " in said
    assert f"extent: {PAGES} live pages" in said
    assert "2 layers that see everything" in said
    assert f"slots of group 0  {SPINE} live" in said
    assert "bytes of group 0" in said


def test_verify_reads_the_pages_of_every_group(store: Path, run: Run) -> None:
    found = run("verify", store, "--json").json
    assert found["ok"]
    assert (found["blocks"], found["num_groups"]) == (SPINE + PAGES, 2)
    assert f"{SPINE + PAGES} pages of 2 groups of layers (" in run("verify", store).out
    name = store / "data.0000"
    data = bytearray(name.read_bytes())
    for place in range(4096 + 50, len(data), 8192):  # slots of both groups are a header and a page
        data[place] ^= 1
    name.write_bytes(data)
    ran = run("verify", store, "--json")
    found = ran.json
    assert ran.code == 1
    assert found["wrong"]["payload"]
    assert found["wrong"]["payload of group 1"]


def test_a_repair_of_a_whole_store_changes_no_page_of_it(store: Path, run: Run) -> None:
    before = [path.read_bytes() for path in sorted(store.glob("data.*"))]
    ran = run("verify", store, "--repair", "--json")
    assert ran.code == 0
    assert ran.json["repaired"] == []
    assert [path.read_bytes() for path in sorted(store.glob("data.*"))] == before


def found_by_a_cache(path: Path, versions: list[int]) -> list[int]:
    """How many tokens of each prompt a cache over a copy of the store finds; they are right."""
    shutil.copytree(path, path.parent / "copy")
    found = []
    with power_loss.open_cache(path.parent / "copy") as cache:
        for tenant, namespace in enumerate(power_loss.TENANTS):
            for tokens in churn.PROMPTS:
                with cache.sequence(tokens, namespace) as seq:
                    assert not wrong_in_pages(cache, seq, churn.source(tenant, versions[tenant]))
                    found.append(seq.num_computed)
        cache.check_integrity()
    shutil.rmtree(path.parent / "copy")
    return found


@pytest.mark.parametrize("seed", one_in(10, range(60)))
def test_a_cache_finds_after_a_repair_what_it_found_before(seed: int, tmp_path: Path, run: Run) -> None:
    rng, path, versions, moments = np.random.default_rng(seed), tmp_path / "kv", [0, 0], []
    with power_loss.open_cache(path) as cache:
        for step in range(power_loss.STEPS):
            tenant, tokens = int(rng.integers(2)), churn.PROMPTS[int(rng.integers(len(churn.PROMPTS)))]
            serve(cache, tokens, power_loss.TENANTS[tenant], churn.source(tenant, versions[tenant]))
            if rng.random() < 0.02:
                cache.purge(power_loss.TENANTS[tenant])
                versions[tenant] += 1
            if step % 10 == 0:
                moments.append(power_loss.files_of(path))
    share, earlier = rng.choice([0.0, 0.02, 0.1]), moments[int(rng.integers(len(moments)))]
    for name, now in power_loss.files_of(path).items():
        data = bytearray(now)
        for place in range(0, len(data), PAGE) if name != "SUPER" else ():
            if rng.random() < share:
                data[place : place + PAGE] = earlier[name][place : place + PAGE]
            if rng.random() < 0.02:
                data[place + int(rng.integers(300))] ^= 1
        (path / name).write_bytes(data)
    before = found_by_a_cache(path, versions)
    assert run("verify", path, "--repair").code in (0, 1)
    assert run("verify", path).out.endswith("nothing is wrong\n")
    after = found_by_a_cache(path, versions)
    assert all(now >= was for now, was in zip(after, before, strict=True))
