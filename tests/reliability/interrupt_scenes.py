"""The scenes of the proof *interrupts*.

This module has those in which sequences are opened and changed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

import pagedkv as pk
from tests.reliability.interrupt_world import NAMESPACES, World

Held: TypeAlias = list[tuple[pk.Sequence, pk.Namespace | None]]
NONE, A, B = NAMESPACES


@dataclass
class Act:
    """A call to be interrupted.

    Attributes
    ----------
    call : the call, or a few that belong together. It can be made again after it was interrupted.
    undo : lets go of everything that it made.
    seqs : sequences (with their namespaces) whose bytes must be right at every moment.
    busy : whether it may hold all blocks that there are, so that others get none before `undo`.
    garbage : whether it leaves sequences to the garbage collector.
    """

    call: Callable[[], object]
    undo: Callable[[], object] = lambda: None
    seqs: Held = field(default_factory=list)
    busy: bool = False
    garbage: bool = False


@dataclass(frozen=True)
class Scene:
    """A public call and the state that it is made in.

    `fits` says whether a world can have that state.
    """

    name: str
    prepare: Callable[[World], Act]
    fits: Callable[[World], bool] = lambda world: True


SCENES: list[Scene] = []


def scene(name: str, fits: Callable[[World], bool] = lambda world: True) -> Callable[..., Callable[[World], Act]]:
    """Add a function to the scenes."""

    def add(prepare: Callable[[World], Act]) -> Callable[[World], Act]:
        SCENES.append(Scene(name, prepare, fits))
        return prepare

    return add


def release(seqs: Held) -> None:
    """Let go of them."""
    for seq, _ in seqs:
        seq.release()
    seqs.clear()


def opening(world: World, prompt: list[int], namespace: pk.Namespace | None, **options: Any) -> Act:
    """A sequence is opened and, if it is kept, compared."""
    seqs: Held = []

    def call() -> None:
        seqs.append((world.cache.sequence(prompt, namespace, **options), namespace))

    return Act(call, lambda: release(seqs), seqs)


def started(world: World, blocks: int = 2, namespace: pk.Namespace | None = A) -> pk.Sequence:
    """A sequence whose prompt is computed."""
    seq = world.cache.sequence(world.prompt(blocks), namespace)
    world.run([(seq, namespace)])
    return seq


# ---- sequences


@scene("sequence, a miss")
def miss(world: World) -> Act:
    return opening(world, world.prompt(2), A)


@scene("sequence, a hit on the device")
def device_hit(world: World) -> Act:
    return opening(world, world.put_into("device", A), A, session="talk")


@scene("sequence, a hit in host memory", lambda world: world.setup.host)
def host_hit(world: World) -> Act:
    return opening(world, world.put_into("host", NONE, 3), NONE)


@scene("sequence, a hit in host memory with the device full", lambda world: world.setup.host)
def host_hit_when_full(world: World) -> Act:
    prompt = world.put_into("host", B)
    world.fill()
    return opening(world, prompt, B)


@scene("sequence, a hit on disk", lambda world: world.setup.disk)
def disk_hit(world: World) -> Act:
    return opening(world, world.put_into("disk", NONE, 3), NONE)


@scene("sequence, part of a block")
def partial_hit(world: World) -> Act:
    prompt = world.put_into("device", A)
    return opening(world, [*prompt[: world.block + 2], 7, 8, 9], A)


@scene("sequence on trial, and count")
def on_trial(world: World) -> Act:
    act = opening(world, world.put_into("device", NONE), NONE, on_trial=True)

    def call() -> None:
        seq = world.cache.sequence(world.prompt(1), A, on_trial=True)
        act.seqs.append((seq, A))
        world.cache.count(seq)

    return Act(call, act.undo, act.seqs)


@scene("a request with demotions")
def request(world: World) -> Act:
    world.fill()

    def call() -> None:
        world.serve(world.prompt(3), B)

    return Act(call)


@scene("a sequence that is dropped, and one in a circle")
def dropped(world: World) -> Act:
    prompts = [world.put_into("device", NONE), world.prompt(1)]

    def call() -> None:
        for prompt in prompts:
            seq = world.cache.sequence(prompt)
            world.run([(seq, NONE)])
            circle: list[Any] = [seq]
            circle.append(circle)
            del seq, circle
        gc.collect(1)

    return Act(call, gc.collect, garbage=True)  # an interruption may come just before the collection


# ---- what sequences do


@scene("append and truncate")
def append(world: World) -> Act:
    seqs = [(started(world, 2, A), A)]

    def call() -> None:
        seqs[0][0].append([3, 4])
        seqs[0][0].append(5)
        seqs[0][0].truncate(world.block + 1)

    return Act(call, lambda: release(seqs), seqs)


@scene("fork and release")
def fork(world: World) -> Act:
    seqs = [(started(world, 1, B), B)]

    def call() -> None:
        for seq in seqs[0][0].fork(3):
            seq.release()
            seq.release()

    return Act(call, lambda: release(seqs), seqs)


@scene("retain, expect_return and what can be asked of a sequence")
def retain(world: World) -> Act:
    seqs = [(started(world, 1, A), A)]

    def call() -> None:
        seq = seqs[0][0]
        seq.retain(priority=70, ttl_s=1e6)
        seq.expect_return(5.0)
        repr(seq), len(seq), seq.blocks, seq.tokens

    return Act(call, lambda: release(seqs), seqs)


@scene("scatter and gather")
def scatter(world: World) -> Act:
    seqs = [(world.cache.sequence(world.prompt(2), NONE), NONE)]

    def call() -> None:
        seq = seqs[0][0]
        rest = world.wanted(seq.tokens, NONE)[seq.num_computed :]
        if not len(rest):  # it was committed before the interruption came
            seq.append(5)
            rest = world.wanted(seq.tokens, NONE)[seq.num_computed :]
        shape = (world.spec.num_layers, len(rest), world.spec.num_kv_heads, world.spec.head_dim)
        kv = np.empty(shape, world.spec.np_dtype)
        kv[:] = rest[None, :, None, None]
        seq.scatter(kv, -kv)
        seq.gather(out=(np.empty_like(seq.gather()[0]), np.empty_like(seq.gather()[1])))

    return Act(call, lambda: release(seqs), seqs)


@scene("exported blocks and pages", lambda world: not world.setup.kernels)
def export(world: World) -> Act:
    seqs = [(started(world, 2, A), A)]
    kept: list[Any] = []

    def call() -> None:
        kept.extend(seqs[0][0].export_blocks())
        kept.extend(np.from_dlpack(view) for view in kept[:1])
        pages = world.cache.pages(0)
        world.cache.layer(0)
        with world.cache.step([seqs[0][0]]) as step:
            pages.tables(step.block_tables)

    def undo() -> None:
        kept.clear()
        release(seqs)

    return Act(call, undo, seqs)
