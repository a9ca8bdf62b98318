"""Connections: URLs, logins, limits, and hostile peers at every step."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument, TierError
from pagedkv.tiers.remote.connecting import Attempt, Dialer
from pagedkv.tiers.remote.connection import Wire
from pagedkv.tiers.remote.store import Unreachable
from pagedkv.tiers.remote.valkey import ValkeyStore
from tests.remote.servers import WATCHDOG_S, Server, certificates, free_port, server, talker

LIMIT_S = 20.0
CONNECT_S = 30.0  # of a busy machine
PASSWORDS = [  # as in the URL, as they are
    ("p4ssw0rd-of-ours", "p4ssw0rd-of-ours"),
    ("p%40ss%2Fw0rd%3A%23%3f%25", "p@ss/w0rd:#?%"),
    ("s%C3%BCss-und-geheim", "süss-und-geheim"),
    ("with:colon@and-at", "with:colon@and-at"),
    ("a%20space%0Aand%20line", "a space\nand line"),
]


def soon() -> float:
    return time.monotonic() + LIMIT_S


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server() as found:
        yield found


# ---- URLs


@pytest.mark.parametrize(
    ("url", "options", "login"),
    [
        ("valkey://h", {"host": "h", "port": 6379}, []),
        ("redis://h:1/", {"host": "h", "port": 1}, []),
        ("valkey://h/3", {"host": "h", "port": 6379}, [(b"SELECT", b"3")]),
        ("valkey://h:1/0?db=4", {"host": "h", "port": 1}, []),
        ("valkey://h:1?db=4", {"host": "h", "port": 1}, [(b"SELECT", b"4")]),
        ("valkey://[::1]:7", {"host": "::1", "port": 7}, []),
        ("valkey://:p@h", {"host": "h", "port": 6379}, [(b"AUTH", b"p")]),
        ("valkey://u:p%40:@@h", {"host": "h", "port": 6379}, [(b"AUTH", b"u", b"p@:@")]),
        ("valkey://u@h", {"host": "h", "port": 6379}, [(b"AUTH", b"u", b"")]),
        ("unix:///run/a%20b.sock?db=2", {"path": "/run/a b.sock"}, [(b"SELECT", b"2")]),
        ("unix://u:p@/s", {"path": "/s"}, [(b"AUTH", b"u", b"p")]),
    ],
)
def test_a_url_is_read(url: str, options: dict[str, Any], login: list[tuple[bytes, ...]]) -> None:
    dialer = Dialer(url, 1.0)
    assert (dialer._options, dialer._login) == (options, login)


@pytest.mark.parametrize(
    "url",
    [
        "valkey://:SECRET?x=1@h", "valkey://:SECRET&SECRET=2@h?SECRET=3", "valkey://:1?db=SECRET@h",
        "valkey://u:SECRET#1@h", "valkey://:SECRET@h?db=1&SECRET=1",
        "valkey://:123/SECRET@h", "valkey://:SECRET@", "valkey://:SECRET@h:99999", "valkey://:SECRET@h:x", "unix://SECRET",
        "unix://run/SECRET", "unix://:SECRET@run/s", "valkey://:SECRET@h/x", "valkey://:SECRET@h/0/1",
        "valkey://:SEC RET@h",
        "valkey://:SECRET@h?db=-1", "valkey://:SECRET@h?db=1&db=2", "valkey://h/x@127.0.0.1", "valkey://:SECRET@h\n",
        "valkey://:SECRET@[::1", "http://:SECRET@h", "SECRET",
    ],
)  # fmt: skip
def test_a_url_that_cannot_be_read_is_refused_and_no_part_of_it_repeated(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ValkeyStore(url)
    said = "".join(traceback.format_exception(caught.value)).partition("pagedkv.errors.InvalidArgument")[2]
    assert "SECRET" not in said
    assert "RET" not in said


def test_certificates_without_tls_or_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="TLS alone"):
        ValkeyStore("valkey://h", ca_file=str(tmp_path / "none"))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        ValkeyStore("valkeys://h", ca_file=str(tmp_path / "none"))


# ---- logins


def chain_of(problem: BaseException | None) -> list[BaseException]:
    """An exception and all behind it, also those that a traceback leaves out."""
    found: list[BaseException] = []
    while problem is not None and problem not in found:
        found.append(problem)
        problem = problem.__cause__ or problem.__context__
    return found


@pytest.mark.parametrize(("quoted", "plain"), PASSWORDS)
@pytest.mark.parametrize("user", ["", "ours"])
def test_a_password_works_and_a_wrong_one_is_in_no_error(
    quoted: str, plain: str, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server() as closed:
        if user:
            closed.client().acl_setuser(user, enabled=True, passwords=[f"+{plain}"], commands=["+@all"], keys=["*"])
        else:
            closed.client().config_set("requirepass", plain)
        for at in (f"127.0.0.1:{closed.port}/0", f"/{closed.folder.relative_to('/')}/s"):
            scheme = "valkey" if at.startswith("127") else "unix"
            right = ValkeyStore(f"{scheme}://{user}:{quoted}@{at}", connect_s=CONNECT_S)
            right.open(soon())
            assert right.exists(["a"], soon()) == [False]
            assert plain not in f"{right!r} {right._dialer!r}"
            right.close()
            wrong = ValkeyStore(f"{scheme}://{user}:{quoted}x@{at}", connect_s=CONNECT_S)
            with pytest.raises(TierError, match="refuses the user or the password") as caught:
                wrong.open(soon())
            wrong.close()
            said = "".join(traceback.format_exception(caught.value))
            for problem in chain_of(caught.value):
                said += f"{problem} {problem!r} {problem.args}"
            assert plain not in said
            assert quoted not in said
    assert plain not in caplog.text


def test_a_login_that_a_server_without_a_password_refuses_is_named(running: Server) -> None:
    store = ValkeyStore(f"valkey://:p@127.0.0.1:{running.port}", connect_s=CONNECT_S)
    with pytest.raises(TierError, match="password"):
        store.open(soon())
    store.close()


def test_a_database_is_selected_and_a_wrong_one_named(running: Server) -> None:
    running.client().flushall()
    store = ValkeyStore(f"{running.unix}?db=3", connect_s=CONNECT_S)
    store.put(["a"], [(b"", np.zeros(1, np.uint8))], soon())
    store.close()
    assert running.client().dbsize() == 0
    store = ValkeyStore(f"valkey://127.0.0.1:{running.port}/99", connect_s=CONNECT_S)
    with pytest.raises(TierError, match="SELECT 99"):
        store.open(soon())
    store.close()


def test_a_user_who_may_not_ask_is_told_which_commands_it_takes(running: Server) -> None:
    running.client().acl_setuser("few", enabled=True, passwords=["+p"], commands=["+ping"], keys=["*"])
    store = ValkeyStore(f"valkey://few:p@127.0.0.1:{running.port}", connect_s=CONNECT_S)
    with pytest.raises(TierError, match=r"INFO.*UNLINK"):
        store.open(soon())
    store.close()


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        (b"-ERR max number of clients reached\r\n", Unreachable, "maxclients"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", Unreachable, "LOADING"),
        (b"-DENIED Redis is running in protected mode\r\n", TierError, "protected-mode"),
        (b"-NOAUTH Authentication required.\r\n", TierError, "password"),
        (b"-ERR unknown command 'INFO'\r\n", TierError, "no Valkey or Redis server"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", TierError, "no Valkey or Redis server"),
        (b"\x15\x03\x01\x00\x02\x02\x46", TierError, "TLS port"),
        (b"+PONG\r\n", TierError, "no Valkey or Redis server"),
    ],
)
def test_a_first_answer_that_is_none_is_named(line: bytes, error: type[Exception], said: str) -> None:
    with talker(line) as url:
        store = ValkeyStore(url, connect_s=CONNECT_S)
        with pytest.raises(error, match=said):
            store.open(soon())
        store.close()


def test_a_plain_url_at_a_port_with_tls_is_named(tmp_path: Path) -> None:
    authority, certificate, key = certificates(tmp_path)
    port = free_port()
    options = ("--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key)
    with server(*options, "--tls-ca-cert-file", authority, "--tls-auth-clients", "no"):
        for login in ("", ":p@"):
            store = ValkeyStore(f"valkey://{login}127.0.0.1:{port}", connect_s=CONNECT_S)
            with pytest.raises((TierError, Unreachable), match="TLS"):
                store.open(soon())
            store.close()


def test_a_certificate_for_another_host_and_a_file_without_one_are_named(tmp_path: Path) -> None:
    authority, certificate, key = certificates(tmp_path, host="127.0.0.9")
    (tmp_path / "empty.pem").write_text("nothing\n")
    port = free_port()
    options = ("--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key)
    with server(*options, "--tls-ca-cert-file", authority, "--tls-auth-clients", "no"):
        for file, said in ((authority, "for this host"), (str(tmp_path / "empty.pem"), "holds no certificate")):
            store = ValkeyStore(f"valkeys://127.0.0.1:{port}", ca_file=file, connect_s=CONNECT_S)
            with pytest.raises(TierError, match=said):
                store.open(soon())
            store.close()


# ---- limits


def test_more_connections_are_opened_than_a_pool_has_by_default(running: Server) -> None:
    store = ValkeyStore(running.unix, connect_s=CONNECT_S)
    for _ in range(120):
        assert store.exists(["none"], soon()) == [False]
        store._idle.pop().close()
    store.close()


def test_a_connection_that_is_late_for_its_call_serves_the_next_one(running: Server) -> None:
    store = ValkeyStore(running.unix, connect_s=CONNECT_S)
    gate, connect, calls = threading.Event(), store._dialer.connect, []

    def slowly() -> Wire:
        calls.append(1)
        gate.wait(WATCHDOG_S)
        return connect()

    store._dialer.connect = slowly  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(Unreachable) as caught:
            store.exists(["a"], time.monotonic() + 0.01)
        assert caught.value.kind == "connect"
    gate.set()
    assert store.exists(["a"], soon()) == [False]
    assert len(calls) == 1
    store.close()


def test_a_connection_that_comes_after_the_end_is_closed(running: Server) -> None:
    gate, made = threading.Event(), []
    connect = Dialer(running.unix, CONNECT_S).connect

    def slowly() -> Wire:
        gate.wait(WATCHDOG_S)
        made.append(connect())
        return made[0]

    store = ValkeyStore(running.unix)
    store._dialer.connect = slowly  # type: ignore[method-assign]
    with pytest.raises(Unreachable):
        store.exists(["a"], time.monotonic() + 0.01)
    attempt = store._left[0]
    store.close()
    gate.set()
    assert attempt.wait(soon()) is made[0]
    assert not made[0].is_quiet


def test_an_attempt_that_failed_is_not_waited_for_again(running: Server) -> None:
    store = ValkeyStore(running.unix, connect_s=CONNECT_S)
    gate = threading.Event()

    def fail() -> Wire:
        gate.wait(WATCHDOG_S)
        raise Unreachable("connect", "of another time")

    old = Attempt(fail)
    store._left.append(old)
    gate.set()
    with pytest.raises(Unreachable, match="another time"):
        old.wait(soon())
    assert store.exists(["a"], soon()) == [False]
    store.close()


def test_connections_that_the_server_has_closed_are_replaced_unnoticed(running: Server) -> None:
    store = ValkeyStore(running.unix, connect_s=CONNECT_S)
    assert store.exists(["a"], soon()) == [False]
    running.client().client_kill_filter(_type="normal")
    assert store.exists(["a"], soon()) == [False]
    store.close()


def test_an_answer_that_no_call_has_asked_for_costs_its_connection() -> None:
    later, connected = threading.Event(), itertools.count()

    def say_more(near: socket.socket) -> None:
        if next(connected) == 0:
            later.wait(WATCHDOG_S)
            near.sendall(b":1\r\n")

    with talker(b":0\r\n", then=say_more) as url:
        store = ValkeyStore(url, connect_s=CONNECT_S)
        assert store.exists(["a"], soon()) == [False]
        first = store._idle[0]
        assert first.is_quiet
        later.set()
        until = soon()
        while first.is_quiet:
            assert time.monotonic() < until
        assert store.exists(["b"], soon()) == [False]
        assert store._idle[0] is not first
        store.close()


@pytest.mark.parametrize("drip", [b"+", b"$138\r\n", b"$4000\r\n", b"$10000000000\r\n", b"*3\r\n"])
def test_a_peer_that_drips_ends_no_later_than_the_limit(drip: bytes) -> None:
    begun = time.monotonic()

    def go_on(near: socket.socket) -> None:
        while time.monotonic() < begun + WATCHDOG_S:
            near.sendall(b"x")
            time.sleep(0.01)

    with talker(drip, then=go_on) as url:
        store = ValkeyStore(url, connect_s=CONNECT_S)
        heads, rows = np.zeros((1, 128), np.uint8), [np.zeros(1 << 20, np.uint8)]
        with pytest.raises(Unreachable):
            store.get_into(["a"], heads, rows, begun + 0.3, lambda i, n: None)
        assert not store._idle
        store.close()
    assert time.monotonic() - begun < LIMIT_S


def test_a_child_closes_its_store_without_the_parents_lock(running: Server) -> None:
    store = ValkeyStore(running.unix, connect_s=CONNECT_S)
    store.exists(["a"], soon())
    with store._lock:
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                store.close()
                os._exit(7)
            os._exit(1)
        until = soon()
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, 9)
            time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 7
    assert store.exists(["a"], soon()) == [False]
    store.close()
