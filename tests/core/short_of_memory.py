"""Fail each allocation of every call of the core in turn, and check the books.

It runs in a child process.

A call that raises MemoryError leaves the books exact and the mutex free, and it works when it is called again. Where
one of the core's own allocations failed, no row and no owner is held that the caller has no handle of.
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv.core import BlockTable
from pagedkv.observe.callbacks import has_no_memory
from tests.core.helpers import tiered
from tests.reliability.failing_alloc import FailingAlloc

PROMPT = list(range(40))
CORE = "pagedkv/_core/"
FOLLOW = np.array([(1, 0, 6), (2, 0, 3)], np.int32)  # of a step's rows: entry 1 behind entry 0 for 6 blocks, and so on


class World:
    """A small cache of two tiers to call the core on.

    The device has a prefix of 8 blocks and one row over it; the tier below holds something.
    """

    def __init__(self, policy: str, **options: Any) -> None:
        told = {"event_words": 512, "tree_keep_names": True}
        self.tree, self.pools, self.placement = tiered(4, (48, 48), policy=policy, **told, **options)
        self.table = BlockTable(self.placement, 8)
        self.cold(list(range(100, 132)))
        self.store(PROMPT[:32])
        self.row, _ = self.table.open(PROMPT)
        self.table.step([self.row])
        self.table.commit([self.row])
        self.small = self.tree.namespace(b"small")
        self.calls = 0

    def cold(self, tokens: list[int]) -> None:
        """A prefix in the lower tier."""
        self.store(tokens)
        self.make_room(48)

    def arrive(self) -> None:
        """All moves decided are made; a completion that is refused is told again."""
        moves = self.placement.take_moves()
        try:
            self.complete(moves)
        except MemoryError:
            self.complete(moves)
            raise

    def complete(self, moves: np.ndarray) -> None:
        transfers = np.unique(moves["transfer"])
        self.placement.complete(transfers, np.ones(len(transfers), np.bool_))

    def make_room(self, num_blocks: int) -> None:
        self.placement.reserve(num_blocks)
        self.arrive()

    def store(self, tokens: list[int], root: int = 0) -> None:
        """Cache a prefix, as far as memory reaches."""
        owner, matched = self.placement.acquire(tokens, root)
        try:
            self.make_room(len(tokens) // 4 - matched)
            rest = np.array(tokens[matched * 4 :], np.int32)
            blocks, done = self.pools[0].alloc(len(rest) // 4), 0
            try:
                done = self.placement.insert(owner, rest, blocks)
            finally:
                self.pools[0].free(blocks[done:])
        finally:
            self.placement.release(owner)

    def sound(self) -> None:
        self.placement.check_integrity()
        self.table.check_integrity()

    def held(self) -> tuple[int, int]:
        """What must not grow by a call that was refused."""
        return self.table.num_rows, self.placement.stats()["owners"]


def opened(world: World) -> None:
    row, _ = world.table.open([*PROMPT[:17], *range(1000, 1300)])
    world.table.release(row)


def acquired(world: World) -> None:
    for tokens in (PROMPT[:12], PROMPT[:20], [*range(100, 112), 5]):
        owner, _ = world.placement.acquire(tokens)
        world.placement.release(owner)


def inserted(world: World) -> None:
    prompt = [*PROMPT[:10], *range(500, 530)]
    row, _ = world.table.open(prompt)
    try:
        world.table.step([row])
        world.table.commit([row])
    finally:
        world.table.release(row)


def forked(world: World) -> None:
    forks = world.table.fork(world.row, 3)
    for fork in forks.tolist():
        world.table.release(fork)


def written_after_a_fork(world: World) -> None:
    fork = int(world.table.fork(world.row, 1)[0])
    try:
        world.table.append([fork, world.row], [7, 8])
        rows = [fork, world.row]
        before = [world.table.info(row) for row in rows], world.pools[0].counts()
        try:
            world.table.step(rows)
        except MemoryError:
            assert before == ([world.table.info(row) for row in rows], world.pools[0].counts()), "half a step"
            raise
        world.table.copies_done()
        world.table.commit([fork, world.row])
    finally:
        world.table.release(fork)
        world.table.truncate(world.row, 40)


def decoded(world: World) -> None:
    try:
        for token in range(30):
            world.table.commit([world.row])
            world.table.append([world.row], [token])
            before = world.table.info(world.row)
            try:
                world.table.try_step([world.row])
            except MemoryError:
                assert world.table.info(world.row) == before, "half a step"
                raise
    finally:
        world.table.cancel([world.row])
        world.table.truncate(world.row, 40)


def appended(world: World) -> None:
    world.table.extend(world.row, list(range(200)))
    world.table.truncate(world.row, 40)


def truncated(world: World) -> None:
    row, _ = world.table.open(PROMPT)
    try:
        before = world.table.info(row)
        try:
            world.table.truncate(row, 14)
        except MemoryError:
            assert world.table.info(row) == before, "half a truncation"
            raise
    finally:
        world.table.release(row)


def followed(world: World) -> None:
    """A row that follows a leader to its end, and one that leaves it midway."""
    world.calls += 1  # a prompt that the call before has not cached
    prompt = list(range(600 + 100 * world.calls, 624 + 100 * world.calls))
    rows: list[int] = []
    try:
        rows.extend(world.table.open([*prompt[:end], *range(800, 810)])[0] for end in (24, 24, 13))
        before = [world.table.info(row) for row in rows], world.pools[0].counts()
        try:
            world.table.step(rows, None, 0, FOLLOW)
        except MemoryError:
            assert before == ([world.table.info(row) for row in rows], world.pools[0].counts()), "half a step"
            raise
        try:
            world.table.commit(rows)
        except MemoryError:
            for row, whole in zip(rows, (34, 34, 23), strict=True):
                _, computed, _, committed = world.table.info(row)
                assert computed in (whole, 4 * committed), "half a row"
            raise
    finally:
        for row in rows:
            world.table.release(row)


def caught_up(world: World) -> None:
    prompt = list(range(640, 664))
    late, _ = world.table.open([*prompt[:13], *range(800, 810)])
    try:
        world.store(prompt)
        world.table.catch_up([late])
    finally:
        world.table.release(late)


def promoted(world: World) -> None:
    owner, _ = world.placement.acquire(list(range(100, 132)))
    try:
        world.make_room(8)
        world.placement.promote(owner)
    finally:
        world.arrive()
        world.placement.settle(owner)
        world.placement.release(owner)


def room_made(world: World) -> None:
    world.store(list(range(700, 720)))
    world.make_room(44)


def shared(world: World) -> None:
    owner, _ = world.placement.acquire(PROMPT[:32])
    try:
        world.placement.release(world.placement.share(owner))
        world.placement.shorten(owner, 3)
    finally:
        world.placement.release(owner)


def given_a_quota(world: World) -> None:
    world.placement.set_quota(world.small, 4)
    world.store(list(range(16)), world.small)
    world.arrive()


def given_a_lifetime(world: World) -> None:
    owner, _ = world.placement.acquire(PROMPT[:32])
    try:
        world.placement.set_retention(owner, 60, 10)
    finally:
        world.placement.release(owner)
    world.placement.expire(11)


def named(world: World) -> None:
    for number in range(40):
        world.store(list(range(4)), world.tree.namespace(b"%d" % number))
    world.arrive()


def dropped(world: World) -> None:
    root = world.tree.namespace(b"to be dropped")
    world.store(list(range(8)), root)
    world.placement.drop_namespace(root)
    assert not len(world.placement.match(list(range(8)), root)[0])


def looked_at(world: World) -> None:
    world.sound()
    world.placement.match(PROMPT, partial=True)
    world.placement.stats()
    world.placement.blocks_in(0)
    world.table.tokens(world.row)
    world.tree.prefixes()
    world.placement.clear()


def drained(world: World) -> None:
    world.placement.drain_events()
    world.store(list(range(900 + 8 * world.calls, 908 + 8 * world.calls)))
    world.calls += 1
    try:
        world.placement.drain_events()
    except MemoryError:
        assert world.placement.drain_events(), "events were lost"
        raise


def told_anew(world: World) -> None:
    blocks = sum(len(event.hashes) for event in world.placement.snapshot_events()[0])
    assert blocks >= world.tree.num_blocks


CALLS: dict[str, Callable[[World], None]] = {
    call.__name__: call
    for call in (
        opened, acquired, inserted, forked, followed, caught_up, written_after_a_fork, decoded, appended, truncated,
        promoted, room_made, shared, given_a_quota, given_a_lifetime, named, dropped, looked_at, drained,
        told_anew,
    )
}  # fmt: skip


def fail_each(call: Callable[[World], None], policy: str, **options: Any) -> Counter[str]:
    """`call` in a new world for every allocation that it makes, which fails; what came of it."""
    alloc, outcomes = FailingAlloc(), Counter[str]()
    for k in itertools.count(1):
        world = World(policy, **options)
        before = world.held()
        faulthandler.dump_traceback_later(60, exit=True)  # a mutex that was never given back
        alloc.arm(k)
        try:
            call(world)
            outcomes["carried out"] += 1
        except MemoryError as error:
            if not has_no_memory(error):  # OutOfBlocks is a MemoryError as well
                raise
            outcomes["refused"] += 1
        finally:
            alloc.disarm()
        where = alloc.where
        world.sound()
        if CORE in where:
            outcomes["of the core's own"] += 1
            assert world.held() == before, (call.__name__, policy, k, where, before, world.held())
        world.arrive()
        call(world)
        world.sound()
        faulthandler.cancel_dump_traceback_later()
        if not alloc.failed:
            return outcomes
    raise AssertionError


def main() -> None:
    total = Counter[str]()
    for policy in sys.argv[2:]:
        for name in CALLS if sys.argv[1] == "all" else [sys.argv[1]]:
            total += fail_each(CALLS[name], policy)
    print(dict(total))
    assert min(total["refused"], total["carried out"], total["of the core's own"]) > 0, total


if __name__ == "__main__":
    main()
