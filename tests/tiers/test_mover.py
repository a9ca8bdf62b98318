"""Moves in every direction carry the right bytes.

Tickets tell the truth about late, cancelled and failed ones.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import deque

import numpy as np
import pytest

from pagedkv.core import MOVE_DTYPE
from pagedkv.errors import ClosedError, InvalidArgument, TierError, WrongType
from pagedkv.tiers import DeviceTier, DiskTier, HostTier, Mover, Ticket
from pagedkv.tiers.mover import parts as parts_module
from pagedkv.tiers.mover import worker
from pagedkv.tiers.mover.work_queue import WorkQueue

from .conftest import BLOCK_BYTES, BLOCK_TOKENS, FINGERPRINT, bytes_of, name_of

DEVICE, HOST, DISK = 0, 1, 2
NUM = 20
TIMEOUT_S = 60


def moves_of(*rows):
    """Moves from (transfer, src tier, dst tier, src block, dst block)."""
    moves = np.zeros(len(rows), MOVE_DTYPE)
    for move, row in zip(moves, rows, strict=True):
        for name, value in zip(("transfer", "src_tier", "dst_tier", "src_block", "dst_block"), row, strict=True):
            move[name] = value
    return moves


def line(transfer, src, dst, blocks, shift=0):
    return [(transfer, src, dst, block, block + shift) for block in blocks]


class HeldTier:
    """A store whose calls wait until they are let go, and may raise."""

    name, num_blocks, block_bytes = "disk", NUM, BLOCK_BYTES

    def __init__(self):
        self.started, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.answer = lambda count: np.ones(count, bool)
        self.calls = []

    def write(self, blocks, records, arena, src_blocks):
        self.started.release()
        assert self.go.acquire(timeout=TIMEOUT_S)
        self.calls.append(blocks.tolist())
        return self.answer(blocks.size)

    def read(self, blocks, expected, arena, dst_blocks):
        return self.write(blocks, expected, arena, dst_blocks)

    def close(self):
        pass


@pytest.fixture
def small_parts(monkeypatch):
    """Two blocks a part, so that small batches use all threads."""
    monkeypatch.setattr(parts_module, "LEAST_PART_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(parts_module, "MOST_PART_BYTES", 2 * BLOCK_BYTES)


@pytest.fixture
def held():
    return HeldTier()


@pytest.fixture
def held_mover(held, small_parts):
    """One thread, a clock that stands still, and the tier that waits."""
    clock = [100.0]
    mover = Mover(
        {HOST: HostTier(NUM, BLOCK_BYTES), DISK: held}, threads=1, clock=lambda: clock[0],
        describe=lambda moves: [name_of(0)] * moves.size, max_queued_blocks=8,
    )  # fmt: skip
    mover.test_clock = clock
    yield mover
    for _ in range(100):
        held.go.release()
    mover.close(cancel=True)


def until(condition):
    """Give other threads the processor until `condition` holds, or a minute is over."""
    end = time.monotonic() + TIMEOUT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def let_go(held, calls=1):
    for _ in range(calls):
        held.go.release()


@pytest.fixture
def tiers(tmp_path):
    disk = DiskTier(tmp_path / "kv", NUM, BLOCK_BYTES, fingerprint=FINGERPRINT, block_tokens=BLOCK_TOKENS, shards=2)
    found = {DEVICE: DeviceTier(NUM, BLOCK_BYTES), HOST: HostTier(NUM, BLOCK_BYTES), DISK: disk}
    yield found
    disk.close()


def describe_by(content):
    """Records that follow from which number lies in which disk block."""

    def describe(moves):
        on_disk = np.where(moves["dst_tier"] == DISK, moves["dst_block"], moves["src_block"])
        return [name_of(content[block]) for block in on_disk.tolist()]

    return describe


def test_bytes_arrive_in_every_direction(tiers, small_parts):
    on_disk = {block: block % 7 for block in range(NUM)}
    numbers = np.arange(NUM) % 7
    content = np.stack([bytes_of(number) for number in numbers])
    legs = [(DEVICE, HOST), (HOST, DISK), (DISK, DEVICE), (DEVICE, DISK), (DISK, HOST), (HOST, DEVICE)]
    with Mover(tiers, describe=describe_by(on_disk)) as mover:
        tiers[DEVICE].arena[:] = content
        for src, dst in legs:
            if dst != DISK:
                tiers[dst].arena[:] = 0
            ids, ok = mover.submit(moves_of(*line(9, src, dst, range(NUM)))).results()
            assert (ids.tolist(), ok.tolist()) == ([9], [True])
            if dst != DISK:
                np.testing.assert_array_equal(tiers[dst].arena, content)
        tiers[DEVICE].arena[10:] = 0
        assert mover.submit(moves_of(*line(1, DEVICE, DEVICE, range(5), 12))).results()[1].all()
        np.testing.assert_array_equal(tiers[DEVICE].arena[12:17], content[:5])
        stats = mover.stats()
    expected = dict.fromkeys(legs, (NUM, NUM * BLOCK_BYTES, 0)) | {(DEVICE, DEVICE): (5, 5 * BLOCK_BYTES, 0)}
    assert {pair: (s.blocks, s.bytes, s.failed) for pair, s in stats.items()} == expected


def test_directions_mix_in_one_batch_and_scattered_blocks_land_where_they_should(tiers, small_parts):
    rng = np.random.default_rng(0)
    content = np.stack([bytes_of(number) for number in range(NUM)])
    tiers[DEVICE].arena[:], tiers[HOST].arena[:] = content, content[::-1]
    order = rng.permutation(NUM)
    batch = moves_of(
        *[(1, DEVICE, HOST, a, b) for a, b in zip(order[:9], order[9:18])],
        *[(2, HOST, DEVICE, a, b) for a, b in zip(order[:9], order[9:18])],
    )
    with Mover(tiers) as mover:
        assert mover.submit(rng.permutation(batch)).results()[1].all()
    np.testing.assert_array_equal(tiers[HOST].arena[order[9:18]], content[order[:9]])
    np.testing.assert_array_equal(tiers[DEVICE].arena[order[9:18]], content[::-1][order[:9]])


def test_one_bad_block_fails_its_transfer_and_no_other(tiers, small_parts):
    on_disk = {block: block for block in range(NUM)}
    with Mover(tiers, describe=describe_by(on_disk)) as mover:
        assert mover.submit(moves_of(*line(1, HOST, DISK, range(9)))).results()[1].all()
        on_disk[4] = 17
        ids, ok = mover.submit(
            moves_of(*line(30, DISK, HOST, [0, 1, 2]), *line(10, DISK, HOST, [3, 4, 5]), *line(20, DISK, HOST, [6]))
        ).results()
        assert dict(zip(ids.tolist(), ok.tolist())) == {10: False, 20: True, 30: True}
        assert (mover.stats()[DISK, HOST].blocks, mover.stats()[DISK, HOST].failed) == (6, 1)


def test_parts_get_smaller_towards_the_end_and_cover_every_move_once():
    ram = {DEVICE: DeviceTier(1000, 1 << 20), HOST: HostTier(1000, 1 << 20)}
    batch = moves_of(*line(1, DEVICE, HOST, range(500)), *line(2, HOST, DEVICE, range(500, 503)))
    cuts = list(parts_module.cut(batch, ram, threads=2))
    assert [(src, dst) for src, dst, _ in cuts] == [(DEVICE, HOST)] * (len(cuts) - 1) + [(HOST, DEVICE)]
    assert np.concatenate([chosen for _, _, chosen in cuts]).tolist() == list(range(503))
    sizes = [chosen.size for _, _, chosen in cuts[:-1]]
    assert sizes[0] == 64
    assert sizes[-2] == 4
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) < 25


def test_no_moves_are_done_at_once(tiers):
    done = []
    with Mover(tiers, on_done=done.append) as mover:
        ticket = mover.submit(np.zeros(0, MOVE_DTYPE))
        assert ticket.done()
        assert ticket.wait(0)
        assert [a.size for a in ticket.results()] == [0, 0]
        assert done == [ticket]


def test_a_ticket_is_not_done_before_its_last_part(held, held_mover):
    ticket = held_mover.submit(moves_of(*line(1, HOST, DISK, range(4))))
    assert held.started.acquire(timeout=TIMEOUT_S)
    assert not ticket.done()
    assert not ticket.wait(0)
    let_go(held)
    assert held.started.acquire(timeout=TIMEOUT_S)
    assert not ticket.done()
    let_go(held)
    assert ticket.wait(TIMEOUT_S)
    assert ticket.done()
    assert ticket.results()[1].tolist() == [True]


def test_cancel_drops_what_waits_and_settles_only_after_what_runs(held, held_mover):
    ticket = held_mover.submit(moves_of(*line(1, HOST, DISK, range(2)), *line(2, HOST, DISK, range(2, 6))))
    assert held.started.acquire(timeout=TIMEOUT_S)
    ticket.cancel()
    assert not ticket.done()  # a thread is still in the memory of transfer 1
    let_go(held)
    ids, ok = ticket.results()
    assert dict(zip(ids.tolist(), ok.tolist())) == {1: True, 2: False}
    assert held.calls == [[0, 1]]
    stats = held_mover.stats()[HOST, DISK]
    assert (stats.blocks, stats.cancelled, stats.late, stats.failed) == (2, 4, 0, 0)


def test_a_transfer_that_was_half_done_when_cancelled_is_not_ok(held, held_mover):
    ticket = held_mover.submit(moves_of(*line(5, HOST, DISK, range(4))))
    assert held.started.acquire(timeout=TIMEOUT_S)
    ticket.cancel()
    let_go(held)
    assert ticket.results()[1].tolist() == [False]


def test_what_has_not_started_by_its_deadline_is_late(held, held_mover):
    first = held_mover.submit(moves_of(*line(1, HOST, DISK, range(2))))
    assert held.started.acquire(timeout=TIMEOUT_S)
    late = held_mover.submit(moves_of(*line(2, HOST, DISK, range(2, 4))), deadline_s=5)
    in_time = held_mover.submit(moves_of(*line(3, HOST, DISK, range(4, 6))), deadline_s=5.5)
    held_mover.test_clock[0] += 5
    let_go(held, 2)
    assert held.started.acquire(timeout=TIMEOUT_S)  # the worker itself has judged `late`, before anybody waits for it
    assert [t.results()[1].tolist() for t in (first, late, in_time)] == [[True], [False], [True]]
    assert held.calls == [[0, 1], [4, 5]]
    assert held_mover.stats()[HOST, DISK].late == 2


def test_a_write_that_started_before_its_deadline_is_finished_after_it(held, held_mover):
    ticket = held_mover.submit(moves_of(*line(1, HOST, DISK, range(2))), deadline_s=5)
    assert held.started.acquire(timeout=TIMEOUT_S)
    held_mover.test_clock[0] += 20
    let_go(held)
    assert ticket.results()[1].tolist() == [True]


@pytest.mark.parametrize(
    "answer",
    [
        lambda count: 1 // 0, lambda count: sys.exit(3), lambda count: None,
        lambda count: np.ones(count + 1, bool), lambda count: np.ones(count),
    ],
)  # fmt: skip
def test_a_tier_that_raises_or_answers_nonsense_costs_its_blocks_and_one_log_line(held, held_mover, caplog, answer):
    held.answer = answer
    let_go(held, 2)
    for transfer in (1, 2):
        ticket = held_mover.submit(moves_of(*line(transfer, HOST, DISK, range(2))))
        assert ticket.results()[1].tolist() == [False]
    assert held_mover.stats()[HOST, DISK].failed == 4
    assert len([r for r in caplog.records if "host to disk: 2 blocks lost" in r.message]) == 1
    held.answer = lambda count: np.ones(count, bool)
    let_go(held)
    assert held_mover.submit(moves_of(*line(3, HOST, DISK, range(2)))).results()[1].tolist() == [True]


def test_a_tier_closed_under_the_mover_fails_the_moves_and_not_the_thread(tiers):
    with Mover(tiers, describe=describe_by({0: 0})) as mover:
        tiers[DISK].close()
        assert mover.submit(moves_of((1, HOST, DISK, 0, 0))).results()[1].tolist() == [False]
        assert mover.submit(moves_of((1, HOST, DEVICE, 0, 0))).results()[1].tolist() == [True]


def test_submit_waits_for_room_in_the_queue(held, held_mover):
    held_mover.submit(moves_of(*line(1, HOST, DISK, range(2))))
    assert held.started.acquire(timeout=TIMEOUT_S)
    held_mover.submit(moves_of(*line(2, HOST, DISK, range(2, 10))))
    assert held_mover.queued_blocks == 8
    through = threading.Event()

    def more():
        held_mover.submit(moves_of(*line(3, HOST, DISK, range(10, 12))))
        through.set()

    thread = threading.Thread(target=more)
    thread.start()
    assert not through.is_set()
    let_go(held)  # the second part of the queue starts: two blocks fewer wait
    assert through.wait(TIMEOUT_S)
    thread.join()
    let_go(held, 10)


def test_a_batch_larger_than_the_queue_is_taken_when_the_queue_is_empty(held, held_mover):
    ticket = held_mover.submit(moves_of(*line(1, HOST, DISK, range(NUM))))
    let_go(held, NUM)
    assert ticket.results()[1].tolist() == [True]


def test_a_submit_that_waits_for_room_is_told_when_the_mover_closes(held, held_mover):
    held_mover.submit(moves_of(*line(1, HOST, DISK, range(2))))
    assert held.started.acquire(timeout=TIMEOUT_S)
    full = held_mover.submit(moves_of(*line(2, HOST, DISK, range(2, 10))))
    told, waiting = [], threading.Event()

    def more():
        waiting.set()
        with pytest.raises(ClosedError):
            held_mover.submit(moves_of(*line(3, HOST, DISK, range(10, 12))))
        told.append(True)

    thread = threading.Thread(target=more)
    thread.start()
    assert waiting.wait(TIMEOUT_S)
    closer = threading.Thread(target=lambda: held_mover.close(cancel=True))
    closer.start()
    thread.join(TIMEOUT_S)
    let_go(held)
    closer.join(TIMEOUT_S)
    assert told == [True]
    assert full.results()[1].tolist() == [False]


def test_on_done_runs_once_per_ticket_and_may_submit(held, small_parts):
    seen, again = [], []

    def on_done(ticket):
        assert ticket.done()
        seen.append(ticket.results()[0].tolist())
        if len(seen) < 4:
            again.append(mover.submit(moves_of(*line(len(seen), DEVICE, HOST, range(NUM)))))
        if len(seen) == 2:
            with pytest.raises(InvalidArgument):
                mover.close()
            raise RuntimeError("the conductor stumbles")

    ram = {DEVICE: DeviceTier(NUM, BLOCK_BYTES), HOST: HostTier(NUM, BLOCK_BYTES)}
    with Mover(ram, on_done=on_done, threads=1, max_queued_blocks=1) as mover:
        assert mover.submit(moves_of(*line(0, DEVICE, HOST, range(NUM)))).wait(TIMEOUT_S)
        for number in range(3):
            assert again[number].wait(TIMEOUT_S)
    assert seen == [[0], [1], [2], [3]]


def test_close_finishes_the_queue_and_close_with_cancel_drops_it(held, held_mover):
    tickets = [held_mover.submit(moves_of(*line(n, HOST, DISK, [2 * n, 2 * n + 1]))) for n in range(3)]
    let_go(held, 3)
    held_mover.close()
    held_mover.close()
    assert all(ticket.results()[1].all() for ticket in tickets)
    with pytest.raises(ClosedError):
        held_mover.submit(moves_of((1, HOST, DISK, 0, 0)))

    mover = Mover({HOST: HostTier(NUM, BLOCK_BYTES), DISK: held}, threads=1, describe=lambda m: [name_of(0)] * m.size)
    for _ in range(3):
        assert held.started.acquire(timeout=TIMEOUT_S)
    runs = mover.submit(moves_of((1, HOST, DISK, 0, 0)))
    assert held.started.acquire(timeout=TIMEOUT_S)
    waits = mover.submit(moves_of((2, HOST, DISK, 1, 1)))
    closer = threading.Thread(target=lambda: mover.close(cancel=True))
    closer.start()
    assert until(lambda: waits.cancelled)
    let_go(held)
    closer.join(TIMEOUT_S)
    assert runs.results()[1].tolist() == [True]
    assert waits.results()[1].tolist() == [False]


def test_a_mover_nobody_holds_lets_its_threads_go(tiers):
    mover = Mover(tiers)
    threads = mover._queue.threads
    shared = weakref.ref(mover._queue)
    mover.submit(moves_of((1, HOST, DEVICE, 0, 0))).results()
    del mover
    gc.collect()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    del thread, threads
    gc.collect()
    assert shared() is None


def test_an_interpreter_that_exits_with_moves_in_flight_ends_cleanly():
    script = """
        import numpy as np
        from pagedkv.tiers import DeviceTier, HostTier, Mover
        tiers = {0: DeviceTier(64, 1 << 20), 1: HostTier(64, 1 << 20)}
        mover = Mover(tiers)
        moves = np.zeros(64, [(n, "i4") for n in ("transfer", "src_tier", "dst_tier", "src_block", "dst_block")])
        moves["dst_tier"] = 1
        moves["src_block"] = moves["dst_block"] = np.arange(64)
        for _ in range(20):
            mover.submit(moves)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_is_refused_and_can_still_exit(tiers):
    with Mover(tiers) as mover:
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                mover.submit(moves_of((1, HOST, DEVICE, 0, 0)))
            except TierError as problem:
                os.write(tell, str(problem).encode())
            finally:
                mover.close()
                os._exit(0)
        os.close(tell)
        os.waitpid(child, 0)
        assert b"forked child" in os.read(told, 500)
        os.close(told)
        assert mover.submit(moves_of((1, HOST, DEVICE, 0, 0))).results()[1].all()


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([(1, HOST, 3, 0, 0)], InvalidArgument), ([(1, -1, HOST, 0, 0)], InvalidArgument),
        ([(1, HOST, DEVICE, NUM, 0)], InvalidArgument), ([(1, HOST, DEVICE, 0, NUM)], InvalidArgument),
        ([(1, HOST, DEVICE, -1, 0)], InvalidArgument), ([(1, HOST, DEVICE, 0, -1)], InvalidArgument),
        ([(1, DISK, DISK, 0, 1)], InvalidArgument), ([(1, HOST, HOST, 4, 4)], InvalidArgument),
        ([(1, HOST, DEVICE, 0, 3), (2, HOST, DEVICE, 1, 3)], InvalidArgument),
        ([(1, HOST, DEVICE, 0, 3), (2, DEVICE, HOST, 3, 7)], InvalidArgument),
    ],
)  # fmt: skip
def test_moves_that_cannot_be_carried_out_are_refused_as_a_whole(tiers, rows, error):
    described = []
    with Mover(tiers, describe=described.append) as mover:
        with pytest.raises(error):
            mover.submit(moves_of((9, DEVICE, HOST, 15, 15), *rows))
        assert not described
        assert not mover.stats()
        assert mover.queued_blocks == 0


def test_what_is_no_array_of_moves_is_refused(tiers):
    with Mover(tiers) as mover:
        for wrong in (None, [], 7, np.zeros(3), np.zeros((1, 1), MOVE_DTYPE), np.zeros(2, [("transfer", "i8")])):
            with pytest.raises(WrongType):
                mover.submit(wrong)
        for deadline_s in (-1, float("nan"), "soon"):
            with pytest.raises(InvalidArgument):
                mover.submit(np.zeros(0, MOVE_DTYPE), deadline_s=deadline_s)


def test_a_store_needs_records_and_a_failing_describe_queues_nothing(tiers):
    batch = moves_of((1, HOST, DISK, 0, 0), (2, HOST, DEVICE, 1, 1))
    with Mover(tiers) as mover, pytest.raises(InvalidArgument, match="describe"):
        mover.submit(batch)
    with Mover(tiers, describe=lambda moves: []) as mover, pytest.raises(InvalidArgument, match="0 records"):
        mover.submit(batch)
    with Mover(tiers, describe=lambda moves: 1 // 0) as mover:
        with pytest.raises(ZeroDivisionError):
            mover.submit(batch)
        assert mover.queued_blocks == 0
        assert mover.submit(batch[1:]).results()[1].tolist() == [True]


def test_describe_is_asked_once_in_the_callers_thread_for_the_stored_moves_alone(tiers):
    asked = []

    def describe(moves):
        asked.append((threading.current_thread(), moves["dst_block"].tolist()))
        return [name_of(block) for block in moves["dst_block"].tolist()]

    with Mover(tiers, describe=describe) as mover:
        mover.submit(moves_of((1, HOST, DISK, 0, 5), (2, HOST, DEVICE, 1, 1), (3, DEVICE, DISK, 2, 6))).results()
    assert asked == [(threading.current_thread(), [5, 6])]


def test_without_threads_moves_wait_until_the_mover_is_closed(tiers):
    with Mover(tiers, threads=0, describe=lambda m: [name_of(0)] * m.size) as mover:
        assert not mover._queue.threads
        ticket = mover.submit(moves_of((0, HOST, DEVICE, 1, 2)))
        assert not ticket.wait(0.01)
        assert mover.queued_blocks == 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"threads": -1}, InvalidArgument), ({"threads": 65}, InvalidArgument), ({"threads": 1.5}, WrongType),
        ({"threads": True}, WrongType),
        ({"max_queued_blocks": 0}, InvalidArgument), ({"deadline_s": -1}, InvalidArgument),
        ({"deadline_s": float("nan")}, InvalidArgument),
    ],
)  # fmt: skip
def test_arguments_that_make_no_mover_are_refused(tiers, changes, error):
    before = threading.active_count()
    with pytest.raises(error):
        Mover(tiers, **changes)
    assert threading.active_count() == before


@pytest.mark.parametrize("tiers", [3, [1], {0: object()}])
def test_what_is_no_mapping_of_tiers_makes_no_mover(tiers):
    with pytest.raises(WrongType, match="mapping of numbers to tiers"):
        Mover(tiers)


def test_tiers_of_different_block_sizes_are_refused():
    with pytest.raises(InvalidArgument, match="block_bytes"):
        Mover({DEVICE: DeviceTier(2, 8), HOST: HostTier(2, 16)})
    with pytest.raises(InvalidArgument, match="block_bytes"):
        Mover({})


def test_many_threads_submitting_at_once_get_their_own_results(tiers, small_parts):
    content = {block: block for block in range(NUM)}
    tiers[HOST].arena[:] = np.stack([bytes_of(number) for number in range(NUM)])
    wrong = []

    def client(number):
        mine = range(number * 5, number * 5 + 5)
        for turn in range(15):
            for src, dst in ((HOST, DISK), (DISK, DEVICE)):
                ids, ok = mover.submit(moves_of(*line(100 * number + turn, src, dst, mine))).results()
                if ids.tolist() != [100 * number + turn] or not ok.all():
                    wrong.append((number, turn))
            if not np.array_equal(tiers[DEVICE].arena[mine], tiers[HOST].arena[mine]):
                wrong.append((number, turn))
            tiers[DEVICE].arena[mine] = 0

    with Mover(tiers, threads=3, describe=describe_by(content), max_queued_blocks=7) as mover:
        clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(TIMEOUT_S)
    assert not wrong


def test_moves_between_memories_do_not_wait_for_a_disk(tiers):
    """A step that needs a block waits for the host's memory, never for another step's load."""
    entered, go_on = threading.Event(), threading.Event()
    real = tiers[DISK].read

    def slow(*arguments):
        entered.set()
        assert go_on.wait(60)
        return real(*arguments)

    tiers[DISK].read = slow
    with Mover(tiers, threads=1, describe=lambda moves: [name_of(b) for b in moves["src_block"].tolist()]) as mover:
        loading = mover.submit(moves_of((1, DISK, HOST, 0, 5)))
        waiting = mover.submit(moves_of((2, DISK, HOST, 1, 6)))
        assert entered.wait(60)
        assert mover.submit(moves_of((3, DEVICE, HOST, 1, 1))).wait(60)
        assert not loading.done()
        assert not waiting.done()
        go_on.set()


def test_where_the_queue_cannot_grow_nothing_is_queued(held_mover):
    class Short(deque):
        def extend(self, parts):
            super().append(parts[0])
            raise MemoryError

    queue, told = held_mover._queue, []
    queued, queue.parts = queue.parts, Short(queue.parts)
    before = len(queue.parts), queue.queued_blocks
    with pytest.raises(MemoryError):
        held_mover.submit(moves_of(*line(1, HOST, DISK, range(4))), before=told.append)
    assert (len(queue.parts), queue.queued_blocks) == before
    assert len(told) == 1, "its caller had the ticket before"
    queue.parts = queued


@pytest.mark.parametrize("where", ["begin_call", "end_call", "is_off", "part_done"])
def test_a_worker_that_finds_no_memory_fails_its_part_and_goes_on(held, held_mover, monkeypatch, where):
    problems = [MemoryError()]

    def short_of_memory(real):
        def call(*arguments):
            if problems:
                raise problems.pop()
            return real(*arguments)

        return call

    home = {"part_done": Ticket, "is_off": worker}.get(where, WorkQueue)
    monkeypatch.setattr(home, where, short_of_memory(getattr(home, where)))
    let_go(held, 2)
    first = held_mover.submit(moves_of(*line(1, HOST, DISK, range(2))))
    assert first.wait(TIMEOUT_S)
    assert first.results()[1].tolist() == [where == "end_call"]  # which is made again
    assert not problems
    second = held_mover.submit(moves_of(*line(2, HOST, DISK, range(2))))
    assert second.wait(TIMEOUT_S)
    assert second.results()[1].tolist() == [True]
    assert until(lambda: held_mover._queue.busy == 0)


def test_a_part_that_is_told_of_twice_counts_once():
    done = []
    ticket = Ticket(np.array([1, 1, 2]), 2, None, done.append)
    ticket.part_done(np.array([0, 1]), np.ones(2, bool))
    ticket.part_done(np.array([0, 1]), None)
    assert not ticket.is_settled
    ticket.part_done(np.array([2]), np.ones(1, bool))
    assert ticket.is_settled
    assert ticket.results()[1].tolist() == [True, True]
    assert done == [ticket]
