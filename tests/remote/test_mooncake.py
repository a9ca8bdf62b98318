"""The store on a real Mooncake: faults cost time and blocks.

No call waits beyond its limit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.cli import main
from pagedkv.tiers.remote.mooncake import MOST_OUT, MooncakeStore
from pagedkv.tiers.remote.store import MISSING, UNUSABLE, Unreachable
from pagedkv.tools import remote
from tests.remote.masters import Master, lent
from tests.remote.servers import WATCHDOG_S, free_port
from tests.remote.test_sharing import PATIENT, SECRET, SPEC, prompt_of, remote_stats, run, wait_for
from tests.stopping import go_on, stop

SLACK_S = 20.0  # beyond a call's limit, of a busy machine: more is a hang
TENANT = pk.Namespace(tenant="a")
HEAD = bytes(range(128))


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    pytest.importorskip(
        "mooncake.store", reason="Mooncake is not installed: pip install '.[mooncake]', and Debian's libibverbs1",
        exc_type=ImportError,
    )  # fmt: skip


@pytest.fixture
def master() -> Iterator[Master]:
    with lent(256 << 20) as found:
        yield found


def open_store(master: Master) -> MooncakeStore:
    store = MooncakeStore(master.address, host="127.0.0.1", protocol="tcp", devices="", segment_bytes=0)
    store.open(soon())
    return store


@pytest.fixture
def store(master: Master) -> Iterator[MooncakeStore]:
    with contextlib.closing(open_store(master)) as found:
        yield found


def soon(seconds: float = WATCHDOG_S) -> float:
    return time.monotonic() + seconds


def row_of(number: int, size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def get(store: MooncakeStore, keys: list[str], size: int, until: float) -> tuple[dict[int, int], Any, Any]:
    sizes: dict[int, int] = {}
    heads, rows = np.zeros((len(keys), 128), np.uint8), [np.zeros(size, np.uint8) for _ in keys]
    with contextlib.suppress(Unreachable):
        store.get_into(keys, heads, rows, until, sizes.__setitem__)
    return sizes, heads, rows


@pytest.mark.parametrize("size", [0, 1, 100_000, 3 << 20, 9 << 20])
def test_values_of_mooncake_come_back_as_they_were(store: MooncakeStore, size: int) -> None:
    keys, rows = [f"pagedkv:g:{i}" for i in range(5)], [row_of(i, size) for i in range(4)]
    assert store.put(keys[:4], [(HEAD, row) for row in rows], soon()) == [""] * 4
    assert store.exists(keys, soon()) == [True] * 4 + [False]
    sizes, heads, back = get(store, [keys[2], keys[4], keys[0]], size, soon())
    assert sizes == {0: 128 + size, 1: MISSING, 2: 128 + size}
    assert heads[0].tobytes() == heads[2].tobytes() == HEAD
    assert np.array_equal(back[0], rows[2])
    assert np.array_equal(back[2], rows[0])
    store.remove(keys, soon())
    assert store.exists(keys, soon()) == [False] * 5


def test_more_values_than_one_call_takes(store: MooncakeStore) -> None:
    keys, rows = [f"pagedkv:g:{i}" for i in range(40)], [row_of(i, 500_000) for i in range(40)]
    assert store.put(keys, [(HEAD, row) for row in rows], soon()) == [""] * 40
    sizes, _, back = get(store, keys, 500_000, soon())
    assert sizes == dict.fromkeys(range(40), 500_128)
    assert all(np.array_equal(row, found) for row, found in zip(rows, back, strict=True))


@pytest.mark.parametrize("other", [0, 999, 1001, 50_000])
def test_values_of_another_size_are_unusable_and_cost_no_other(store: MooncakeStore, other: int) -> None:
    store.put(["a", "c"], [(HEAD, row_of(i, 1000)) for i in range(2)], soon())
    store.put(["b"], [(HEAD, row_of(5, other))], soon())
    sizes, _, back = get(store, ["a", "b", "c"], 1000, soon())
    assert sizes == {0: 1128, 1: UNUSABLE, 2: 1128}
    assert np.array_equal(back[2], row_of(1, 1000))


def test_a_group_is_removed_from_mooncake_and_no_other(store: MooncakeStore) -> None:
    groups = ["pagedkv:aa:", "pagedkv:ab:", "xpagedkv:aa:", "paged.kv:aa:", "pagedxkv:aa:"]
    keys = [f"{group}{i}" for group in groups for i in range(20)]
    store.put(keys, [(b"h", row_of(0, 10))] * len(keys), soon())
    assert store.remove_group("paged.kv:aa:", soon()) == 20
    assert store.remove_group("pagedkv:aa:", soon()) == 20
    assert [store.exists([f"{group}7"], soon())[0] for group in groups] == [False, True, True, False, True]


def test_a_full_store_refuses_values_and_keeps_the_others() -> None:
    with lent(64 << 20) as full, contextlib.closing(open_store(full)) as store:
        keys = [f"pagedkv:g:{i}" for i in range(120)]
        answers = store.put(keys, [(HEAD, row_of(i, 1 << 20)) for i in range(120)], soon())
        assert set(answers) <= {"", "FULL"}
        kept = [key for key, answer in zip(keys, answers, strict=True) if not answer]
        assert 10 < len(kept) < 120
        sizes, _, back = get(store, kept, 1 << 20, soon())
        for i, size in sizes.items():
            assert size in (MISSING, 128 + (1 << 20))
            assert size < 0 or np.array_equal(back[i], row_of(int(kept[i].rpartition(":")[2]), 1 << 20))


@pytest.mark.parametrize("who", ["lender", "master"])
def test_a_stopped_machine_holds_no_call_beyond_its_limit(store: MooncakeStore, master: Master, who: str) -> None:
    store.put(["a"], [(HEAD, row_of(0, 1000))], soon())
    process = master.lender if who == "lender" else master.process
    stop(process)
    begun = time.monotonic()
    assert get(store, ["a"], 1000, soon(0.3))[0] == {}
    assert 0.25 < time.monotonic() - begun < SLACK_S
    go_on(process)
    wait_for(lambda: get(store, ["a"], 1000, soon(5.0))[0] == {0: 1128}, "it does not serve again")
    assert np.array_equal(get(store, ["a"], 1000, soon())[2][0], row_of(0, 1000))


def test_calls_that_hang_are_bounded_and_come_back(store: MooncakeStore, master: Master) -> None:
    store.put(["a"], [(HEAD, row_of(0, 1000))], soon())
    stop(master.process)
    before = threading.active_count()
    for _ in range(MOST_OUT):
        with pytest.raises(Unreachable, match="no answer in time"):
            store.exists(["a"], soon(0.02))
    with pytest.raises(Unreachable, match="have not come back"):
        store.exists(["a"], soon(30.0))
    assert threading.active_count() <= before + MOST_OUT
    go_on(master.process)

    def answers() -> bool:
        with contextlib.suppress(Unreachable):
            return store.exists(["a"], soon(5.0)) == [True]
        return False

    wait_for(answers, "it does not serve again")


def test_a_master_that_is_killed_and_begins_anew(store: MooncakeStore, master: Master) -> None:
    master.process.kill()
    master.process.wait()
    with pytest.raises(Unreachable):
        store.exists(["a"], soon(2.0))
    master.begin()

    def writes() -> bool:
        with contextlib.suppress(Unreachable):
            return store.put(["b"], [(HEAD, row_of(1, 1000))], soon(5.0)) == [""]
        return False

    wait_for(writes, "it does not serve again")
    assert get(store, ["b"], 1000, soon())[0] == {0: 1128}


# ---- along the user's path


def open_cache(master: Master, **options: Any) -> pk.KVCache:
    options = {"secret": SECRET, "insecure": True, **PATIENT, **options}
    return pk.KVCache(SPEC, pk.Blocks(200), remote=pk.Mooncake(master.address, **options))


@pytest.mark.parametrize("seal", [False, True])
def test_a_second_cache_finds_all_blocks_and_a_purge_deletes_a_namespace(master: Master, seal: bool) -> None:
    with open_cache(master, seal=seal, required=True) as first, open_cache(master, seal=seal, required=True) as second:
        for namespace in (None, TENANT):
            run(first, prompt_of(1), namespace)
            assert first.publish(prompt_of(1), namespace) == 20
        for namespace in (None, TENANT):
            assert run(second, prompt_of(1), namespace) == {"device": 0, "remote": 320, "partial": 0}
        first.purge(TENANT)
        second.check_integrity()
        with open_cache(master, seal=seal, required=True) as third:
            assert run(third, prompt_of(1), TENANT)["remote"] == 0
            assert run(third, prompt_of(1))["remote"] == 320


def test_a_stopped_lender_costs_hits_and_the_next_request_goes_on(master: Master) -> None:
    with open_cache(master, required=True) as first:
        run(first, prompt_of(1))
        assert first.publish(prompt_of(1)) == 20
    with open_cache(master, required=True, read_s=0.3, lookup_s=2.0) as second:
        stop(master.lender)
        run(second, prompt_of(1))
        run(second, prompt_of(2))
        go_on(master.lender)
        assert run(second, prompt_of(1))["device"] == 320
        second.check_integrity()


def test_without_a_master_the_store_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pagedkv")
    unused = f"127.0.0.1:{free_port()}"
    begun = time.monotonic()
    with pk.KVCache(SPEC, pk.Blocks(200), remote=pk.Mooncake(unused, secret=SECRET, insecure=True)) as cache:
        run(cache, prompt_of(1))
        assert remote_stats(cache)["state"] == "left_out"
    assert time.monotonic() - begun < SLACK_S
    assert "start the master first" in caplog.text
    with pytest.raises(pk.TierError, match="start the master first"):
        pk.KVCache(SPEC, pk.Blocks(200), remote=pk.Mooncake(unused, secret=SECRET, insecure=True, required=True))


def test_the_doctor_measures_mooncake_and_inspect_says_that_it_cannot_list(
    master: Master, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "MEASURED_BYTES", 1 << 20)
    monkeypatch.setattr(remote, "SIZES", (64 << 10, 128 << 10))
    url = f"mooncake://{master.address}"
    assert main(["doctor", "--json", "--remote", url]) == 0
    found = {check["name"]: check["status"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found.pop("network") == "warning"
    assert {"connect", "lookup", "damage", "verdict"} <= set(found)
    assert set(found.values()) <= {"ok", "skipped"}
    assert main(["inspect", "--remote", url]) == 2
    assert "cannot be listed" in capsys.readouterr().err
