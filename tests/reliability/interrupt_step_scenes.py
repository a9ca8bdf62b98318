"""Steps to be interrupted.

Decoding, chunks, copies on write, room that has to be made, and bodies that fail.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

import pagedkv as pk
from pagedkv.kernels.jit import CompileCache
from pagedkv.kernels.nvrtc import default_nvrtc
from pagedkv.kernels.variant import variant
from tests.reliability.interrupt_scenes import A, Act, B, release, scene, started
from tests.reliability.interrupt_world import World


@scene("a decode step over two sequences")
def decode(world: World) -> Act:
    seqs = [(started(world, 2, A), A), (started(world, 1, B), B)]
    width = world.spec.num_kv_heads

    def call() -> None:
        for seq, _ in seqs:
            if seq.num_tokens == seq.num_computed:
                seq.append(5)
        with world.cache.step([seq for seq, _ in seqs]) as step:
            world.write(step, seqs)
            q = np.ones((len(step.tokens), width, world.spec.head_dim), world.spec.np_dtype)
            step.attend(0, q, return_lse=True)
            step.to_csr()

    return Act(call, lambda: release(seqs), seqs)


@scene("a step in chunks with lookahead, marked written")
def chunks(world: World) -> Act:
    seq = world.cache.sequence(world.prompt(2), B)
    seqs = [(seq, B)]

    def call() -> None:
        while seq.num_computed < seq.num_tokens:
            left = seq.num_tokens - seq.num_computed
            with world.cache.step([seq], q_lens=[min(left, world.block - 1)], lookahead=2) as step:
                world.write(step, seqs)
                for layer in range(world.spec.num_layers):
                    step.mark_written(layer)
        if seq.num_tokens < 3 * world.block:
            seq.append([1, 2, 3])

    return Act(call, lambda: release(seqs), seqs)


@scene("a step that raises, and one that writes too little")
def failing(world: World) -> Act:
    seqs = [(world.cache.sequence(world.prompt(1), A), A)]

    def call() -> None:
        with suppress(ZeroDivisionError), world.cache.step([seqs[0][0]]):
            raise ZeroDivisionError
        with suppress(pk.InvalidArgument), world.cache.step([seqs[0][0]]):
            pass

    return Act(call, lambda: release(seqs), seqs)


@scene("forks that copy on write")
def forks(world: World) -> Act:
    seqs = [(started(world, 2, A), A)]

    def call() -> None:
        made = [(seq, A) for seq in seqs[0][0].fork(2)]
        seqs.extend(made)
        for number, (seq, _) in enumerate(made):
            seq.append(number)
        world.run(made)

    def undo() -> None:
        release(seqs)

    return Act(call, undo, seqs)


@scene("a step without room, with demotions")
def step_with_demotions(world: World) -> Act:
    seqs = [(world.cache.sequence(world.prompt(3), A), A)]
    world.fill()

    def call() -> None:
        if seqs[0][0].num_tokens == seqs[0][0].num_computed:
            seqs[0][0].append(list(range(world.block)))
        world.run(seqs)

    return Act(call, lambda: release(seqs), seqs)


@scene("a kernel is compiled", lambda world: world.setup.kernels)
def compiled(world: World) -> Act:
    compiler = CompileCache(default_nvrtc(), world.folder / f"kernels {world.prompt(0)[0]}")

    def call() -> None:
        assert compiler.get(variant("plan"), "sm_90").code

    return Act(call)


@scene("out of blocks")
def out_of_blocks(world: World) -> Act:
    held = world.books["live on device"]  # by the bystanders; blocks that are sent or moved now may be free by then
    room = world.cache.stats().blocks["device"]["max"] - held
    seqs = [(world.cache.sequence(world.prompt(room + 2), B), B)]

    def call() -> None:
        try:
            world.run(seqs)
        except pk.OutOfBlocks:
            return
        raise AssertionError("more blocks were given than there are")

    return Act(call, lambda: release(seqs), seqs)
