"""The Valkey store against real servers: values come back, errors are named, secrets not."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, TierError
from pagedkv.tiers.remote.store import MISSING, UNUSABLE, Unreachable
from pagedkv.tiers.remote.valkey import ValkeyStore
from tests.remote.servers import Server, certificates, free_port, redis_server, server, talker

HEAD = bytes(range(128))
LIMIT_S = 20.0


def soon() -> float:
    return time.monotonic() + LIMIT_S


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server() as found:
        yield found


@pytest.fixture
def store(running: Server) -> Iterator[ValkeyStore]:
    running.client().flushall()
    found = ValkeyStore(running.unix, connect_s=LIMIT_S)
    found.open(soon())
    yield found
    found.close()


def bytes_of(number: int, size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def get(store: ValkeyStore, keys: list[str], size: int) -> tuple[list[int], NDArray[np.uint8], list[NDArray[np.uint8]]]:
    sizes = [0] * len(keys)
    heads, rows = np.zeros((len(keys), 128), np.uint8), [np.zeros(size, np.uint8) for _ in keys]
    store.get_into(keys, heads, rows, soon(), lambda i, n: sizes.__setitem__(i, n))
    return sizes, heads, rows


@pytest.mark.parametrize("size", [0, 1, 100_000, 3 << 20])
def test_values_come_back_as_they_were(store: ValkeyStore, size: int) -> None:
    rows = [bytes_of(number, size) for number in range(4)]
    keys = [f"pagedkv:g:{number}" for number in range(4)]
    assert store.put(keys[:3], [(HEAD, row) for row in rows[:3]], soon()) == ["", "", ""]
    assert store.exists(keys, soon()) == [True, True, True, False]
    sizes, heads, back = get(store, [keys[2], keys[3], keys[0]], size)
    assert sizes == [128 + size, MISSING, 128 + size]
    assert heads[0].tobytes() == heads[2].tobytes() == HEAD
    assert np.array_equal(back[0], rows[2])
    assert np.array_equal(back[2], rows[0])


def test_more_bytes_than_a_window_go_both_ways(store: ValkeyStore) -> None:
    rows = [bytes_of(number, 1 << 20) for number in range(30)]
    keys = [f"k{number}" for number in range(30)]
    assert store.put(keys, ((HEAD, row) for row in rows), soon()) == [""] * 30
    sizes, _, back = get(store, keys, 1 << 20)
    assert sizes == [128 + (1 << 20)] * 30
    assert all(map(np.array_equal, back, rows))


def test_a_value_of_another_size_is_unusable_and_costs_no_other(store: ValkeyStore, running: Server) -> None:
    good = bytes_of(1, 1000)
    store.put(["a", "c"], [(HEAD, good)] * 2, soon())
    for wrong in (b"", b"x", b"x" * 1127, b"x" * 1129, b"x" * 4512):
        running.client().set("b", wrong)
        sizes, _, back = get(store, ["a", "b", "c"], 1000)
        assert sizes == [1128, UNUSABLE, 1128]
        assert np.array_equal(back[2], good)


def test_a_value_far_too_long_is_not_read_to_its_end(store: ValkeyStore, running: Server) -> None:
    running.client().set("b", b"x" * 1_000_000)
    with pytest.raises(Unreachable, match="far longer") as caught:
        get(store, ["b"], 1000)
    assert caught.value.kind == "protocol"
    assert store.exists(["b"], soon()) == [True]


def test_a_key_of_another_type_is_unusable(store: ValkeyStore, running: Server) -> None:
    running.client().lpush("list", "x")
    assert get(store, ["list", "none"], 10)[0] == [UNUSABLE, MISSING]


def test_a_group_is_removed_and_no_other(store: ValkeyStore) -> None:
    groups = ["pagedkv:aa:", "pagedkv:ab:", "pagedkv:aa", "pagedkv:a*:", "pagedkv:[a]a:", "pagedkv:?a:"]
    keys = [f"{group}{number}" for group in groups for number in range(50)]
    store.put(keys, [(HEAD, bytes_of(0, 10))] * len(keys), soon())
    for group in ("pagedkv:a*:", "pagedkv:[a]a:", "pagedkv:?a:", "pagedkv:aa:"):
        assert store.remove_group(group, soon()) == 50
    assert sum(store.exists(keys, soon())) == 100
    assert store.remove_group("pagedkv:", soon()) == 100


def test_a_large_group_is_removed_to_the_last_key(store: ValkeyStore, running: Server) -> None:
    pipe = running.client().pipeline(transaction=False)
    for number in range(20_000):
        pipe.set(f"g:{number}", b"x")
    pipe.execute()
    assert store.remove_group("g:", soon()) == 20_000
    assert running.client().dbsize() == 0


def test_keys_are_forgotten_after_their_time(running: Server) -> None:
    store = ValkeyStore(running.unix, ttl_s=100, connect_s=LIMIT_S)
    store.put(["t"], [(HEAD, bytes_of(0, 10))], soon())
    assert 0 < running.client().ttl("t") <= 100
    assert get(store, ["t"], 10)[0] == [138]
    store.close()


def test_a_full_server_that_evicts_nothing_refuses_by_name() -> None:
    with server(memory="8mb", policy="noeviction") as full:
        store = ValkeyStore(full.unix, connect_s=LIMIT_S)
        row = bytes_of(0, 1 << 20)
        answers = store.put([f"k{i}" for i in range(12)], [(HEAD, row)] * 12, soon())
        assert answers[0] == ""
        assert answers[-1] == "OOM"
        assert set(answers) == {"", "OOM"}
        assert store.exists(["k0"], soon()) == [True]
        store.close()


def test_a_call_that_ends_in_time_is_answered_after_one_that_did_not(running: Server) -> None:
    store = ValkeyStore(running.unix, connect_s=LIMIT_S)
    store.put(["a"], [(HEAD, bytes_of(1, 10))], soon())
    running.pause()
    try:
        with pytest.raises(Unreachable) as caught:
            store.exists(["b"], time.monotonic() + 0.05)
        assert caught.value.kind == "timeout"
    finally:
        running.go_on()
    assert store.exists(["a"], soon()) == [True]
    store.close()


def test_an_exception_in_the_callback_closes_the_connection(store: ValkeyStore) -> None:
    store.put(["a", "b"], [(HEAD, bytes_of(1, 10)), (HEAD, bytes_of(2, 10))], soon())

    def stop(i: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get_into(["a", "b"], np.zeros((2, 128), np.uint8), [np.zeros(10, np.uint8)] * 2, soon(), stop)
    sizes, _, back = get(store, ["b"], 10)
    assert sizes == [138]
    assert np.array_equal(back[0], bytes_of(2, 10))


def test_a_forked_child_does_not_touch_the_connections(store: ValkeyStore) -> None:
    store.put(["a"], [(HEAD, bytes_of(1, 10))], soon())
    child = os.fork()
    if not child:
        try:
            store.exists(["a"], soon())
        except Unreachable:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert store.exists(["a"], soon()) == [True]


# ---- servers of another kind than the URL says


def refusal(url: str, **options: str) -> str:
    store = ValkeyStore(url, connect_s=LIMIT_S, ca_file=options.get("ca_file"))
    with pytest.raises(TierError) as caught:
        store.open(soon())
    store.close()
    return "".join(traceback.format_exception(caught.value))


def test_an_http_server_is_named() -> None:
    with talker(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        assert "no Valkey or Redis server" in refusal(url)


def test_an_old_redis_is_named() -> None:
    text = b"redis_version:6.2.7\r\nredis_mode:standalone\r\n"
    with talker(b"$%d\r\n%s\r\n" % (len(text), text)) as url:
        said = refusal(url)
    assert "6.2.7" in said
    assert "7.0 or newer" in said


def test_a_node_of_a_cluster_is_named() -> None:
    with server("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        assert "node of a cluster" in refusal(node.tcp)


@pytest.mark.parametrize("password", ["p4ssw0rd-of-ours", "p%40ss%2Fw0rd%3A"])
def test_a_wrong_password_is_named_and_not_repeated(password: str) -> None:
    with server("--requirepass", "right") as closed:
        for url in (f"valkey://:{password}@127.0.0.1:{closed.port}/0", f"unix://:{password}@{closed.folder}/s"):
            said = refusal(url)
            assert "password" in said
            assert password not in said
            assert "p@ss/w0rd:" not in said
        assert "wants one" in refusal(closed.tcp)
        store = ValkeyStore(f"valkey://:right@127.0.0.1:{closed.port}/0", connect_s=LIMIT_S)
        store.open(soon())
        store.close()


def test_tls_works_and_a_wrong_authority_is_named(tmp_path: Path) -> None:
    authority, certificate, key = certificates(tmp_path)
    (tmp_path / "other").mkdir()
    other, _, _ = certificates(tmp_path / "other")
    port = free_port()
    files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", authority)
    tls = ("--tls-port", str(port), *files)
    with server(*tls, "--tls-auth-clients", "no") as secure:
        store = ValkeyStore(f"valkeys://127.0.0.1:{port}/0", ca_file=authority, connect_s=LIMIT_S)
        store.open(soon())
        row = bytes_of(3, 1 << 20)
        store.put(["a"], [(HEAD, row)], soon())
        assert np.array_equal(get(store, ["a"], 1 << 20)[2][0], row)
        store.close()
        assert "certificate" in refusal(f"valkeys://127.0.0.1:{port}/0", ca_file=other)
        assert "certificate" in refusal(f"valkeys://127.0.0.1:{port}/0")
        plain = ValkeyStore(f"valkeys://127.0.0.1:{secure.port}/0", ca_file=authority, connect_s=0.2)
        with pytest.raises((TierError, Unreachable), match="TLS"):
            plain.open(soon())


def test_a_server_that_is_not_there_may_come(running: Server) -> None:
    store = ValkeyStore(f"valkey://127.0.0.1:{free_port()}/0")
    with pytest.raises(Unreachable) as caught:
        store.open(soon())
    assert caught.value.kind == "connect"


@pytest.mark.parametrize("url", ["", "http://x", "valkey://", "valkey://h:1/0?x=1", "valkey://h:port/0"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        ValkeyStore(url)


# ---- servers that say anything


@pytest.mark.parametrize(
    "answer",
    [
        b"x" * 20_000, b"$-2\r\n", b"$99999999999999999999\r\n", b"$1e3\r\n", b":1\r\n", b"*1\r\n$1\r\nx\r\n",
        b"$138\r\n" + b"x" * 140, b"$138\r\n" + b"x" * 138 + b"\r\n+extra\r\n", b"\r\n", b"$\r\n", b"-\r\n" * 2,
        b"+OK\r\n",
    ],
)  # fmt: skip
def test_no_answer_to_a_get_is_taken_for_a_value(answer: bytes) -> None:
    came: list[int] = []
    with talker(answer) as url:
        store = ValkeyStore(url, connect_s=LIMIT_S)
        with contextlib.suppress(Unreachable):
            ask(store, came, 0.3)
        store.close()
    assert came in ([], [UNUSABLE]) or answer.endswith(b"+extra\r\n")  # the value before it was whole


def ask(store: ValkeyStore, came: list[int], limit_s: float) -> None:
    heads, rows = np.zeros((1, 128), np.uint8), [np.zeros(10, np.uint8)]
    store.get_into(["a"], heads, rows, time.monotonic() + limit_s, lambda i, n: came.append(n))


def test_a_reply_that_breaks_off_anywhere_is_no_value() -> None:
    reply = b"$138\r\n" + HEAD + b"0123456789" + b"\r\n"
    for cut in range(0, len(reply), 7):
        came: list[int] = []
        with talker(reply[:cut], None) as url:
            store = ValkeyStore(url, connect_s=LIMIT_S)
            with pytest.raises(Unreachable) as caught:
                ask(store, came, 0.1)
            assert caught.value.kind in ("timeout", "closed")
            store.close()
        assert came == []


def test_the_servers_are_of_a_version_that_is_tested() -> None:
    assert redis_server()
