"""Prefixes and moves through ``pagedkv.h``: calls work, and refused ones change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv import c_api
from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree
from pagedkv.errors import DoubleRelease
from tests.c_api.native import ARGUMENT, BAD, BLOCKS, NIL, OK, RANGE, ROOM, STALE, STATE, call, out, tokens_of
from tests.core.helpers import below, cache, finish, make_room, nothing_changes, remember, single, sound, tiered, where

MOVE = c_api.struct("pagedkv_move")


def own(placement: Placement, tokens: Any, most: int = NIL, ns: int = 0) -> tuple[int, int, int]:
    """An owner, its blocks and how many of them lie below the device."""
    owner, found = out(), np.zeros(1, c_api.struct("pagedkv_found"))
    given = tokens_of(tokens)
    assert call("placement_acquire", placement, ns, given, len(given), most, owner, found) == OK
    assert found["blocked"][0] == NIL
    return int(owner[0]), int(found["num_blocks"][0]), int(found["num_cold"][0])


def taken(placement: Placement, room: int = 64) -> Any:
    moves, num = np.zeros(room, MOVE), out(np.int32)
    assert call("placement_take_moves", placement, moves, room, num) == OK
    return moves[: num[0]]


def completed(placement: Placement, transfers: Any, outcomes: Any) -> int:
    given, ends = np.array(transfers, np.int64), np.array(outcomes, np.uint8)
    return call("placement_complete", placement, given, ends, len(given), None)


def test_a_prefix_is_looked_up_and_owned() -> None:
    _, _, placement = single(2, 16)
    cache(placement, [1, 1, 2, 2, 3, 3])
    tokens, blocks, tiers, num = tokens_of([1, 1, 2, 2, 9]), out(np.int32, 4), out(np.uint8, 4), out()
    assert call("placement_match", placement, 0, tokens, 5, blocks, tiers, 4, num) == OK
    expected = placement.match(tokens)
    assert (num[0], blocks[:2].tolist(), tiers[:2].tolist()) == (2, expected[1].tolist(), [0, 0])
    owner, num_blocks, cold = own(placement, tokens)
    assert (num_blocks, cold, placement.stats()["owners"]) == (2, 0, 1)
    assert call("placement_path", placement, owner, blocks, tiers, 4, num) == OK
    assert (num[0], blocks[:2].tolist()) == (2, expected[1].tolist())
    assert call("placement_release", placement, owner) == OK
    assert placement.stats()["owners"] == 0
    assert own(placement, tokens, 1)[1] == 1
    assert own(placement, [])[1] == 0
    sound(placement)


def test_namespaces_share_nothing() -> None:
    _, _, placement = single(1, 16)
    cache(placement, [1, 2])
    ns, again, name = out(), out(), np.frombuffer(b"tenant", np.uint8)
    assert call("placement_namespace", placement, name, 6, ns) == OK
    assert call("placement_namespace", placement, name, 6, again) == OK
    assert ns[0] == again[0] == placement.tree.find(b"tenant") != 0
    assert own(placement, [1, 2], ns=int(ns[0]))[1] == 0
    assert call("placement_namespace", placement, None, 0, again) == OK
    assert again[0] == 0
    assert call("placement_namespace", placement, None, 1, again) == ARGUMENT
    assert call("placement_namespace", placement, name, 6, None) == ARGUMENT


def test_a_short_array_is_told_how_long_it_must_be() -> None:
    _, _, placement = single(1, 16)
    cache(placement, [1, 2, 3])
    tokens, blocks, tiers, num = tokens_of([1, 2, 3, 4, 5]), out(np.int32, 3), out(np.uint8, 3), out()
    owner, *_ = own(placement, tokens)
    with nothing_changes(placement):
        assert call("placement_match", placement, 0, tokens, 5, blocks, tiers, 2, num) == ROOM
        assert (num[0], blocks.tolist()) == (3, [BAD] * 3)
        assert call("placement_path", placement, owner, blocks, tiers, 2, num) == ROOM
        assert (num[0], blocks.tolist()) == (3, [BAD] * 3)
        assert call("placement_match", placement, 0, tokens, 5, blocks, tiers, 3, num) == OK
    assert blocks.tolist() == placement.match(tokens)[1].tolist()


def test_room_is_made_by_moves_that_the_caller_carries_out() -> None:
    _, _, placement = tiered(1, (4, 8))
    cache(placement, [1, 2, 3, 4])
    missing, flying = out(), out()
    assert call("placement_reserve", placement, 0, 3, missing) == OK
    assert missing[0] == 3
    moves = taken(placement)
    assert moves[["src_tier", "dst_tier"]].tolist() == [(0, 1)] * len(moves)
    assert call("placement_in_flight", placement, flying) == OK
    assert flying[0] == 1
    assert len(taken(placement)) == 0
    assert completed(placement, moves["transfer"], [1] * len(moves)) == OK
    assert call("placement_reserve", placement, 0, 3, missing) == OK
    assert missing[0] == 0
    assert where(placement, [1, 2, 3, 4])[-3:] == [1, 1, 1]
    sound(placement)


def test_a_prefix_below_the_device_comes_up_and_is_settled() -> None:
    placement = below()
    owner, num_blocks, cold = own(placement, [1, 2, 3, 4])
    started, needed, settled = out(np.int32), out(), out(np.int32)
    assert (num_blocks, cold) == (4, 4)
    assert call("placement_promote", placement, owner, started, needed) == OK
    assert (started[0], needed[0]) == (1, 4)
    moves = taken(placement)
    assert completed(placement, moves["transfer"][:1], [1]) == OK
    assert call("placement_settle", placement, owner, settled) == OK
    assert settled[0] == 4
    assert where(placement, [1, 2, 3, 4]) == [0] * 4
    sound(placement)


@pytest.mark.parametrize(("outcome", "again"), [(0, 0), (2, 4)])
def test_a_promotion_that_failed_is_settled_away_and_one_not_tried_can_be_hit(outcome: int, again: int) -> None:
    placement = below()
    owner, *_ = own(placement, [1, 2, 3, 4])
    call("placement_promote", placement, owner, out(np.int32), out())
    moves = taken(placement)
    outcomes = [1, 1, 1, 0] if outcome == 0 else [outcome] * 4
    assert completed(placement, moves["transfer"], outcomes) == OK
    settled = out(np.int32)
    assert call("placement_settle", placement, owner, settled) == OK
    assert settled[0] == 0
    assert own(placement, [1, 2, 3, 4])[1] == again


def test_moves_come_in_whole_transfers() -> None:
    _, _, placement = tiered(1, (8, 16))
    cache(placement, [1, 2, 3])
    cache(placement, [9, 8, 7, 6])
    make = out()
    assert call("placement_reserve", placement, 0, 8, make) == OK
    moves, num = np.zeros(8, MOVE), out(np.int32)
    with nothing_changes(placement):
        assert call("placement_take_moves", placement, moves, 2, num) == ROOM
        assert num[0] == 3
        assert call("placement_take_moves", placement, None, 0, num) == ROOM
        assert num[0] == 3
    assert call("placement_take_moves", placement, moves, 4, num) == OK
    assert num[0] == 3
    assert len(set(moves["transfer"][:3].tolist())) == 1
    rest = taken(placement)
    assert len(rest) == 4
    assert moves["transfer"][0] not in rest["transfer"]
    assert completed(placement, [*moves["transfer"][:3], *rest["transfer"]], [1] * 7) == OK
    sound(placement)


def test_a_transfer_that_was_not_handed_out_cannot_be_completed() -> None:
    def two_decided() -> Placement:
        _, _, placement = tiered(1, (8, 16))
        cache(placement, [1, 2, 3])
        cache(placement, [9, 8, 7])
        call("placement_reserve", placement, 0, 8, out())
        return placement

    ids = list(dict.fromkeys(taken(two_decided())["transfer"].tolist()))  # a twin's, which are the same
    placement = two_decided()
    assert taken(placement, 3)["transfer"].tolist() == [ids[0]] * 3
    given, bad = np.array(ids, np.int64), out(np.int32)
    with nothing_changes(placement):
        assert call("placement_complete", placement, given, np.ones(2, np.uint8), 2, bad) == STATE
        assert bad[0] == 1
    assert taken(placement)["transfer"].tolist() == [ids[1]] * 3
    assert completed(placement, ids, [1, 1]) == OK
    sound(placement)


def test_entries_for_a_transfer_count_together_and_a_stale_one_stops_all() -> None:
    _, _, placement = tiered(1, (8, 16))
    cache(placement, [1, 2, 3])
    cache(placement, [9, 8, 7])
    call("placement_reserve", placement, 0, 8, out())
    ids = list(dict.fromkeys(taken(placement)["transfer"].tolist()))
    bad, given = out(np.int32), np.array([ids[0], ids[1], 12345, ids[0]], np.int64)
    with nothing_changes(placement):
        assert call("placement_complete", placement, given, np.ones(4, np.uint8), 4, bad) == STALE
        assert bad[0] == 2
        assert call("placement_complete", placement, given, np.full(4, 3, np.uint8), 4, bad) == ARGUMENT
        assert bad[0] == 0
    assert completed(placement, [ids[0], ids[1], ids[0]], [1, 1, 0]) == OK
    assert sorted(map(len, (placement.match([1, 2, 3])[1], placement.match([9, 8, 7])[1]))) == [0, 3]
    assert completed(placement, [ids[0]], [1]) == STALE
    assert completed(placement, [], []) == OK
    sound(placement)


def test_blocks_are_allocated_and_inserted_for_engines_without_a_table() -> None:
    _, pool, placement = single(2, 4)
    cache(placement, [7, 7, 8, 8])
    ids, done, bad = out(np.int32, 4), out(np.int32), out(np.int32)
    assert call("placement_allocate", placement, 3, ids) == OK
    assert pool.counts()["cached"] == 1, "one of the cached blocks went for it"
    owner, num_blocks, _ = own(placement, [7, 7, 1, 1])
    assert num_blocks == 1
    tokens = tokens_of([1, 1, 2, 2])
    with nothing_changes(placement):
        for wrong, entry in (([ids[0], ids[0]], 1), ([ids[0], 99], 1), (placement.blocks_of(owner).tolist() * 2, 0)):
            assert call("placement_insert", placement, owner, tokens, tokens_of(wrong), 2, done, bad) == STATE
            assert bad[0] == entry
        assert call("placement_insert", placement, 77, tokens, ids, 2, done, bad) == STALE
        assert call("placement_allocate", placement, 1, ids[3:]) == BLOCKS
        assert call("placement_allocate", placement, 2**31 - 1, ids) == BLOCKS
    assert call("placement_insert", placement, owner, tokens, ids, 2, done, bad) == OK
    assert done[0] == 2
    assert len(placement.match([7, 7, 1, 1, 2, 2])[1]) == 3
    pool.free(ids[2:3])
    sound(placement)


def test_a_block_that_the_tree_has_is_adopted() -> None:
    _, pool, placement = single(1, 8)
    first = remember(placement, [1, 2])
    owner, ids = own(placement, [])[0], out(np.int32, 2)
    call("placement_allocate", placement, 2, ids)
    assert call("placement_insert", placement, owner, tokens_of([1, 2]), ids, 2, out(np.int32), None) == OK
    assert ids.tolist() == placement.blocks_of(first).tolist()
    assert pool.num_free == 6


def test_a_refused_call_on_prefixes_changes_nothing() -> None:
    placement = below((4, 8))
    cold, *_ = own(placement, [1, 2, 3, 4])
    blocks, tiers, num = out(np.int32, 8), out(np.uint8, 8), out()
    started, missing, tokens, owner = out(np.int32), out(), tokens_of([1, 2, 3, 4]), out()
    ids = placement.pools[0].alloc(2)
    gone, *_ = own(placement, [5])
    placement.release(gone)
    with nothing_changes(placement):
        assert call("placement_promote", placement, cold, started, missing) == BLOCKS
        assert (started[0], missing[0]) == (0, 4)
        for stale in (gone, -1, 2**62, 99):
            assert call("placement_promote", placement, stale, started, missing) == STALE
            assert call("placement_settle", placement, stale, started) == STALE
            assert call("placement_path", placement, stale, blocks, tiers, 8, num) == STALE
            assert call("placement_release", placement, stale) == STALE
        for ns in (-1, 12345, 2**40):
            assert call("placement_match", placement, ns, tokens, 4, blocks, tiers, 8, num) == RANGE
            assert call("placement_acquire", placement, ns, tokens, 4, NIL, owner, None) == RANGE
        for tier in (-1, 2, 4, 99):
            assert call("placement_reserve", placement, tier, 1, missing) == RANGE
    placement.pools[0].free(ids)


def test_arguments_of_prefixes_that_are_never_allowed_change_nothing() -> None:
    placement = below()
    owner, *_ = own(placement, [1])
    tokens, blocks, tiers, num = tokens_of([1, 2, 3, 4]), out(np.int32, 8), out(np.uint8, 8), out()
    small, ends = out(np.int32), np.ones(1, np.uint8)
    wrong: list[tuple[Any, ...]] = [
        ("placement_match", placement, 0, None, 4, blocks, tiers, 8, num),
        ("placement_match", placement, 0, tokens, -1, blocks, tiers, 8, num),
        ("placement_match", placement, 0, tokens, 4, None, tiers, 8, num),
        ("placement_match", placement, 0, tokens, 4, blocks, None, 8, num),
        ("placement_match", placement, 0, tokens, 4, blocks, tiers, -1, num),
        ("placement_match", placement, 0, tokens, 4, blocks, tiers, 8, None),
        ("placement_acquire", placement, 0, None, 4, NIL, num, None),
        ("placement_acquire", placement, 0, tokens, -1, NIL, num, None),
        ("placement_acquire", placement, 0, tokens, 4, -2, num, None),
        ("placement_acquire", placement, 0, tokens, 4, NIL, None, None),
        ("placement_promote", placement, owner, None, num),
        ("placement_promote", placement, owner, small, None),
        ("placement_settle", placement, owner, None),
        ("placement_path", placement, owner, None, tiers, 8, num),
        ("placement_path", placement, owner, blocks, None, 8, num),
        ("placement_path", placement, owner, blocks, tiers, -1, num),
        ("placement_path", placement, owner, blocks, tiers, 8, None),
        ("placement_reserve", placement, 0, -1, num),
        ("placement_reserve", placement, 0, 1, None),
        ("placement_take_moves", placement, None, 8, small),
        ("placement_take_moves", placement, blocks, -1, small),
        ("placement_take_moves", placement, blocks, 0, None),
        ("placement_complete", placement, None, ends, 1, None),
        ("placement_complete", placement, num, None, 1, None),
        ("placement_complete", placement, num, ends, -1, None),
        ("placement_in_flight", placement, None),
        ("placement_allocate", placement, -1, blocks),
        ("placement_allocate", placement, 1, None),
        ("placement_insert", placement, owner, None, blocks, 1, small, None),
        ("placement_insert", placement, owner, tokens, None, 1, small, None),
        ("placement_insert", placement, owner, tokens, blocks, -1, small, None),
        ("placement_insert", placement, owner, tokens, blocks, 1, None, None),
    ]
    with nothing_changes(placement):
        for name, *arguments in wrong:
            assert call(name, *arguments) == ARGUMENT, (name, arguments)
        for name, *arguments in wrong:
            assert call(name, 0, *arguments[1:]) == ARGUMENT, name
        assert call("placement_release", 0, owner) == ARGUMENT


def test_a_placement_is_made_and_deleted_without_python() -> None:
    options = np.zeros(1, c_api.struct("pagedkv_options"))
    options["block_size"], options["num_tiers"], options["blocks"] = 4, 2, [[8, 16, 0, 0]]
    policy = np.frombuffer(b"arc\0", np.uint8)
    options["policy"] = policy.ctypes.data
    handle, pool, other = out(), out(), out()
    assert call("placement_new", options, handle) == OK
    placement = int(handle[0])
    assert call("placement_pool", placement, 1, pool) == OK
    counts = np.zeros(1, c_api.struct("pagedkv_counts"))
    assert call("pool_counts", int(pool[0]), counts) == OK
    assert counts["capacity"][0] == 16
    for tier in (-1, 2):
        assert call("placement_pool", placement, tier, other) == RANGE
    assert call("placement_pool", placement, 0, None) == ARGUMENT
    assert call("placement_pool", 0, 0, other) == ARGUMENT
    for name, handle_of in (("placement_delete", placement), ("pool_delete", int(pool[0])), ("placement_delete", 0)):
        c_api.function(name)(handle_of)
    assert call("placement_new", options, None) == ARGUMENT
    assert call("placement_new", None, other) == ARGUMENT
    for field, value in (("block_size", 0), ("block_size", 257), ("num_tiers", 0), ("num_tiers", 5), ("blocks", -1)):
        wrong = options.copy()
        wrong[field] = value
        assert call("placement_new", wrong, other) == ARGUMENT, field
    unknown = np.frombuffer(b"clock\0", np.uint8)
    options["policy"] = unknown.ctypes.data
    assert call("placement_new", options, other) == ARGUMENT
    assert other[0] == BAD


def test_an_exception_of_a_signal_handler_is_a_code_and_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> bool:
        raise KeyboardInterrupt

    options = np.zeros(1, c_api.struct("pagedkv_options"))
    options["block_size"], options["num_tiers"], options["blocks"] = 4, 1, [[8, 0, 0, 0]]
    monkeypatch.setattr("pagedkv._core.c_api.api.policy_needs_chain", interrupted)
    handle = out()
    assert call("placement_new", options, handle) == STATE
    assert handle[0] == BAD


def test_a_placement_of_python_is_the_same_one() -> None:
    handle = out()
    placement = Placement(RadixTree(1), [BlockPool(4)])
    assert call("placement_of", id(placement), handle) == OK
    assert call("placement_of", id(placement.tree), out()) == ARGUMENT
    assert call("placement_of", 0, out()) == ARGUMENT
    assert call("placement_of", id(placement), None) == ARGUMENT
    cache(placement, [1, 2])
    assert own(int(handle[0]), [1, 2])[1] == 2  # type: ignore[arg-type]
    c_api.function("placement_delete")(int(handle[0]))
    assert placement.stats()["owners"] == 1


def test_a_match_that_a_transfer_ends_early_names_it() -> None:
    placement = below()
    make_room(placement, 4)
    owner, *_ = own(placement, [1, 2, 3, 4])
    call("placement_promote", placement, owner, out(np.int32), out())
    call("placement_release", placement, owner)
    other, found = out(), np.zeros(1, c_api.struct("pagedkv_found"))
    tokens = tokens_of([1, 2])
    assert call("placement_acquire", placement, 0, tokens, 2, NIL, other, found) == OK
    (transfer,) = set(finish(placement)["transfer"].tolist())
    assert found["blocked"][0] == transfer


@pytest.mark.parametrize("n", [2**30 + 1, 2**62, 2**63 - 1, (2**64 + 4) // 5])
def test_more_tokens_than_a_row_can_have_are_refused(n: int) -> None:
    _, _, placement = single(1, 16)
    tokens, blocks, tiers, num, owner = tokens_of([1]), out(np.int32, 4), out(np.uint8, 4), out(), out()
    assert call("placement_match", placement, 0, tokens, n, blocks, tiers, 4, num) == ARGUMENT
    assert call("placement_acquire", placement, 0, tokens, n, -1, owner, None) == ARGUMENT


def test_zero_names_no_owner_though_a_row_has_one() -> None:
    """A caller's zeroed memory must not let go of a row's own prefix."""
    _, _, placement = single(1, 16)
    table = BlockTable(placement, 4)
    row, _ = table.open([1, 2, 3])
    with nothing_changes((table, [row])):
        assert call("placement_release", placement, 0) == STALE
        with pytest.raises(DoubleRelease):
            placement.release(0)
