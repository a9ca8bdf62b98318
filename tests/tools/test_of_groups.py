"""``pagedkv inspect`` and ``verify`` on a store for groups of layers."""

from __future__ import annotations

from pathlib import Path

import pytest

import pagedkv as pk
from tests.cache.test_by_group import compute, prompt
from tests.cache.test_by_group_on_disk import LENGTH, SPEC
from tests.tools.conftest import Run, is_refused

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
    assert f"4 layers with a window of 2 blocks, pages of 2,048 bytes: {PAGES} live pages" in said
    assert "2 layers that see everything" in said


def test_verify_reads_the_pages_of_every_group(store: Path, run: Run) -> None:
    found = run("verify", store, "--json").json
    assert found["ok"]
    assert found["blocks"] == SPINE + PAGES
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


def test_repair_is_refused_with_the_reason(store: Path, run: Run) -> None:
    is_refused(run("verify", store, "--repair"), "groups of layers")
