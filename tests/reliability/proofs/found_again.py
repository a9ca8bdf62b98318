"""A process that was killed leaves a disk full of blocks for the next one.

Not a byte may be wrong, and that is the other proofs' part. This one asks how much is there: of the whole blocks of
the last LAST prompts that were committed SETTLED_S or longer before the kill, the share that the next process serves
from disk. Of a prompt the last token is always computed, so its block counts only if another follows it.

On a real trace most blocks are used once, and a disk that writes blocks that are used again has no reason to keep
those: there the bar counts blocks that a second request had used by that time, which means that it found them cached.
The share of all blocks stands beside it, as do that of the last LAST prompts at the kill itself, and the share
of computed blocks that was written.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tests.reliability import small_store as small
from tests.reliability.chat_life import BLOCK, ENTRY, WEIGHTS, Load, open_cache, paths_of, tokens_of
from tests.reliability.fork_server import ForkServer
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.token_kv import serve

LAST = 100  # prompts
SETTLED_S = 2.0
BAR = 0.9
AT_ONCE = 4
COMPARED = 5  # prompts of each kill, byte by byte
SYSTEMS = (1, 4, 20, 200)
TRACE = {"memory": 4096, "least_requests": 800, "most_requests": 4000}
MOONCAKE = "mooncake:conversation"
WEKA = Path(os.environ.get("PAGEDKV_SHARED", "/nonexistent")) / "traces" / "weka_dev_b512.npz"
BARRED = {
    **{f"{number} system prompts": Load(f"chats {number}") for number in SYSTEMS},
    "4 system prompts by groups": Load("chats 4", by_group=True),
}
TRACES = {
    "Mooncake": Load(MOONCAKE, **TRACE),
    "Mooncake, all": Load(MOONCAKE, write="all", **TRACE),
    "Weka": Load(str(WEKA), **TRACE),
    "Weka, all": Load(str(WEKA), write="all", **TRACE),
}
OTHERS = {
    "4 system prompts, disk 2 x": Load("chats 4", disk=2),
    "200 system prompts, disk 2 x": Load("chats 200", disk=2),
    "4 system prompts, half one-off": Load("one-off 4"),
}
BARRED_COUNTS = ("", "used again")
OTHERS_EVERY = 5  # one kill of so many is of TRACES or OTHERS


def wanted_blocks(paths: Sequence[np.ndarray], within: set[int] | None) -> set[int]:
    """The whole blocks of these prompts that can be found.

    Only those in `within`, where that is given.
    """
    wanted = {block for path in paths for block in path[:-1].tolist()}
    return wanted if within is None else wanted & within


def used_again(paths: Sequence[np.ndarray], hit_blocks: Sequence[int]) -> set[int]:
    """Blocks that a second request found cached."""
    return {block for path, hits in zip(paths, hit_blocks, strict=True) for block in path[:hits].tolist()}


@dataclass
class Counts:
    """Of all kills under one load.

    Attributes
    ----------
    wanted, found : blocks, by the label that `check` gives them.
    worst : the smallest share of one kill, of ``""`` or ``"used again"``.
    written, computed : blocks.
    """

    kills: int = 0
    wanted: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    worst: float = 1.0
    written: int = 0
    computed: int = 0

    def share(self, what: str) -> float:
        """Found of the wanted."""
        return self.found[what] / max(1, self.wanted[what])

    def lines(self) -> Iterator[tuple[str, int]]:
        """For a tally."""
        yield "kills", self.kills
        for what in self.wanted:
            yield f"% found {what}".rstrip(), int(100 * self.share(what))
        yield "% found after the worst kill", int(100 * self.worst)
        yield "% of computed blocks written", int(100 * self.written / max(1, self.computed))


def check(folder: Path, name: str, load: Load, killed: float, counts: Counts) -> tuple[int, int]:
    """Reopen, ask for the last prompts, and count.

    Returns
    -------
    tokens with wrong KV, blocks that were compared.
    """
    log = np.fromfile(folder / "log", ENTRY)
    paths = paths_of(load.source)[: len(log)]
    settled = int((log["time"] <= killed - SETTLED_S).sum())
    asked = {"": paths[max(0, settled - LAST) : settled], "at the kill": paths[-LAST:]}
    again = used_again(paths[:settled], log["hit_blocks"][:settled].tolist())
    sets = {"all blocks": None, "used again": again} if name in TRACES else {"": None}
    wrong = hits = 0
    with open_cache(folder, load) as cache:
        for moment, last in asked.items():
            on_disk = [cache.match(tokens_of(path))["disk"] // BLOCK for path in last]
            found = {block for path, count in zip(last, on_disk, strict=True) for block in path[:count].tolist()}
            for kind, within in sets.items():
                wanted = wanted_blocks(last, within)
                label = " ".join(word for word in (kind, moment) if word)
                counts.wanted[label] += len(wanted)
                counts.found[label] += len(found & wanted)
                if label in BARRED_COUNTS:
                    counts.worst = min(counts.worst, len(found & wanted) / max(1, len(wanted)))
        for path in asked[""][-COMPARED:]:
            served = serve(cache, tokens_of(path), None, WEIGHTS)
            wrong += served.wrong
            hits += served.hits.get("disk", 0) // BLOCK
    counts.kills += 1
    counts.written += int(log["blocks_written"][-1])
    counts.computed += sum(map(len, paths)) - int(log["hit_blocks"].sum())
    return wrong, hits


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Kill, reopen, ask; the loads take turns."""
    tally, lock = Tally(), threading.Lock()
    others = {**TRACES, **OTHERS}
    if not WEKA.is_file():
        others = {name: load for name, load in others.items() if not name.startswith("Weka")}
        tally.skipped = ("the Weka trace is not there (PAGEDKV_SHARED)",)
    counts = {name: Counts() for name in (*BARRED, *others)}
    servers = [ForkServer() for _ in range(AT_ONCE)]
    free = list(servers)

    def one(number: int) -> None:
        choose = random.Random(f"{seed} {number}")
        turn = number // OTHERS_EVERY
        other = number % OTHERS_EVERY == OTHERS_EVERY - 1
        loads = others if other else BARRED
        name, load = list(loads.items())[(turn if other else number - turn) % len(loads)]
        with lock:
            server = free.pop()
        with small.scratch() as folder:
            ran = server.call(
                "tests.reliability.chat_life:kill_one", folder=str(folder), load=asdict(load),
                requests=choose.randint(load.least_requests, load.most_requests), pause_s=0.02,
                wait_s=choose.uniform(SETTLED_S, 2 * SETTLED_S),
            )  # fmt: skip
            with lock:
                free.append(server)
            how = f"seed {seed}, kill {number} ({name})"
            with lock:  # the shares are counted in one thread at a time
                tally.count += 1
                if ran["heard"] != ["slow"] or ran["ended"] != -signal.SIGKILL:
                    tally.fail(f"{how}: ended with {ran['ended']}, said {ran['heard']}")
                else:
                    wrong, hits = check(folder, name, load, ran["killed"], counts[name])
                    tally.hits += hits
                    if wrong:
                        tally.fail(f"{how}: wrong KV of {wrong} tokens")
        tick(1)

    try:
        with small.quiet(), ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(one, number) for number in range(count)]:
                done.result()
    finally:
        for server in servers:
            server.__exit__(None, None, None)
    for name, counted in counts.items():
        if counted.kills:
            judge(name, counted, tally)
            for what, value in counted.lines():
                tally.add(f"{name}: {what}", value)
    return tally


def judge(name: str, counts: Counts, tally: Tally) -> None:
    """Wrong where too little was found, or nothing was asked for."""
    what = "used again" if name in TRACES else ""
    if name not in OTHERS and (not counts.wanted[what] or counts.share(what) <= BAR):
        tally.fail(f"{name}: {counts.found[what]} of {counts.wanted[what]} blocks {what} were found again")


PROOF = Proof(
    claim="kill -9 of a server, open again: of the whole blocks of the last 100 prompts that were committed 2 s before "
    "the kill, over 90 % are served from disk, also by groups of layers",
    unit="kills",
    quick=10,
    full=1250,
    run=run,
)
