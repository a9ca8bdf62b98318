"""The Valkey store while its server or link fails: nothing wrong, an end in time."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.tiers.remote.store import MISSING, Unreachable
from pagedkv.tiers.remote.valkey import ValkeyStore
from tests.remote.servers import WATCHDOG_S, Link, Server, server, talker

CONNECT_S = 30.0  # of a busy machine
SLACK_S = 20.0  # beyond a call's limit, of a busy machine: more is a hang
COUNT, SIZE = 24, 1 << 20
KEYS = [f"pagedkv:g:{number}" for number in range(COUNT)]


def value(number: int) -> tuple[bytes, NDArray[np.uint8]]:
    """A head and a row that no other number has."""
    row = np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)
    return number.to_bytes(8, "little") * 16, row


VALUES = [value(number) for number in range(COUNT)]


def soon() -> float:
    return time.monotonic() + WATCHDOG_S


@contextlib.contextmanager
def ends_by(limit_s: float) -> Iterator[float]:
    """The `until` of a call, which must end soon after it; it may raise Unreachable."""
    begun = time.monotonic()
    with contextlib.suppress(Unreachable):
        yield begun + limit_s
    assert time.monotonic() - begun < limit_s + SLACK_S


@contextlib.contextmanager
def fails_by(limit_s: float) -> Iterator[float]:
    """The `until` of a call, which must fail soon after it."""
    begun = time.monotonic()
    with pytest.raises((Unreachable, TierError)):
        yield begun + limit_s
    assert time.monotonic() - begun < limit_s + SLACK_S


def read(
    store: ValkeyStore, limit_s: float = WATCHDOG_S, during: Callable[[int], Any] = lambda i: None
) -> tuple[int, set[int]]:
    """How many right values came, and the other answers; a wrong value fails."""
    heads, rows = np.zeros((COUNT, 128), np.uint8), [np.ones(SIZE, np.uint8) for _ in KEYS]
    sizes: dict[int, int] = {}

    def came(i: int, size: int) -> None:
        assert i not in sizes
        sizes[i] = size
        if size >= 0:
            assert size == 128 + SIZE
            assert heads[i].tobytes() == VALUES[i][0], f"value {i} has another's head"
            assert np.array_equal(rows[i], VALUES[i][1]), f"value {i} is wrong"
        during(len(sizes))

    with ends_by(limit_s) as until:
        store.get_into(KEYS, heads, rows, until, came)
    return sum(size >= 0 for size in sizes.values()), {size for size in sizes.values() if size < 0}


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server() as found:
        yield found


@pytest.fixture
def store(running: Server) -> Iterator[ValkeyStore]:
    running.client().flushall()
    with contextlib.closing(ValkeyStore(running.unix, connect_s=CONNECT_S)) as found:
        assert found.put(KEYS, VALUES, soon()) == [""] * COUNT
        yield found


@pytest.fixture
def mortal() -> Iterator[tuple[Server, ValkeyStore]]:
    """A server that the test may kill, with all values."""
    with server() as found, contextlib.closing(ValkeyStore(found.unix, connect_s=CONNECT_S)) as store:
        assert store.put(KEYS, VALUES, soon()) == [""] * COUNT
        yield found, store


# ---- servers that go away


def test_a_server_killed_before_a_call_is_unreachable(mortal: tuple[Server, ValkeyStore]) -> None:
    found, store = mortal
    found.kill()
    for call in (
        lambda until: store.exists(KEYS, until),
        lambda until: store.put(KEYS, VALUES, until),
        lambda until: store.remove(KEYS, until),
        lambda until: store.remove_group("pagedkv:", until),
        store.open,
    ):
        with pytest.raises(Unreachable) as caught:
            call(soon())
        assert caught.value.kind == "connect"
    assert read(store) == (0, set())


@pytest.mark.parametrize("at", [1, 7, COUNT - 1])
def test_a_server_killed_in_the_middle_of_a_read_has_served_what_came(
    mortal: tuple[Server, ValkeyStore], at: int
) -> None:
    found, store = mortal
    served, others = read(store, during=lambda number: number == at and found.kill())
    assert at <= served <= COUNT
    assert not others
    assert not store._idle or served == COUNT


@pytest.mark.parametrize("at", [0, 5, COUNT - 1])
def test_a_server_killed_in_the_middle_of_a_write_is_unreachable(mortal: tuple[Server, ValkeyStore], at: int) -> None:
    found, store = mortal

    def values() -> Iterator[tuple[bytes, NDArray[np.uint8]]]:
        for number, each in enumerate(VALUES):
            if number == at:
                found.kill()
            yield each

    with pytest.raises(Unreachable) as caught:
        store.put(KEYS, values(), soon())
    assert caught.value.kind in ("closed", "connect")
    assert not store._idle


def test_a_server_stopped_before_a_call_costs_its_limit_and_no_later_call(running: Server, store: ValkeyStore) -> None:
    for call in (
        lambda until: store.exists(KEYS, until),
        lambda until: store.put(KEYS, VALUES, until),
        lambda until: store.remove(["none"], until),
        lambda until: store.remove_group("none:", until),
        store.open,
    ):
        running.pause()
        try:
            with fails_by(0.05) as until:
                call(until)
        finally:
            running.go_on()
        assert store.exists([*KEYS, "none"], soon()) == [True] * COUNT + [False]
    assert read(store) == (COUNT, set())


@pytest.mark.parametrize("at", [1, 7, COUNT - 1])
def test_a_server_stopped_in_the_middle_of_a_read_has_served_what_came(
    running: Server, store: ValkeyStore, at: int
) -> None:
    try:
        served, others = read(store, 0.7, during=lambda number: number == at and running.pause())
    finally:
        running.go_on()
    assert served <= COUNT
    assert not others
    assert read(store) == (COUNT, set())


@pytest.mark.parametrize("at", [0, 5, COUNT - 1])
def test_a_server_stopped_in_the_middle_of_a_write_costs_its_limit(
    running: Server, store: ValkeyStore, at: int
) -> None:
    def values() -> Iterator[tuple[bytes, NDArray[np.uint8]]]:
        for number, each in enumerate(VALUES):
            if number == at:
                running.pause()
            yield each

    try:
        with ends_by(0.3) as until:
            store.put(KEYS, values(), until)
    finally:
        running.go_on()
    assert store.put(KEYS, VALUES, soon()) == [""] * COUNT
    assert read(store) == (COUNT, set())


def test_a_server_that_goes_on_in_the_middle_of_a_call_is_waited_for(running: Server, store: ValkeyStore) -> None:
    goes_on = threading.Timer(0.1, running.go_on)

    def pause(number: int) -> None:
        if number == 3:
            running.pause()
            goes_on.start()

    try:
        assert read(store, during=pause) == (COUNT, set())
    finally:
        running.go_on()
        goes_on.join()


def late_replies(running: Server, store: ValkeyStore, rounds: int) -> tuple[int, int]:
    """Call a server that answers late, then once more; how many calls of each kind had answers.

    The values of neighbouring keys differ, as do their answers to EXISTS: an answer to another question is seen.
    """
    size = 1000
    rows = [np.full(size, number, np.uint8) for number in range(8)]
    keys = [f"late:{number}" for number in range(8)]
    store.put(keys, [(bytes([number]) * 128, row) for number, row in enumerate(rows)], soon())
    in_time = after = 0
    for number, step in itertools.product(range(rounds), (0, 1)):
        which = (number + 3 * step) % 8
        heads, back = np.zeros((1, 128), np.uint8), [np.full(size, 255, np.uint8)]
        timer = threading.Timer(0.004, running.go_on)
        if step == 0:
            running.pause()
            timer.start()
        sizes: list[int] = []
        try:
            with ends_by(0.003 if step == 0 else WATCHDOG_S) as until:
                if number % 3 == 0:
                    there = store.exists([keys[which], f"none:{number}", keys[which]], until)
                    assert there == [True, False, True], f"round {number}: another question's answer"
                    sizes.append(0)
                else:
                    store.get_into(keys[which : which + 1], heads, back, until, lambda i, n: sizes.append(n))  # noqa: B023
                    assert sizes == [128 + size]
                    assert set(heads[0].tolist()) == set(back[0].tolist()) == {which}, f"round {number}: another's"
        finally:
            running.go_on()
        if step == 0:
            timer.join()
        in_time, after = (in_time + len(sizes), after) if step == 0 else (in_time, after + len(sizes))
    return in_time, after


def test_no_late_reply_answers_the_next_question(running: Server, store: ValkeyStore) -> None:
    in_time, after = late_replies(running, store, 300)
    assert after == 300
    assert in_time < 300


@pytest.mark.slow
def test_none_of_a_thousand_late_replies_answers_another_call(running: Server, store: ValkeyStore) -> None:
    assert late_replies(running, store, 1000)[1] == 1000


# ---- links


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-7], lambda data: data + data, lambda data: data[:1], lambda data: b""],
    ids=["loses", "repeats", "cuts", "drops"],
)  # fmt: skip
@pytest.mark.parametrize("piece", [2, 5, 17])
def test_a_link_that_loses_or_repeats_bytes_gives_no_wrong_value(
    running: Server, store: ValkeyStore, damage: Callable[[bytes], bytes], piece: int
) -> None:
    link = Link(running.port, mangle=lambda number, data: damage(data) if number == piece else data)
    with contextlib.closing(ValkeyStore(link.url, connect_s=CONNECT_S)) as far:
        read(far, 1.0)
        assert read(far) == (COUNT, set()), "the next call has a connection of its own"
    link.close()


def test_a_slow_link_carries_what_comes_in_time(running: Server, store: ValkeyStore) -> None:
    link = Link(running.port, bytes_per_s=20e6)
    with contextlib.closing(ValkeyStore(link.url, connect_s=CONNECT_S)) as far:
        served, others = read(far, 0.3)
        assert served < COUNT
        assert not others
        assert read(far) == (COUNT, set())
    link.close()


# ---- servers that refuse


def test_a_server_that_evicts_serves_the_rest() -> None:
    with server(memory="16mb") as small, contextlib.closing(ValkeyStore(small.unix, connect_s=CONNECT_S)) as store:
        assert store.put(KEYS, VALUES, soon()) == [""] * COUNT
        served, others = read(store)
        assert 0 < served < COUNT
        assert others == {MISSING}
        assert sum(store.exists(KEYS, soon())) <= served, "the server's own answers take room, too"


def test_a_replica_is_read_and_refuses_writes_by_name(running: Server, store: ValkeyStore) -> None:
    running.client().config_set("repl-diskless-sync-delay", 0)
    with server() as second, contextlib.closing(ValkeyStore(second.unix, connect_s=CONNECT_S)) as replica:
        second.client().replicaof("127.0.0.1", running.port)
        until = soon()
        while second.client().info("replication")["master_link_status"] != "up":
            assert time.monotonic() < until
            time.sleep(0.02)
        replica.open(soon())
        assert read(replica) == (COUNT, set())
        assert set(replica.put(KEYS, VALUES, soon())) == {"READONLY"}
        assert read(replica) == (COUNT, set())


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"-MOVED 3999 127.0.0.1:6381\r\n", "MOVED"), (b"-OOM command not allowed\r\n", "OOM"),
        (b"-ERR what\r\n", "ERR"),
        (b"-lower case\r\n", "ERR"), (b"-\r\n", "ERR"), (b"-MISCONF disk\r\n", "MISCONF"), (b"+OK\r\n", ""),
        (b"-" + b"A" * 10_000 + b"\r\n", "ERR"), (b"-UNHEARD of\r\n", "ERR"), (b"-\x1b[31MOOM x\r\n", "ERR"),
    ],
)  # fmt: skip
def test_a_refused_write_is_named_by_one_word(line: bytes, word: str) -> None:
    with talker(line) as url, contextlib.closing(ValkeyStore(url, connect_s=CONNECT_S)) as store:
        assert store.put(["k"], [(b"head", np.zeros(3, np.uint8))], soon()) == [word]


# ---- servers that say anything


def one(store: ValkeyStore, until: float) -> list[int]:
    sizes: list[int] = []
    store.get_into(["k"], np.zeros((1, 4), np.uint8), [np.zeros(2, np.uint8)], until, lambda i, n: sizes.append(n))
    return sizes


CALLS: dict[str, Callable[[ValkeyStore, float], object]] = {
    "exists": lambda store, until: store.exists(["k"], until),
    "get_into": one,
    "put": lambda store, until: store.put(["k"], [(b"head", np.zeros(2, np.uint8))], until),
    "remove": lambda store, until: store.remove(["k"], until),
    "remove_group": lambda store, until: store.remove_group("k", until),
    "open": lambda store, until: store.open(until),
    "groups": lambda store, until: store.groups("k", until),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "answer",
    [
        b"+", b"\r\n", b"*-5\r\n", b"*99999999\r\n", b"*999999999999\r\n", b"$-7\r\n", b"$99999999999\r\n", b"~1\r\n",
        b"\x00", b"*2\r\n$1\r\n0\r\n*99999999\r\n", b"*2\r\n$1\r\n0\r\n*-1\r\n", b"*2\r\n$99999\r\n",
        b"*2\r\n:0\r\n*0\r\n",
        b"*2\r\n$1\r\n0\r\n*1\r\n$5000\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n", b"x" * 100_000,
        b"$6\r\nheadxx\r\n:1\r\n",
    ],
    ids=lambda answer: repr(answer)[2:22],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_costs_the_connection(call: str, answer: bytes) -> None:
    with talker(answer, None) as url, contextlib.closing(ValkeyStore(url, connect_s=CONNECT_S)) as store:
        with fails_by(WATCHDOG_S) as until:
            CALLS[call](store, until)
        assert not store._idle


def test_a_search_without_an_end_ends_in_time() -> None:
    page = b"*2\r\n$1\r\n7\r\n*1\r\n$1\r\nx\r\n"  # the same cursor for ever, and no key of ours
    with (
        talker(*[page] * 100_000) as url,
        contextlib.closing(ValkeyStore(url, connect_s=CONNECT_S)) as store,
        fails_by(0.2) as until,
    ):
        store.remove_group("k", until)


def test_a_reply_closed_at_each_of_its_bytes_is_unreachable() -> None:
    reply = b"$6\r\nheadro\r\n"
    for cut in range(len(reply)):
        with talker(reply[:cut], None) as url, contextlib.closing(ValkeyStore(url, connect_s=CONNECT_S)) as store:
            with fails_by(WATCHDOG_S) as until:
                one(store, until)
            assert not store._idle


def test_an_answer_that_comes_with_the_next_question_is_not_taken_for_its_own() -> None:
    came: list[int] = []
    heads, row = np.zeros((1, 4), np.uint8), np.zeros(2, np.uint8)
    with (
        talker(b"", b"$6\r\nheadro\r\n") as url,
        contextlib.closing(ValkeyStore(url, connect_s=CONNECT_S)) as store,
    ):
        for key in ("a", "b"):
            with pytest.raises(Unreachable):
                store.get_into([key], heads, [row], time.monotonic() + 1.0, lambda _, size: came.append(size))
    assert not came
