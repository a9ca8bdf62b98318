"""The cost of a namespace ends with its use.

The cache forgets a name once nothing is cached, held or set for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache import roots as roots_module
from pagedkv.cache.roots import Roots
from tests.slices import one_in

from .conftest import BLOCK, SPEC, Toy, prompt

FEW = 200  # of 64 blocks, each a namespace's at most, twice, and a few


def names_of(cache: pk.KVCache) -> tuple[int, int, int]:
    """Names that the cache knows, that the core knows, and nodes of the tree."""
    tree = cache.placement.tree
    return len(cache._roots), tree.num_namespaces, tree.num_nodes


def use(cache: pk.KVCache, namespace: pk.Namespace, tokens: list[int]) -> None:
    with cache.sequence(tokens, namespace) as seq, cache.step([seq]) as step:
        for layer in range(SPEC.num_layers):
            step.mark_written(layer)


def test_explain_of_a_namespace_that_was_never_used_makes_nothing() -> None:
    with pk.KVCache(SPEC, pk.Blocks(16)) as cache:
        before = names_of(cache)
        for number in range(100_000):
            assert cache.explain([1] * 9, pk.Namespace(salt=number.to_bytes(16, "little"))).cached_tokens == 0
        assert names_of(cache) == before


@pytest.mark.parametrize("policy", one_in(2, ["lru", "s3fifo", "hazard"]))
def test_names_used_once_and_evicted_leave_as_many_as_are_cached(policy: str) -> None:
    with pk.KVCache(SPEC, pk.Blocks(32), pk.Blocks(32), policy=policy) as cache:
        tokens = prompt(1, BLOCK + 1)
        for number in range(2_000):
            use(cache, pk.Namespace(salt=os.urandom(16)), tokens)
            if number % 500 == 0 and policy != "hazard":
                assert max(names_of(cache)) <= FEW
        cache.check_integrity()


def test_a_hundred_thousand_names_used_once_and_evicted_leave_as_many_as_are_cached() -> None:
    with pk.KVCache(SPEC, pk.Blocks(32)) as cache:
        placement, tokens = cache.placement, np.arange(BLOCK, dtype=np.int32)
        for number in range(100_000):
            root = cache._root(pk.Namespace(salt=number.to_bytes(16, "little")))
            owner, _ = placement.acquire(tokens, root)
            assert placement.insert(owner, tokens, placement.allocate(1)) == 1
            placement.release(owner)
            if number % 10_000 == 0:
                assert max(names_of(cache)) <= FEW
        assert max(names_of(cache)) <= FEW
        cache.check_integrity()


def test_what_the_policy_hazard_remembers_of_evicted_prefixes_bounds_its_names() -> None:
    with pk.KVCache(SPEC, pk.Blocks(8), policy="hazard") as cache:
        for number in range(1_000):
            use(cache, pk.Namespace(tenant=str(number)), prompt(number, BLOCK + 1))
        hazard = cache.placement.hazard
        assert hazard is not None
        remembered = hazard.stats()["remembered_runs"]
        assert names_of(cache)[0] <= 2 * remembered + 16
        for number in range(1_000):
            cache.purge(pk.Namespace(tenant=str(number)))
        use(cache, pk.Namespace(), prompt(1, BLOCK + 1))
        assert max(names_of(cache)) <= 32
        cache.check_integrity()


def test_purges_leave_nothing_of_what_they_purged_and_of_themselves() -> None:
    with pk.KVCache(SPEC, pk.Blocks(64)) as cache:
        a_tenant = pk.Namespace(tenant="bounded")
        cache.set_quota(a_tenant, pk.Blocks(8))
        size = 0
        for number in range(2_000):
            name = pk.Namespace(tenant=str(number))
            cache.purge(name)
            if number % 2:
                use(cache, name, prompt(number, BLOCK + 1))
                assert cache.purge(name) == 1
            use(cache, a_tenant, prompt(number, BLOCK + 1))
            cache.purge(a_tenant)
            size = size or cache.placement.tree.num_nodes
        assert max(names_of(cache)) <= size + 16
        cache.check_integrity()


def test_a_namespace_that_was_forgotten_begins_anew_and_is_no_others() -> None:
    with pk.KVCache(SPEC, pk.Blocks(8)) as cache:
        toys = [Toy(cache, salt) for salt in range(64)]  # each namespace's own weights: a block of another's would show
        names = [pk.Namespace(tenant=str(salt)) for salt in range(64)]
        tokens = prompt(1, 2 * BLOCK + 1)
        for _ in range(3):
            for toy, name in zip(toys, names, strict=True):
                assert cache.explain(tokens, name).cached_tokens == 0, "evicted long ago"
                toy.use(tokens, name)
                toy.use(tokens, name)
                assert toy.tokens_checked
        assert max(names_of(cache)) < 32
        assert cache.placement.tree.find(names[0].digest()) is None
        cache.check_integrity()


def test_a_block_shows_nothing_of_the_namespace_that_had_its_number_before() -> None:
    """The core uses the slots of namespaces again.

    A block of the old namespace must not pass for one of the next.
    """
    with pk.KVCache(SPEC, pk.Blocks(4)) as cache:
        poison = 0xFF
        for number in range(100):
            name = pk.Namespace(salt=os.urandom(16))
            with cache.sequence(prompt(number, 2), name) as seq, cache.step([seq]) as step:
                rest = [cache.layer(layer)[0][seq.blocks, 2:] for layer in range(SPEC.num_layers)]
                assert not any(part.any() for part in rest), f"of namespace {number - 1}"
                cache.device_arena[seq.blocks] = poison
                for layer in range(SPEC.num_layers):
                    step.mark_written(layer)
            cache.placement.clear()
        cache.check_integrity()


def test_quotas_and_kinds_outlive_purges_and_names_that_come_and_go() -> None:
    with pk.KVCache(SPEC, pk.Blocks(64), policy="hazard") as cache:
        bounded, kind = pk.Namespace(tenant="bounded"), pk.Namespace(tenant="of a kind")
        cache.set_quota(bounded, pk.Blocks(2))
        cache.set_kind(kind, "agents")
        for number in range(50):
            use(cache, pk.Namespace(tenant=str(number)), prompt(number, BLOCK + 1))
            if number % 10 == 0:
                cache.purge(bounded)
                cache.purge(kind)
        for turn in range(3):
            use(cache, bounded, prompt(turn, 4 * BLOCK + 1))
        root = cache.placement.tree.find(bounded.digest())
        assert root is not None
        assert len(cache.placement.blocks_in(root)) <= 2
        assert cache._roots.kinds == {kind.digest(): 1}
        cache.set_quota(bounded, None)
        cache.set_kind(kind)
        assert (cache._roots.quotas, cache._roots.kinds) == ({}, {})


def test_lifting_a_quota_that_was_never_set_makes_no_name() -> None:
    with pk.KVCache(SPEC, pk.Blocks(8)) as cache:
        before = names_of(cache)
        for number in range(100):
            cache.set_quota(pk.Namespace(tenant=str(number)), None)
        assert names_of(cache) == before


def test_a_name_that_a_thread_is_about_to_use_is_not_forgotten() -> None:
    with pk.KVCache(SPEC, pk.Blocks(16)) as cache:
        name = pk.Namespace(tenant="late")
        root = cache._root(name)
        for number in range(200):
            use(cache, pk.Namespace(tenant=str(number)), prompt(number, BLOCK + 1))
        owner, _ = cache.placement.acquire(prompt(1, BLOCK + 1), root)
        cache.placement.release(owner)
        assert cache._root(name) is root
        number = int(root)
        del root
        for other in range(200):
            use(cache, pk.Namespace(tenant=str(other)), prompt(other, BLOCK + 1))
        assert int(cache._root(name)) != number


def test_threads_that_use_names_while_others_are_forgotten_are_never_refused() -> None:
    problems: list[BaseException] = []
    with pk.KVCache(SPEC, pk.Blocks(64), pk.Blocks(32), max_sequences=64) as cache:

        def tenant(thread: int) -> None:
            try:
                for number in range(300):
                    name = pk.Namespace(tenant=f"{(thread * 7 + number) % 5 if number % 3 else number}")
                    use(cache, name, prompt(number % 7, BLOCK + 1))
                    cache.explain(prompt(number % 7, BLOCK + 1), name)
                    if number % 20 == 0:
                        cache.purge(name)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=tenant, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert max(names_of(cache)) <= FEW + 64
        cache.check_integrity()


def test_the_makings_of_a_name_that_were_interrupted_are_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pk.KVCache(SPEC, pk.Blocks(16)) as cache:
        name, interrupted = pk.Namespace(tenant="a"), [True]
        cache.set_quota(name, pk.Blocks(2))
        cache.purge(name)
        saw = cache._scrub.saw

        def stop(root: int) -> None:
            if interrupted.pop():
                raise KeyboardInterrupt
            saw(root)

        monkeypatch.setattr(cache._scrub, "saw", stop)
        with pytest.raises(KeyboardInterrupt):
            cache.sequence([1, 2], name)
        interrupted.append(False)
        use(cache, name, prompt(1, 4 * BLOCK + 1))
        assert len(cache.placement.blocks_in(cache._root(name))) == 2


def test_a_table_of_names_keeps_the_namespace_itself_no_longer() -> None:
    """Fields may have 64 KiB each: what stays is 32 bytes."""
    with pk.KVCache(SPEC, pk.Blocks(16)) as cache:
        use(cache, pk.Namespace(tenant="x" * 65_536), prompt(1, 2))
        roots = cache._roots
        assert isinstance(roots, Roots)
        assert all(type(digest) is bytes and len(digest) == 32 for digest in roots._known)
        assert np.all([len(cache.placement.tree.name(root)) == 32 for root in roots._known.values()])


class Stopped(BaseException):
    """Comes out at a line of the library, as a signal's exception would."""


def lines_of(call: Callable[[], object], target: int = 0) -> int:
    """How many lines of roots.py a call passes; it is stopped before number `target`."""
    passed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        if event == "line" and frame.f_code.co_filename == roots_module.__file__:
            passed += 1
            if passed == target:
                raise Stopped
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Stopped:
        pass
    finally:
        sys.settrace(before)
    return passed


def test_an_interrupt_at_any_line_loses_no_namespace() -> None:
    names = [pk.Namespace(tenant=str(number)) for number in range(6)]
    with pk.KVCache(SPEC, pk.Blocks(64)) as cache:
        for target in range(1, 200):
            for name in names:
                use(cache, name, prompt(1, BLOCK + 1))  # needed: each has a block
            stopped = lines_of(lambda: use(cache, pk.Namespace(tenant="new"), prompt(2, BLOCK + 1)), target) == target
            for number in range(8):  # whatever was stopped is put right by calls for other namespaces
                use(cache, pk.Namespace(tenant=f"other {number}"), prompt(3, BLOCK + 1))
            tree, roots = cache.placement.tree, cache._roots
            assert tree.num_namespaces <= len(roots._known) + 1, f"line {target}"
            cache.check_integrity()
            cache.purge(pk.Namespace(tenant="new"))
            for number in range(8):
                cache.purge(pk.Namespace(tenant=f"other {number}"))
            if not stopped:
                break
        assert 30 < target < 199


def test_a_purge_that_is_interrupted_at_any_line_leaves_nothing() -> None:
    name = pk.Namespace(tenant="purged")
    with pk.KVCache(SPEC, pk.Blocks(64)) as cache:
        for target in range(1, 300):
            use(cache, name, prompt(1, BLOCK + 1))
            stopped = lines_of(lambda: cache.purge(name), target) == target
            cache.purge(name)
            for number in range(3):  # calls for others settle what is left
                use(cache, pk.Namespace(tenant=f"other {number}"), prompt(3, BLOCK + 1))
                cache.purge(pk.Namespace(tenant=f"other {number}"))
            assert (cache._roots._leaving, cache._roots._unsettled) == ({}, {}), f"line {target}"
            if not stopped:
                break
        assert 15 < target < 299
