"""``python -m bench.remote_waits``.

How long a cache's calls wait for a store that stands still. Each call is made through a KVCache, with a store that is
stopped (SIGSTOP) a moment before: a redis-server by redis- py, a cluster of three by valkey-glide-sync, and Mooncake,
whose master and lender of memory are stopped. ``beyond_ms`` is the time beyond the call's limit, median of 9 caches;
the bar is 50. ``sequence`` waits `lookup_s` for the store's answer; ``load`` reads blocks that the store said it has,
is stopped then, and gives up after `read_s`; ``publish`` has `wait_s`, ``purge`` `purge_s`; ``await`` asks for
`await_remote_s` for blocks that the store lacks, and this store is not stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from bench.timing import environment, print_table, write_results
from pagedkv.spec.remote import Remote
from tests.remote.masters import Master, is_installed, lent
from tests.remote.servers import cluster, server
from tests.stopping import go_on, stop

SPEC = pk.KVSpec(4, 8, 128, "float16", 16, model="bench@1")  # blocks of 256 KiB
BLOCKS, ROOM = 20, 24
SECRET = b"a secret of the bench"
PATIENT = {"lookup_s": 20.0, "read_s": 20.0, "write_s": 20.0, "connect_s": 20.0}
LIMITS = {"sequence": 0.02, "load": 0.3, "publish": 0.1, "purge": 0.3, "await": 0.2}
NAMES = {"sequence": "lookup_s", "load": "read_s", "purge": "purge_s"}  # limits that are options of the store
COLUMNS = ("client", "call", "limit_ms", "beyond_ms", "worst_ms")
TENANT = pk.Namespace(tenant="a")


class Place(NamedTuple):
    """A running store.

    Attributes
    ----------
    client : its name in the table.
    remote : options of it, with the limits that are given.
    stop, go_on : make it stand still, and go on.
    """

    client: str
    remote: Callable[..., Remote]
    stop: Callable[[], None]
    go_on: Callable[[], None]


@contextlib.contextmanager
def places() -> Iterator[list[Place]]:
    """All stores that can run here."""
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(server())
        found = [Place("redis-py", lambda **limits: pk.Valkey(one.unix, secret=SECRET, **limits), one.pause, one.go_on)]
        if importlib.util.find_spec("glide_sync") is not None:
            nodes = stack.enter_context(cluster())
            url = f"valkey://127.0.0.1:{nodes[0].port}"

            def all_nodes(what: str) -> Callable[[], None]:
                return lambda: [getattr(node, what)() for node in nodes] and None

            found.append(
                Place(
                    "glide, a cluster",
                    lambda **limits: pk.Valkey(url, secret=SECRET, cluster=True, insecure=True, **limits),
                    all_nodes("pause"), all_nodes("go_on"),
                )
            )  # fmt: skip
        if is_installed():
            master = stack.enter_context(lent(256 << 20))
            found.append(
                Place(
                    "Mooncake", lambda **limits: pk.Mooncake(master.address, secret=SECRET, insecure=True, **limits),
                    to_both(master, stop), to_both(master, go_on),
                )
            )  # fmt: skip
        yield found


def to_both(master: Master, what: Callable[[subprocess.Popen[Any]], None]) -> Callable[[], None]:
    """Does something to Mooncake's master and to the lender."""

    def act() -> None:
        for process in (master.process, master.lender):
            what(process)

    return act


def prompt_of(number: int, blocks: int = BLOCKS) -> NDArray[np.int32]:
    """Tokens of so many whole blocks, and one more."""
    return np.random.default_rng(number).integers(0, 32_000, blocks * SPEC.block_size + 1).astype(np.int32)


def compute(cache: pk.KVCache, prompt: NDArray[np.int32], namespace: pk.Namespace | None = None, **options: Any) -> int:
    """Compute a prompt; tokens that were found in the store."""
    with cache.sequence(prompt, namespace, **options) as seq:
        shape = (SPEC.num_layers, len(prompt) - seq.num_computed, SPEC.num_kv_heads, SPEC.head_dim)
        seq.scatter(np.zeros(shape, np.float16), np.zeros(shape, np.float16))
        return int(seq.hit_tokens.get("remote", 0))


def beyond(place: Place, call: str) -> float:
    """Seconds beyond its limit that a call took, in a cache of its own."""
    limit = LIMITS[call]
    limits = {**PATIENT, "write": "never", **({NAMES[call]: limit} if call in NAMES else {})}
    if call == "sequence":
        limits |= {"lookup_s": 20.0}  # for the connection; the limit comes with the call
    with pk.KVCache(SPEC, memory=pk.Blocks(ROOM), remote=place.remote(**limits)) as cache:
        known = compute(cache, prompt_of(1))
        if known != BLOCKS * SPEC.block_size and call != "sequence":
            raise RuntimeError(f"{place.client}: {known} tokens came from the store")
        if call == "publish":
            compute(cache, prompt_of(4, 2))
        work: dict[str, Callable[[], object]] = {
            "sequence": lambda: cache.sequence(prompt_of(2)).release(),
            "load": lambda: cache.sequence(prompt_of(2)).release(),
            "publish": lambda: cache.publish(prompt_of(4, 2), wait_s=limit),
            "purge": lambda: purge(cache),
            "await": lambda: cache.sequence(prompt_of(5), await_remote_s=limit).release(),
        }
        tier: Any = cache._storage.remote  # type: ignore[attr-defined]
        if call == "sequence":
            tier.lookup_s = limit
        if call == "load":
            tier._store = stopping(tier._store, place)
        elif call != "await":
            place.stop()
        began = time.perf_counter()
        work[call]()
        took = time.perf_counter() - began
        place.go_on()
    return took - limit


def stopping(store: Any, place: Place) -> Any:
    """A store that stands still from its first read on."""
    real = store.get_into

    def get_into(*arguments: Any) -> Any:
        place.stop()
        return real(*arguments)

    store.get_into = get_into
    return store


def purge(cache: pk.KVCache) -> None:
    """Purge a namespace; the store does not confirm it."""
    with contextlib.suppress(pk.TierError):
        cache.purge(TENANT)


def main() -> None:
    """Run, print, and write the result file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.remote_waits", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result file here")
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    env, rows = environment(), []
    with places() as found:
        for place in found:
            with pk.KVCache(SPEC, memory=pk.Blocks(2 * ROOM), remote=place.remote(**PATIENT)) as cache:
                for number in (1, 2):
                    compute(cache, prompt_of(number))
                    cache.publish(prompt_of(number))
            for call, limit in LIMITS.items():
                taken = [beyond(place, call) for _ in range(arguments.runs)]
                rows.append({
                    "client": place.client, "call": call, "limit_ms": limit * 1e3,
                    "beyond_ms": round(1e3 * statistics.median(taken), 2), "worst_ms": round(1e3 * max(taken), 2),
                })  # fmt: skip
    print_table(rows, COLUMNS, title="Calls to a store that stands still")
    if arguments.json:
        write_results(arguments.json, "remote_waits", rows, env=env)


if __name__ == "__main__":
    main()
