"""Objects deleted, closed, released or collected in any order.

Nothing crashes or leaks, and no commit is left half done.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from functools import partial

import numpy as np
import pytest

import pagedkv as pk
from tests.collecting import collect_until

from .conftest import BLOCK, SPEC, Toy, all_free, prompt


def test_sequences_outlive_their_deleted_cache():
    toy = Toy(pk.KVCache(SPEC, pk.Blocks(16), host_memory=pk.Blocks(4)))
    seq = toy.cache.sequence(prompt(1))
    toy.run(seq)
    gone = weakref.ref(toy.cache)
    wanted = [array.copy() for array in seq.gather()]
    toy.cache = None
    gc.collect()
    assert gone() is None
    for got, want in zip(seq.gather(), wanted, strict=True):
        assert np.array_equal(got, want)
    (fork,) = seq.fork()
    seq.release()
    assert np.array_equal(fork.gather()[0], wanted[0])
    fork.append(1)
    fork.scatter(np.zeros((2, 1, 2, 4)), np.zeros((2, 1, 2, 4)))
    del fork, seq


def test_a_step_outlives_its_deleted_cache():
    toy = Toy(pk.KVCache(SPEC, pk.Blocks(16)))
    seq = toy.cache.sequence(prompt(1))
    with toy.cache.step([seq]) as step:
        pairs = [toy.new_kv(step, [seq], layer) for layer in range(2)]
        toy.cache = None
        gc.collect()
        for layer, pair in enumerate(pairs):
            step.write(layer, *pair)
    assert seq.num_computed == 13
    assert np.array_equal(seq.gather()[0][0], pairs[0][0])


def test_a_deleted_cache_gives_its_threads_and_its_directory_back(tmp_path):
    before = threading.active_count()
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(20))
    for _ in range(5):
        cache = pk.KVCache(SPEC, pk.Blocks(4), disk=disk)
        Toy(cache).use(prompt(1))
        cache.prefetch(prompt(1)).wait(60)
        threads = [t for t in threading.enumerate() if t.name.startswith("pagedkv")]
        assert threads
        del cache
        gc.collect()
        for thread in threads:
            thread.join(60)
    assert threading.active_count() <= before  # an earlier test's threads may end meanwhile
    pk.KVCache(SPEC, pk.Blocks(4), disk=disk).close()


def test_views_of_the_arena_outlive_the_closed_cache():
    toy = Toy(pk.KVCache(SPEC, pk.Blocks(16)))
    seq = toy.cache.sequence(prompt(1))
    toy.run(seq)
    arena, (k_view, _) = toy.cache.device_arena, toy.cache.layer(0)
    blocks = seq.blocks
    toy.cache.close()
    toy.cache = seq = None
    gc.collect()
    assert arena.any()
    assert np.array_equal(k_view[blocks].reshape(-1, 2, 4)[:13], Toy.kv(_Spec(), prompt(1), 0)[0])


class _Spec:
    spec, salt = SPEC, 0


def test_arrays_of_a_step_outlive_it(open_cache):
    toy = Toy(open_cache())
    seq = toy.cache.sequence(prompt(1))
    with toy.cache.step([seq]) as step:
        arrays = step.arrays
        toy.write(step, seq)
    kept = [
        getattr(arrays, name)
        for name in ("tokens", "positions", "block_tables", "slot_mapping", "seq_lens", "q_indptr")
    ]
    copies = [array.copy() for array in kept]
    del arrays, step
    for start in range(2, 30):
        toy.use(prompt(start))
    for array, copy in zip(kept, copies, strict=True):
        assert np.array_equal(array, copy)


def test_after_close_nothing_reads_writes_or_moves(open_cache):
    toy = Toy(open_cache(8, host=4, pin_budget=3))
    cache = toy.cache
    seq = cache.sequence(prompt(1))
    toy.run(seq)
    seq.append(1)
    pinned = cache.pin(prompt(1))
    step = cache.step([seq])
    cache.close()
    cache.close()
    pinned.release()
    name, kv = pk.Namespace(tenant="a"), np.zeros((2, 1, 2, 4))
    for use in (
        lambda: cache.sequence([1]), lambda: cache.step([seq]), lambda: cache.prefetch([1]), lambda: cache.pin([1]),
        lambda: cache.set_quota(name, pk.Blocks(1)), lambda: cache.purge(name),
        lambda: cache.explain([1]),
        lambda: cache.device_arena, lambda: cache.layer(0), lambda: cache.decode, lambda: seq.gather(),
        lambda: seq.scatter(kv, kv), lambda: seq.retain(), lambda: step.__enter__(),
    ):  # fmt: skip
        with pytest.raises(pk.ClosedError):
            use()
    seq.release()
    cache.check_integrity()


@pytest.mark.parametrize("use", ["append", "truncate", "fork", "tokens", "blocks", "num_tokens", "num_computed"])
def test_after_close_bookkeeping_works_or_says_that_it_is_closed(open_cache, use):
    toy = Toy(open_cache())
    seq = toy.cache.sequence(prompt(1))
    toy.run(seq)
    toy.cache.close()
    try:
        what = getattr(seq, use)
        if callable(what):
            what(1)
    except pk.ClosedError:
        pass
    toy.cache.check_integrity()


def test_a_step_that_is_under_way_when_the_cache_closes_commits_nothing_wrong(open_cache):
    toy = Toy(open_cache())
    seq = toy.cache.sequence(prompt(1))
    with pytest.raises(pk.ClosedError), toy.cache.step([seq]) as step:  # noqa: PT012
        step.write(0, *toy.new_kv(step, [seq], 0))
        toy.cache.close()
        step.write(1, *toy.new_kv(step, [seq], 1))
    assert seq.num_computed == 0


def test_the_with_block_of_a_cache_closes_it():
    with pk.KVCache(SPEC, pk.Blocks(8)) as cache:
        Toy(cache).use(prompt(1))
    with pytest.raises(pk.ClosedError):
        cache.sequence([1])


def test_closing_after_an_exception_keeps_the_exception():
    with pytest.raises(KeyError), pk.KVCache(SPEC, pk.Blocks(8)) as cache:
        raise KeyError
    with pytest.raises(pk.ClosedError):
        cache.explain([1])


class Node:
    """Something that refers to itself, so that only the garbage collector frees it."""

    def __init__(self, held):
        self.held, self.me = held, self


def test_sequences_forgotten_in_reference_cycles_are_released_by_the_collector(open_cache):
    toy = Toy(open_cache(8))
    for start in range(30):
        seq = toy.cache.sequence(prompt(start))
        collect_until(partial(has_run, toy, seq))
        Node(seq).more = seq
        del seq
    collect_until(lambda: toy.cache.stats().sequences == 0)
    assert all_free(toy.cache)


def has_run(toy, seq):
    try:
        toy.run(seq)
    except pk.OutOfBlocks:
        return False
    return True


def test_sequences_and_their_cache_in_one_cycle():
    gone = []
    for _ in range(20):
        cache = pk.KVCache(SPEC, pk.Blocks(8), host_memory=pk.Blocks(4))
        seq = cache.sequence(prompt(1))
        Toy(cache).run(seq)
        node = Node([cache, seq, cache.step([seq])])
        gone.append(weakref.ref(cache))
        del cache, seq, node
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_collection_at_any_allocation_is_harmless(open_cache):
    toy = Toy(open_cache(12, host=6))
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for start in range(40):
            try:
                seq = toy.cache.sequence(prompt(start % 7))
                toy.run(seq)
                toy.check(seq)
                Node(seq).forks = seq.fork(2)
            except pk.OutOfBlocks:
                gc.collect()
            seq = None
            toy.cache.check_integrity()
            toy.cache.stats()
            toy.cache.explain(prompt(start % 7))
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert all_free(toy.cache)


def test_a_sequence_dropped_inside_a_step_is_kept_until_its_end(open_cache):
    toy = Toy(open_cache())
    seq = toy.cache.sequence(prompt(1))
    with toy.cache.step([seq]) as step:
        pairs = [toy.new_kv(step, [seq], layer) for layer in range(2)]
        del seq
        gc.collect()
        other = toy.cache.sequence(prompt(2))
        toy.run(other)
        for layer, pair in enumerate(pairs):
            step.write(layer, *pair)
    toy.check(other)
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}


@pytest.mark.parametrize("when", ["before", "between layers", "after"])
def test_an_exception_inside_a_step_commits_nothing_and_the_step_can_be_made_again(open_cache, when):
    toy = Toy(open_cache())
    first, second = toy.cache.sequence(prompt(1)), toy.cache.sequence(prompt(2))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), toy.cache.step([first, second]) as step:  # noqa: PT012
            if when != "before":
                step.write(0, *toy.new_kv(step, [first, second], 0))
            if when == "after":
                step.write(1, *toy.new_kv(step, [first, second], 1))
            raise ZeroDivisionError
        assert (first.num_computed, second.num_computed) == (0, 0)
        toy.cache.check_integrity()
    toy.run(first, second)
    toy.check(first, second)


def test_a_generator_that_is_never_finished_holds_nothing(open_cache):
    toy = Toy(open_cache())

    def stream():
        with toy.cache.sequence(prompt(1)) as seq:
            while True:
                toy.run(seq)
                yield seq.num_tokens
                seq.append(1)

    tokens = stream()
    assert [next(tokens) for _ in range(3)] == [13, 14, 15]
    del tokens
    gc.collect()
    assert all_free(toy.cache)


@pytest.mark.parametrize("closing", ["cache.close()", "", "del cache", "seq.release()", "del cache; gc.collect()"])
def test_a_process_ends_cleanly_whatever_it_left_open(tmp_path, closing):
    script = f"""
        import gc
        import numpy as np
        import pagedkv as pk
        spec = pk.KVSpec(2, 2, 4, "float32", 4, model="toy")
        cache = pk.KVCache(spec, pk.Blocks(8), pk.Blocks(4), pk.Disk({str(tmp_path / "kv")!r}, pk.Blocks(20)))
        for start in range(6):
            with cache.sequence(range(100 * start, 100 * start + 13)) as other:
                kv = np.zeros((2, 13, 2, 4))
                other.scatter(kv, kv)
        seq = cache.sequence(range(13))
        ticket = cache.prefetch(range(100, 113))
        {closing}
    """
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


ENDS = """
import atexit, sys
def last():
    try:
        %s
    except pk.ClosedError as error:
        print("refused:", error)
    else:
        print("done")
    cache.close()
if sys.argv[2] == "before":
    atexit.register(last)
import numpy as np
import pagedkv as pk
if sys.argv[2] == "after":
    atexit.register(last)
spec = pk.KVSpec(1, 1, 8, "float32", 4, model="toy")
disk = pk.Disk(sys.argv[1], pk.Blocks(20), write="all", admission="all")
cache = pk.KVCache(spec, pk.Blocks(16), pk.Blocks(16), disk)
with cache.sequence(range(24)) as seq:
    seq.scatter(*np.ones((2, 1, 24, 1, 8), np.float32))
"""


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("call", ["cache.close()", "cache.flush()", "cache.checkpoint()"])
def test_a_handler_that_a_program_registers_for_its_end_never_hangs(tmp_path, call, registered):
    """Registered after the import it finds all at work, although caches are loaded later."""
    path = str(tmp_path / "kv")
    ran = subprocess.run(
        [sys.executable, "-c", ENDS % call, path, registered], capture_output=True, text=True, timeout=60, check=True
    )
    is_done = registered == "after" or call == "cache.close()"
    assert ran.stdout.startswith("done" if is_done else "refused: the process is ending"), ran.stderr
    spec = pk.KVSpec(1, 1, 8, "float32", 4, model="toy")
    with pk.KVCache(spec, pk.Blocks(16), disk=pk.Disk(path, pk.Blocks(20))) as again:
        if registered == "after":
            assert again.match(range(24))["disk"] == 24


def test_opening_and_closing_many_times_leaks_no_descriptor(tmp_path):
    from pathlib import Path

    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(20))
    before = None
    for turn in range(30):
        with pk.KVCache(SPEC, pk.Blocks(4), host_memory=pk.Blocks(4), disk=disk) as cache:
            Toy(cache).use(prompt(turn))
        if before is None:
            before = descriptors()
    assert descriptors() == before


def test_a_forked_child_is_refused_everywhere_and_can_still_exit(tmp_path):
    """It has none of the cache's threads, and perhaps a mutex that is never given back."""
    script = f"""
        import os, signal
        import numpy as np
        import pagedkv as pk
        spec = pk.KVSpec(2, 2, 4, "float32", 4, model="toy")
        cache = pk.KVCache(spec, pk.Blocks(8), pk.Blocks(4), pk.Disk({str(tmp_path / "kv")!r}, pk.Blocks(20)))
        seq = cache.sequence(range(13))
        child = os.fork()
        if not child:
            signal.alarm(30)
            calls = [
                lambda: cache.sequence(range(9)), lambda: cache.step([seq]), lambda: cache.prefetch(range(9)),
                lambda: cache.purge(None), lambda: cache.flush(), lambda: cache.pin(range(9)), lambda: cache.stats(),
                lambda: cache.explain(range(9)), lambda: seq.append(1), lambda: seq.fork(), lambda: seq.gather(),
            ]
            for call in calls:
                try:
                    call()
                except pk.ClosedError as problem:
                    assert "a forked child must open one of its own" in str(problem), problem
                else:
                    os._exit(1)
            seq.release()
            cache.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        kv = np.zeros((2, 13, 2, 4))
        seq.scatter(kv, kv)
        seq.release()
        cache.check_integrity()
        cache.close()
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
