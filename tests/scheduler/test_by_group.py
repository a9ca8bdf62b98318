"""A scheduler over a cache that keeps each layer's reach alone: every request ends.

Every position that a layer reads is compared with the KV computed for it, in the layer's own pages.

Not covered: prompts that share within a step, which it does not do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.scheduler import Plan, SchedulerOptions
from pagedkv.scheduler.needs import Pages
from tests.slices import one_in

from .conftest import BLOCK, Server, chain, greedy, prompt
from .test_random_runs import Run, finished

FULL, WINDOW, CHUNK = pk.Attention(1, 2), pk.Attention(1, 2, window=10), pk.Attention(1, 2, chunk=12)
SPECS = {
    "windows": pk.KVSpec.of([WINDOW, WINDOW, FULL], dtype="float32", block_size=BLOCK),
    "chunks": pk.KVSpec.of([CHUNK, FULL], dtype="float32", block_size=BLOCK),
    "both": pk.KVSpec.of([WINDOW, FULL, CHUNK, pk.Attention(1, 2, window=30)], dtype="float32", block_size=BLOCK),
    "few": pk.KVSpec.of([WINDOW] * 2 + [FULL] * 9 + [CHUNK] * 3, dtype="float32", block_size=BLOCK),
    "many": pk.KVSpec.of([WINDOW] * 13 + [FULL] * 2, dtype="float32", block_size=BLOCK),
}
LEAST = {"windows": 24, "chunks": 20, "both": 60, "few": 14, "many": 12}  # blocks of all layers, so that it is tight
FAR = pk.Attention(1, 2, window=57)
FEW = pk.KVSpec.of([FAR] * 3 + [FULL] * 23, dtype="float32", block_size=BLOCK)  # an extent holds seven pages of FAR


class GroupServer(Server):
    """The toy model with layers that see differently far."""

    def write(self, plan: Plan, step: pk.Step) -> None:
        spec = self.cache.spec
        starts = step.positions[step.q_indptr[:-1]].tolist()
        values = [
            chain(seq.tokens)[start : start + q_len]
            for seq, start, q_len in zip(plan.sequences, starts, plan.q_lens.tolist(), strict=True)
        ]
        kv = np.repeat(np.concatenate(values)[:, None, None], 2, axis=2)
        for layer in range(spec.num_layers):
            kv[..., 1] = layer
            step.write(layer, kv, kv)
        for layer in range(spec.num_layers):
            tables, (k, _) = step.tables_of(layer), self.cache.layer(layer)
            lengths = zip(step.seq_lens.tolist(), tables.seq_lens.tolist(), strict=True)
            each = zip(plan.sequences, starts, lengths, tables.block_tables, strict=True)
            for seq, start, (length, there), blocks in each:
                first = length - there
                assert first <= reach_of(spec, layer, start), "the layer's reach is not there"
                found = k[blocks[: -(-there // BLOCK)], :, 0].reshape(-1, 2)[:there]
                assert found[:, 0].tolist() == chain(seq.tokens)[first:length].tolist(), "other KV than was computed"
                assert (found[:, 1] == layer).all()


def reach_of(spec: pk.KVSpec, layer: int, position: int) -> int:
    """The first position that a token there sees in a layer."""
    if spec.windows is not None and (window := spec.windows[layer]) is not None:
        return max(0, position - window + 1)
    if spec.chunks is not None and (chunk := spec.chunks[layer]) is not None:
        return position // chunk * chunk
    return 0


def opened(
    spec: pk.KVSpec, blocks: int, host: int = 0, disk: pk.Disk | None = None, **options: Any
) -> GroupServer:
    below = pk.Blocks(host) if host else None
    cache = pk.KVCache(
        spec, pk.Blocks(blocks), below, disk, by_group=True, max_sequences=options.get("max_running", 8) + 2
    )
    return GroupServer(cache, SchedulerOptions(**{"max_running": 8, "max_batch_tokens": 32} | options))


@pytest.fixture
def serve() -> Iterator[Callable[..., GroupServer]]:
    servers: list[GroupServer] = []

    def open_it(*given: Any, **options: Any) -> GroupServer:
        servers.append(opened(*given, **options))
        return servers[-1]

    yield open_it
    for server in servers:
        server.cache.check_integrity()
        server.cache.close()


@pytest.mark.parametrize("name", SPECS)
def test_requests_end_with_what_they_would_have_come_to_alone(serve: Callable[..., GroupServer], name: str) -> None:
    server = serve(SPECS[name], 80)
    requests = [server.submit(prompt(i, 20 + 9 * i), 12, n=1 + i % 3) for i in range(6)]
    server.run()
    for request in requests:
        assert sorted(out.tolist() for out in request.outputs) == sorted(greedy(request, i) for i in range(request.n))
    again = server.submit(prompt(5, 65), 12)
    server.run()
    assert again.hit_tokens["device"] >= 60, "the next one with its prompt goes on from there"


def test_more_requests_run_at_once_than_where_every_layer_keeps_all(serve: Callable[..., GroupServer]) -> None:
    spec = pk.KVSpec.of([WINDOW] * 8 + [FULL], dtype="float32", block_size=BLOCK)
    lanes = []
    for by_group in (False, True):
        cache = pk.KVCache(spec, pk.Blocks(160), by_group=by_group)
        server = GroupServer(cache, SchedulerOptions(max_running=40, max_batch_tokens=72))
        for i in range(40):
            server.submit(prompt(i, 40), 24)
        server.run()
        lanes.append(server.max_lanes)
        assert bool(server.scheduler.stats().preempted_by_recompute) == (not by_group)
        cache.close()
    assert lanes[1] >= 2 * lanes[0]


def test_a_step_finds_room_for_the_pages_of_every_group(serve: Callable[..., GroupServer]) -> None:
    """Thirteen layers have a window and two see everything: windows fill the memory."""
    server = serve(SPECS["many"], 16)
    requests = [server.submit(prompt(i, 9 + i), 30) for i in range(8)]
    server.run()
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]
    assert server.scheduler.stats().preempted_by_recompute > 0, "it has to be tight"


def test_a_request_that_could_not_run_alone_is_refused(serve: Callable[..., GroupServer]) -> None:
    server = serve(SPECS["windows"], 30)
    most = server.scheduler._running.needs.capacity
    with pytest.raises(pk.RequestTooLarge) as caught:
        server.submit(prompt(1, most * BLOCK), 1)
    assert caught.value.asked > caught.value.capacity == most
    assert "lower max_batch_tokens" in str(caught.value)
    longest = next(n for n in range(most * BLOCK, 0, -1) if taken(server, n))
    assert longest > 30 * BLOCK, "as many blocks of all layers would not hold it"
    server.run()


def taken(server: GroupServer, num_tokens: int) -> bool:
    try:
        server.submit(prompt(2, num_tokens), 1)
    except pk.RequestTooLarge:
        return False
    return True


def test_a_request_left_alone_with_scattered_pages_begins_anew_by_itself(serve: Callable[..., GroupServer]) -> None:
    """Pages of its window lie among those of requests that have ended.

    They keep extents from the group that sees everything, which evicting does not change.
    """
    server = serve(FEW, 40, max_running=6, max_batch_tokens=12, watermark=0.0)
    running, needs = server.scheduler._running, server.scheduler._running.needs
    most = next(n for n in range(400, 0, -1) if needs.as_blocks(needs.at_most(8, n, 1)) <= needs.capacity)
    request = server.submit(prompt(1, 8), most)
    beside = [server.submit(prompt(2 + i, 8), 90 + 7 * i) for i in range(3)]
    while running.alone is None:
        assert not request.ended, "it was to lack room"
        server.turn()
    assert running.alone is request
    assert not running.requests or running.requests == [request]
    late = server.submit(prompt(9, 8), 3, priority=100)
    while not request.ended:
        server.turn()
        assert running.requests in ([], [request]), "it runs by itself until it has ended"
    assert request.num_preemptions == 1
    server.run()
    for one in (request, *beside, late):
        assert one.outputs[0].tolist() == greedy(one)


def test_a_request_that_does_not_even_fit_by_itself_lets_others_go_on(serve: Callable[..., GroupServer]) -> None:
    """A caller's own sequences hold a page in each of many extents, which counts for less."""
    server = serve(FEW, 60, max_running=43, max_batch_tokens=48, watermark=0.0)
    needs, running, cache = server.scheduler._running.needs, server.scheduler._running, server.cache
    outside = [cache.sequence(prompt(20 + i, BLOCK)) for i in range(42)]
    with cache.step(outside) as step:
        for layer in range(FEW.num_layers):
            step.mark_written(layer)
    for i, seq in enumerate(outside):
        if i % 7:
            seq.release()
    left = server.scheduler._running.left_by_others()[0]
    most = next(n for n in range(400, 0, -1) if needs.as_blocks(needs.at_most(8, n, 1)) <= left)
    request, other = server.submit(prompt(1, 8), most), server.submit(prompt(2, 8), 3)
    assert isinstance(how_it_ends(server), pk.OutOfBlocks)
    assert other.ended
    assert other.outputs[0].tolist() == greedy(other)
    assert running.alone is None
    for seq in outside[::7]:
        seq.release()
    server.run()
    assert request.outputs[0].tolist() == greedy(request)


def how_it_ends(server: GroupServer) -> BaseException | None:
    """Serve in a thread, so that a plan that is made for ever shows."""
    problems: list[BaseException] = []

    def serve() -> None:
        try:
            server.run()
        except BaseException as problem:
            problems.append(problem)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    serving.join(30.0)  # only tells a hang
    assert not serving.is_alive(), "a step is planned for ever"
    return problems[0] if problems else None


def test_pages_are_added_and_compared_group_by_group() -> None:
    some, more = Pages(np.array([3, 1])), Pages(np.array([2, 2]))
    assert some + more == Pages(np.array([5, 3])) == sum([some, more], Pages(np.array([0, 0])))
    assert some + 0 == some == 0 + some
    assert some - more == Pages(np.array([1, -1]))
    assert some != more
    assert repr(some) == "Pages([3, 1])"


class GroupRun(Run):
    """Random requests over a server by groups."""

    def __init__(self, seed: int, spec: pk.KVSpec, blocks: int, options: dict[str, Any]) -> None:
        super().begin(seed, opened(spec, blocks, **options))


def test_prompts_that_others_push_to_the_host_are_hit_there(serve: Callable[..., GroupServer]) -> None:
    server = serve(SPECS["windows"], 60, host=400, max_running=2)
    requests = [server.submit(prompt(i % 10, 40), 6) for i in range(30)]
    server.run()
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]
    hits = server.cache.stats().hit_tokens
    assert hits["host"] > 0
    assert hits["host"] + hits["device"] >= 20 * (40 - BLOCK)


def test_prompts_are_hit_on_a_disk_by_the_next_scheduler(serve: Callable[..., GroupServer], tmp_path: Path) -> None:
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(400), write="all", admission="all", unnamed_model=True)
    for life in range(2):
        server = serve(SPECS["windows"], 60, disk=disk, max_running=2)
        requests = [server.submit(prompt(i % 10, 40), 6) for i in range(30)]
        server.run()
        assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]
        hits = server.cache.stats().hit_tokens
        assert hits["disk"] > 0
        assert hits["disk"] + hits["device"] >= (30 if life else 20) * (40 - BLOCK)
        server.cache.close()


def test_requests_end_beside_threads_that_prefetch_their_prompts(serve: Callable[..., GroupServer]) -> None:
    server = serve(SPECS["windows"], 40, host=400, max_running=4)
    requests = [server.submit(prompt(i % 8, 40), 6) for i in range(60)]
    stop, problems = threading.Event(), []

    def prefetch(first: int) -> None:
        name = first
        try:
            while not stop.is_set():
                server.cache.prefetch(np.array(prompt(name % 8, 40), np.int32)).wait()
                name += 3
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=prefetch, args=(first,), daemon=True) for first in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert how_it_ends(server) is None
    finally:
        stop.set()
        for thread in threads:
            thread.join(30.0)
    assert not problems
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


@pytest.mark.parametrize("seed", one_in(8, range(32)))
def test_whatever_happens_over_groups_everybody_ends_and_nothing_is_wrong(seed: int, tmp_path: Path) -> None:
    choose = Random(seed)
    name = choose.choice(list(SPECS))
    max_running = choose.randint(1, 6)
    options = {
        "max_running": max_running,
        "max_batch_tokens": max_running + choose.randint(1, 30),
        "order": choose.choice(["first_come", "longest_prefix"]),
        "admission": choose.choice(["prompt", "prompt", "worst_case"]),
        "watermark": choose.choice([0.0, 0.1]),
        "lookahead": choose.choice([0, 0, 3]),
        "priority_tokens": choose.choice([0, 1, 50]),
        "window": 3,
        "host": choose.choice([0, 20, 100]),
    }
    blocks = choose.randint(LEAST[name], 2 * LEAST[name])
    if choose.random() < 0.5:
        options["disk"] = pk.Disk(
            tmp_path / "kv", pk.Blocks(choose.choice([60, 400])), write=choose.choice(["all", "reused", "evicted"]),
            admission="all", unnamed_model=True,
        )  # fmt: skip
    run = GroupRun(seed, SPECS[name], blocks, options)
    finished(run, 150)
