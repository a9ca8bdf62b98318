"""Calls of ``pagedkv.h`` from threads with and without the GIL, beside Python's calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv import c_api
from pagedkv.core import BlockPool, BlockTable
from tests.c_api.native import NIL, OK, Arrays, at, out, tokens_of
from tests.core.helpers import single, sound
from tests.reliability.crowd import restless, together

ROUNDS = 400


def holding_the_gil(name: str) -> Callable[..., Any]:
    """A call as compiled code that never lets go of the GIL makes it, Numba's for one."""
    function: Any = c_api.function(name)
    kind = ctypes.PYFUNCTYPE(function._restype_, *function._argtypes_)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return kind(address)


def test_threads_with_and_without_the_gil_share_a_pool() -> None:
    pool = BlockPool(64)
    handle = c_api.handle_of(pool)

    def native(take: Callable[..., Any], give: Callable[..., Any]) -> None:
        ids = np.zeros(8, np.int32)
        for i in range(3000):
            n = 1 + i % 8
            assert take(handle, n, at(ids)) == OK
            assert give(handle, at(ids), n, 0) == OK

    def python() -> None:
        for i in range(3000):
            pool.free(pool.alloc(1 + i % 8))

    without = (c_api.function("pool_alloc"), c_api.function("pool_free"))
    holding = (holding_the_gil("pool_alloc"), holding_the_gil("pool_free"))
    with restless():
        assert together([python, lambda: native(*without), lambda: native(*holding), lambda: native(*holding)]) == []
    assert pool.num_free == 64
    sound(pool)


def test_threads_with_and_without_the_gil_serve_rows_of_one_table() -> None:
    table = BlockTable(single(4, 128)[2], 8)
    handle = c_api.handle_of(table)

    def native(find: Callable[[str], Callable[..., Any]]) -> None:
        begin, step, commit, release = map(find, ("table_open", "table_step", "table_commit", "table_release"))
        for i in range(ROUNDS):
            tokens, row, cached, taken = tokens_of([*range(9), i]), out(), out(), out()
            arrays = Arrays(1, 4, 16)
            assert begin(handle, 0, at(tokens), 10, 1, NIL, at(row), at(cached)) == OK
            assert step(handle, at(row), 1, 0, 0, at(arrays.struct), 0) == OK
            assert commit(handle, at(row), 1, arrays.number, at(taken), 0) == OK
            assert release(handle, int(row[0]), 0) == OK

    def python() -> None:
        for i in range(ROUNDS):
            row, _ = table.open([*range(9), 1000 + i])
            step = table.step([row])
            table.commit([row], step.number)
            table.release(row)

    with restless():
        assert together([python, python, lambda: native(c_api.function), lambda: native(holding_the_gil)]) == []
    assert table.num_rows == 0
    assert len(table.placement.match(range(8))[1]) == 2
    sound(table, table.placement)


def test_a_call_that_holds_the_gil_lets_go_of_it_while_it_waits_for_the_mutex() -> None:
    """Python's step releases the GIL under the mutex, and needs it again to go on."""
    table = BlockTable(single(4, 1024)[2], 2)
    row, _ = table.open(range(4000))
    look, handle = holding_the_gil("placement_in_flight"), c_api.handle_of(table.placement)

    def python() -> None:
        for _ in range(5000):
            table.step([row])
            table.cancel([row])

    def native() -> None:
        flying = out()
        for _ in range(20_000):
            assert look(handle, at(flying)) == OK

    with restless():
        assert together([python, native, native]) == []
    table.release(row)
    sound(table)
