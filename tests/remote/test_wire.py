"""Replies over a socket that gives them in any pieces: none is taken for another."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pagedkv.tiers.remote.connection import Refused, Wire
from pagedkv.tiers.remote.store import UNUSABLE, Unreachable


def soon() -> float:
    return time.monotonic() + 60.0


class Socket:
    """A peer that answers with these pieces, and counts the reads."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.reads, self.limit = list(pieces), 0, 0.0

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0
        self.limit = seconds

    def send(self, data: memoryview) -> int:
        return min(len(data), 3)

    def recv_into(self, target: memoryview) -> int:
        self.reads += 1
        if not self.pieces:
            return 0
        piece = self.pieces.pop(0)
        part = piece[: len(target)]
        target[: len(part)] = part
        if piece[len(part) :]:
            self.pieces.insert(0, piece[len(part) :])
        return len(part)


class Connection:
    """A connection of redis-py over such a peer."""

    def __init__(self, peer: Any) -> None:
        self._sock, self.is_closed = peer, False

    def disconnect(self) -> None:
        self.is_closed = True


def wire(*pieces: bytes) -> Wire:
    return Wire(Connection(Socket(*pieces)))


def test_a_library_without_its_socket_is_named() -> None:
    with pytest.raises(ImportError, match="redis 6 to 8"):
        Wire(object())
    with pytest.raises(ImportError, match="redis 6 to 8"):
        Wire(Connection(object()))


def test_a_value_comes_back_however_its_reply_is_cut() -> None:
    reply = b"$6\r\nheadro\r\n:1\r\n"
    for cut in range(len(reply) + 1):
        head, row = bytearray(4), bytearray(2)
        found = wire(*filter(None, (reply[:cut], reply[cut:])))
        assert found.value([memoryview(head), memoryview(row)], soon()) == 6
        assert (head, row) == (b"head", b"ro")
        assert found.line(soon()) == b":1"
        assert found.is_clean
    found = wire(*(reply[i : i + 1] for i in range(len(reply))))
    assert found.value([memoryview(bytearray(6))], soon()) == 6


def test_a_reply_that_ends_early_is_no_value() -> None:
    reply = b"$6\r\nheadro\r\n"
    for cut in range(len(reply)):
        with pytest.raises(Unreachable) as caught:
            wire(*filter(None, (reply[:cut],))).value([memoryview(bytearray(6))], soon())
        assert caught.value.kind == "closed"


@pytest.mark.parametrize(
    "reply",
    [
        b"$-2\r\n", b"$+6\r\n", b"$ 6\r\n", b"$6 \r\n", b"$0x6\r\n", b"$\xb2\r\n", b"$99999999999999999\r\n",
        b"$1e9\r\n", b"$25\r\n", b"$\r\n", b"+OK\r\n", b":6\r\n", b"*1\r\n$6\r\nheadro\r\n", b"$6\r\nheadroxx",
        b"$6\nheadro\r\n" + b"-" * 20_000,
        b"_\r\n", b"%1\r\n", b">1\r\n", b"\0" * 8,
    ],
)  # fmt: skip
def test_no_other_reply_is_a_value_or_makes_room_for_itself(reply: bytes) -> None:
    with pytest.raises(Unreachable) as caught:
        wire(reply).value([memoryview(bytearray(6))], soon())
    assert caught.value.kind == "protocol"


def test_an_error_says_nothing_about_a_value_unless_it_is_of_another_type() -> None:
    assert wire(b"-WRONGTYPE Operation against a key\r\n").value([memoryview(bytearray(6))], soon()) == UNUSABLE
    for word in ("LOADING", "NOAUTH", "MASTERDOWN", "MOVED", "ERR"):
        with pytest.raises(Refused, match=f"answered {word}"):
            wire(f"-{word} why\r\n".encode()).value([memoryview(bytearray(6))], soon())


def test_a_line_without_an_end_is_read_into_the_same_bytes() -> None:
    peer = Socket(b"+" + b"x" * 100_000)
    with pytest.raises(Unreachable, match="does not end"):
        Wire(Connection(peer)).line(soon())
    assert peer.reads <= 2


def test_nothing_is_read_or_sent_after_the_limit() -> None:
    past = time.monotonic() - 1
    for call in (lambda it: it.line(past), lambda it: it.send(b"x", past), lambda it: it.text(past)):
        peer = Socket(b"+OK\r\n")
        with pytest.raises(Unreachable) as caught:
            call(Wire(Connection(peer)))
        assert caught.value.kind == "timeout"
        assert peer.reads == 0


def test_pieces_of_what_is_sent_are_sent_until_all_is() -> None:
    sent: list[bytes] = []
    peer = Socket()
    peer.send = lambda data: sent.append(bytes(data[:3])) or 3  # type: ignore[method-assign,func-returns-value]
    Wire(Connection(peer)).send(b"0123456", soon())
    assert b"".join(sent) == b"0123456"
