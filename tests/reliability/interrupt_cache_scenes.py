"""Calls of the cache itself to be interrupted.

Prefetches, pins, quotas, purges, questions, opening and closing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.observe.metrics import samples
from tests.in_blocks import in_blocks
from tests.reliability.interrupt_scenes import NONE, A, Act, B, scene
from tests.reliability.interrupt_world import TENANT, World


@scene("prefetch and wait", lambda world: world.setup.host or world.setup.disk)
def prefetch(world: World) -> Act:
    prompt = world.put_into(world.setup.tiers[1], NONE)
    world.background = True

    def call() -> None:
        ticket = world.cache.prefetch(prompt)
        world.tickets.append(ticket)
        ticket.done()
        ticket.wait(60)

    return Act(call)


@scene("prefetch and cancel")
def prefetch_cancelled(world: World) -> Act:
    prompt = world.put_into("device", A)
    world.background = True

    def call() -> None:
        for _ in range(2):
            ticket = world.cache.prefetch(prompt, A)
            world.tickets.append(ticket)
            ticket.cancel()

    return Act(call)


@scene("prefetch_likely, set_kind and save_learned", lambda world: world.setup.policy == "hazard")
def likely(world: World) -> Act:
    world.put_into(world.setup.tiers[-1], A)
    world.background = True

    def call() -> None:
        world.tickets.extend(world.cache.prefetch_likely(60.0, 4))
        world.cache.set_kind(A, "agents")
        world.cache.set_kind(A)
        world.cache.save_learned()

    return Act(call)


@scene("pin and let go")
def pin(world: World) -> Act:
    prompt = world.put_into("device", B)

    def call() -> None:
        world.cache.pin(prompt, B).release()
        with world.cache.pin(prompt, B) as pinned:
            assert pinned.num_tokens

    return Act(call)


@scene("a quota that drives blocks out")
def quota(world: World) -> Act:
    for _ in range(3):
        world.serve(world.prompt(2), A)

    def call() -> None:
        for tier in world.setup.tiers:
            world.cache.set_quota(TENANT, pk.Blocks(2), pk.Tier[tier.upper()])
        world.serve(world.prompt(2), A)
        for tier in world.setup.tiers:
            kept = 4 if world.setup.quota and tier == "device" else None
            world.cache.set_quota(TENANT, in_blocks(kept), pk.Tier[tier.upper()])

    return Act(call)


@scene("purge")
def purge(world: World) -> Act:
    for tier in world.setup.tiers:
        world.put_into(tier, A, 1)
    world.serve(world.prompt(2), A)

    def call() -> None:
        world.cache.purge(A)

    return Act(call)


@scene("flush", lambda world: world.setup.disk)
def flush(world: World) -> Act:
    world.serve(world.prompt(3), NONE)

    def call() -> None:
        world.cache.flush()

    return Act(call)


@scene("explain, stats, events and other questions")
def questions(world: World) -> Act:
    prompt = world.put_into("device", A)

    def call() -> None:
        world.cache.explain(prompt, A)
        world.cache.stats()
        world.cache.events()
        world.cache.observe_prefill(100, 0.001, 5)
        world.cache.used_on()
        stats = world.cache.stats()
        samples(stats), stats.to_dict(), str(stats), stats.token_hit_rate
        repr(world.cache), repr(world.cache.explain(prompt)), world.cache.costs, world.cache.device_arena

    return Act(call)


@scene("a namespace that is new")
def new_namespace(world: World) -> Act:
    numbers: list[int] = []

    def call() -> None:
        numbers.append(0)
        namespace = pk.Namespace(tenant="new", salt=bytes([len(numbers)]) * 16)
        world.serve(world.prompt(1), namespace)
        world.cache.purge(namespace)

    return Act(call)


@scene("hooks that come and go, and a recorder")
def hooks(world: World) -> Act:
    from pagedkv.lab.recording import Recorder

    made: list[Any] = []

    def call() -> None:
        made.append(Recorder(world.cache, max_frames=3))
        world.cache.hooks.add(made[-1])
        world.serve(world.prompt(1), NONE)
        world.cache.hooks.remove(made[-1])

    def undo() -> None:
        for hook in made:
            with suppress(pk.InvalidArgument):
                world.cache.hooks.remove(hook)

    return Act(call, undo)


@scene("a cache is opened, used and closed")
def open_and_close(world: World) -> Act:
    number = world.prompt(0)[0]
    path = world.folder / f"other {number}"
    prompt = world.prompt(3)
    made: list[pk.KVCache] = []

    def call() -> None:
        for cache in made:
            cache.close()  # an interrupt may have come before the first line of that of `with`
        for _ in range(2):
            made.append(world.open(path))
            with made[-1] as cache, cache.sequence(prompt, A) as seq:
                world.check(seq, A)
                rest = world.wanted(seq.tokens, A)[seq.num_computed :]
                shape = (world.spec.num_layers, len(rest), world.spec.num_kv_heads, world.spec.head_dim)
                kv = np.empty(shape, world.spec.np_dtype)
                kv[:] = rest[None, :, None, None]
                seq.scatter(kv, -kv)
                cache.flush()

    def undo() -> None:
        for cache in made:
            cache.close()
        made.clear()

    return Act(call, undo)
