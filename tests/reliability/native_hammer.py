"""Native callers of the core, in threads that work without the GIL.

Python's own calls go on beside them, on the same objects.

Needs the compiled module ``pagedkv.native_threads`` (from native_threads.pyx), which only a copy of the tree has.

    python -m tests.reliability.native_hammer OPERATIONS SEED THREADS [unlocked]
"""

from __future__ import annotations

import importlib
import random
import sys
import traceback
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pagedkv.core import BlockPool, Placement, RadixTree
from tests.reliability import child
from tests.reliability.crowd import restless, together
from tests.reliability.proof import Tally

NUM_BLOCKS = 256
OPERATIONS = 240_000  # of a round, all threads together: native calls are over before other threads begin


def one_round(operations: int, seed: int, threads: int, locked: bool, tally: Tally) -> None:
    """Native threads allocate, free and match, while one thread of Python's inserts and looks."""
    native = importlib.import_module("pagedkv.native_threads")
    choose = random.Random(seed)
    pool, lone = BlockPool(NUM_BLOCKS), BlockPool(64)
    tree = RadixTree(1, 1)
    root = tree.namespace(b"")
    placement = Placement(tree, [pool])
    each = max(1, operations // threads)
    seen: list[int] = []

    def insert() -> None:
        for _ in range(min(each // 50, 200)):
            tokens = choose.choices([0, 1], k=choose.randint(1, 12))
            owner, matched = placement.acquire(tokens, root)
            placement.insert(owner, tokens[matched:], placement.allocate(len(tokens) - matched))
            placement.release(owner)
            lone.free(lone.alloc(1))
            if choose.random() < 0.05:
                placement.clear()

    def look(tokens: NDArray[np.int32]) -> None:
        seen.append(native.match(placement, tokens, root, each))

    jobs: list[Callable[[], object]] = [insert]
    for number in range(1, threads):
        tokens = np.array(choose.choices([0, 1], k=12), np.int32)
        if number % 2:
            jobs.append(partial(native.churn, lone, each, locked))
        else:
            jobs.append(partial(look, tokens))
    for error in together(jobs):
        tally.fail(f"round {seed}, {threads} threads: {''.join(traceback.format_exception(error)[-4:])}")
    tally.count += each * threads
    tally.add("blocks matched", sum(seen))
    if locked:
        placement.check_integrity()
        lone.check_integrity()
        if lone.counts()["live"] or pool.counts()["live"]:
            tally.fail(f"round {seed}, {threads} threads: blocks are still held")


def main(operations: int, seed: int, threads: int, *, locked: bool) -> Tally:
    """Rounds until so many calls are made."""
    tally, number = Tally(), 0
    with restless():
        while tally.count < operations and tally.wrong < 10:
            before = tally.count
            one_round(min(operations, OPERATIONS), seed * 1_000_003 + number, threads, locked, tally)
            number += 1
            child.done(tally.count - before)
    return tally


if __name__ == "__main__":
    operations, seed, threads = map(int, sys.argv[1:4])
    child.answer(main(operations, seed, threads, locked="unlocked" not in sys.argv))
