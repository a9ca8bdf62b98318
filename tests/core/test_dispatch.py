"""A move from decision to end.

Who has it, who is told, and what becomes of moves that their thread lost.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pagedkv._core.dispatch import CLOSED, ENDED, NOT_YET, NOTHING, Dispatch
from pagedkv.core import MOVE_DTYPE, Placement, Tier
from pagedkv.errors import InvalidArgument, WrongType
from tests.core.helpers import below, cache, finish, make_room, sound, tiered, where

WATCHDOG_S = 60.0


def decided() -> tuple[Placement, Dispatch]:
    """Two blocks whose demotion is decided."""
    _, _, placement = tiered(1, (4, 8))
    dispatch = Dispatch(placement)
    cache(placement, [1, 2, 3, 4])
    assert placement.reserve(2) == 2
    return placement, dispatch


def end(dispatch: Dispatch, moves: np.ndarray, *, ok: bool = True, announce: bool = True) -> None:
    transfers = np.unique(moves["transfer"])
    flags = np.full(len(transfers), ok)
    dispatch.finish(transfers, flags, flags, announce=announce)


def test_moves_are_taken_once_and_ended_by_whoever_took_them() -> None:
    placement, dispatch = decided()
    assert dispatch.num_decided == 2
    taken = dispatch.take()
    assert taken is not None
    assert taken.moves.dtype == MOVE_DTYPE
    assert dispatch.take() is None
    assert placement.num_in_flight == 1
    end(dispatch, taken.moves)
    assert placement.num_in_flight == 0
    del taken  # of which nothing is left
    assert placement.match([1, 2, 3, 4])[0].tolist() == [0, 0, 1, 1]
    sound(placement)


def test_moves_that_were_taken_and_lost_are_given_up() -> None:
    placement, dispatch = decided()
    seen = dispatch.num_announced
    taken = dispatch.take()
    del taken
    assert placement.num_in_flight == 0
    assert dispatch.wait(seen, 0.0) == ENDED
    assert placement.reserve(2) == 0
    sound(placement)


def test_moves_given_up_where_a_thread_may_still_write_keep_their_destinations() -> None:
    placement, dispatch = decided()
    taken = dispatch.take()
    assert taken is not None
    blocks = np.ascontiguousarray(taken.moves["dst_block"])
    dispatch.give_up(taken.moves, keep=True)
    host = placement.pools[1]
    assert host is not None
    assert host.refs(blocks).tolist() == [1, 1]
    host.free(blocks)
    sound(placement)


def test_what_is_over_already_is_passed_over() -> None:
    placement, dispatch = decided()
    taken = dispatch.take()
    assert taken is not None
    end(dispatch, taken.moves)
    end(dispatch, taken.moves, ok=False)
    dispatch.give_up(taken.moves)
    assert dispatch.num_announced == 1
    sound(placement)


def test_a_caller_that_waits_is_told_what_there_is_to_wait_for() -> None:
    _, dispatch = decided()
    seen = dispatch.num_announced
    assert dispatch.wait(seen, 0.0) == NOT_YET
    taken = dispatch.take()
    assert taken is not None
    end(dispatch, taken.moves, announce=False)
    assert dispatch.is_telling()
    assert dispatch.wait(seen, 0.0) == NOT_YET
    dispatch.announce()
    assert not dispatch.is_telling()
    assert dispatch.wait(seen, 0.0) == ENDED
    assert dispatch.wait(dispatch.num_announced, 0.0) == NOTHING
    assert (dispatch.num_started, dispatch.under_way(0, 1)) == (1, 0)


def test_a_thread_that_waits_for_moves_hears_of_the_first_and_of_a_wake_and_of_the_end() -> None:
    _, _, placement = tiered(1, (4, 8))
    dispatch = Dispatch(placement)
    cache(placement, [1, 2, 3, 4])
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(dispatch.take(WATCHDOG_S) for _ in range(3)))
    dispatch.wake()
    thread.start()
    placement.reserve(2)
    while len(found) < 2:
        thread.join(0.01)
        assert thread.is_alive()
    dispatch.close()
    thread.join(WATCHDOG_S)
    assert [taken is None for taken in found] == [True, False, True]


def test_a_closed_dispatch_gives_up_what_was_not_taken_and_tells_those_that_wait() -> None:
    placement, dispatch = decided()
    seen = dispatch.num_announced
    taken = dispatch.take()
    placement.reserve(3)
    dispatch.close()
    assert placement.num_in_flight == 1
    assert dispatch.wait(dispatch.num_announced, 0.0) == CLOSED
    del taken
    assert dispatch.wait(seen, 0.0) == ENDED
    sound(placement)


def test_a_placement_has_one_dispatch_at_a_time() -> None:
    placement, dispatch = decided()
    with pytest.raises(InvalidArgument, match="already"):
        Dispatch(placement)
    del dispatch
    Dispatch(placement)
    with pytest.raises(WrongType):
        Dispatch(None)  # type: ignore[arg-type]
    with pytest.raises(WrongType):
        Dispatch(tiered(1, (4, 8))[2]).give_up(np.zeros(2))


def test_a_promotion_says_until_when_it_is_wanted() -> None:
    placement, dispatch = decided()
    taken = dispatch.take()
    assert taken is not None
    end(dispatch, taken.moves)
    owner, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(owner, 12345)
    taken = dispatch.take()
    assert taken is not None
    assert dispatch.until(int(taken.moves["transfer"][0])) == 12345
    end(dispatch, taken.moves)
    placement.release(owner)


def test_blocks_that_are_read_for_no_owner_are_counted_and_no_others() -> None:
    placement = below((8, 8))
    dispatch = Dispatch(placement)
    first, _ = placement.acquire([1, 2, 3, 4])
    second, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(first)
    placement.release(first)
    assert dispatch.num_unowned == 0, "the other one still has them"
    placement.release(second)
    assert dispatch.num_unowned == 4
    late, matched = placement.acquire([1, 2, 3, 4])
    assert (matched, dispatch.num_unowned) == (0, 4), "a match ends before blocks on their way"
    assert dispatch.num_coming == 0, "reads take blocks"
    finish(placement)
    assert dispatch.num_unowned == 0
    placement.release(late)
    sound(placement)


@pytest.mark.parametrize("copy_first", [True, False])
def test_a_copy_under_way_of_a_run_that_is_read_owns_nothing_of_it(copy_first: bool) -> None:
    _, _, placement = tiered(1, (4, 8, 8), closed=(False, False, True), write="evicted")
    cache(placement, [1, 2, 3, 4])
    make_room(placement, 4)
    dispatch = Dispatch(placement)
    nodes, lacking = placement.uncopied(Tier.DISK)
    assert lacking.tolist() == [4]
    placement.copy(nodes, Tier.DISK)
    owner, matched = placement.acquire([1, 2, 3, 4])
    placement.promote(owner)
    assert (matched, placement.num_in_flight, dispatch.num_unowned) == (4, 2, 0)
    placement.release(owner)
    assert (dispatch.num_unowned, dispatch.num_coming) == (4, 0)
    copy, read = dict.fromkeys(placement.take_moves()["transfer"].tolist())
    for transfer in (copy, read) if copy_first else (read, copy):
        assert dispatch.num_unowned == (0 if transfer == copy and not copy_first else 4)
        placement.complete([transfer], [True])
        sound(placement)
    assert (dispatch.num_unowned, where(placement, [1, 2, 3, 4])) == (0, [Tier.DEVICE] * 4)


def test_blocks_that_are_demoted_are_coming_and_those_that_are_copied_stay() -> None:
    _, _, placement = tiered(1, (6, 16), closed=(False, True), write="evicted")
    cache(placement, [1, 2, 3, 4])
    dispatch = Dispatch(placement)
    assert placement.reserve(3) == 1
    assert placement.num_in_flight == 2, "one block leaves, and those before it are copied"
    assert (dispatch.num_coming, dispatch.num_unowned) == (1, 0)
    dispatch.hold_up(1)
    assert dispatch.num_coming == 2, "a prefetch ends and lets go"
    dispatch.hold_up(-1)
    finish(placement)
    assert dispatch.num_coming == 0
    sound(placement)


def test_callers_wait_for_late_reads_until_they_would_hang() -> None:
    _, _, placement = tiered(1, (4, 8))
    dispatch = Dispatch(placement)
    seen = dispatch.num_announced
    assert dispatch.wait(seen, 0.0) == NOTHING
    dispatch.hold_late(3, WATCHDOG_S)
    assert (dispatch.num_unowned, dispatch.wait(seen, 0.0)) == (3, NOT_YET)
    thread = threading.Thread(target=dispatch.hold_late, args=(-1,))
    thread.start()
    assert dispatch.wait(seen, WATCHDOG_S) == ENDED
    thread.join()
    dispatch.hold_late(-2)
    assert (dispatch.num_unowned, dispatch.wait(dispatch.num_announced, 0.0)) == (0, NOTHING)
    dispatch.hold_late(1, WATCHDOG_S)
    dispatch.close()
    assert dispatch.wait(dispatch.num_announced, WATCHDOG_S) == NOTHING
    dispatch = Dispatch(tiered(1, (4, 8))[2])
    dispatch.hold_late(2, 0.0)
    assert dispatch.num_unowned == 0, "they hang"
    assert dispatch.wait(dispatch.num_announced, WATCHDOG_S) == NOTHING
