"""Calls to be interrupted of a cache that shares a store: lookups, loads, sends, purges."""

from __future__ import annotations

from contextlib import suppress

import pagedkv as pk
from tests.reliability.interrupt_scenes import NONE, A, Act, B, Held, Scene, opening, release, scene
from tests.reliability.interrupt_schedules import Turns
from tests.reliability.interrupt_world import World


def has_store(world: World) -> bool:
    return world.setup.remote


def stored(world: World, namespace: pk.Namespace | None, blocks: int = 2) -> list[int]:
    """Return a prompt whose prefix lies in the store alone, as far as requests reach that."""
    prompt = world.prompt(blocks)
    world.serve(prompt, namespace)
    world.cache.publish(prompt, namespace)
    for _ in range(24):
        if world.where(prompt, namespace) == "":
            break
        world.serve(world.prompt(3), NONE)
    return prompt


@scene("a request whose prefix lies in the store", has_store)
def found(world: World) -> Act:
    return opening(world, stored(world, A), A)


@scene("a request that waits for blocks that never come to the store", has_store)
def awaited(world: World) -> Act:
    return opening(world, world.prompt(2), B, await_remote_s=0.01)


@scene("a load from the store, looked at and kept", has_store)
def load(world: World) -> Act:
    prompt = stored(world, NONE, 3)
    seqs: Held = []

    def call() -> None:
        with world.cache.load(prompt) as under_way:
            under_way.done()
            seqs.append((under_way.sequence(), NONE))

    return Act(call, lambda: release(seqs), seqs)


@scene("a load from the store that is given up", has_store)
def given_up(world: World) -> Act:
    prompt = stored(world, B)

    def call() -> None:
        with world.cache.load(prompt, B, deadline_s=0.001) as under_way:
            under_way.done()

    return Act(call)


@scene("prefetch from the store", has_store)
def prefetched(world: World) -> Act:
    prompt = stored(world, A)
    world.background = True

    def call() -> None:
        ticket = world.cache.prefetch(prompt, A)
        world.tickets.append(ticket)
        ticket.wait(60)

    return Act(call)


@scene("publish", has_store)
def publish(world: World) -> Act:
    prompt, other = world.put_into("device", A), world.prompt(1)

    def call() -> None:
        world.cache.publish(prompt, A)
        world.cache.publish(other, B, wait_s=0.001)

    return Act(call)


@scene("a purge that the store takes part in", has_store)
def purge(world: World) -> Act:
    stored(world, A)
    world.serve(world.prompt(2), A)

    def call() -> None:
        world.cache.purge(A)

    return Act(call)


@scene("another cache on the same store", has_store)
def another(world: World) -> Act:
    prompt = stored(world, A)
    opened: list[pk.KVCache] = []

    def call() -> None:
        for cache in opened:
            cache.close()
        opened.append(world.open(world.folder / "another"))
        with opened[-1].sequence(prompt, A) as seq:
            world.check(seq, A)
        opened[-1].close()

    def undo() -> None:
        for cache in opened:
            with suppress(pk.errors.ClosedError):
                cache.close()
        opened.clear()

    return Act(call, undo)


def _loads(world: World) -> Act:
    turns, prompts = Turns(world, A), [stored(world, A), stored(world, A, 3)]

    def call() -> None:
        for prompt in prompts:
            turns.requests.append(turns.scheduler.submit(prompt, 3, namespace=A))
        turns.run()

    return Act(call, turns.stop, busy=True)


def _add() -> None:
    from tests.reliability.interrupt_scenes import SCENES

    SCENES.append(Scene("scheduler: requests whose prefixes lie in the store", _loads, has_store))


_add()
