"""Calls to ranks over sockets whose other ends the test holds, by a clock that it turns."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv._core.placement import MOVE_DTYPE
from pagedkv.tiers import Name, Record
from pagedkv.tiers.ranks.frames import Kind, pack_answer, unpack_moves
from pagedkv.tiers.ranks.group import Group
from pagedkv.tiers.ranks.mover import FarMemory, FarStore, RankMover
from pagedkv.tiers.ranks.wire import HEAD, MAGIC, VERSION, Wire
from tests.ranks.conftest import WATCHDOG_S

TIERS = {0: FarMemory("device", 8, 64), 1: FarMemory("host", 16, 64), 2: FarStore("disk", 32, 64)}
RECORD = Record(b"k" * 32, b"p" * 32, b"n" * 32, np.arange(4, dtype=np.int32))


class Far:
    """The test's end of a wire."""

    def __init__(self) -> None:
        near, self.end = socket.socketpair()
        self.wire = Wire(near)

    def hear(self) -> tuple[int, int, bytes]:
        """Kind, call and payload of the next frame."""
        _, kind, _, size, call = HEAD.unpack(self.end.recv(HEAD.size, socket.MSG_WAITALL))
        return kind, call, self.end.recv(size, socket.MSG_WAITALL) if size else b""

    def say(self, kind: Kind, call: int, payload: bytes = b"") -> None:
        self.end.sendall(HEAD.pack(MAGIC, kind, VERSION, len(payload), call) + payload)

    def answer(self, call: int, *ok: bool, tried: Any = None, left: Any = (), rest: bytes = b"") -> None:
        flags = np.array(ok, np.bool_)
        known = flags | True if tried is None else np.array(tried, np.bool_)
        self.say(Kind.ANSWER, call, pack_answer("ok", flags, known, np.array(left, np.intp), rest))


class Bench:
    """Two ranks, and a clock that stands still until the test turns it."""

    def __init__(self) -> None:
        self.time = 100.0
        self.fars = [Far(), Far()]
        self.group = Group([far.wire for far in self.fars], 10.0, lambda: self.time)
        self.mover = RankMover(self.group, TIERS, lambda moves: [RECORD] * len(moves))
        self.settled = threading.Event()

    def turn(self, seconds: float) -> None:
        self.time += seconds
        self.group._loop.wake()

    def submit(self, *moves: tuple[int, int, int, int, int], deadline_s: float | None = None) -> tuple[Any, int]:
        """A ticket, and the number of the call.

        Moves are (transfer, tiers from and to, blocks from and to).
        """
        array = np.zeros(len(moves), MOVE_DTYPE)
        for row, values in zip(array, moves, strict=True):
            for name, value in zip(("transfer", "src_tier", "dst_tier", "src_block", "dst_block"), values, strict=True):
                row[name] = value
        ticket = self.mover.submit(array, deadline_s=deadline_s, on_done=lambda _: self.settled.set(), here=True)
        heard = [far.hear() for far in self.fars]
        assert heard[0] == heard[1]
        assert heard[0][0] == Kind.MOVES
        return ticket, heard[0][1]

    def handle(self) -> None:
        """Have the group handle all that was said."""
        done = threading.Event()
        self.group.call(Kind.FLUSH, done=lambda _: done.set())
        for far in self.fars:
            kind, call = Kind.PING, 0
            while kind != Kind.FLUSH:
                kind, call, _ = far.hear()
            far.answer(call)
        assert done.wait(WATCHDOG_S)

    def ended(self, ticket: Any) -> tuple[list[bool], list[bool], list[bool]]:
        """Whether each transfer arrived and was tried, and each move was left, once it is settled."""
        assert self.settled.wait(WATCHDOG_S)
        return ticket.results()[1].tolist(), ticket.tried().tolist(), ticket.left().tolist()


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench()
    yield found
    found.group.close()
    for far in found.fars:
        far.end.close()


UP = [(1, 1, 0, 0, 0), (1, 1, 0, 1, 1), (2, 1, 0, 2, 2)]


def test_a_transfer_arrives_if_it_has_at_all_ranks(bench: Bench) -> None:
    ticket, call = bench.submit(*UP)
    bench.fars[1].answer(call, True, False, tried=(True, True))
    assert not bench.settled.wait(0)
    bench.fars[0].answer(call, True, True)
    assert bench.ended(ticket) == ([True, False], [True, True], [False] * 3)
    counts = bench.mover.stats()[1, 0]
    assert (counts.blocks, counts.bytes, counts.failed) == (2, 128, 1)


@pytest.mark.parametrize("said", [False, True])
def test_a_failure_speaks_against_the_source_where_a_rank_says_so(bench: Bench, said: bool) -> None:
    ticket, call = bench.submit(*UP)
    bench.fars[0].answer(call, False, True, tried=(False, True))
    bench.fars[1].answer(call, False, True, tried=(said, True))
    assert bench.ended(ticket) == ([False, True], [said, True], [False] * 3)


def test_a_rank_that_could_not_even_try_fails_everything_without_a_word_against_it(bench: Bench) -> None:
    ticket, call = bench.submit(*UP)
    bench.fars[0].answer(call, True, True)
    bench.fars[1].say(Kind.UNABLE, call, b"no")
    assert bench.ended(ticket) == ([False, False], [False, False], [False] * 3)


def test_an_answer_about_other_transfers_fails_everything(bench: Bench) -> None:
    ticket, call = bench.submit(*UP)
    bench.fars[0].answer(call, True, True)
    bench.fars[1].answer(call, True)
    assert bench.ended(ticket)[0] == [False, False]


def test_orders_carry_blocks_deadline_and_records(bench: Bench) -> None:
    array = np.zeros(1, MOVE_DTYPE)
    array["transfer"], array["src_tier"], array["src_block"], array["dst_block"] = 1 << 40, 2, 31, 7
    bench.mover.submit(array, deadline_s=2.5)
    order = unpack_moves(bench.fars[0].hear()[2])
    assert order.deadline_s == 2.5
    assert order.records == [RECORD]
    for name in order.moves.dtype.names or ():
        assert order.moves[name] == array[name]


def test_blocks_that_one_rank_left_are_kept_until_it_is_back(bench: Bench) -> None:
    ticket, call = bench.submit(*UP)
    bench.fars[0].answer(call, False, True, tried=(False, True), left=(0, 1))
    bench.fars[0].say(Kind.BACK, call, pack_answer("ok", left=np.array([1])))  # before the other rank has answered
    bench.fars[1].answer(call, True, True)
    assert bench.ended(ticket) == ([False, True], [False, True], [True, True, False])
    back: list[int] = []
    done = threading.Event()

    def tell(moves: Any) -> None:
        back.extend(moves.tolist())
        if sorted(back) == [0, 1]:
            done.set()

    ticket.when_back(tell)
    assert not done.wait(0)
    bench.fars[0].say(Kind.BACK, call, pack_answer("ok", left=np.array([0]), rest=b"last"))
    assert done.wait(WATCHDOG_S)
    assert sorted(back) == [0, 1]


def test_blocks_that_two_ranks_left_are_kept_for_both(bench: Bench) -> None:
    ticket, call = bench.submit(*UP[:1])
    for far in bench.fars:
        far.answer(call, False, tried=[False], left=[0])
    assert bench.ended(ticket)[2] == [True]
    back = threading.Event()
    ticket.when_back(lambda moves: back.set())
    bench.fars[0].say(Kind.BACK, call, pack_answer("ok", left=np.array([0]), rest=b"last"))
    bench.handle()
    assert not back.wait(0)
    bench.fars[1].end.close()  # a rank that is gone touches nothing
    assert back.wait(WATCHDOG_S)


def test_a_read_is_given_up_at_its_deadline_and_its_blocks_kept_until_all_answered(bench: Bench) -> None:
    ticket, call = bench.submit(*UP, deadline_s=1.0)
    assert bench.mover.watch(ticket) <= 1.05
    bench.turn(1.0)
    assert bench.mover.watch(ticket) > 0
    assert not bench.settled.wait(0)
    bench.turn(0.06)
    bench.mover.watch(ticket)
    assert bench.ended(ticket) == ([False, False], [False, False], [True] * 3)
    assert bench.mover.stats()[1, 0].left == 3
    back: list[int] = []
    done = threading.Event()
    ticket.when_back(lambda moves: (back.extend(moves.tolist()), done.set()))
    bench.fars[0].answer(call, True, True)
    assert not done.wait(0)
    bench.fars[1].answer(call, True, True)
    assert done.wait(WATCHDOG_S)
    assert back == [0, 1, 2]
    assert bench.mover.stats()[1, 0].blocks == 0


def ping(far: Far) -> None:
    kind, _, _ = far.hear()
    assert kind == Kind.PING


def test_a_rank_that_owes_an_answer_and_is_silent_is_lost_and_named(bench: Bench) -> None:
    ticket, call = bench.submit(*UP)
    for far in bench.fars:
        ping(far)
    bench.fars[0].say(Kind.PONG, 0, pack_answer("ok"))
    bench.turn(7.4)
    bench.fars[0].answer(call, True, True)
    assert not bench.settled.wait(0)
    bench.turn(0.2)
    assert bench.ended(ticket) == ([False, False], [False, False], [False] * 3)
    with pytest.raises(pk.RankLost, match="rank 1 has not answered for 10 s"):
        bench.group.check()
    assert bench.fars[1].end.recv(1) == b""


def test_a_slow_rank_that_answers_pings_is_waited_for(bench: Bench) -> None:
    ticket, call = bench.submit(*UP)
    bench.fars[0].answer(call, True, True)
    for _ in range(20):  # 60 seconds in all
        bench.handle()
        bench.turn(3.0)
        ping(bench.fars[1])
        bench.fars[1].say(Kind.PONG, 0, pack_answer("ok"))
    bench.fars[1].answer(call, True, True)
    assert bench.ended(ticket)[0] == [True, True]


def test_an_answer_that_waits_to_be_read_is_no_silence(bench: Bench) -> None:
    """As after a pause of the deciding process."""
    ticket, call = bench.submit(*UP)
    inside, goes_on = threading.Event(), threading.Event()
    tick = bench.group.tick

    def paused() -> float:
        inside.set()
        assert goes_on.wait(WATCHDOG_S)
        return tick()

    bench.group.tick = paused  # type: ignore[method-assign]
    bench.turn(0)
    assert inside.wait(WATCHDOG_S)
    for far in bench.fars:
        far.answer(call, True, True)
    bench.time += 1000.0
    goes_on.set()
    assert bench.ended(ticket)[0] == [True, True]
    assert bench.group.lost is None


def test_ranks_that_owe_nothing_may_be_silent(bench: Bench) -> None:
    bench.turn(1e6)
    ticket, call = bench.submit(*UP)
    for far in bench.fars:
        ping(far)
        far.answer(call, True, True)
    assert bench.ended(ticket)[0] == [True, True]


def test_after_a_loss_every_call_is_over_at_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.fars[0].end.close()
    array = np.zeros(1, MOVE_DTYPE)
    array["src_tier"] = 1
    for _ in range(3):
        ticket = bench.mover.submit(array)
        assert ticket.wait(WATCHDOG_S)
        assert not ticket.results()[1].any()
    with pytest.raises(pk.RankLost, match="rank 0 has closed its connection"):
        bench.group.ask(Kind.FLUSH, b"", WATCHDOG_S, "flush")
    assert bench.group.state == "off"
    assert [record.message for record in caplog.records if "rank 0" in record.message] == [
        "rank 0 has closed its connection: its part of the KV is gone, and nothing is computed or moved any more"
    ]


@pytest.mark.parametrize(
    "frame",
    [
        b"x" * HEAD.size,
        HEAD.pack(MAGIC, Kind.ANSWER, VERSION, 3, 1) + b"cut",
        HEAD.pack(MAGIC, 77, VERSION, 0, 1),
        HEAD.pack(MAGIC, Kind.ANSWER, VERSION + 1, 0, 1),
        HEAD.pack(MAGIC, Kind.ANSWER, VERSION, (1 << 32) - 1, 1),
    ],
)
def test_a_rank_that_sends_nonsense_is_lost(bench: Bench, frame: bytes) -> None:
    ticket, call = bench.submit(*UP)
    bench.fars[0].answer(call, True, True)
    bench.fars[1].end.sendall(frame)
    assert bench.ended(ticket)[0] == [False, False]
    with pytest.raises(pk.RankLost, match=r"rank 1 (sent|speaks)"):
        bench.group.check()


def test_answers_to_no_question_change_nothing(bench: Bench) -> None:
    ticket, call = bench.submit(*UP)
    for far in bench.fars:
        far.answer(call + 5, True)
        far.say(Kind.BACK, call, pack_answer("ok", left=np.array([0])))
        far.answer(call, True, True, left=[])
        far.answer(call, False, False)
    assert bench.ended(ticket)[0] == [True, True]


def test_a_call_that_takes_too_long_names_the_rank(bench: Bench) -> None:
    with pytest.raises(pk.TierError, match="rank 0 did not flush its disk within 0 s"):
        bench.group.ask(Kind.FLUSH, b"", 0.0, "flush its disk")


def test_closing_ends_the_moves_under_way_and_refuses_others(bench: Bench) -> None:
    ticket, _ = bench.submit(*UP)
    bench.group.close()
    assert bench.ended(ticket)[0] == [False, False]
    bench.mover.close()
    for call in (lambda: bench.group.call(Kind.FLUSH), lambda: bench.mover.submit(np.zeros(1, MOVE_DTYPE))):
        with pytest.raises(pk.ClosedError):
            call()


def test_the_mover_waits_for_its_moves_when_it_is_closed(bench: Bench) -> None:
    ticket, call = bench.submit(*UP)
    closing = threading.Thread(target=bench.mover.close)
    closing.start()
    for far in bench.fars:
        far.answer(call, True, True)
    closing.join(WATCHDOG_S)
    assert not closing.is_alive()
    assert bench.ended(ticket)[0] == [True, True]


def refused(bench: Bench) -> list[tuple[type[Exception], Callable[[], object]]]:
    moves = np.zeros(1, MOVE_DTYPE)
    to_nowhere, to_disk = moves.copy(), moves.copy()
    to_nowhere["dst_tier"], to_disk["dst_tier"] = 3, 2
    nameless = RankMover(bench.group, TIERS)
    return [
        (pk.WrongType, lambda: bench.mover.submit([1])),  # type: ignore[arg-type]
        (pk.InvalidArgument, lambda: bench.mover.submit(to_nowhere)),
        (pk.InvalidArgument, lambda: nameless.submit(to_disk)),
        (pk.InvalidArgument, lambda: bench.mover.submit(to_disk, records=[])),
        (pk.InvalidArgument, lambda: bench.mover.submit(to_disk, records=[Name(b"", b"")])),
    ]


def test_moves_that_no_rank_can_carry_out_are_refused_here(bench: Bench) -> None:
    for kind, call in refused(bench):
        with pytest.raises(kind):
            call()
    empty = bench.mover.submit(np.zeros(0, MOVE_DTYPE))
    assert empty.done()
