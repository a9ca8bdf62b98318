"""Many threads on the core alone: pool, placement over three tiers, block table.

Contents are numbers in arrays.

python -m tests.reliability.core_hammer OPERATIONS SEED [MOST_THREADS]
"""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pagedkv.core import POLICIES, BlockPool, BlockTable, Placement, RadixTree, policy_needs_chain
from pagedkv.errors import OutOfBlocks, PagedKVError
from tests.reliability import child
from tests.reliability.crowd import restless, together
from tests.reliability.proof import Tally
from tests.toy import chain

OPERATIONS = 6000  # of a round, all threads together
EMPTY = 0
NAMESPACES = (b"a", b"b")
PLACES = ["transfer", "src_tier", "dst_tier", "src_block", "dst_block"]


class Wrong(AssertionError):
    """A block holds something else than what it is said to hold."""


def contents(namespace: bytes, tokens: list[int]) -> NDArray[np.int64]:
    """A number for each token, that follows from the namespace and all tokens up to it."""
    return 1 + chain(tokens, zlib.crc32(namespace))  # above EMPTY


class World:
    """A placement over three tiers of blocks of one token, a table on it, and a pool.

    Only the threads of the test use the pool.
    """

    def __init__(self, choose: random.Random, threads: int) -> None:
        sizes = (12 * threads, 10 * threads, 20 * threads)
        policy = choose.choice(POLICIES)
        self.tree = RadixTree(1, 3, keep_chain=policy_needs_chain(policy), keep_names=True)
        self.pools = [BlockPool(size) for size in sizes]
        self.placement = Placement(
            self.tree, self.pools, policy=policy, demotion=choose.choice(["leaf_first", "oldest_first"]),
            event_words=1024, pin_budget=8,
        )  # fmt: skip
        self.table = BlockTable(self.placement, 6 * threads)
        self.memory = [np.zeros(size, np.int64) for size in sizes]
        self.roots = {name: self.tree.namespace(name) for name in NAMESPACES}
        self.pool = BlockPool(10, max_blocks=20 * threads, chunk=7)
        self.owned = np.zeros(20 * threads, np.int64)
        self.working = threads

    def sound(self) -> None:
        """All books agree."""
        self.placement.check_integrity()
        self.table.check_integrity()
        self.pool.check_integrity()


class Caller:
    """One thread's calls."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.choose = world, random.Random(seed)
        self.operations = self.hits = 0
        self.mine: list[int] = []  # blocks of the lone pool

    def work(self, operations: int) -> None:
        """Calls, until so many are made."""
        ways: list[Callable[[], None]] = [self.prefix, self.rows, self.blocks, self.look]
        try:
            while self.operations < operations:
                with contextlib.suppress(OutOfBlocks):
                    self.choose.choices(ways, weights=[40, 20, 35, 5])[0]()
        finally:
            self.world.working -= 1
            self.world.owned[self.mine] -= 1
            self.world.pool.free(self.mine)

    def move(self) -> None:
        """The mover's part: copies what was decided; some copies fail and leave rubbish."""
        world = self.world
        while world.working or world.placement.num_in_flight:
            moves = world.placement.take_moves()
            ended: dict[int, bool] = {}
            for transfer, src, dst, src_block, dst_block in moves[PLACES].tolist():
                ok = ended.setdefault(transfer, self.choose.random() < 0.9)
                world.memory[dst][dst_block] = world.memory[src][src_block] if ok else EMPTY
            world.placement.complete(list(ended), list(ended.values()))
            self.operations += 2 if ended else 0

    def prefix(self) -> None:
        """Own a prefix, bring it up, compare it, add to it, let go."""
        placement, pool = self.world.placement, self.world.pools[0]
        name = self.choose.choice(NAMESPACES)
        tokens = self.choose.choices([0, 1], k=self.choose.randint(0, 9))
        wanted = contents(name, tokens)
        owner, _ = placement.acquire(tokens, self.world.roots[name])
        try:
            with contextlib.suppress(OutOfBlocks):
                if placement.reserve(int((placement.tiers_of(owner) > 0).sum())) == 0:
                    placement.promote(owner)
            matched = placement.settle(owner)
            self.compare(placement.blocks_of(owner)[:matched], wanted[:matched])
            if placement.reserve(len(tokens) - matched) == 0:
                blocks = pool.alloc(len(tokens) - matched)
                self.world.memory[0][blocks] = wanted[matched:]
                joined = placement.insert(owner, tokens[matched:], blocks)
                pool.free(blocks[joined:])
                held = placement.blocks_of(owner)
                self.compare(held, wanted[: len(held)])
            if self.choose.random() < 0.1:
                other = placement.share(owner)
                placement.set_retention(other, self.choose.randint(0, 100), self.choose.choice([0, 5]))
                placement.expire(self.choose.randint(0, 6))
                placement.release(other)
                self.operations += 4
        finally:
            placement.release(owner)
        self.operations += 9

    def compare(self, blocks: NDArray[np.int32], wanted: NDArray[np.int64]) -> None:
        found = self.world.memory[0][blocks]
        if not np.array_equal(found, wanted):
            raise Wrong(f"blocks {blocks.tolist()} hold {found.tolist()} instead of {wanted.tolist()}")
        self.hits += len(wanted)

    def rows(self) -> None:
        """Take a few sequences through steps, forks and truncations.

        No prefix begins with their tokens.
        """
        table = self.world.table
        rows: list[int] = []
        try:
            rows.append(table.open(self.choose.choices([2, 3], k=self.choose.randint(1, 4)))[0])
            for _ in range(self.choose.randint(1, 3)):
                step = table.step(rows, lookahead=self.choose.choice([0, 2]))
                for i, row in enumerate(rows):
                    used = table.blocks(row).tolist()
                    if step.block_tables[i, : len(used)].tolist() != used:
                        raise Wrong(f"row {row} has blocks {used}, its step {step.block_tables[i].tolist()}")
                table.commit(rows)
                table.append(rows, [self.choose.choice([2, 3]) for _ in rows])
                table.step(rows)
                table.copies_done()
                table.commit(rows)
                self.operations += 6 + len(rows)
            if self.choose.random() < 0.3 and len(rows) < 3:
                rows += table.fork(rows[0], 1).tolist()
            table.truncate(rows[-1], self.choose.randint(0, len(table.tokens(rows[-1]))))
        finally:
            for row in rows:
                table.release(row)
            self.operations += 4 + len(rows)

    def blocks(self) -> None:
        """Blocks of the lone pool belong to one thread at a time."""
        pool, owned = self.world.pool, self.world.owned
        if self.choose.random() < 0.5 and len(self.mine) < 15:
            got = pool.alloc(self.choose.randint(0, 6)).tolist()
            if owned[got].any():
                raise Wrong(f"one of the blocks {got} was given to two threads")
            owned[got] += 1
            self.mine += got
            self.operations += 1
        else:
            self.choose.shuffle(self.mine)
            away, self.mine = self.mine[:5], self.mine[5:]
            pool.incref(away)
            pool.free(away)
            if pool.check(pool.handles(away)).tolist() != away:
                raise Wrong(f"the handles of {away} name other blocks")
            owned[away] -= 1
            pool.free(away)
            self.operations += 5

    def look(self) -> None:
        """What only looks, and names that were used up."""
        placement = self.world.placement
        placement.match(
            self.choose.choices([0, 1], k=6), self.world.roots[self.choose.choice(NAMESPACES)], partial=True
        )
        placement.stats()
        placement.drain_events()
        if self.choose.random() < 0.1:
            placement.snapshot_events()
        for release in (placement.release, self.world.table.release):
            with contextlib.suppress(PagedKVError):
                release(12345)
        if self.choose.random() < 0.05:
            placement.clear()
        self.operations += 6


def one_round(operations: int, seed: int, most_threads: int, tally: Tally) -> None:
    """One world and its threads; one of them moves."""
    choose = random.Random(seed)
    threads = choose.randint(2, most_threads)
    world = World(choose, threads - 1)
    callers = [Caller(world, seed * 100 + k) for k in range(threads)]
    mover, *others = callers
    jobs: list[Callable[[], object]] = [mover.move]
    jobs += [partial(caller.work, max(1, operations // len(others))) for caller in others]
    for error in together(jobs):
        tally.fail(f"round {seed}, {threads} threads: {''.join(traceback.format_exception(error)[-4:])}")
    world.sound()
    held = [pool.counts()["live"] for pool in (*world.pools, world.pool)]
    if any(held) or world.table.num_rows or world.placement.stats()["owners"]:
        tally.fail(f"round {seed}, {threads} threads: blocks are still held: {held}")
    tally.add("quiet points")
    tally.count += sum(caller.operations for caller in callers)
    tally.hits += sum(caller.hits for caller in callers)


def main(operations: int, seed: int, most_threads: int = 16) -> Tally:
    """Rounds until so many calls are made."""
    tally, number = Tally(), 0
    with restless():
        while tally.count < operations and tally.wrong < 10:
            before = tally.count
            one_round(min(operations, OPERATIONS), seed * 1_000_003 + number, most_threads, tally)
            number += 1
            child.done(tally.count - before)
    return tally


if __name__ == "__main__":
    child.answer(main(*map(int, sys.argv[1:])))
