"""The core forgets namespaces that nothing needs.

Their old names and numbers name nothing afterwards.
"""

from __future__ import annotations

import threading
from types import ModuleType

import numpy as np
import pytest

from pagedkv.core import BlockTable
from pagedkv.errors import InvalidArgument, StaleHandle
from tests.core.helpers import cache, finish, make_room, remember, single, sound, tiered


def test_a_namespace_that_nothing_needs_is_forgotten_and_its_number_is_refused_everywhere() -> None:
    tree, _, placement = tiered(1, (8, 8, 8))
    table = BlockTable(placement, 4)
    name = tree.namespace(b"a")
    assert placement.forget(name)
    assert placement.forget(name)
    assert tree.find(b"a") is None
    again = tree.namespace(b"a")
    assert again != name
    calls = (
        lambda: placement.acquire([1], name), lambda: placement.match([1], name),
        lambda: placement.set_quota(name, 1), lambda: placement.drop_namespace(name),
        lambda: placement.blocks_in(name), lambda: placement.restore([], [], name),
        lambda: table.open([1], name), lambda: tree.match([1], name), lambda: tree.prefixes(name),
        lambda: tree.name(name), lambda: placement.restore_forest([1], [0], [0, 1], [-1], [name]),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(StaleHandle, match="forgotten"):
            call()
    assert placement.moving_in(name) == 0
    sound(placement, table)


def test_what_needs_a_namespace_keeps_it() -> None:
    tree, _, placement = tiered(1, (4, 8), event_words=256)
    table = BlockTable(placement, 4)
    name = tree.namespace(b"a")
    owner, _ = placement.acquire([1], name)
    assert not placement.forget(name), "an owner of nothing yet"
    row, _ = table.open([1], name, owner=owner)
    assert not placement.forget(name), "a row"
    table.step([row])
    table.commit([row])
    table.release(row)
    assert not placement.forget(name), "a block"
    placement.reserve(4)
    assert not placement.forget(name), "a transfer"
    finish(placement)
    assert not placement.forget(name), "a block in a colder tier"
    placement.clear()
    assert not placement.forget(name), "events that were not drained"
    assert {event.namespace for event in placement.drain_events() if event.kind != "cleared"} == {b"a"}
    placement.set_quota(name, 3)
    assert not placement.forget(name), "a quota"
    placement.set_quota(name, None)
    assert placement.forget(name)
    assert not placement.forget(0), "the default namespace"
    sound(placement, table)


def test_events_name_the_namespace_that_they_were_of_and_never_the_one_after_it() -> None:
    tree, _, placement = single(1, 8, event_words=1024)
    names = {}
    for number in range(50):
        key = b"%d" % number
        names[number] = tree.namespace(key)
        cache(placement, [number, 1000], names[number])
        placement.clear()
        for older in range(number):
            placement.forget(names[older])
        if number % 7 == 6:
            for event in placement.drain_events():
                if event.kind == "stored":
                    assert event.namespace == b"%d" % event.token_ids[0]
    assert tree.num_namespaces <= 9
    sound(placement)


@pytest.mark.slow
def test_what_the_policy_remembers_keeps_a_namespace_until_it_is_forgotten(native_hazard: ModuleType) -> None:
    tree, _, placement = single(1, 8, policy="hazard", history_blocks=8)
    table = BlockTable(placement, 4)

    def use(name: int, tokens: list[int]) -> None:
        row, _ = table.open(tokens, name)
        table.step([row])
        table.commit([row])
        table.release(row)

    name = tree.namespace(b"a")
    use(name, [1, 2, 3])
    placement.clear()
    assert not placement.forget(name)
    assert placement.hazard is not None
    placement.hazard.set_kind(name, 1)
    for token in range(100, 140, 2):
        use(0, [token, token + 1])
    assert native_hazard.history_problems(placement) == []
    assert not placement.forget(name), "a kind that was set"
    placement.hazard.set_kind(name, 0)
    assert placement.forget(name)
    sound(placement, table)


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_a_forgotten_namespace_that_comes_back_knows_what_was_evicted_and_no_other_does(
    native_generations: ModuleType, policy: str
) -> None:
    tree, _, placement = single(1, 4, policy=policy)

    def use(key: bytes) -> list[tuple[int, int]]:
        name = tree.namespace(key)
        cache(placement, [1, 2], name)
        queues: list[tuple[int, int]] = native_generations.queues(placement)
        make_room(placement, 4)
        assert placement.forget(name)
        return queues

    assert use(b"a") == [(0, 0)], "new"
    assert use(b"a") == [(0, 1)], "evicted lately"
    assert use(b"b") == [(0, 0)], "another one's"
    name = tree.namespace(b"a")
    placement.drop_namespace(name)
    assert placement.forget(name)
    assert use(b"a") == [(0, 0)], "purged"
    sound(placement)


def test_a_dropped_namespace_is_forgotten_when_the_last_that_used_it_has_gone() -> None:
    tree, _, placement = tiered(1, (4, 8))
    name = tree.namespace(b"a")
    placement.set_quota(name, 3)
    owner = remember(placement, [1, 2], name)
    placement.drop_namespace(name)
    assert tree.find(b"a") is None
    assert tree.name(name) == b"a", "what is on its way still has a name"
    assert not placement.forget(name)
    other, found = placement.acquire([1, 2], name)
    assert found == 0
    placement.release(owner)
    assert not placement.forget(name), "another owner has come"
    placement.release(other)
    assert placement.forget(name)
    with pytest.raises(StaleHandle):
        tree.name(name)
    sound(placement)


def test_quotas_of_namespaces_that_come_and_go_use_the_same_lists_again() -> None:
    tree, _, placement = single(1, 8, policy="hazard")
    size = None
    for number in range(200):
        name = tree.namespace(b"%d" % number)
        placement.set_quota(name, 2)
        placement.drop_namespace(name)
        assert placement.forget(name)
        size = size or tree.num_nodes
    assert tree.num_nodes == size
    free = tree.namespace(b"free")
    cache(placement, [1, 2, 3, 4], free)
    assert len(placement.match([1, 2, 3, 4], free)[0]) == 4, "a quota of the namespace that had its slot before"
    sound(placement)


def test_a_quota_that_is_lifted_where_there_is_none_makes_no_lists() -> None:
    tree, _, placement = single(1, 8)
    names = [tree.namespace(b"%d" % number) for number in range(100)]
    for name in names:
        placement.set_quota(name, None)
        assert placement.forget(name)
    assert tree.num_nodes == 1


def test_a_number_that_was_forgotten_between_two_calls_is_refused_and_nothing_breaks() -> None:
    tree, pool, placement = single(1, 64)
    stop, problems, done = threading.Event(), [], [0]

    def use() -> None:
        try:
            while not stop.is_set():
                try:
                    owner, _ = placement.acquire([1, 2], tree.namespace(b"a"))
                except StaleHandle:
                    continue
                blocks, token = placement.allocate(1), np.array([1], np.int32)
                left = 0 if len(placement.blocks_of(owner)) else placement.insert(owner, token, blocks)
                pool.free(blocks[left:])
                placement.release(owner)
                done[0] += 1
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        placement.clear()
        name = tree.find(b"a")
        if name is not None:
            placement.forget(name)
        tree.namespace(b"b")
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert done[0]
    sound(placement)


def test_what_was_never_a_namespace_is_told_apart_from_what_was_one() -> None:
    tree, _, placement = single(1, 8)
    cache(placement, [1, 2])
    for number in (1, 99, -1, 2**62):
        with pytest.raises(InvalidArgument, match="not one of this tree"):
            placement.match([1], number)
    with pytest.raises(StaleHandle):
        tree.name(99)
