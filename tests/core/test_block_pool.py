"""BlockPool: ids, reference counts, generations, growth, reservations.

A call that fails changes nothing.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from pagedkv.core import BlockPool
from pagedkv.errors import DoubleRelease, InvalidArgument, OutOfBlocks, StaleHandle, WrongType
from tests.core.helpers import DAMAGED_IDS, TOO_LARGE, kind, nothing_changes, single, struct_of

LIMIT = 2**31 - 1


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    c = pool.counts()
    assert c["free"] + c["live"] + c["cached"] == c["capacity"]
    return c["capacity"], c["free"], c["live"], c["cached"]


def test_allocated_blocks_are_distinct_and_have_one_reference_each() -> None:
    pool = BlockPool(5)
    ids = pool.alloc(3)
    assert ids.dtype == np.int32
    assert len(set(ids.tolist())) == 3
    assert pool.refs(ids).tolist() == [1, 1, 1]
    assert counts(pool) == (5, 2, 3, 0)
    pool.free(ids)
    assert counts(pool) == (5, 5, 0, 0)
    pool.check_integrity()


def test_nothing_asked_is_nothing_given() -> None:
    pool = BlockPool(0)
    with nothing_changes(pool):
        assert pool.alloc(0).tolist() == []
        pool.free([])
        pool.incref(np.empty(0, np.int32))
        assert pool.refs([]).tolist() == []
        assert pool.check(pool.handles([])).tolist() == []
        pool.reserve(0)
        pool.unreserve(0)
        assert pool.alloc_reserved(0).tolist() == []


def test_a_freed_block_is_handed_out_again_before_a_fresh_one() -> None:
    pool = BlockPool(8)
    first, second = pool.alloc(2)
    pool.free([first])
    assert pool.alloc(1).tolist() == [first]
    assert second not in pool.alloc(6)
    pool.check_integrity()


def test_asking_for_more_than_there_is_says_who_holds_the_rest_and_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.alloc(3)
    with nothing_changes(pool), pytest.raises(OutOfBlocks) as raised:
        pool.alloc(2)
    error = raised.value
    assert (error.asked, error.free, error.evictable, error.held) == (2, 1, 0, 3)
    assert "asked for 2 blocks" in str(error)


def test_a_growing_pool_grows_by_whole_chunks_of_512_up_to_its_maximum() -> None:
    pool = BlockPool(0, max_blocks=1200)
    address = pool.address
    capacities = []
    for n in (1, 511, 1, 600, 87):
        pool.alloc(n)
        capacities.append(pool.capacity)
        pool.check_integrity()
    assert capacities == [512, 512, 1024, 1200, 1200]
    with nothing_changes(pool), pytest.raises(OutOfBlocks):
        pool.alloc(1)
    assert pool.address == address
    assert pool.max_blocks == len(pool) == 1200


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_growth_covers_a_request_of_several_chunks(chunk: int) -> None:
    pool = BlockPool(2, max_blocks=50, chunk=chunk)
    pool.alloc(12)
    assert 12 <= pool.capacity <= 50
    assert pool.capacity == 50 or (pool.capacity - 2) % chunk == 0
    assert pool.num_available == 38
    assert pool.num_free == pool.capacity - 12
    pool.check_integrity()


@pytest.mark.parametrize("num_blocks", [0, 5])
def test_a_chunk_as_large_as_int32_grows_to_the_maximum(num_blocks: int) -> None:
    pool = BlockPool(num_blocks, max_blocks=10, chunk=LIMIT)
    pool.alloc(num_blocks + 2)
    assert pool.capacity == 10
    pool.check_integrity()


def test_a_fixed_pool_does_not_grow() -> None:
    pool = BlockPool(3)
    pool.alloc(3)
    with pytest.raises(OutOfBlocks):
        pool.alloc(1)
    assert pool.capacity == pool.max_blocks == 3


def test_a_block_stays_owned_until_every_reference_is_given_back() -> None:
    pool = BlockPool(2)
    (block,) = pool.alloc(1).tolist()
    pool.incref([block, block])
    pool.free([block, block])
    assert pool.refs([block]).tolist() == [1]
    assert counts(pool) == (2, 1, 1, 0)
    pool.free([block])
    assert counts(pool) == (2, 2, 0, 0)
    pool.check_integrity()


def test_the_same_id_twice_in_one_free_counts_twice() -> None:
    pool = BlockPool(4)
    a, b = pool.alloc(2).tolist()
    with nothing_changes(pool), pytest.raises(DoubleRelease, match=r"entry 2 of 3"):
        pool.free([a, b, a])
    pool.incref([a])
    pool.free([a, b, a])
    assert counts(pool) == (4, 4, 0, 0)
    pool.check_integrity()


def test_double_release_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    ids = pool.alloc(2)
    pool.free(ids)
    with nothing_changes(pool), pytest.raises(DoubleRelease):
        pool.free(ids)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("bad", [-1, 4, 100, LIMIT, -(2**31)])
def test_an_id_that_was_never_handed_out_undoes_the_whole_call(position: int, bad: int) -> None:
    pool = BlockPool(100)
    ids = pool.alloc(4).tolist()
    ids[position] = bad
    with nothing_changes(pool):
        for call in (pool.free, pool.incref):
            with pytest.raises(InvalidArgument, match=f"entry {position} of 4"):
                call(ids)
    if not 0 <= bad < 100:
        with pytest.raises(InvalidArgument):
            pool.refs(ids)
        with pytest.raises(InvalidArgument):
            pool.handles(ids)


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(4)
    a, b = pool.alloc(2).tolist()
    pool.free([b])
    with nothing_changes(pool), pytest.raises(StaleHandle, match="entry 1"):
        pool.incref([a, b])


@pytest.mark.parametrize(("start", "ids"), [(LIMIT, [0]), (LIMIT - 1, [0, 0]), (LIMIT - 2, [1, 0, 0, 1, 0])])
def test_a_count_past_31_bits_is_refused_and_undone(start: int, ids: list[int]) -> None:
    pool = BlockPool(4)
    pool.alloc(2)
    struct_of(pool).refs[0] = start
    with nothing_changes(pool), pytest.raises(InvalidArgument, match="references"):
        pool.incref(ids)
    struct_of(pool).refs[0] = 1
    pool.check_integrity()


def test_a_count_reaches_31_bits_and_comes_back() -> None:
    pool = BlockPool(1)
    (block,) = pool.alloc(1).tolist()
    struct_of(pool).refs[block] = LIMIT - 1
    pool.incref([block])
    assert pool.refs([block]).tolist() == [LIMIT]
    pool.free([block])
    assert pool.refs([block]).tolist() == [LIMIT - 1]


def test_a_handle_is_stale_once_its_block_was_freed_even_when_it_is_owned_again() -> None:
    pool = BlockPool(2)
    ids = pool.alloc(2)
    handles = pool.handles(ids)
    assert pool.check(handles).tolist() == ids.tolist()
    pool.free(ids[:1])
    with pytest.raises(StaleHandle):
        pool.check(handles[:1])
    assert pool.check(handles[1:]).tolist() == [ids[1]]
    assert pool.alloc(1).tolist() == [ids[0]]
    with nothing_changes(pool), pytest.raises(StaleHandle, match="entry 0"):
        pool.check(handles)
    assert pool.check(pool.handles(ids)).tolist() == ids.tolist()


def test_a_handle_survives_while_somebody_still_owns_the_block() -> None:
    pool = BlockPool(1)
    ids = pool.alloc(1)
    handles = pool.handles(ids)
    pool.incref(ids)
    pool.free(ids)
    assert pool.check(handles).tolist() == ids.tolist()


@pytest.mark.parametrize("forged", [-1, 99, 1 << 32, LIMIT, -(2**63), 2**63 - 1])
def test_a_forged_handle_is_stale(forged: int) -> None:
    pool = BlockPool(4)
    pool.alloc(1)
    with pytest.raises(StaleHandle):
        pool.check([forged])


def test_a_reservation_keeps_blocks_from_others() -> None:
    pool = BlockPool(4)
    pool.reserve(3)
    assert pool.num_available == 1
    with nothing_changes(pool):
        with pytest.raises(OutOfBlocks):
            pool.alloc(2)
        with pytest.raises(OutOfBlocks):
            pool.reserve(2)
        with pytest.raises(DoubleRelease):
            pool.unreserve(4)
        with pytest.raises(InvalidArgument):
            pool.alloc_reserved(4)
    assert len(pool.alloc(1)) == 1
    assert len(pool.alloc_reserved(2)) == 2
    pool.unreserve(1)
    assert pool.counts()["reserved"] == 0
    assert len(pool.alloc(1)) == 1
    pool.check_integrity()


def test_the_last_blocks_under_the_watermark_are_never_handed_out() -> None:
    pool = BlockPool(4, watermark=2)
    assert pool.num_available == 2
    ids = pool.alloc(2)
    with nothing_changes(pool), pytest.raises(OutOfBlocks):
        pool.alloc(1)
    pool.free(ids)
    assert pool.num_available == pool.num_obtainable == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((-1, {}), InvalidArgument),
        ((2**31, {}), InvalidArgument),
        ((10**30, {}), InvalidArgument),
        ((1.5, {}), WrongType),
        ((float("nan"), {}), WrongType),
        (("8", {}), WrongType),
        ((None, {}), WrongType),
        ((True, {}), WrongType),
        (([8], {}), WrongType),
        ((8, {"max_blocks": 7}), InvalidArgument),
        ((8, {"max_blocks": -1}), InvalidArgument),
        ((8, {"chunk": 0}), InvalidArgument),
        ((8, {"chunk": 1.0}), WrongType),
        ((8, {"watermark": 9}), InvalidArgument),
        ((8, {"watermark": -1}), InvalidArgument),
    ],
)
def test_a_pool_of_an_impossible_size_is_refused(arguments: tuple[Any, dict[str, Any]], error: type) -> None:
    size, options = arguments
    with pytest.raises(error):
        BlockPool(size, **options)


@pytest.mark.parametrize("call", ["alloc", "reserve", "unreserve", "alloc_reserved"])
@pytest.mark.parametrize("n", [-1, 2**31, 2**64, 1.0, float("nan"), "1", None, True, [1]])
def test_a_number_of_blocks_that_is_none_changes_nothing(call: str, n: Any) -> None:
    pool = BlockPool(4)
    pool.alloc(1)
    with nothing_changes(pool), pytest.raises((InvalidArgument, WrongType)):
        getattr(pool, call)(n)


@pytest.mark.parametrize("call", ["free", "incref", "refs", "handles"])
@pytest.mark.parametrize("ids", [*DAMAGED_IDS, *TOO_LARGE], ids=kind)
def test_ids_of_another_type_or_beyond_int32_change_nothing(call: str, ids: Any) -> None:
    pool = BlockPool(4)
    pool.alloc(2)
    with nothing_changes(pool), pytest.raises((WrongType, InvalidArgument)):
        getattr(pool, call)(ids)


def test_ids_may_come_in_any_integer_form() -> None:
    pool = BlockPool(8)
    wide = np.zeros(8, np.int32)
    wide[::4] = pool.alloc(2)
    read_only = wide[::4].copy()
    read_only.flags.writeable = False
    forms = [
        wide[::4],
        wide[::4][::-1],
        read_only,
        read_only.astype(np.int64),
        read_only.astype(np.uint8),
        read_only.astype(">i4"),
        tuple(read_only.tolist()),
        read_only.tolist(),
        list(read_only),
        range(2),
    ]
    for form in forms:
        pool.incref(form)
    assert pool.refs([0, 1]).tolist() == [1 + len(forms)] * 2
    assert read_only.tolist() == [0, 1]
    pool.check_integrity()


def test_blocks_that_the_tree_holds_are_out_of_bounds_for_free_and_incref() -> None:
    _, pool, placement = single(1, 4)
    owner, _ = placement.acquire([])
    placement.insert(owner, [7], pool.alloc(1))
    for _ in range(2):
        with nothing_changes(placement):
            with pytest.raises(DoubleRelease):
                pool.free([0])
            with pytest.raises(StaleHandle):
                pool.incref([0])
        if owner >= 0:
            placement.release(owner)
            owner = -1


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_agree_with_a_dictionary_of_counts(seed: int) -> None:
    rng = Random(seed)
    size = rng.randint(1, 12)
    pool = BlockPool(rng.randint(0, size), max_blocks=size, chunk=rng.randint(1, 4))
    refs: dict[int, int] = {}
    for _ in range(1500):
        what = rng.randrange(3)
        if what == 0:
            n = rng.randint(0, 4)
            if n <= size - len(refs):
                got = pool.alloc(n).tolist()
                assert len(set(got)) == n
                assert not refs.keys() & set(got)
                refs.update(dict.fromkeys(got, 1))
            else:
                with pytest.raises(OutOfBlocks):
                    pool.alloc(n)
            continue
        ids = [rng.randrange(-1, size + 1) for _ in range(rng.randint(0, 4))]
        if refs and rng.random() < 0.7:
            ids = rng.choices(sorted(refs), k=len(ids))
        after = dict(refs)
        for block in ids:
            after[block] = after.get(block, 0) + (1 if what == 1 else -1)
        if what == 1:
            possible = all(block in refs for block in ids)
            call = pool.incref
        else:
            possible = all(count >= 0 for count in after.values())
            call = pool.free
        if possible:
            call(ids)
            refs = {block: count for block, count in after.items() if count}
        else:
            with pytest.raises((DoubleRelease, StaleHandle, InvalidArgument)):
                call(ids)
        assert pool.dump()["refs"] == refs
    pool.check_integrity()


def test_a_pool_says_what_it_holds() -> None:
    pool = BlockPool(3)
    pool.alloc(1)
    assert repr(pool) == "<BlockPool 3 blocks: 2 free, 1 live, 0 cached>"
    assert len(pool) == 3
    assert pool.dump()["stack"] == []
