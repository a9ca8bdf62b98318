"""A server's life that ends with kill -9.

It serves requests over device, host and disk, and logs its commits. A block of a load is a number, and stands for
BLOCK tokens that follow from it. The log outlives the process: written bytes are in the page cache.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.lab.replay.load import load_trace
from tests.core.write_policies import chats
from tests.reliability.fork_server import Child
from tests.reliability.token_kv import GROUPED, SPEC, serve

BLOCK = SPEC.block_size
WEIGHTS = "the chats' model"
ENTRY = np.dtype([("time", "<f8"), ("hit_blocks", "<i8"), ("blocks_written", "<i8")])  # of one committed request
TOLD_EVERY = 64  # requests between two looks at the counters
Path32 = NDArray[np.int32]


@dataclass(frozen=True)
class Load:
    """Requests, and the tiers they meet.

    Attributes
    ----------
    source : ``"chats N"``, N system prompts; ``"one-off N"``, where every second prompt never returns; or a trace, a
        file or a name that ``load_trace`` takes.
    memory : blocks of device and host together.
    disk : blocks of the disk, as a multiple of memory.
    write : of the disk; None for its default.
    least_requests, most_requests : served before the slow end, at full speed.
    by_group : whether the cache is one over groups of layers.
    """

    source: str
    memory: int = 512
    disk: int = 8
    write: str | None = None
    least_requests: int = 600
    most_requests: int = 2400
    by_group: bool = False


@functools.cache
def paths_of(source: str) -> list[Path32]:
    """The blocks of each request, int32."""
    kind, _, number = source.partition(" ")
    if kind == "chats":
        return chats(int(number))
    if kind == "one-off":
        kept, first = chats(int(number), turns=1500), 1_000_000
        once = [np.arange(first + 20 * i, first + 20 * i + 20, dtype=np.int32) for i in range(len(kept))]
        return [path for pair in zip(kept, once, strict=True) for path in pair]
    trace = load_trace(source)
    return [trace.path(request) for request in range(trace.num_requests)]


def tokens_of(path: Path32) -> NDArray[np.int32]:
    """The prompt: BLOCK tokens for each block."""
    return np.asarray(path[:, None] * BLOCK + np.arange(BLOCK), np.int32).ravel()


def open_cache(folder: Path, load: Load) -> pk.KVCache:
    """The cache of both lives, with the options that the library chooses.

    But for ``admission="all"``: nothing is really computed here, so reading a block takes longer than to compute it.
    """
    options: dict[str, Any] = {} if load.write is None else {"write": load.write}
    disk = pk.Disk(str(folder / "kv"), pk.Blocks(load.disk * load.memory), admission="all", **options)
    half = pk.Blocks(load.memory // 2)
    return pk.KVCache(GROUPED if load.by_group else SPEC, half, half, disk, by_group=load.by_group)


def live(folder: Path, load: Load, requests: int, pause_s: float, say: Callable[[str], object]) -> None:
    """Serve `requests` at full speed, say so, then go on slowly.

    One request each `pause_s`, until this process is killed.
    """
    cache = open_cache(folder, load)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    entry = np.zeros(1, ENTRY)
    for number, path in enumerate(paths_of(load.source)):
        if number % TOLD_EVERY == 0:
            written = sum(count for way, count in cache.stats().moved_bytes.items() if way.endswith("_to_disk"))
            entry["blocks_written"] = written // cache.spec.block_bytes
        served = serve(cache, tokens_of(path), None, WEIGHTS)
        entry["time"], entry["hit_blocks"] = time.monotonic(), sum(served.hits.values()) // BLOCK
        os.write(log, entry.tobytes())
        if number + 1 == requests:
            say("slow")
        if number >= requests:
            time.sleep(pause_s)
    say("the load ran dry")


def kill_one(folder: str, load: dict[str, Any], requests: int, pause_s: float, wait_s: float) -> dict[str, Any]:
    """Live in a child and kill it `wait_s` after its slow end began.

    Returns the time of the kill, and all that the child said.
    """
    child = Child(lambda say: live(Path(folder), Load(**load), requests, pause_s, say))
    heard = [child.line()]
    time.sleep(wait_s)
    killed = time.monotonic()
    child.kill()
    heard += child.heard()
    return {"heard": heard, "ended": child.end(), "killed": killed}
