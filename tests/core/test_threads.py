"""Several threads on one cache, switching as often as Python can.

Counts stay right, and only named errors come out.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest

from pagedkv.core import BlockPool, BlockTable
from pagedkv.errors import OutOfBlocks, PagedKVError
from tests.core.helpers import cached_prefixes, finish, single, sound, tiered

NUM_THREADS = 4


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(was)


def together(*workers: Callable[[Random], None]) -> None:
    """Run the workers in threads of their own; the first error of any is raised here."""
    errors: list[BaseException] = []

    def guarded(worker: Callable[[Random], None], seed: int) -> None:
        try:
            worker(Random(seed))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(worker, i)) for i, worker in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_one_pool_from_several_threads() -> None:
    pool = BlockPool(10, max_blocks=400, chunk=7)
    owned = np.zeros(400, np.int64)

    def work(rng: Random) -> None:
        mine: list[int] = []
        for _ in range(4000):
            if rng.random() < 0.5 and len(mine) < 60:
                got = pool.alloc(rng.randint(0, 20)).tolist()
                assert not owned[got].any()
                owned[got] += 1
                mine += got
            elif mine:
                rng.shuffle(mine)
                away, mine = mine[:9], mine[9:]
                pool.incref(away)
                pool.free(away)
                handles = pool.handles(away)
                assert pool.check(handles).tolist() == away
                owned[away] -= 1
                pool.free(away)
        owned[mine] -= 1
        pool.free(mine)

    together(*[work] * NUM_THREADS)
    assert pool.counts()["live"] == 0
    pool.check_integrity()


def test_one_placement_from_several_threads() -> None:
    tree, pool, placement = single(2, 200, event_words=4096)

    def work(rng: Random) -> None:
        namespace = tree.namespace(b"shared")
        for _ in range(500):
            tokens = [rng.randint(0, 1) for _ in range(2 * rng.randint(0, 16))]
            owner, matched = placement.acquire(tokens, namespace)
            try:
                blocks = placement.allocate(len(tokens) // 2 - matched)
            except OutOfBlocks:
                blocks = np.empty(0, np.int32)
            done = placement.insert(owner, tokens[2 * matched : 2 * (matched + len(blocks))], blocks)
            assert len(placement.blocks_of(owner)) == matched + done
            assert pool.refs(placement.blocks_of(owner)).all()
            placement.match(tokens, namespace, partial=True)
            other = placement.share(owner)
            placement.release(owner)
            placement.set_retention(other, rng.randint(0, 100), rng.choice([0, 5]))
            placement.expire(rng.randint(0, 6))
            placement.release(other)
            if rng.random() < 0.05:
                placement.drain_events()
                placement.stats()
            if rng.random() < 0.01:
                placement.clear()

    together(*[work] * NUM_THREADS)
    assert pool.counts()["live"] == 0
    assert placement.stats()["owners"] == 0
    sound(placement)


def test_one_placement_over_tiers_from_several_threads_and_a_mover() -> None:
    tree, pools, placement = tiered(1, (40, 60, 80), inclusive=(False, False, True))
    busy = [True] * (NUM_THREADS - 1)

    def move(rng: Random) -> None:
        while any(busy) or placement.num_in_flight:
            moves = placement.take_moves()
            transfers = list(dict.fromkeys(moves["transfer"].tolist()))
            for node in moves["node"][:1].tolist():
                assert placement.path_tokens(node).size > placement.depth_of(node)
            placement.complete(transfers, [rng.random() < 0.9 for _ in transfers])

    def work(rng: Random) -> None:
        for _ in range(400):
            tokens = [rng.randint(0, 2) for _ in range(rng.randint(0, 9))]
            owner, _ = placement.acquire(tokens)
            try:
                if placement.reserve(int((placement.tiers_of(owner) > 0).sum())) == 0:
                    placement.promote(owner)
            except OutOfBlocks:
                pass
            matched = placement.settle(owner)
            if placement.reserve(len(tokens) - matched) == 0:
                try:
                    blocks = pools[0].alloc(len(tokens) - matched)
                except OutOfBlocks:
                    blocks = np.empty(0, np.int32)
                done = placement.insert(owner, tokens[matched : matched + len(blocks)], blocks)
                pools[0].free(blocks[done:])
            assert len(placement.tiers_of(owner)) == len(placement.blocks_of(owner))
            placement.release(owner)
        busy.pop()

    together(move, *[work] * (NUM_THREADS - 1))
    finish(placement)
    assert all(pool.counts()["live"] == 0 for pool in pools)
    sound(placement)
    prefixes = cached_prefixes(tree)
    assert all(prefix[:-1] in prefixes for prefix in prefixes if len(prefix) > 1)


def test_one_table_from_several_threads() -> None:
    _, pool, placement = single(4, 600)
    table = BlockTable(placement, 64)

    def work(rng: Random) -> None:
        for _ in range(60):
            rows = [table.open([rng.randint(0, 1) for _ in range(rng.randint(0, 40))])[0] for _ in range(3)]
            for _ in range(4):
                step = table.step(rows, lookahead=rng.choice([0, 2]))
                assert step.block_tables.shape[0] == 3
                for i, row in enumerate(rows):
                    used = table.blocks(row).tolist()
                    assert step.block_tables[i, : len(used)].tolist() == used
                table.commit(rows)
                table.append(rows, [rng.randint(0, 1) for _ in rows])
                table.step(rows)
                table.copies_done()
            table.commit(rows)
            rows += table.fork(rows[0], 2).tolist()
            table.truncate(rows[-1], rng.randint(0, len(table.tokens(rows[-1]))))
            for row in rows:
                table.release(row)

    together(*[work] * NUM_THREADS)
    assert table.num_rows == 0
    assert pool.counts()["live"] == 0
    sound(table, placement)


def test_handles_used_up_by_another_thread_give_named_errors() -> None:
    _, _, placement = single(2, 64)
    table = BlockTable(placement, 32)
    owners, rows = [-1] * 8, [-1] * 8

    def work(rng: Random) -> None:
        for _ in range(1200):
            i = rng.randrange(8)
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(0, 8))]
            try:
                what = rng.randrange(8)
                if what == 0:
                    owner, owners[i] = owners[i], placement.acquire(tokens)[0]
                    placement.release(owner)
                elif what == 1:
                    row, rows[i] = rows[i], table.open(tokens)[0]
                    table.release(row)
                elif what == 2:
                    table.step([rows[i], rows[i - 1]])
                elif what == 3:
                    table.commit([rows[i]])
                elif what == 4:
                    table.extend(rows[i], tokens)
                elif what == 5:
                    placement.release(owners[i])
                elif what == 6:
                    table.release(rows[i])
                else:
                    placement.blocks_of(owners[i])
                    table.blocks(rows[i])
            except PagedKVError:
                pass

    together(*[work] * NUM_THREADS)
    for release, handles in ((placement.release, owners), (table.release, rows)):
        for handle in handles:
            with contextlib.suppress(PagedKVError):
                release(handle)
    sound(table, placement)


def test_namespaces_made_by_several_threads_at_once_are_the_same() -> None:
    tree, _, placement = single()
    found: list[list[int]] = []

    def work(rng: Random) -> None:
        found.append([tree.namespace(b"%d" % i) for i in range(300)])

    together(*[work] * NUM_THREADS)
    assert all(roots == found[0] for roots in found)
    assert len(set(found[0])) == 300
    sound(placement)
