"""The store on a cluster of three real servers: faults cost time and blocks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, TierError
from pagedkv.tiers.remote.glide import ClusterStore
from pagedkv.tiers.remote.store import MISSING, UNUSABLE, Unreachable
from pagedkv.tiers.remote.tier import RemoteTier
from pagedkv.tiers.remote.valkey import ValkeyStore
from pagedkv.tiers.remote.value import Values
from tests.remote.servers import WATCHDOG_S, Server, certificates, cluster, free_port, server
from tests.remote.test_tier import BLOCK, NAMESPACE, ORDER, contents, names, read

CONNECT_S = 30.0  # of a busy machine
SLACK_S = 20.0  # beyond a call's limit, of a busy machine: more is a hang
COUNT, SIZE = 24, 1 << 20
KEYS = [f"pagedkv:g:{number}" for number in range(COUNT)]
VALUES = [
    (bytes([number]) * 128, np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)) for number in range(COUNT)
]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    pytest.importorskip("glide_sync", reason="valkey-glide-sync is not installed: pip install '.[test]'")


def soon() -> float:
    return time.monotonic() + WATCHDOG_S


def url_of(node: Server) -> str:
    return f"valkey://127.0.0.1:{node.port}"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Server]]:
    with cluster() as found:
        yield found


@pytest.fixture
def store(nodes: list[Server]) -> Iterator[ClusterStore]:
    for node in nodes:
        node.client().flushall()
    with contextlib.closing(ClusterStore(url_of(nodes[0]), connect_s=CONNECT_S)) as found:
        found.open(soon())
        yield found


def get(
    store: ClusterStore, keys: list[str], size: int, until: float | None = None
) -> tuple[dict[int, int], NDArray[np.uint8], list[NDArray[np.uint8]]]:
    sizes: dict[int, int] = {}
    heads, rows = np.zeros((len(keys), 128), np.uint8), [np.zeros(size, np.uint8) for _ in keys]
    with contextlib.suppress(Unreachable):
        store.get_into(keys, heads, rows, soon() if until is None else until, sizes.__setitem__)
    return sizes, heads, rows


def right(store: ClusterStore, until: float | None = None) -> tuple[int, set[int]]:
    """How many right values came, and the other answers; a wrong value fails."""
    begun = time.monotonic()
    sizes, heads, rows = get(store, KEYS, SIZE, until)
    assert until is None or time.monotonic() < max(until, begun) + SLACK_S
    served = [i for i, size in sizes.items() if size == 128 + SIZE]
    for i in served:
        assert heads[i].tobytes() == VALUES[i][0]
        assert np.array_equal(rows[i], VALUES[i][1])
    return len(served), {size for size in sizes.values() if size < 0}


@pytest.mark.parametrize("size", [0, 1, 100_000, 3 << 20])
def test_values_of_a_cluster_come_back_as_they_were(store: ClusterStore, size: int) -> None:
    rows = [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number in range(4)]
    keys = [f"pagedkv:g:{number}" for number in range(4)]
    assert store.put(keys[:3], [(VALUES[0][0], row) for row in rows[:3]], soon()) == ["", "", ""]
    assert store.exists(keys, soon()) == [True, True, True, False]
    sizes, heads, back = get(store, [keys[2], keys[3], keys[0]], size)
    assert sizes == {0: 128 + size, 1: MISSING, 2: 128 + size}
    assert heads[0].tobytes() == heads[2].tobytes() == VALUES[0][0]
    assert np.array_equal(back[0], rows[2])
    assert np.array_equal(back[2], rows[0])
    store.remove(keys, soon())
    assert store.exists(keys, soon()) == [False] * 4


def test_the_values_lie_on_all_nodes(store: ClusterStore, nodes: list[Server]) -> None:
    assert store.put(KEYS, VALUES, soon()) == [""] * COUNT
    assert all(node.client().dbsize() for node in nodes)
    assert right(store) == (COUNT, set())


def test_values_of_another_size_or_type_are_unusable_and_cost_no_other(
    store: ClusterStore, nodes: list[Server]
) -> None:
    import redis

    client = redis.RedisCluster(host="127.0.0.1", port=nodes[0].port)
    store.put(["a", "d"], [(VALUES[0][0], VALUES[0][1][:1000])] * 2, soon())
    client.set("b", b"x" * 1129)
    client.set("e", b"x" * 100_000)
    client.lpush("c", "x")
    client.close()
    sizes, _, back = get(store, ["a", "b", "c", "e", "d"], 1000)
    assert sizes == {0: 1128, 1: UNUSABLE, 2: UNUSABLE, 3: UNUSABLE, 4: 1128}
    assert np.array_equal(back[4], VALUES[0][1][:1000])


def test_a_group_is_removed_from_a_cluster_and_no_other(store: ClusterStore) -> None:
    groups = ["pagedkv:aa:", "pagedkv:ab:", "pagedkv:aa", "pagedkv:a*:", "pagedkv:[a]a:", "pagedkv:?a:"]
    keys = [f"{group}{number}" for group in groups for number in range(50)]
    store.put(keys, [(b"h", VALUES[0][1][:10])] * len(keys), soon())
    for group in ("pagedkv:a*:", "pagedkv:[a]a:", "pagedkv:?a:", "pagedkv:aa:"):
        assert store.remove_group(group, soon()) == 50
    assert sum(store.exists(keys, soon())) == 100
    assert store.remove_group("pagedkv:", soon()) == 100


def test_a_cluster_forgets_keys_after_their_time(nodes: list[Server]) -> None:
    with contextlib.closing(ClusterStore(url_of(nodes[0]), ttl_s=100, connect_s=CONNECT_S)) as store:
        store.put(["t"], [(b"h", VALUES[0][1][:10])], soon())
        times: list[int] = []
        for node in nodes:
            with contextlib.suppress(Exception):  # MOVED
                times.append(node.client().ttl("t"))
        assert len(times) == 1
        assert 0 < times[0] <= 100


def test_full_nodes_refuse_by_name() -> None:
    full = cluster(memory="6mb", policy="noeviction")
    with full as nodes, contextlib.closing(ClusterStore(url_of(nodes[0]), connect_s=CONNECT_S)) as store:
        answers = store.put(KEYS * 2, VALUES * 2, soon())
        assert set(answers) == {"", "OOM"}
        assert store.exists([KEYS[answers.index("")]], soon()) == [True]


def test_a_tier_serves_blocks_from_a_cluster(nodes: list[Server]) -> None:
    values = Values(b"a secret of ours", b"f" * 32, BLOCK, seal=True)
    limits = {"lookup_s": CONNECT_S, "read_s": CONNECT_S, "write_s": CONNECT_S}
    tier = RemoteTier(ClusterStore(url_of(nodes[0]), connect_s=CONNECT_S), values, 64, where="cluster", **limits)
    assert tier.write(ORDER, names(), contents(), ORDER).all()
    assert tier.lookup(NAMESPACE, [name.key for name in names()]) == len(ORDER)
    ok, back = read(tier)
    assert ok.all()
    assert np.array_equal(back, contents())
    assert tier.purge(NAMESPACE) == len(ORDER)
    assert not read(tier)[0].any()
    assert tier.stats().failures == {}
    tier.close()


# ---- faults


def test_a_stopped_node_costs_the_limit_and_no_later_call(store: ClusterStore, nodes: list[Server]) -> None:
    store.put(KEYS, VALUES, soon())
    for call in (
        lambda until: store.exists(KEYS, until),
        lambda until: store.put(KEYS, VALUES, until),
        lambda until: store.remove([f"none:{n}" for n in range(20)], until),
        lambda until: store.remove_group("none:", until),
    ):
        nodes[1].pause()
        try:
            begun = time.monotonic()
            with pytest.raises(Unreachable) as caught:
                call(begun + 0.1)
            assert caught.value.kind in ("timeout", "closed", "protocol")
            assert time.monotonic() - begun < SLACK_S
        finally:
            nodes[1].go_on()
    assert right(store) == (COUNT, set())


def late_replies(store: ClusterStore, nodes: list[Server], rounds: int) -> None:
    keys = [f"late:{number}" for number in range(8)]
    rows = [np.full(1000, number, np.uint8) for number in range(8)]
    store.put(keys, [(bytes([number]) * 128, row) for number, row in enumerate(rows)], soon())
    for number in range(2 * rounds):
        which, is_late = (number * 3) % 8, number % 2 == 0
        timer = threading.Timer(0.006, lambda: [node.go_on() for node in nodes])
        if is_late:
            for node in nodes:
                node.pause()
            timer.start()
        try:
            until = time.monotonic() + (0.004 if is_late else WATCHDOG_S)
            sizes, heads, back = get(store, keys[which : which + 1], 1000, until)
        finally:
            for node in nodes:
                node.go_on()
        if is_late:
            timer.join()
        assert is_late or sizes == {0: 1128}
        if sizes:
            assert set(heads[0].tolist()) == set(back[0].tolist()) == {which}, f"call {number}: another's answer"


def test_no_late_reply_of_a_cluster_answers_the_next_question(store: ClusterStore, nodes: list[Server]) -> None:
    late_replies(store, nodes, 100)


@pytest.mark.slow
def test_none_of_a_thousand_late_replies_of_a_cluster_answers_another(store: ClusterStore, nodes: list[Server]) -> None:
    late_replies(store, nodes, 1000)


@pytest.mark.slow
def test_a_killed_node_costs_its_values_alone() -> None:
    with cluster() as mortal, contextlib.closing(ClusterStore(url_of(mortal[0]), connect_s=CONNECT_S)) as store:
        assert store.put(KEYS, VALUES, soon()) == [""] * COUNT
        lost = mortal[1].client().dbsize()
        mortal[1].kill()
        begun = time.monotonic()
        with pytest.raises(Unreachable):
            store.exists(KEYS, begun + 0.5)
        assert time.monotonic() - begun < SLACK_S
        served, others = right(store, time.monotonic() + 1.0)
        assert served <= COUNT - lost
        assert not others, "what a dead node had is not known to be missing"


def test_many_threads_share_the_client(store: ClusterStore) -> None:
    store.put(KEYS, VALUES, soon())
    found: list[tuple[int, set[int]]] = []
    threads = [threading.Thread(target=lambda: found.append(right(store))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(COUNT, set())] * 4


def test_a_forked_child_does_not_touch_the_client(store: ClusterStore) -> None:
    store.exists(["a"], soon())
    child = os.fork()
    if not child:
        with contextlib.suppress(Unreachable):
            store.exists(["a"], soon())
            os._exit(1)
        store.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert store.exists(["a"], soon()) == [False]


# ---- clusters of another kind than the URL says


def refusal(url: str, error: type[Exception], **options: Any) -> str:
    with contextlib.closing(ClusterStore(url, connect_s=3.0, **options)) as store:
        with pytest.raises(error) as caught:
            store.open(soon())
        return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(("quoted", "plain"), [("sEcReT", "sEcReT"), ("s%40E%2FcR", "s@E/cR")])
def test_a_wrong_password_of_a_cluster_is_named_and_not_repeated(quoted: str, plain: str) -> None:
    with server("--requirepass", "right") as closed:
        said = refusal(f"valkey://:{quoted}@127.0.0.1:{closed.port}", TierError)
        assert "password" in said
        assert plain not in said
        assert quoted not in said
        assert "password" in refusal(closed.tcp, TierError)


def test_a_password_and_tls_work_and_a_wrong_authority_is_named(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    (tmp_path / "other").mkdir()
    other, _, _ = certificates(tmp_path / "other")
    with cluster(tls=files) as secure:
        for node in secure:
            node.client().config_set("requirepass", "right word")
        url = f"valkeys://:right%20word@127.0.0.1:{secure[0].port}"
        with contextlib.closing(ClusterStore(url, ca_file=files[0], connect_s=CONNECT_S)) as store:
            store.open(soon())
            assert store.put(KEYS, VALUES, soon()) == [""] * COUNT
            assert right(store) == (COUNT, set())
        assert "certificate" in refusal(url, TierError, ca_file=other)
        assert "certificate" in refusal(url, TierError)
        assert "password" in refusal(url.replace(":right", ":wrong"), TierError, ca_file=files[0])


def test_a_server_alone_and_none_are_unreachable() -> None:
    with server() as alone:
        assert "is it a cluster" in refusal(alone.tcp, Unreachable)
    assert "is it a cluster" in refusal(f"valkey://127.0.0.1:{free_port()}", Unreachable)


@pytest.mark.parametrize("url", ["unix:///s", "valkey://h/1", "valkey://:SECRET?x=1@h", "valkey://:%ff@h"])
def test_a_url_that_is_none_of_a_cluster_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ClusterStore(url)
    assert "SECRET" not in str(caught.value)


def test_the_store_of_one_server_names_a_cluster(nodes: list[Server]) -> None:
    one = contextlib.closing(ValkeyStore(url_of(nodes[0]), connect_s=CONNECT_S))
    with one as store, pytest.raises(TierError, match="node of a cluster"):
        store.open(soon())
