"""``python -m bench.groups``: the core over groups of layers, beside a uniform one.

``decode``    a step of rows that all decode: ``append``, ``step``, ``commit``, by their length
``match``     a prompt that is cached to its end: looking it up, and owning it
``stranded``  bytes of free pages in extents that are in use, when no further sequence fits. Lengths are lognormal, with
              the medians of chats and of code (``--lengths FILE.npz`` takes a file's); all sequences grow by a block in
              turn, and those that find no room start over

The systems take turns within each round, so that all share the machine's moods.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from bench.timing import CPU, environment, gc_off, print_table, summarise, write_results
from pagedkv.core import BlockPool, BlockTable, ExtentPool, Placement, RadixTree
from pagedkv.spec.groups import layout_of

SIZE, STEPS = 16, 8  # tokens of a block; decode steps in a round
WINDOWS = {"uniform": 0, "window 128": 128, "window 1,024": 1024}
COLUMNS = ("case", "system", "us", "ratio")
MODELS = {
    "Gemma 3 27B": [pk.Attention(16, 128) if i % 6 == 5 else pk.Attention(16, 128, window=1024) for i in range(62)],
    "gpt-oss-120b": [pk.Attention(8, 64, window=None if i % 2 else 128) for i in range(36)],
    "Llama 4 Scout": [pk.Attention(8, 128, chunk=None if i % 4 == 3 else 8192) for i in range(48)],
}
MEDIANS = {"chat": (1024, 128), "code": (2048, 16)}  # prompt and output tokens
Rows = list[dict[str, Any]]


def core(num_blocks: int, window: int) -> Placement:
    """A core over so many blocks; with a window, in tokens, over twice as many extents."""
    pools = ExtentPool(2 * num_blocks, (1, 1)).pools if window else (BlockPool(num_blocks),)
    for pool in pools:  # as in a server that has run for a while: the books' memory has been touched
        pool.free(pool.alloc(pool.num_available))
    groups = [(pools[1], window // SIZE, 0)] if window else None
    return Placement(RadixTree(SIZE), [pools[0]], groups=groups)


def tokens_of(length: int, seed: int) -> NDArray[np.int32]:
    """A prompt."""
    return np.random.default_rng(seed).integers(0, 32_000, length).astype(np.int32)


def compute(table: BlockTable, row: int) -> None:
    """All of a row's tokens, 2,048 at once."""
    while (left := table.info(row).num_tokens - table.info(row).num_computed) > 0:
        table.step([row], [min(left, 2048)])
        table.commit([row])


def decode(num_rows: int, length: int, window: int, steps: int) -> Callable[[], None]:
    """A decode step of rows of about this length, of which a sixteenth begin a block."""
    blocks = num_rows * ((length + steps) // SIZE + 2)
    table = BlockTable(core(blocks, window), num_rows)
    handles = np.array([table.open(tokens_of(length - i % SIZE, i))[0] for i in range(num_rows)], np.int64)
    for row in handles.tolist():
        compute(table, row)
    sampled = np.full(num_rows, 7, np.int32)

    def step() -> None:
        table.append(handles, sampled)
        table.step(handles)
        table.commit(handles)

    return step


def match(length: int, window: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Looking a cached prompt up, and owning it."""
    placement, prompt = core(length // SIZE + 300, window), tokens_of(length, 0)
    table = BlockTable(placement, 1)
    row, _ = table.open(np.append(prompt, np.int32(7)))
    compute(table, row)
    table.release(row)
    if len(placement.match(prompt)[0]) != length // SIZE:
        raise RuntimeError("the prompt is not cached to its end")
    return lambda: placement.match(prompt), lambda: placement.release(placement.acquire(prompt)[0])


def beside(case: str, work: Mapping[str, Callable[[], object]], rounds: int, inner: int) -> Rows:
    """Medians of each system's work, in turns, and their ratios to the first one."""
    found: dict[str, list[float]] = {name: [] for name in work}
    with gc_off():
        for _ in range(rounds):
            for name, call in work.items():
                call()  # the other systems' arrays leave the processor's caches
                start = CPU()
                for _ in range(inner):
                    call()
                found[name].append(CPU() - start)
    medians = {name: summarise(times, inner).us() for name, times in found.items()}
    first = medians[next(iter(medians))]
    return [
        {"case": case, "system": name, "us": median, "ratio": median / first}
        for name, median in medians.items()
    ]


def lengths(kind: str, file: str | None) -> Iterator[tuple[int, int]]:
    """Prompt and output tokens of requests, without end."""
    if file is not None:
        with np.load(file) as data:
            pairs = list(zip(data["input_tokens"].tolist(), data["output_tokens"].tolist(), strict=True))
        while True:
            yield from pairs
    random = np.random.default_rng(0)
    prompt, output = MEDIANS[kind]
    while True:
        yield int(random.lognormal(np.log(prompt), 1.0)) + 1, int(random.lognormal(np.log(output), 1.0)) + 1


def stranded(model: str, requests: Iterator[tuple[int, int]], memory: int, served: int) -> dict[str, Any]:
    """Serve so many requests; the stranded part of memory whenever no other one fitted."""
    spec = pk.KVSpec.of(MODELS[model], dtype="bfloat16", block_size=SIZE)
    layout = layout_of(spec, memory)
    extents = ExtentPool(memory // layout.extent_bytes, layout.per_extent)
    running: list[tuple[list[NDArray[np.int32]], int, int]] = []
    shares: list[float] = []
    ended, waiting = 0, next(requests)
    while ended < served:
        while waiting is not None:
            pages = take(extents, layout.groups, [np.empty(0, np.int32) for _ in layout.groups], waiting[0])
            if pages is None:
                pools = zip(extents.pools, layout.strides, strict=True)
                used = sum(pool.counts()["live"] * stride for pool, stride in pools) / layout.extent_bytes
                shares.append(1 - (used + extents.num_free) / extents.num_extents)
                break
            running.append((pages, waiting[0], sum(waiting)))
            waiting = next(requests)
        still = []
        for pages, length, end in running:
            grown = None if length >= end else take(extents, layout.groups, pages, length + SIZE)
            if grown is None:
                for pool, ids in zip(extents.pools, pages, strict=True):
                    pool.free(ids)
                ended += 1
            else:
                still.append((grown, length + SIZE, end))
        running = still
    return {
        "case": "stranded", "system": model, "mean %": 100 * float(np.mean(shares)), "most %": 100 * max(shares),
        "extent_bytes": layout.extent_bytes, "memory_bytes": memory,
    }  # fmt: skip


def take(
    extents: ExtentPool, groups: Any, held: list[NDArray[np.int32]], length: int
) -> list[NDArray[np.int32]] | None:
    """The pages of a sequence that grows to `length`; None if they do not fit: no change."""
    blocks, taken = -(-length // SIZE), []
    for pool, group, ids in zip(extents.pools, groups, held, strict=True):
        need = blocks if not group.is_short else min(blocks, group.need(length // SIZE) + 1)
        try:
            taken.append(pool.alloc(max(0, need - len(ids))))
        except pk.OutOfBlocks:
            for other, new in zip(extents.pools, taken, strict=False):
                other.free(new)
            return None
    grown = []
    for pool, group, ids, new in zip(extents.pools, groups, held, taken, strict=True):
        need = blocks if not group.is_short else min(blocks, group.need(length // SIZE) + 1)
        every = np.concatenate((ids, new))
        pool.free(every[: len(every) - need])
        grown.append(every[len(every) - need :])
    return grown


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.groups", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--lengths-of-rows", type=int, nargs="*", default=[1024, 8192, 32_768])
    parser.add_argument("--prompts", type=int, nargs="*", default=[8192, 131_072])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--lengths", metavar="FILE", nargs="*", default=[], help=".npz of input_tokens, output_tokens")
    parser.add_argument("--memory-gib", type=int, default=40)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", default=None)
    options, env = parser.parse_args(), environment()
    timed: Rows = []
    for length in options.lengths_of_rows:
        steps = options.rounds * (STEPS + 1)
        work = {name: decode(options.rows, length, window, steps) for name, window in WINDOWS.items()}
        timed += beside(f"decode {options.rows} x {length:,}", work, options.rounds, STEPS)
    for length in options.prompts:
        calls = {name: match(length, window) for name, window in WINDOWS.items()}
        for part, case in enumerate(("match", "own and release")):
            timed_calls = {name: pair[part] for name, pair in calls.items()}
            timed += beside(f"{case} {length:,}", timed_calls, options.rounds, max(1, 65_536 // length))
    print_table(timed, COLUMNS, title="groups of layers beside uniform layers")
    sources: dict[str, str | None] = {Path(file).name: file for file in options.lengths} or dict.fromkeys(MEDIANS)
    held = [
        {"lengths": name} | stranded(model, lengths(name, file), options.memory_gib << 30, options.requests)
        for name, file in sources.items()
        for model in MODELS
    ]
    print_table(held, ("system", "lengths", "mean %", "most %"), title="free bytes in extents in use, memory full")
    if options.json:
        write_results(options.json, "groups", timed, env=env, stranded=held)


if __name__ == "__main__":
    main()
