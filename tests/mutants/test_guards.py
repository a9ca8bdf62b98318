"""What a mutant survived until these tests were written; each is about one guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv._core.chain_key import ROOT_PARENT, chain_keys
from pagedkv.cache.device_kv import DeviceKV
from pagedkv.cache.records import whole_prefixes
from pagedkv.core import RadixTree
from pagedkv.tiers import Record, StoredBlock
from tests.cache.conftest import BLOCK, SPEC, Toy, prompt, where
from tests.in_blocks import in_blocks

SECRET, DIGEST = b"s" * 32, b"n" * 32


@pytest.fixture
def open_toy(tmp_path: Path) -> Iterator[Callable[..., Toy]]:
    """Opens caches whose content is known; at the end their books are checked."""
    opened: list[Toy] = []

    def open_it(device: int, host: int | None = None, disk: int | None = None, **options: Any) -> Toy:
        store = None if disk is None else pk.Disk(str(tmp_path / "kv"), pk.Blocks(disk))
        opened.append(Toy(pk.KVCache(SPEC, in_blocks(device), in_blocks(host), store, **options)))
        return opened[-1]

    yield open_it
    for toy in opened:
        toy.cache.check_integrity()
        toy.cache.close()


def test_blocks_whose_hashes_collide_are_told_apart_by_their_tokens() -> None:
    """Among so many blocks some share their 32-bit hash; with this seed they do."""
    tree = RadixTree(1, seed=0)
    tokens = np.arange(200_000, dtype=np.int32)
    ids = tokens.copy()
    for i in range(len(tokens)):
        assert tree.insert(tokens[i : i + 1], ids[i : i + 1]) == 1
    assert np.array_equal(ids, tokens)


def test_making_room_for_a_promotion_never_drops_what_is_promoted(open_toy: Callable[..., Toy]) -> None:
    toy = open_toy(4, host=3)
    toy.use(prompt(1))
    toy.use(prompt(2))
    assert where(toy.cache, prompt(1)) == [("host", 3)]  # the coldest blocks of a full tier
    assert toy.use(prompt(1)) == {"host": 3 * BLOCK}


def test_no_block_crosses_namespaces_on_any_tier(open_toy: Callable[..., Toy]) -> None:
    toy = open_toy(4, host=3, disk=20)
    tenants = [None, pk.Namespace(tenant="a"), pk.Namespace(salt="a"), pk.Namespace(model="a")]
    for salt, namespace in enumerate(tenants):
        toy.salt = salt  # another tenant's KV for the same tokens is another
        assert toy.use(prompt(1), namespace) == {}
    for salt, namespace in enumerate(tenants):
        toy.salt = salt
        assert sum(toy.use(prompt(1), namespace).values()) == 3 * BLOCK


def test_a_disk_that_lost_its_content_is_a_miss_and_never_wrong(open_toy: Callable[..., Toy], tmp_path: Path) -> None:
    toy = open_toy(4, disk=20)
    toy.use(prompt(1))
    toy.use(prompt(2))
    assert where(toy.cache, prompt(1)) == [("disk", 3)]
    for path in (tmp_path / "kv").glob("data.*"):
        path.write_bytes(bytes(path.stat().st_size))
    assert toy.use(prompt(1)) == {}
    assert toy.cache.stats().missed_promotions == 3


def test_a_stored_block_whose_key_is_not_that_of_its_content_is_never_used() -> None:
    tokens = np.arange(3 * BLOCK, dtype=np.int32)
    keys = chain_keys(SECRET, DIGEST, ROOT_PARENT, tokens, BLOCK)
    stored = [
        StoredBlock(10 + i, Record(key, parent, DIGEST, tokens[i * BLOCK : (i + 1) * BLOCK]), i + 1)
        for i, (key, parent) in enumerate(zip(keys, [ROOT_PARENT, *keys], strict=False))
    ]
    (run,), orphans = whole_prefixes(stored, SECRET)
    assert (run.namespace, run.tokens.tolist(), run.blocks.tolist(), orphans) == (
        DIGEST, tokens.tolist(), [10, 11, 12], {"no_parent": [], "wrong_key": [], "doubled": []}
    )  # fmt: skip
    for forged in range(3):
        record = stored[forged].record
        other = Record(record.key, record.parent, DIGEST, record.tokens + np.int32(1))
        changed = [*stored[:forged], StoredBlock(10 + forged, other, 9), *stored[forged + 1 :]]
        runs, orphans = whole_prefixes(changed, SECRET)
        assert [run.blocks.tolist() for run in runs] == ([[10, 11, 12][:forged]] if forged else [])
        assert orphans["wrong_key"] == [10 + forged]
        assert sorted(orphans["no_parent"]) == [11, 12][forged:]


def test_the_source_of_a_copy_is_nobody_elses_until_it_is_copied(
    open_toy: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = open_toy(3)
    seq = toy.cache.sequence(prompt(1, 3))
    toy.run(seq)
    (fork,) = seq.fork()
    copy, others = DeviceKV.copy_blocks, []

    def disturbed(self: DeviceKV, pairs: Any) -> None:
        """The other owner of the source goes, and another sequence takes what is free."""
        monkeypatch.setattr(DeviceKV, "copy_blocks", copy)
        fork.release()
        others.append(toy.cache.sequence(prompt(2, 4)))
        toy.run(*others)
        copy(self, pairs)

    monkeypatch.setattr(DeviceKV, "copy_blocks", disturbed)
    seq.append(10)
    toy.run(seq)
    toy.check(seq, *others)
    seq.release()
    others[0].release()


def test_a_token_with_slot_minus_one_is_written_nowhere() -> None:
    spec = pk.KVSpec(1, 1, 2, "float32", 4, model="toy")
    arena = np.zeros((3, spec.block_bytes), np.uint8)
    kv = DeviceKV(spec, arena)
    values = np.arange(1, 7, dtype=np.float32).reshape(3, 1, 2)
    kv.write(0, np.array([-1, 5, -1]), values, values)
    for view in kv.layer(0):
        assert np.argwhere(view.any(axis=(2, 3))).tolist() == [[1, 1]]
        assert view[1, 1].tolist() == [[3, 4]]
