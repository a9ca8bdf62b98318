"""Calls that do not come back.

No thread waits for them for ever, and what they do in the end changes nothing.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
from unittest.mock import Mock

import numpy as np
import pytest

from pagedkv.errors import ClosedError, TierError
from pagedkv.tiers import DiskTier, HostTier, Mover
from pagedkv.tiers.disk.circuit_breaker import FIRST_REST_S, CircuitBreaker
from pagedkv.tiers.disk.segment_files import SegmentFiles
from pagedkv.tiers.disk.segments import Segments
from pagedkv.tiers.disk.superblock import MAX_PURGES
from pagedkv.tiers.mover.hangs import HANG_S as SHIPPED_HANG_S
from pagedkv.tiers.mover.hangs import ends_within
from pagedkv.tiers.mover.parts import cut

from .conftest import BLOCK_BYTES, name_of
from .test_degradation import Clock
from .test_mover import DISK, HOST, NUM, TIMEOUT_S, HeldTier, let_go, line, moves_of, until

HANG_S = 30.0


class LeavableTier(HeldTier):
    """A store that is told of its calls that hang."""

    is_off = False

    def __init__(self):
        super().__init__()
        self.told = []

    def call_hangs(self, num_blocks):
        self.told.append(num_blocks)

    def call_came_back(self):
        self.told.append("back")

    def log_state(self):
        pass


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def leavable():
    return LeavableTier()


@pytest.fixture
def open_mover(clock):
    """Opens movers of one thread over host memory and a store, with a clock that stands still."""
    opened = []

    def open_it(store):
        tiers = {HOST: HostTier(NUM, BLOCK_BYTES), DISK: store}
        mover = Mover(tiers, threads=1, clock=clock, hang_s=HANG_S, describe=lambda m: [name_of(0)] * m.size)
        opened.append((mover, store))
        return mover

    yield open_it
    for mover, store in opened:
        let_go(store, 100)
        mover.close(cancel=True)


def begun(mover, store, *rows, **options):
    """A ticket whose first part is inside the store."""
    ticket = mover.submit(moves_of(*rows), **options)
    assert store.started.acquire(timeout=TIMEOUT_S)
    return ticket


def outcome(ticket):
    ids, ok = ticket.results()
    return ids.tolist(), ok.tolist(), ticket.tried().tolist(), ticket.left().tolist()


def test_a_read_is_left_at_its_deadline_and_what_it_does_later_changes_nothing(open_mover, leavable, clock, caplog):
    mover = open_mover(leavable)
    ticket = begun(mover, leavable, *line(7, DISK, HOST, range(3)), deadline_s=5)
    waits = mover.submit(moves_of(*line(8, DISK, HOST, range(3, 5))), deadline_s=5)
    clock.now += 5
    assert outcome(ticket) == ([7], [False], [False], [True] * 3)
    assert outcome(waits) == ([8], [False], [False], [False] * 2)
    stats = mover.stats()[DISK, HOST]
    assert (stats.left, stats.late, stats.failed, stats.blocks) == (3, 2, 0, 0)
    assert len([r for r in caplog.records if "does not answer in time" in r.message]) == 1
    back = []
    done = threading.Event()
    ticket.when_back(lambda moves: (back.extend(moves.tolist()), done.set()))
    assert not back
    let_go(leavable)
    assert done.wait(TIMEOUT_S)
    assert back == [0, 1, 2]
    assert outcome(ticket) == ([7], [False], [False], [True] * 3)
    assert mover.stats()[DISK, HOST] == stats
    assert leavable.told == [], "late is not hanging"


def test_who_asks_too_late_is_told_of_what_is_back_already(open_mover, leavable, clock):
    mover = open_mover(leavable)
    ticket = begun(mover, leavable, *line(7, DISK, HOST, range(3)), deadline_s=5)
    clock.now += 5
    assert ticket.left().all()
    let_go(leavable, 2)
    mover.submit(moves_of((8, DISK, HOST, 4, 4))).results()  # by the same thread: it is back
    back = []
    ticket.when_back(lambda moves: back.extend(moves.tolist()))
    assert back == [0, 1, 2]


def test_a_call_that_hangs_is_left_its_store_is_told_and_nobody_else_is_sent_there(open_mover, leavable, clock):
    mover = open_mover(leavable)
    ticket = begun(mover, leavable, *line(1, HOST, DISK, range(3)))
    waits = mover.submit(moves_of(*line(2, HOST, DISK, range(3, 5))))
    clock.now += HANG_S
    assert outcome(ticket) == ([1], [False], [True], [True] * 3)
    assert outcome(waits) == ([2], [False], [False], [False] * 2)
    refused = mover.submit(moves_of(*line(3, DISK, HOST, [9])))
    assert mover.queued_blocks == 0, "at once"
    assert refused.done()
    assert outcome(refused) == ([3], [False], [False], [False])
    assert mover.submit(moves_of((4, HOST, HOST, 0, 1))).results()[1].all(), "memory needs no store"
    assert leavable.told == [3]
    assert mover.stats()[HOST, DISK].left == 5
    let_go(leavable)
    assert until(lambda: leavable.told == [3, "back"])
    let_go(leavable)
    assert mover.submit(moves_of(*line(5, HOST, DISK, [0]))).results()[1].all()
    assert leavable.calls == [[0, 1, 2], [0]]


def test_a_store_that_cannot_be_left_in_a_write_is_waited_for(open_mover, clock):
    store = HeldTier()
    mover = open_mover(store)
    ticket = begun(mover, store, *line(1, HOST, DISK, range(3)))
    clock.now += HANG_S
    assert mover.submit(moves_of(*line(2, DISK, HOST, [9]))).results()[1].tolist() == [False], "no read goes after it"
    assert not ticket.done()
    let_go(store)
    assert ticket.results()[1].all()


def test_closing_leaves_the_threads_that_hang_and_settles_every_ticket(open_mover, leavable, clock, caplog):
    mover = open_mover(leavable)
    ticket = begun(mover, leavable, *line(1, DISK, HOST, range(3)))
    waits = mover.submit(moves_of(*line(2, DISK, HOST, range(3, 5))))
    clock.now += HANG_S
    mover.close()
    assert not ticket.results()[1].any()
    assert not waits.results()[1].any()
    assert [r.message for r in caplog.records if "are left there" in r.message]
    with pytest.raises(ClosedError):
        mover.submit(moves_of((3, HOST, HOST, 0, 1)))


def test_a_tier_with_a_call_that_hangs_is_off_until_it_is_back_and_for_a_rest(clock, caplog):
    breaker = CircuitBreaker("here", clock=clock)
    breaker.call_hangs()
    breaker.call_hangs()
    assert breaker.state == "off"
    assert not caplog.records, "the caller that told it holds a lock"
    breaker.log_state()
    clock.now += 10 * FIRST_REST_S
    assert (breaker.may_read(), breaker.may_write()) == (False, False), "no call is sent after them"
    breaker.read(1, [])  # it comes back, and with bytes
    breaker.call_came_back()
    assert (breaker.state, breaker.may_read()) == ("off", False)
    breaker.call_came_back()
    assert (breaker.state, breaker.may_read(), breaker.may_write()) == ("off", False, False)
    clock.now += 2 * FIRST_REST_S  # one for each
    assert [breaker.may_read() for _ in range(2)] == [True, False]
    breaker.read(1, [])
    assert breaker.state == "ok"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["disk tier here is off now: a call into it does not come back", "disk tier here works again"]


def test_what_a_write_that_hung_has_written_gets_no_name(open_tier, arena, monkeypatch):
    tier = open_tier()
    payloads = Segments.write_payloads

    def slow(segments, slots, rows, indices, seeds):
        tier.call_hangs(slots.size)
        rows[indices] = 0xA5  # another owner was given the memory meanwhile
        return payloads(segments, slots, rows, indices, seeds)

    with monkeypatch.context() as patch:
        patch.setattr(Segments, "write_payloads", slow)
        assert not tier.write([0, 1], [name_of(0), name_of(1)], arena, [0, 1]).any()
    stats = tier.stats()
    assert (stats.state, stats.hung, stats.blocks_written, stats.write_errors) == ("off", 2, 0, {"ETIMEDOUT": 2})
    tier.call_came_back()
    tier.close()
    assert list(open_tier().records()) == []


def test_what_would_wait_for_a_call_that_hangs_says_so(open_tier, arena):
    tier = open_tier()
    assert tier.write([0], [name_of(0)], arena, [0]).all()
    tier.call_hangs(1)
    assert not tier.flush()
    assert not tier.read([0], [name_of(0)], arena, [0]).any()
    with pytest.raises(TierError, match="may come back after a restart"):
        tier.purge(name_of(0).namespace)
    with pytest.raises(TierError, match="does not come back"):
        tier.clear()
    tier.call_came_back()
    tier.clear()


def test_a_tier_closed_with_a_call_inside_keeps_its_files_until_that_is_back(open_tier, arena, monkeypatch, caplog):
    tier, inside, go = open_tier(), threading.Event(), threading.Event()
    read = Segments.read

    def stuck(*arguments):
        inside.set()
        assert go.wait(TIMEOUT_S)
        return read(*arguments)

    monkeypatch.setattr(Segments, "read", stuck)
    target = arena.copy()

    def reading():
        tier.read([0], [name_of(0)], target, [0])
        tier.call_came_back()

    thread = threading.Thread(target=reading)
    thread.start()
    assert inside.wait(TIMEOUT_S)
    tier.call_hangs(1)
    tier.close()
    assert [r.message for r in caplog.records if "does not answer: it is left as it is" in r.message]
    with pytest.raises(TierError):
        open_tier()
    go.set()
    thread.join(TIMEOUT_S)
    assert isinstance(open_tier(), DiskTier), "the last call to come back turns the lights off"


def test_a_call_that_comes_back_while_a_tier_closes_and_the_closer_never_both_end_it(open_tier, arena, monkeypatch):
    """The closer ends the store if the call comes back before the closer has looked.

    After that, the last call to come back ends it.
    """
    read = Segments.read
    for step in ("shut", "is_empty"):
        tier, inside, go = open_tier(), threading.Event(), threading.Event()

        def stuck(*arguments, inside=inside, go=go):
            inside.set()
            assert go.wait(TIMEOUT_S)
            return read(*arguments)

        def reading(tier=tier):
            tier.read([0], [name_of(0)], arena.copy(), [0])
            tier.call_came_back()

        monkeypatch.setattr(Segments, "read", stuck)
        thread = threading.Thread(target=reading)
        thread.start()
        assert inside.wait(TIMEOUT_S)
        tier.call_hangs(1)
        gate = tier._gate
        take_step = getattr(gate, step)

        def back_at_once(*arguments, take_step=take_step, go=go, thread=thread):
            answer = take_step(*arguments)
            go.set()
            thread.join(TIMEOUT_S)
            return answer

        tier._gate = Mock(wraps=gate, is_ours=True, **{step: back_at_once})
        tier.close()
        open_tier().close()


def test_a_tier_closes_while_another_thread_hangs_in_flush_and_that_one_closes_the_files(open_tier, monkeypatch):
    tier, inside, go = open_tier(), threading.Event(), threading.Event()
    sync = SegmentFiles.sync

    def stuck(segments):
        inside.set()
        assert go.wait(TIMEOUT_S)
        sync(segments)

    monkeypatch.setattr(SegmentFiles, "sync", stuck)
    monkeypatch.setattr("pagedkv.tiers.disk.tier.HANG_S", 0)
    thread = threading.Thread(target=tier.flush)
    thread.start()
    assert inside.wait(TIMEOUT_S)
    tier.close()
    with pytest.raises(TierError):
        open_tier()
    go.set()
    thread.join(TIMEOUT_S)
    monkeypatch.undo()
    assert isinstance(open_tier(), DiskTier)


def test_a_purge_that_takes_long_holds_up_nobody_and_costs_nobody_else_a_block(open_tier, arena, monkeypatch):
    tier, inside, go = open_tier(), threading.Event(), threading.Event()
    assert tier.write([0, 1], [name_of(0), name_of(1)], arena, [0, 1]).all()
    for number in range(MAX_PURGES):
        tier.purge(number.to_bytes(32, "big"))
    sync = SegmentFiles.sync

    def slow(segments):
        inside.set()
        assert go.wait(TIMEOUT_S)
        sync(segments)

    monkeypatch.setattr(SegmentFiles, "sync", slow)
    thread = threading.Thread(target=tier.purge, args=[b"z" * 32])
    thread.start()
    assert inside.wait(TIMEOUT_S)
    assert tier.is_off
    assert not tier.read([0], [name_of(0)], arena.copy(), [0]).any()
    assert not tier.write([1], [name_of(2)], arena, [2]).any()
    go.set()
    thread.join(TIMEOUT_S)
    stats = tier.stats()
    assert (tier.is_off, stats.misses["off"], stats.writes_refused, stats.hung) == (False, 1, 1, 0)
    assert tier.read([0], [name_of(0)], arena.copy(), [0]).all()
    assert not tier.read([1], [name_of(1)], arena.copy(), [1]).any(), "what a refused write was to replace"
    assert [found.block for found in tier.records()] == [0]


def test_a_purge_during_which_a_call_hangs_forgets_nothing_of_others(open_tier, arena, monkeypatch):
    tier = open_tier()
    assert tier.write([0], [name_of(0)], arena, [0]).all()
    for number in range(MAX_PURGES):
        tier.purge(number.to_bytes(32, "big"))
    sync = SegmentFiles.sync
    monkeypatch.setattr(SegmentFiles, "sync", lambda segments: (sync(segments), tier.call_hangs(1)))
    with pytest.raises(TierError, match="may come back after a restart"):
        tier.purge(b"z" * 32)
    tier.call_came_back()
    assert [found.block for found in tier.records()] == [0]


def test_a_read_that_a_store_refused_says_nothing_against_what_is_there(open_mover, leavable):
    mover = open_mover(leavable)
    leavable.answer = lambda count: np.zeros(count, bool)
    let_go(leavable, 3)
    assert outcome(mover.submit(moves_of((1, DISK, HOST, 0, 0))))[1:3] == ([False], [True])
    leavable.is_off = True
    assert outcome(mover.submit(moves_of((2, DISK, HOST, 0, 0))))[1:3] == ([False], [False])
    assert outcome(mover.submit(moves_of((3, HOST, DISK, 0, 0))))[1:3] == ([False], [True]), "a write is lost"


@pytest.mark.parametrize("line_of", ["a call into it does not come back", "does not answer in time"])
def test_who_is_interrupted_while_a_hang_is_logged_costs_nobody_the_result(open_tier, clock, monkeypatch, line_of):
    class Interrupted(logging.Handler):
        def emit(self, record):
            if line_of in record.getMessage():
                raise KeyboardInterrupt

    inside, go, read = threading.Event(), threading.Event(), Segments.read

    def stuck(*arguments):
        inside.set()
        assert go.wait(TIMEOUT_S)
        return read(*arguments)

    monkeypatch.setattr(Segments, "read", stuck)
    handler, log = Interrupted(), logging.getLogger("pagedkv.tiers")
    log.addHandler(handler)
    try:
        mover = Mover({HOST: HostTier(NUM, BLOCK_BYTES), DISK: open_tier()}, threads=1, clock=clock, hang_s=HANG_S,
                      describe=lambda moves: [name_of(0)] * moves.size)  # fmt: skip
        ticket = mover.submit(moves_of((1, DISK, HOST, 0, 0)))
        assert inside.wait(TIMEOUT_S)
        clock.now += HANG_S
        with pytest.raises(KeyboardInterrupt):
            ticket.results()
        assert ticket.wait(TIMEOUT_S)
        assert outcome(ticket) == ([1], [False], [False], [True])
    finally:
        log.removeHandler(handler)
        go.set()
        mover.close()


def test_who_only_looks_or_waits_for_room_gives_up_what_hangs_too(clock, leavable):
    mover = Mover({HOST: HostTier(NUM, BLOCK_BYTES), DISK: leavable}, threads=1, clock=clock, hang_s=HANG_S,
                  max_queued_blocks=1, describe=lambda moves: [name_of(0)] * moves.size)  # fmt: skip
    first = begun(mover, leavable, (1, DISK, HOST, 0, 0))
    second = mover.submit(moves_of((2, DISK, HOST, 1, 1)))
    assert not first.done()
    clock.now += HANG_S
    third = mover.submit(moves_of((3, DISK, HOST, 2, 2)))  # there is no room before the first is given up
    assert [first.done(), second.done(), third.done()] == [True] * 3
    let_go(leavable)
    assert until(lambda: leavable.told == [1, "back"])
    fourth = begun(mover, leavable, (4, DISK, HOST, 0, 0))
    clock.now += HANG_S
    assert fourth.wait(TIMEOUT_S)
    fifth = mover.submit(moves_of((5, DISK, HOST, 0, 0)))
    assert fifth.done()
    let_go(leavable)
    mover.close()


def test_a_store_that_raises_when_told_of_a_hang_costs_no_thread_and_no_result(open_mover, leavable, clock, caplog):
    def refuse(*_):
        raise OSError("no")

    leavable.call_hangs = leavable.call_came_back = refuse
    mover = open_mover(leavable)
    ticket = begun(mover, leavable, (1, DISK, HOST, 0, 0))
    clock.now += HANG_S
    assert ticket.done()
    let_go(leavable, 2)
    assert until(lambda: len([r for r in caplog.records if "told of a call that hangs" in r.message]) == 2)
    assert mover.submit(moves_of((2, DISK, HOST, 0, 0))).results()[1].all(), "by the same thread"


def test_two_threads_at_a_disk_of_two_megabytes_a_second_do_not_hang():
    block_bytes = 1 << 20
    tiers = {HOST: HostTier(400, block_bytes), DISK: HeldTier()}
    tiers[DISK].block_bytes = block_bytes
    for direction in ((HOST, DISK), (DISK, HOST)):
        sizes = [chosen.size for *_, chosen in cut(moves_of(*line(1, *direction, range(400))), tiers, 2)]
        assert sum(sizes) == 400
        assert 2 * max(sizes) * block_bytes < 2e6 * SHIPPED_HANG_S
    memory = [chosen.size for *_, chosen in cut(moves_of(*line(1, HOST, HOST, range(400), 0)), tiers, 2)]
    assert max(memory) > 2 * max(sizes), "between memories nothing hangs"


def test_work_that_takes_too_long_goes_on_alone_and_what_it_raises_in_time_is_raised():
    go, over = threading.Event(), threading.Event()

    def slow():
        assert go.wait(TIMEOUT_S)
        over.set()

    assert not ends_within(0, slow)
    go.set()
    assert over.wait(TIMEOUT_S)
    assert ends_within(TIMEOUT_S, lambda: None)
    with pytest.raises(ZeroDivisionError):
        ends_within(TIMEOUT_S, lambda: 1 // 0)


def test_an_interpreter_that_exits_while_a_call_hangs_ends():
    script = """
        import threading
        import numpy as np
        from pagedkv.tiers import HostTier, Mover

        class Stuck:
            name, num_blocks, block_bytes = "disk", 4, 64
            inside = threading.Event()

            def read(self, blocks, expected, arena, dst_blocks):
                self.inside.set()
                threading.Event().wait()

        mover = Mover({1: HostTier(4, 64), 2: Stuck()}, hang_s=0.05, describe=lambda moves: [None] * moves.size)
        moves = np.zeros(1, [(n, "i4") for n in ("transfer", "src_tier", "dst_tier", "src_block", "dst_block")])
        moves["src_tier"], moves["dst_tier"] = 2, 1
        mover.submit(moves)
        assert Stuck.inside.wait(60)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
