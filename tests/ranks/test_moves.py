"""Three ranks: a block has a part at each, and all parts move or none counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tiers import DiskTier
from tests.collecting import collect_until
from tests.ranks.conftest import BLOCK, SPEC, WATCHDOG_S, World, prompt

Open = Callable[..., World]


def test_blocks_come_back_from_host_and_disk_to_every_rank(world: Open, tmp_path: Path) -> None:
    here = world(disk=tmp_path / "kv")
    for number in range(20):
        assert here.ask(prompt(number)) == {}
    found = [here.ask(prompt(number)) for number in reversed(range(20))]
    assert {name for each in found for name in each} == {"device", "host", "disk"}
    assert all(sum(each.values()) == 2 * BLOCK for each in found)
    stats = here.cache.stats()
    assert stats.failed_moves == 0
    assert stats.moved_bytes["device_to_host"] % SPEC.block_bytes == 0
    assert stats.disk is not None
    assert stats.disk["state"] == "ok"
    assert stats.disk["blocks_read"] == 3 * stats.moved_bytes["disk_to_device"] // SPEC.block_bytes


def test_a_restart_finds_each_rank_s_part(world: Open, tmp_path: Path) -> None:
    first = world(disk=tmp_path / "kv")
    for number in range(3):
        first.ask(prompt(number))
    first.close()
    second = world(disk=tmp_path / "kv")
    assert [second.ask(prompt(number)) for number in range(3)] == [{"disk": 2 * BLOCK}] * 3
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["rank0of3", "rank1of3", "rank2of3"]


def test_the_counters_of_a_closed_cache_are_its_last(world: Open, tmp_path: Path) -> None:
    here = world(disk=tmp_path / "kv")
    here.ask(prompt(1))
    here.cache.checkpoint()
    before = here.cache.stats().disk
    here.close()
    after = here.cache.stats().disk
    assert before is not None
    assert after == before
    assert before["blocks_written"] % 3 == 0 < before["blocks_written"]


def test_a_cache_that_is_dropped_lets_its_ranks_go(address: str) -> None:
    here = World(address)
    here.ask(prompt(1))
    here.cache = None
    collect_until(lambda: all(part.wait(0) for part in here.parts))
    here.close()


def only_at_two_ranks(here: World, folder: Path, tokens: list[int]) -> None:
    """Close the world, and remove a prompt's blocks from the disk of rank 1."""
    here.close()
    spec = here.ranks.shard_spec(SPEC, 1)
    options: dict[str, Any] = {"fingerprint": spec.fingerprint(), "block_tokens": BLOCK}
    tier = DiskTier(folder / "rank1of3", 64, spec.block_bytes, **options)
    wanted = [each.block for each in tier.records() if each.record.tokens[0] in tokens]
    assert wanted
    tier.invalidate(np.array(wanted, np.int32))
    tier.close()


def test_a_restart_finds_no_block_that_a_rank_lacks(world: Open, tmp_path: Path) -> None:
    first = world(disk=tmp_path / "kv")
    for number in range(2):
        first.ask(prompt(number))
    only_at_two_ranks(first, tmp_path / "kv", prompt(1))
    second = world(disk=tmp_path / "kv")
    assert second.cache.match(prompt(1))["disk"] == 0
    assert second.ask(prompt(1)) == {}
    assert second.ask(prompt(0)) == {"disk": 2 * BLOCK}
    assert second.cache.stats().failed_moves == 0


def damage(file: Path) -> None:
    """Flip a bit of every 16 bytes behind the headers of a disk tier's file."""
    data = bytearray(file.read_bytes())
    data[4096::16] = bytes(byte ^ 1 for byte in data[4096::16])
    file.write_bytes(data)


def test_a_block_that_is_damaged_at_one_rank_is_a_miss_at_all(world: Open, tmp_path: Path) -> None:
    here = world(disk=tmp_path / "kv")
    for number in range(20):
        here.ask(prompt(number))
    cold = next(n for n in range(20) if here.cache.match(prompt(n)) == {"device": 0, "host": 0, "disk": 2 * BLOCK})
    here.cache.checkpoint()
    damage(tmp_path / "kv" / "rank1of3" / "data.0000")
    assert here.ask(prompt(cold)) == {}
    stats = here.cache.stats()
    assert stats.missed_promotions > 0
    assert stats.failed_moves == 2
    assert here.ask(prompt(cold)) == {"device": 2 * BLOCK}


def test_a_disk_that_hangs_at_one_rank_costs_the_hit_and_keeps_its_blocks_until_it_is_back(
    world: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world(disk=tmp_path / "kv")
    for number in range(3):
        first.ask(prompt(number))
    first.close()
    here = world(disk=tmp_path / "kv", deadline_s=0.05)
    store, goes_on = here.parts[1]._storage.store, threading.Event()
    read = store.read

    def hang(*given: Any) -> Any:
        assert goes_on.wait(WATCHDOG_S)
        return read(*given)

    monkeypatch.setattr(store, "read", hang)
    assert here.ask(prompt(1)) == {}
    assert here.cache.stats().blocks["device"]["live"] == 2
    goes_on.set()
    until = time.monotonic() + WATCHDOG_S
    while here.cache.stats().blocks["device"]["live"]:
        assert time.monotonic() < until
    here.cache._storage._group.check()


def test_a_rank_that_cannot_carry_out_moves_costs_them_and_is_named(
    world: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = world()
    for number in range(6):
        here.ask(prompt(number))
    assert here.cache.match(prompt(0))["host"] == 2 * BLOCK
    mover = here.parts[2]._storage.carrier

    def submit(*_: object, **__: object) -> None:
        raise MemoryError("no memory for a ticket")

    with monkeypatch.context() as broken:
        broken.setattr(mover, "submit", submit)
        assert here.ask(prompt(0)) == {}
    assert here.cache.stats().failed_moves > 0
    assert "rank 2 could not carry out a call: MemoryError: no memory for a ticket" in caplog.text
    assert here.ask(prompt(0)) == {"device": 2 * BLOCK}
    here.ask(prompt(7))


def test_attention_of_all_ranks_is_that_of_one_cache(world: Open) -> None:
    here = world()
    draw = np.random.default_rng(0)
    tokens = prompt(1)
    k, v = draw.standard_normal((2, SPEC.num_layers, len(tokens), 3, 4)).astype(np.float32)
    q = draw.standard_normal((len(tokens), 9, 4)).astype(np.float32)
    with pk.KVCache(SPEC, pk.Blocks(8)) as alone, alone.sequence(tokens) as seq, alone.step([seq]) as step:
        for layer in range(2):
            step.write(layer, k[layer], v[layer])
        wanted = step.attend(1, q)
    with here.cache.sequence(tokens) as seq, here.cache.step([seq]) as step:
        arrays = step.slot_mapping, step.block_tables, step.seq_lens, step.q_indptr
        outputs = []
        for rank, part in enumerate(here.parts):
            mine = part.step(*arrays)
            for layer in range(2):
                mine.write(layer, k[layer][:, rank : rank + 1], v[layer][:, rank : rank + 1])
            outputs.append(mine.attend(1, q[:, 3 * rank : 3 * rank + 3]))
        for layer in range(2):
            step.mark_written(layer)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), wanted, rtol=0, atol=1e-6)


def test_forks_copy_their_shared_block_at_every_rank(world: Open) -> None:
    here = world()
    with here.cache.sequence(prompt(1)) as seq:
        here.compute(seq)
        (other,) = seq.fork(1)
        with other:
            seq.append(7001)
            here.compute(seq)
            other.append(7002)
            here.compute(other)
            assert seq.num_computed == other.num_computed == 2 * BLOCK + 2


def test_blocks_of_another_tenant_are_zeroed_at_every_rank(world: Open) -> None:
    here = world(scrub="always")
    for part in here.parts:
        part.device_arena[:] = 0xA5
    with here.cache.sequence(prompt(1)[:BLOCK]) as seq, here.cache.step([seq], q_lens=[1]) as step:
        for part in here.parts:
            assert not part.device_arena[step.block_tables[0, 0]].any()
        for layer in range(SPEC.num_layers):
            step.mark_written(layer)


def test_a_purge_reaches_every_rank_s_disk(world: Open, tmp_path: Path) -> None:
    tenant = pk.Namespace(tenant="a")
    here = world(disk=tmp_path / "kv")
    here.ask(prompt(1), tenant)
    here.ask(prompt(2))
    here.cache.checkpoint()
    assert here.cache.purge(tenant) > 0
    here.close()
    again = world(disk=tmp_path / "kv")
    assert [part._storage.store.stats().misses["purged"] for part in again.parts] == [0] * 3
    assert again.cache.match(prompt(1), tenant)["disk"] == 0
    assert again.ask(prompt(2)) == {"disk": 2 * BLOCK}


def test_a_purge_that_one_rank_cannot_write_is_an_error_that_names_it(
    world: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = pk.Namespace(tenant="a")
    here = world(disk=tmp_path / "kv")
    here.ask(prompt(1), tenant)

    def purge(_: bytes) -> None:
        raise pk.TierError("no space")

    monkeypatch.setattr(here.parts[1]._storage.store, "purge", purge)
    with pytest.raises(pk.TierError, match="rank 1 could not purge its disk: TierError: no space"):
        here.cache.purge(tenant)
    assert here.ask(prompt(1), tenant) == {}


def test_the_deciding_process_has_no_kv_to_give(world: Open) -> None:
    here = world()
    with here.cache.sequence(prompt(1)) as seq:
        here.compute(seq)
        refused: list[Callable[[], object]] = [
            lambda: here.cache.device_arena, lambda: here.cache.layer(0), seq.gather, here.cache.used_on,
        ]  # fmt: skip
        for call in refused:
            with pytest.raises(pk.InvalidArgument, match="lies in its ranks' processes"):
                call()
        kv = np.zeros((1, 3, 4), np.float32)
        seq.append(7)
        with pytest.raises(pk.InvalidArgument, match="mark_written"), here.cache.step([seq]) as step:
            step.write(0, kv, kv)


@pytest.mark.parametrize(
    ("changed", "value", "said"),
    [
        ("slot_mapping", [8 * BLOCK], "not among this rank's 8"),
        ("block_tables", [[8]], "not among this rank's 8"),
        ("block_tables", [0], "not the arrays of one step"),
        ("q_indptr", [0, 2], "not the arrays of one step"),
        ("seq_lens", [1, 1], "not the arrays of one step"),
        ("slot_mapping", ["x"], "integers"),
    ],
)
def test_a_rank_refuses_arrays_of_no_step(world: Open, changed: str, value: Any, said: str) -> None:
    here = world()
    arrays = {"slot_mapping": [0], "block_tables": [[0]], "seq_lens": [1], "q_indptr": [0, 1]}
    here.parts[0].step(**arrays)
    with pytest.raises(pk.LayoutMismatch, match=said):
        here.parts[0].step(**{**arrays, changed: value})
