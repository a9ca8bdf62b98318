"""Arguments whose conversion runs foreign code.

That code may call back in, change what is being read, lie, or fail.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree
from pagedkv.errors import InvalidArgument, PagedKVError, WrongType
from pagedkv.spec.sizes import Blocks, Bytes
from tests.core.helpers import cache, nothing_changes, remember, single, sound


class Calling:
    """An integer that calls a function whenever it is read."""

    def __init__(self, value: int, call: Callable[[], Any]) -> None:
        self.value, self.call = value, call

    def __index__(self) -> int:
        self.call()
        return self.value


class CallingArray:
    """An array that calls a function whenever it is read."""

    def __init__(self, values: Any, call: Callable[[], Any]) -> None:
        self.values, self.call = values, call

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.call()
        return np.array(self.values, dtype)


class Returning:
    """Its ``__index__`` returns what no index is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> Any:
        return self.value


class Liar(int):
    """An int that compares as it likes."""

    def __le__(self, other: object) -> bool:
        return True

    __lt__ = __ge__ = __gt__ = __le__


def test_ids_that_call_the_pool_back_see_it_before_the_call() -> None:
    pool = BlockPool(8)
    ids = pool.alloc(3).tolist()
    seen = []

    def look() -> None:
        pool.check_integrity()
        seen.append(pool.num_free)

    pool.free([Calling(i, look) for i in ids])
    assert seen == [5, 5, 5]
    assert pool.num_free == 8
    pool.check_integrity()


def test_ids_that_free_themselves_while_they_are_read_are_freed_once() -> None:
    pool = BlockPool(8)
    ids = pool.alloc(3).tolist()
    with pytest.raises(PagedKVError):
        pool.free([Calling(ids[0], lambda: pool.free(ids[:1])), ids[1]])
    assert pool.dump()["refs"] == {ids[1]: 1, ids[2]: 1}
    pool.check_integrity()


def test_an_array_that_allocates_while_it_is_read_loses_nothing() -> None:
    pool = BlockPool(8)
    ids = pool.alloc(3)
    taken: list[int] = []
    pool.free(CallingArray(ids, lambda: taken.extend(pool.alloc(2).tolist())))
    assert sorted(pool.dump()["refs"]) == sorted(taken)
    pool.check_integrity()


def test_a_count_that_grows_the_pool_while_it_is_read_is_served_after_it() -> None:
    pool = BlockPool(0, max_blocks=20, chunk=5)
    got = pool.alloc(Calling(3, lambda: pool.alloc(9)))
    assert len(got) == 3
    assert len(pool.dump()["refs"]) == 12
    pool.check_integrity()


def test_tokens_that_use_the_placement_while_they_are_read() -> None:
    _, pool, placement = single(1, 16)
    cache(placement, [1, 2, 3])

    def use() -> None:
        cache(placement, [7, 8])
        placement.reserve(12)

    owner, matched = placement.acquire([Calling(1, use), 2, Calling(3, use), 4])
    sound(placement)
    tail = CallingArray([9, 9], use)
    blocks = pool.alloc(2)
    assert placement.insert(owner, tail, blocks) == 2
    assert placement.blocks_of(owner).size == matched + 2
    placement.release(owner)
    sound(placement)


def test_an_owner_released_while_the_tokens_for_it_are_read_is_stale() -> None:
    _, pool, placement = single(1, 16)
    owner = remember(placement, [1, 2])
    blocks = pool.alloc(1)
    with pytest.raises(PagedKVError):
        placement.insert(owner, [Calling(3, lambda: placement.release(owner))], blocks)
    assert pool.refs(blocks).tolist() == [1]
    sound(placement)


def test_a_row_released_while_its_tokens_are_read_is_stale() -> None:
    table = BlockTable(BlockPool(16), 4, block_size=2)
    row, other = table.open([1, 2, 3])[0], table.open([5])[0]
    with pytest.raises(PagedKVError):
        table.append([row, other], [Calling(3, lambda: table.release(row)), 4])
    with pytest.raises(PagedKVError):
        table.extend(other, CallingArray([1, 2], lambda: table.release(other)))
    assert table.num_rows == 0
    sound(table)


def test_rows_stepped_while_their_lengths_are_read() -> None:
    table = BlockTable(BlockPool(16), 4, block_size=2)
    row = table.open([1, 2, 3])[0]

    def step() -> None:
        table.step([row])
        table.commit([row])

    with pytest.raises(InvalidArgument):
        table.step([row], [Calling(2, step)])
    assert table.info(row) == (3, 3, 2, 0)
    sound(table)


@pytest.mark.parametrize("change", ["clear", "shrink", "grow"])
def test_a_list_that_changes_its_length_while_it_is_read_is_refused(change: str) -> None:
    pool = BlockPool(64)
    ids: list[Any] = pool.alloc(50).tolist()

    def meddle() -> None:
        if change == "grow":
            ids.extend(range(10_000))
        else:
            del ids[0 if change == "clear" else 25 :]

    ids[20] = Calling(20, meddle)
    with nothing_changes(pool), pytest.raises(InvalidArgument, match="changed its length"):
        pool.free(ids)


def test_a_list_whose_items_change_while_it_is_read_is_read_as_it_is_then() -> None:
    pool = BlockPool(8)
    ids: list[Any] = pool.alloc(4).tolist()

    def swap() -> None:
        ids[3] = 99

    ids[1] = Calling(1, swap)
    with nothing_changes(pool), pytest.raises(InvalidArgument, match="block 99"):
        pool.free(ids)


def test_an_error_in_foreign_code_comes_through_and_changes_nothing() -> None:
    pool = BlockPool(8)
    pool.alloc(2)
    _, _, placement = single()

    def fail() -> None:
        raise RuntimeError("foreign")

    with nothing_changes(pool, placement):
        for call in (pool.free, pool.incref, pool.refs, placement.match, placement.acquire, RadixTree.tokens):
            for argument in ([0, Calling(1, fail)], CallingArray([0, 1], fail)):
                with pytest.raises(RuntimeError, match="foreign"):
                    call(argument)
        with pytest.raises(RuntimeError, match="foreign"):
            pool.alloc(Calling(1, fail))


@pytest.mark.parametrize("value", ["1", 1.0, None, [], float("nan")])
def test_an_index_that_returns_no_integer_is_of_the_wrong_type(value: Any) -> None:
    pool = BlockPool(8)
    pool.alloc(2)
    _, _, placement = single()
    with nothing_changes(pool, placement):
        for call in (pool.free, pool.refs, placement.match):
            with pytest.raises(WrongType):
                call([0, Returning(value)])
        for call in (pool.alloc, pool.reserve, placement.release, placement.reserve):
            with pytest.raises(WrongType):
                call(Returning(value))


@pytest.mark.parametrize("value", [-3, 2**33, -(2**40)])
def test_an_integer_that_lies_about_its_size_is_read_by_its_value(value: int) -> None:
    pool = BlockPool(8)
    pool.free(pool.alloc(4))
    _, _, placement = single()
    with nothing_changes(pool, placement):
        for call in (pool.alloc, pool.reserve, pool.unreserve, placement.reserve, lambda n: pool.free([n, n])):
            with pytest.raises((PagedKVError, MemoryError)):
                call(Liar(value))


def test_an_index_that_pretends_to_be_an_integer_cannot_empty_the_list_behind_the_check() -> None:
    script = """
from pagedkv.core import BlockPool
from pagedkv.errors import PagedKVError
class Pretender:
    __ge__ = __le__ = lambda self, other: True
    def __int__(self):
        ids.clear()
        return 5
    __index__ = __int__
class Index:
    def __index__(self):
        return Pretender()
ids = [Index(), *range(100_000)]
try:
    BlockPool(8).refs(ids)
except PagedKVError:
    pass
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_a_finaliser_that_calls_back_in_never_waits_for_itself() -> None:
    """The collector may run at any allocation.

    If the core allocated under the mutex, this test would hang.
    """
    _, _, placement = single(2, 64, event_words=4096)
    table = BlockTable(placement, 8)
    calls = 0

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            nonlocal calls
            calls += 1
            placement.stats()
            placement.pools[0].counts()  # type: ignore[union-attr]
            placement.match([1, 2, 3, 4])

    was = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for i in range(40):
            Cycle()
            row = table.open([1, 2, 3, 4, 5, i])[0]
            table.step([row])
            table.commit([row])
            table.release(row)
            use_everything(placement)
            sound(table, placement)
    finally:
        gc.set_threshold(*was)
    gc.collect()
    assert calls == 40


def use_everything(placement: Placement) -> None:
    owner, _ = placement.acquire([1, 2, 3, 4])
    placement.release(placement.share(owner))
    placement.set_retention(owner, 60, 10)
    placement.expire(20)
    placement.promote(owner)
    placement.settle(owner)
    placement.release(owner)
    placement.take_moves()
    placement.complete([], [])
    placement.drain_events()
    placement.set_quota(0, 30)
    placement.reserve(10)
    placement.clear()
    placement.dump()
    placement.tree.prefixes()


@pytest.mark.parametrize("dtype", [[("a", np.int64)], "V4", "U3", "M8[s]"])
def test_an_empty_array_of_no_numbers_is_of_the_wrong_type(dtype: Any) -> None:
    """NumPy makes floats of an empty list, so emptiness alone says nothing.

    The core refuses a dtype that can hold no token.
    """
    tree = RadixTree(4, 1)
    assert tree.tokens([]).size == 0
    with pytest.raises(WrongType, match="dimension of integers"):
        tree.tokens(np.zeros(0, dtype))


def test_a_number_of_bytes_is_no_number_of_blocks_tokens_or_rows() -> None:
    pool, tree = BlockPool(8), RadixTree(4)
    calls: dict[str, Callable[[Any], object]] = {
        "num_blocks": BlockPool,
        "max_blocks": lambda n: BlockPool(1, max_blocks=n),
        "watermark": lambda n: BlockPool(8, watermark=n),
        "n": pool.alloc,
        "pin_budget": lambda n: Placement(tree, [BlockPool(8)], pin_budget=n),
        "block_size": RadixTree,
        "max_sequences": lambda n: BlockTable(pool, n, block_size=4),
        "ids": lambda n: pool.free([n]),
    }
    for name, call in calls.items():
        with pytest.raises(WrongType, match=rf"^{name}\b.* is not in bytes: write a plain int, not Bytes\(3\)"):
            call(Bytes(3))
    assert pool.num_free == 8


def test_a_number_of_blocks_counts_blocks_and_nothing_else() -> None:
    pool = BlockPool(Blocks(8), max_blocks=Blocks(9), watermark=Blocks(1))
    assert pool.counts()["capacity"] == 8
    assert len(pool.alloc(Blocks(3))) == 3
    for call in (RadixTree, lambda n: BlockTable(pool, n, block_size=4), lambda n: BlockTable(pool, block_size=n)):
        with pytest.raises(WrongType, match=r"is not in blocks: write a plain int, not Blocks\(4\)"):
            call(Blocks(4))
