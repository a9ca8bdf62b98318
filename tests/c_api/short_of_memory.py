"""Fail each allocation of every call of ``pagedkv.h`` in turn, and check the books.

It runs in a child process. A call that answers E_MEMORY leaves the books exact and the mutex free, and works when it
is called again with the same arguments. But for calls whose comment in the header says otherwise, nothing has changed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from pagedkv import c_api
from tests.c_api.native import MEMORY, NIL, OK, Arrays, at, call, out, rows_of, tokens_of
from tests.core.helpers import state
from tests.core.short_of_memory import PROMPT, World
from tests.reliability.failing_alloc import FailingAlloc

Case = Generator[tuple[Any, ...], None, None]  # yields a call and its arguments; goes on once that has succeeded
COLD = list(range(100, 132))
HALF_DONE = {"placement_promote", "placement_reserve", "placement_allocate", "table_truncate", "table_commit"}
MOVE = c_api.struct("pagedkv_move")


def made(kind: str, *arguments: Any) -> Case:
    """A new object, and its end."""
    handle = out()
    yield (f"{kind}_new", *arguments, handle)
    c_api.function(f"{kind}_delete")(int(handle[0]))


def pool_new(world: World) -> Case:
    yield from made("pool", 64, 128, 32)


def placement_new(world: World) -> Case:
    options = np.zeros(1, c_api.struct("pagedkv_options"))
    options["block_size"], options["num_tiers"], options["blocks"][0][:2] = 4, 2, (16, 16)
    yield from made("placement", options)


def table_new(world: World) -> Case:
    yield from made("table", world.placement, 16)


def placement_namespace(world: World) -> Case:
    name = np.frombuffer(b"another tenant", np.uint8)
    yield "placement_namespace", world.placement, name, len(name), out()


def pool_alloc(world: World) -> Case:
    ids = out(np.int32, 3)
    yield "pool_alloc", world.pools[0], 3, ids
    yield "pool_share", world.pools[0], ids, 3, None
    yield "pool_free", world.pools[0], np.repeat(ids, 2), 6, None


def placement_match(world: World) -> Case:
    tokens = tokens_of([*PROMPT, *range(4000)])
    yield "placement_match", world.placement, 0, tokens, len(tokens), out(np.int32, 20), out(np.uint8, 20), 20, out()


def placement_acquire(world: World) -> Case:
    tokens = tokens_of(PROMPT[:22])
    owners = [out() for _ in range(70)]  # more than there is room for at first
    for owner in owners:
        yield "placement_acquire", world.placement, 0, tokens, len(tokens), 3, owner, None
    yield "placement_path", world.placement, owners[0][0], out(np.int32, 8), out(np.uint8, 8), 8, out()
    for owner in owners:
        yield "placement_release", world.placement, owner[0]


def placement_promote(world: World) -> Case:
    owner, tokens, moves, num = out(), tokens_of(COLD), np.zeros(64, MOVE), out(np.int32)
    yield "placement_acquire", world.placement, 0, tokens, len(tokens), NIL, owner, None
    yield "placement_reserve", world.placement, 0, 8, out()
    yield "placement_promote", world.placement, owner[0], out(np.int32), out()
    yield "placement_take_moves", world.placement, moves, 64, num
    transfers = np.unique(moves["transfer"][: num[0]])
    yield (
        *("placement_complete", world.placement, transfers, np.ones(len(transfers), np.uint8)),
        *(len(transfers), out(np.int32)),
    )
    yield "placement_settle", world.placement, owner[0], out(np.int32)
    yield "placement_release", world.placement, owner[0]


def placement_reserve(world: World) -> Case:
    yield "placement_reserve", world.placement, 0, 44, out()
    world.arrive()


def placement_insert(world: World) -> Case:
    owner, ids, tokens = out(), out(np.int32, 5), tokens_of(range(700, 720))
    yield "placement_acquire", world.placement, 0, tokens, 20, NIL, owner, None
    yield "placement_allocate", world.placement, 5, ids
    yield "placement_insert", world.placement, owner[0], tokens, ids, 5, out(np.int32), out(np.int32)
    yield "placement_release", world.placement, owner[0]


def table_open(world: World) -> Case:
    row, tokens = out(), tokens_of([*PROMPT[:17], *range(1000, 1300)])
    yield "table_open", world.table, 0, tokens, len(tokens), 1, NIL, row, out()
    yield "table_extend", world.table, row[0], tokens_of(range(2000)), 2000
    yield "table_truncate", world.table, row[0], 14
    yield "table_tokens", world.table, row[0], out(np.int32, 20), 20, out()
    yield "table_release", world.table, row[0], 1


def table_step(world: World) -> Case:
    rows, arrays = rows_of([world.row]), Arrays(1, 32, 64, 4)
    for token in range(30):
        yield "table_append", world.table, rows, tokens_of([token]), 1, None
        yield "table_blocks_needed", world.table, rows, 1, None, 0, out(), None
        yield "table_step", world.table, rows, 1, None, 0, arrays.struct, None
        yield "table_commit", world.table, rows, 1, arrays.number, out(), None
    yield "table_truncate", world.table, world.row, 40


def table_fork(world: World) -> Case:
    forks, arrays = out(np.int64, 3), Arrays(4, 32, 64, 8)
    yield "table_fork", world.table, world.row, 3, forks
    rows = rows_of([world.row, *forks])
    yield "table_append", world.table, rows, tokens_of([5, 6, 7, 8]), 4, None
    yield "table_step", world.table, rows, 4, None, 0, arrays.struct, None
    yield "table_copies_done", world.table, None, 0
    yield "table_cancel", world.table, rows, 4, arrays.number
    for fork in forks:
        yield "table_release", world.table, fork, 0
    yield "table_truncate", world.table, world.row, 40


CASES: tuple[Callable[[World], Case], ...] = (
    *(pool_new, placement_new, table_new, placement_namespace, pool_alloc, placement_match, placement_acquire),
    *(placement_promote, placement_reserve, placement_insert, table_open, table_step, table_fork),
)


def armed(alloc: FailingAlloc, k: int, name: str, *arguments: Any) -> int | None:
    """The code of the call whose k-th allocation fails; None if ctypes had no memory for it."""
    given = [
        at(each) if each is None or isinstance(each, np.ndarray)
        else int(each) if isinstance(each, (int, np.integer)) else c_api.handle_of(each)
        for each in arguments
    ]  # fmt: skip
    function = c_api.function(name)
    alloc.arm(k)
    try:
        return int(function(*given))
    except (MemoryError, ctypes.ArgumentError) as error:  # of an argument's conversion, before the call
        if "MemoryError" not in repr(error):
            raise
        return None
    finally:
        alloc.disarm()


def fail_each(alloc: FailingAlloc, case: Callable[[World], Case], outcomes: Counter[str]) -> None:
    """Fail each allocation of each call of the case once, in a world of its own."""
    for k in itertools.count(1):
        world, any_failed = World("lru"), False
        faulthandler.dump_traceback_later(60, exit=True)  # a mutex that was never given back
        for name, *arguments in case(world):
            held = [None if not isinstance(each, np.ndarray) else each.copy() for each in arguments]
            before = state((world.table, [world.row]))
            code = armed(alloc, k, name, *arguments)
            any_failed |= bool(alloc.failed)
            where = (case.__name__, name, k, alloc.where, code)
            assert code in (OK, MEMORY, None), where
            world.sound()
            if code != OK:
                outcomes[name] += code == MEMORY
                if name not in HALF_DONE:
                    assert before == state((world.table, [world.row])), where
                for each, was in zip(arguments, held, strict=True):  # a struct that the call may have written into
                    if was is not None and each.flags.writeable:
                        each[...] = was
                assert call(name, *arguments) == OK, where
                world.sound()
        faulthandler.cancel_dump_traceback_later()
        if not any_failed:
            return


def main() -> None:
    alloc, outcomes = FailingAlloc(), Counter[str]()
    for case in CASES:
        fail_each(alloc, case, outcomes)
    print(dict(outcomes))


if __name__ == "__main__":
    main()
