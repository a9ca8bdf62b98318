"""``python -m bench.remote``.

How fast blocks go to and from a store, beside a raw socket; how long calls wait for a store that is stopped; and the
cost of claims. It starts its own redis-server.

``speed``: 64 MiB in blocks of a size, written and read by the tier, checked, on one thread; best of 3. ``raw`` is the
rate at which a plain socket of the same family brings as many bytes from another process into memory, best of 3;
``share`` is read over raw. ``bare`` is the rate at which a client gets the same values of the same server, 8 MiB at
a time, without looking at them, best of 3. Where Mooncake is installed, its own master and a process that lends it
memory are started, too. ``wait``: the server is stopped; milliseconds beyond the call's limit, median of 9.
``claims``: bytes per claim, by the process's memory, and the time to match a prompt of 128 blocks among so many.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.timing import environment, print_table, write_results
from pagedkv.cache.remote.claims import Claims
from pagedkv.core import BlockPool, Placement, RadixTree
from pagedkv.tiers import Name
from pagedkv.tiers.remote.mooncake import MooncakeStore
from pagedkv.tiers.remote.store import Store
from pagedkv.tiers.remote.tier import RemoteTier
from pagedkv.tiers.remote.valkey import ValkeyStore
from pagedkv.tiers.remote.value import HEAD_BYTES, Values
from tests.remote.masters import is_installed, lent
from tests.remote.servers import Server, server

TOTAL, SIZES = 64 << 20, (64 << 10, 256 << 10, 1 << 20, 2 << 20)
CASES = [*((size, False) for size in SIZES), (1 << 20, True)]
AT_ONCE = 8 << 20  # bytes of one call
SPEED = ("way", "block_kib", "mode", "write_gb_s", "read_gb_s", "raw_gb_s", "bare_gb_s", "share")
WAIT = ("call", "limit_ms", "beyond_ms", "worst_ms")
CLAIMS = ("claims", "bytes_each", "match_us", "graft_us_each")


def best(work: Callable[[], object], count: int = 3) -> float:
    """The shortest time of some runs, in seconds."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def raw_socket(family: int) -> float:
    """Seconds in which another process's bytes come through a plain socket."""
    out, back = np.ones(TOTAL, np.uint8), np.zeros(TOTAL, np.uint8)
    with socket.socket(family) as listener:
        listener.bind("" if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen(1)
        child = os.fork()
        if not child:
            peer, _ = listener.accept()
            for _ in range(3):
                peer.recv(1)
                peer.sendall(out.data)
            os._exit(0)
        with socket.socket(family) as near:
            near.connect(listener.getsockname())

            def pull() -> None:
                near.sendall(b"x")
                have = 0
                while have < TOTAL:
                    have += near.recv_into(back.data[have:])

            took = best(pull)
        os.waitpid(child, 0)
    return took


def bare_client(family: int, place: str | tuple[str, int], keys: list[str], size: int) -> float:
    """Seconds in which a client receives values, each of `size` bytes, and looks at none."""
    each = len(f"${size}\r\n") + size + 2
    part = max(1, AT_ONCE // size)
    with socket.socket(family) as wire:
        wire.connect(place)
        back = bytearray(part * each)

        def pull() -> None:
            for start in range(0, len(keys), part):
                some = keys[start : start + part]
                wire.sendall(b"".join(f"*2\r\n$3\r\nGET\r\n${len(key)}\r\n{key}\r\n".encode() for key in some))
                have, wanted = 0, len(some) * each
                while have < wanted:
                    have += wire.recv_into(memoryview(back)[have:wanted])

        return best(pull)


def open_tier(store: Store, size: int, *, seal: bool = False, **limits: float) -> RemoteTier:
    """A tier of blocks of a size."""
    limits = {"lookup_s": 30.0, "read_s": 30.0, "write_s": 30.0, **limits}
    return RemoteTier(store, values_of(size, seal), 4096, where="bench", **limits)


def values_of(size: int, seal: bool) -> Values:
    """Keys and heads of blocks of a size."""
    return Values(bytes(32), bytes(32), size, seal=seal, prefix="bench")


def read_all(tier: RemoteTier, names: list[Name], back: np.ndarray[Any, Any], part: int) -> None:
    """Read blocks, so many at a time."""
    for start in range(0, len(names), part):
        rows = np.arange(start, min(start + part, len(names)), dtype=np.int32)
        if not tier.read(rows, names[start : start + part], back, rows).all():
            raise RuntimeError("a block did not come")


def through(store: Store, empty: Callable[[], object], size: int, seal: bool) -> tuple[float, float, list[str]]:
    """Seconds of writing and of reading, and the keys that are there in the end."""
    count = TOTAL // size
    out = np.random.default_rng(size).integers(0, 256, (count, size), np.uint8)
    back, order = np.zeros_like(out), np.arange(count, dtype=np.int32)
    wrote, tier = [], open_tier(store, size, seal=seal)
    for salt in range(3):
        empty()
        names = [Name(bytes([salt]) + number.to_bytes(31, "little"), bytes(32)) for number in range(count)]
        began = time.perf_counter()
        stored = tier.write(order, names, out, order)
        wrote.append(time.perf_counter() - began)
        if not stored.all():
            raise RuntimeError("the store did not take every block")
    read = best(partial(read_all, tier, names, back, max(1, AT_ONCE // size)))
    if not np.array_equal(out, back):
        raise RuntimeError("wrong bytes")
    values = values_of(size, seal)
    return min(wrote), read, [values.key(name.namespace, name.key) for name in names]


def row_of(way: str, size: int, seal: bool, seconds: tuple[float, float, float, float | None]) -> dict[str, Any]:
    """A row from the seconds of writing, reading, the plain socket and the bare client."""
    wrote, read, raw, bare = seconds
    return {
        "way": way, "block_kib": size >> 10, "mode": "seal" if seal else "sum",
        "write_gb_s": round(TOTAL / wrote / 1e9, 2), "read_gb_s": round(TOTAL / read / 1e9, 2),
        "raw_gb_s": round(TOTAL / raw / 1e9, 2), "bare_gb_s": None if bare is None else round(TOTAL / bare / 1e9, 2),
        "share": round(raw / read, 2),
    }  # fmt: skip


def speed(running: Server) -> list[dict[str, Any]]:
    """A row for each way to a server, size and mode."""
    rows = []
    places: dict[str, tuple[str, int, Any]] = {
        "tcp": (running.tcp, socket.AF_INET, ("127.0.0.1", running.port)),
        "unix": (running.unix, socket.AF_UNIX, running.unix.removeprefix("unix://")),
    }
    for way, (url, family, place) in places.items():
        raw = raw_socket(family)
        for size, seal in CASES:
            store = ValkeyStore(url, connect_s=5.0)
            wrote, read, keys = through(store, running.client().flushall, size, seal)
            bare = bare_client(family, place, keys, size + HEAD_BYTES)
            store.close()
            rows.append(row_of(way, size, seal, (wrote, read, raw, bare)))
    return rows


def mooncake_speed() -> list[dict[str, Any]]:
    """A row for each size and mode; none where Mooncake is not installed."""
    if not is_installed():
        return []
    rows, raw = [], raw_socket(socket.AF_INET)
    with lent(4 * TOTAL) as master:
        store = MooncakeStore(master.address, host="127.0.0.1", protocol="tcp", devices="", segment_bytes=0)
        store.open(time.monotonic() + 60.0)
        for size, seal in CASES:
            wrote, read, _ = through(store, lambda: store.remove_group("bench:", time.monotonic() + 60.0), size, seal)
            rows.append(row_of("mooncake", size, seal, (wrote, read, raw, None)))
        store.close()
    return rows


def wait(running: Server) -> list[dict[str, Any]]:
    """A row for each call, against a server that is stopped."""
    rows, one = [], np.zeros(1, np.int32)
    arena, name = np.zeros((1, 1 << 20), np.uint8), Name(bytes(32), bytes(32))
    for call, limit in (("lookup", 0.02), ("read", 0.3), ("write", 0.3)):
        beyond = []
        for _ in range(9):
            tier = open_tier(ValkeyStore(running.unix, connect_s=5.0), 1 << 20, **{f"{call}_s": limit})
            tier.lookup(bytes(32), [bytes(32)], anew=True)  # the connection is there
            running.pause()
            began = time.perf_counter()
            if call == "lookup":
                tier.lookup(bytes(32), [bytes(32)] * 64, anew=True)
            else:
                getattr(tier, call)(one, [name], arena, one)
            beyond.append(time.perf_counter() - began - limit)
            running.go_on()
            tier.close()
        rows.append({
            "call": call, "limit_ms": limit * 1e3, "beyond_ms": round(1e3 * statistics.median(beyond), 2),
            "worst_ms": round(1e3 * max(beyond), 2),
        })  # fmt: skip
    return rows


def claims(num_claims: int) -> dict[str, Any]:
    """The cost of a cache that knows so many blocks of a store; in a process of its own."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.write(sink, repr(_claims(num_claims)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    per_claim, match_us, graft_us = (float(word) for word in os.read(source, 200).decode().strip("()").split(","))
    return {
        "claims": num_claims, "bytes_each": round(per_claim), "match_us": round(match_us, 1),
        "graft_us_each": round(graft_us, 2),
    }  # fmt: skip


def _claims(num_claims: int) -> tuple[float, float, float]:
    gc.collect()
    before = _resident()
    pools = [BlockPool(64), None, None, BlockPool(num_claims)]
    core = Placement(RadixTree(16, 4), pools, beside=(False, False, False, True))
    known = Claims(core, bytes(32), 1 << 20)
    keys, blocks = [bytes(32)] * 128, 128
    prompts = [np.arange(i * 3000, i * 3000 + blocks * 16, dtype=np.int32) for i in range(num_claims // blocks)]
    began = time.perf_counter()
    for prompt in prompts:
        known.graft(prompt, 0, 0, keys)
    graft_us = 1e6 * (time.perf_counter() - began) / num_claims
    used = _resident() - before - sum(prompt.nbytes for prompt in prompts)
    some = prompts[:: max(1, len(prompts) // 100)]
    if any(len(core.match(prompt)[0]) != blocks for prompt in some):
        raise RuntimeError("a claim is not matched")
    return used / num_claims, 1e6 * best(lambda: [core.match(prompt) for prompt in some], 9) / len(some), graft_us


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Run, print, and write the result file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.remote", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result file here")
    arguments = parser.parse_args()
    env = environment()
    claim_rows = [claims(1024), claims(65_536), claims(1_000_000)]
    with server(memory="1gb") as running:
        speed_rows, wait_rows = speed(running) + mooncake_speed(), wait(running)
    for rows, columns in ((speed_rows, SPEED), (wait_rows, WAIT), (claim_rows, CLAIMS)):
        print_table(rows, columns)
    if arguments.json:
        write_results(arguments.json, "remote", speed_rows, env=env, wait=wait_rows, claims=claim_rows)


if __name__ == "__main__":
    main()
