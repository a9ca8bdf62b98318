"""Several threads on one cache of three tiers: each checks every byte of its own sequences."""

from __future__ import annotations

import random
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.core import BlockPool, Placement, RadixTree

from .conftest import BLOCK, Toy, all_free, prompt

NUM_THREADS, OPERATIONS = 4, 120


@pytest.fixture(autouse=True)
def tiny_switch_interval():
    """Threads change places as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*jobs):
    """Run jobs in threads that start at once; the first exception of any of them."""
    barrier, problems = threading.Barrier(len(jobs)), []

    def run(job):
        try:
            barrier.wait(60)
            job()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def request(toy, choose, namespace):
    """One request from start to end, perhaps with forks and a further turn; checked all along."""
    held = []
    try:
        held.append(toy.cache.sequence(choose.choices([0, 1], k=choose.randint(1, 22)), namespace))
        toy.check(*held)
        toy.run(*held, lookahead=choose.choice([0, 0, 5]))
        toy.check(*held)
        if choose.random() < 0.4:
            held += held[0].fork(choose.randint(1, 2))
        for _ in range(choose.randint(0, 3)):
            for seq in held:
                seq.append(choose.choices([0, 1], k=choose.randint(1, 3)))
            toy.run(*held)
            toy.check(*held)
        if choose.random() < 0.2:
            held[0].truncate(choose.randint(0, held[0].num_tokens))
            toy.check(*held)
    except pk.OutOfBlocks:
        return False
    finally:
        choose.shuffle(held)
        for seq in held:
            seq.release()
    return True


def worker(cache, seed, operations, namespace=None, salt=0):
    """A job of `operations` requests, most of which must succeed."""

    def job():
        toy, choose = Toy(cache, salt), random.Random(seed)
        served = sum(request(toy, choose, namespace) for _ in range(operations))
        assert served > operations // 2

    return job


@pytest.mark.slow
@pytest.mark.parametrize("demotion", ["oldest_first", "leaf_first"])
@pytest.mark.parametrize("policy", ["hazard", "s3fifo", "lru"])
def test_threads_with_their_own_sequences_read_what_was_computed(open_cache, policy, demotion):
    cache = open_cache(48, host=16, disk=60, policy=policy, demotion=demotion)
    together(*(worker(cache, seed, OPERATIONS) for seed in range(NUM_THREADS)))
    cache.check_integrity()
    assert all_free(cache)
    assert cache.stats().sequences == 0
    assert cache.stats().failed_moves == 0


def test_threads_in_two_namespaces_never_meet(open_cache):
    cache = open_cache(48, host=12, disk=40)
    names = [pk.Namespace(tenant="a"), pk.Namespace(tenant="b")]
    together(*(worker(cache, seed, OPERATIONS // 2, names[seed % 2], seed % 2) for seed in range(NUM_THREADS)))
    cache.check_integrity()
    assert all_free(cache)


def test_others_may_look_prefetch_pin_and_purge_meanwhile(open_cache):
    cache = open_cache(48, host=12, disk=40, pin_budget=6, event_words=1 << 12)
    purged, stop = pk.Namespace(tenant="purged"), threading.Event()

    def look():
        choose = random.Random(99)
        while not stop.is_set():
            tokens = choose.choices([0, 1], k=20)
            cache.explain(tokens)
            cache.stats()
            cache.events()
            cache.check_integrity()

    def disturb():
        choose, toy = random.Random(98), Toy(cache, 5)
        while not stop.is_set():
            tokens = choose.choices([0, 1], k=choose.randint(1, 20))
            cache.prefetch(tokens)
            with suppress(pk.PinBudgetExceeded):
                cache.pin(tokens[:8]).release()
            request(toy, choose, purged)
            cache.purge(purged)
            toy.salt += 1  # what was purged must not be seen: it would not match

    watchers = [threading.Thread(target=watch) for watch in (look, disturb)]
    for thread in watchers:
        thread.start()
    try:
        together(*(worker(cache, seed, OPERATIONS // 2) for seed in range(2)))
    finally:
        stop.set()
        for thread in watchers:
            thread.join()
    cache.prefetch([0]).wait(60)
    cache.check_integrity()
    assert all_free(cache)


def test_threads_that_ask_for_the_same_cold_prefix_all_get_it(open_cache):
    toy = Toy(open_cache(32, host=8, disk=40))
    for turn in range(12):
        tokens = prompt(turn, 6 * BLOCK + 1)
        toy.use(tokens)
        for start in range(100 + 10 * turn, 104 + 10 * turn):
            toy.use(prompt(start, 6 * BLOCK + 1))
        together(*[lambda tokens=tokens: toy.use(tokens)] * NUM_THREADS)
        assert toy.use(tokens) == {"device": 6 * BLOCK}
    assert all_free(toy.cache)


def test_the_moves_of_one_transfer_are_taken_together_whatever_another_thread_takes_first(monkeypatch):
    placement = Placement(RadixTree(1, 2), [BlockPool(16), BlockPool(64)])
    for start, count in ((100, 3), (200, 2), (300, 4), (400, 5)):
        owner, _ = placement.acquire(range(start, start + count))
        placement.insert(owner, list(range(start, start + count)), placement.pools[0].alloc(count))
        placement.release(owner)
    placement.reserve(2 + 3)  # the first run is to be demoted: three moves
    empty, taken = np.empty, []

    def disturbed(*arguments, **options):
        """Between looking and taking, another thread takes those and more are decided."""
        monkeypatch.setattr(np, "empty", empty)
        taken.append(placement.take_moves())
        placement.reserve(2 + 3 + 2 + 4)
        return empty(*arguments, **options)

    monkeypatch.setattr(np, "empty", disturbed)
    taken.append(placement.take_moves())
    monkeypatch.setattr(np, "empty", empty)
    taken.append(placement.take_moves())
    transfers = [set(moves["transfer"].tolist()) for moves in taken]
    assert sum(len(ids) for ids in transfers) == len(set.union(*transfers)), transfers


def test_siblings_in_different_threads_copy_before_they_write(open_cache):
    toy = Toy(open_cache(64))
    for turn in range(40):
        parent = toy.cache.sequence(prompt(turn, 6))
        toy.run(parent)
        seqs = [parent, *parent.fork(NUM_THREADS - 1)]

        def go_on(i, seq):
            for step in range(4):
                seq.append(100 * i + step)
                toy.run(seq)
                toy.check(seq)

        together(*(lambda i=i, seq=seq: go_on(i, seq) for i, seq in enumerate(seqs)))
        toy.check(*seqs)
        for seq in seqs:
            seq.release()


def test_sequences_released_by_another_thread_than_their_own(open_cache):
    toy = Toy(open_cache(32, host=16))
    for turn in range(20):
        seqs = [toy.cache.sequence(prompt(turn * 4 + i)) for i in range(NUM_THREADS)]
        together(*(lambda seq=seq: toy.run(seq) for seq in seqs))
        toy.check(*seqs)
        together(*(seq.release for seq in seqs), *(seq.release for seq in seqs))
    assert all_free(toy.cache)


def test_closing_while_threads_work_ends_each_of_them_with_closed_error_or_success(open_cache):
    for turn in range(6):
        cache = open_cache(24, host=8)
        ends, working = [], threading.Barrier(NUM_THREADS + 1)

        def work(seed, cache=cache, ends=ends, working=working):
            toy, choose = Toy(cache), random.Random(seed)
            working.wait(60)
            try:
                for _ in range(400):
                    request(toy, choose, None)
                ends.append("done")
            except pk.ClosedError:
                ends.append("closed")
            except BaseException as problem:
                ends.append(problem)

        threads = [threading.Thread(target=work, args=(seed + turn,)) for seed in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        working.wait(60)
        cache.close()
        for thread in threads:
            thread.join()
        assert set(ends) <= {"done", "closed"}
        cache.check_integrity()
