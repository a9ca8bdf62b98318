"""Caches that share a store while the store, its content and the link to it go wrong.

Three caches of three kinds, over a unix socket, over TCP and over a link that damages answers, serve random prompts of
two namespaces from memories that hold a few of them. Between and during requests values are changed, exchanged, cut and
deleted, the server is stopped, killed and started again, and it evicts by itself. Every byte of every prompt is
compared, wherever it came from.
"""

from __future__ import annotations

import contextlib
import threading
import time
from random import Random
from typing import Any

import numpy as np

import pagedkv as pk
from tests.reliability.proof import Proof, Tally, Tick
from tests.remote import servers

SPEC = pk.KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4, model="toy@1")
TABLE = np.random.default_rng(7).standard_normal((512, 1, 8), dtype=np.float32)
SECRET = b"a secret of ours"
PROMPTS, BLOCKS = 60, 24
READ_S = 0.2  # for the values of a prompt
LARGE = 600  # bytes of a piece that holds values
HANGS_S = 60.0  # a request that takes longer hangs
MISSES = ("absent", "length", "format", "key", "sum", "late")
FAULTS = ("flipped", "exchanged", "cut", "deleted", "emptied", "stopped", "killed")


class World:
    """A server, the caches that share it, and the faults."""

    def __init__(self, seed: int, tally: Tally, undo: contextlib.ExitStack) -> None:
        self.rng, self.tally, self._undo = Random(seed), tally, undo
        self.port = servers.free_port()
        self._server = contextlib.ExitStack()
        undo.callback(self._server.close)
        self.start()
        self._link = servers.Link(self.port, mangle=self._mangle)
        undo.callback(self._link.close)
        self.caches = [self._open(url, **options) for url, options in (
            (self.running.unix, {"memory": pk.Blocks(80)}),
            (self.running.tcp, {"device_memory": pk.Blocks(60), "host_memory": pk.Blocks(60)}),
            (self._link.url, {"memory": pk.Blocks(70)}),
        )]  # fmt: skip
        made = np.random.default_rng(seed)
        stems = [made.integers(0, 512, 8 * SPEC.block_size) for _ in range(6)]
        self.prompts = [
            np.concatenate((stems[number % 6], made.integers(0, 512, made.integers(4, BLOCKS) * SPEC.block_size)))
            .astype(np.int32) for number in range(PROMPTS)
        ]  # fmt: skip

    def start(self) -> None:
        """A server on the same port and socket, empty."""
        self.running = self._server.enter_context(servers.server(memory="2mb", port=self.port))

    def _open(self, url: str, **sizes: Any) -> pk.KVCache:
        remote = pk.Valkey(url, secret=SECRET, read_s=READ_S, write_s=0.5, lookup_s=0.1, min_blocks=1, claims=64)
        return self._undo.enter_context(pk.KVCache(SPEC, remote=remote, threads=2, **sizes))

    def _mangle(self, number: int, data: bytes) -> bytes:
        """One piece of an answer in 150 is damaged, and one with values in 10 comes too late."""
        rng = Random(number)
        if len(data) > LARGE and rng.random() < 1 / 10:
            self.tally.add("answers held back by the link")
            time.sleep(1.5 * READ_S)
        if rng.random() > 1 / 150:
            return data
        self.tally.add("answers damaged by the link")
        at = rng.randrange(len(data))
        return rng.choice([data[:at], data + data[at:], data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]])

    # ---- faults

    def fault(self) -> None:
        """Something goes wrong at the store."""
        kind = self.rng.choices(FAULTS, (30, 20, 20, 20, 2, 4, 1))[0]
        with contextlib.suppress(OSError, ConnectionError):
            getattr(self, f"_{kind}")()
            self.tally.add(f"values {kind}" if kind in FAULTS[:4] else f"servers {kind}")

    def _some(self, count: int) -> list[bytes]:
        client = self.running.client()
        found = (client.randomkey() for _ in range(count))
        return [key for key in found if key is not None]

    def _flipped(self) -> None:
        client = self.running.client()
        for key in self._some(6):
            at = self.rng.randrange(max(1, client.strlen(key)))
            if old := client.getrange(key, at, at):
                client.setrange(key, at, bytes([old[0] ^ (1 << self.rng.randrange(8))]))

    def _exchanged(self) -> None:
        client, keys = self.running.client(), self._some(6)
        values = [client.get(key) for key in keys]
        for key, value in zip(keys, values[1:] + values[:1], strict=True):
            if value is not None:
                client.set(key, value)

    def _cut(self) -> None:
        client = self.running.client()
        for key in self._some(6):
            value = client.get(key) or b""
            client.set(key, value[: self.rng.randrange(len(value) + 1)])

    def _deleted(self) -> None:
        for key in self._some(10):
            self.running.client().delete(key)

    def _emptied(self) -> None:
        self.running.client().flushall()

    def _stopped(self) -> None:
        self.running.pause()
        threading.Timer(self.rng.choice([0.02, 0.15, 0.3]), self.running.go_on).start()

    def _killed(self) -> None:
        self._server.close()
        self.start()
        for number, cache in enumerate(self.caches[:1]):  # its socket lies elsewhere now
            cache.close(write_s=0.0)
            self.caches[number] = self._open(self.running.unix, memory=pk.Blocks(80))

    # ---- requests

    def request(self) -> None:
        """One prompt through one cache; every byte is compared."""
        cache, prompt = self.rng.choice(self.caches), self.rng.choice(self.prompts)
        tenant = self.rng.choice([None, None, pk.Namespace(tenant="a")])
        shift = 0.0 if tenant is None else 1.0
        began = time.monotonic()
        with cache.sequence(prompt, tenant) as seq:
            hits = seq.hit_tokens["remote"]
            if seq.num_computed < len(prompt):
                with cache.step([seq]) as step:
                    rows = TABLE[step.tokens]
                    for layer in range(SPEC.num_layers):
                        step.write(layer, rows + layer + shift, rows - layer)
            k, v = seq.gather()
            layers = np.arange(SPEC.num_layers, dtype=np.float32)[:, None, None, None]
            rows = TABLE[prompt][None]
            if not (np.array_equal(k, rows + layers + shift) and np.array_equal(v, rows - layers)):
                self.tally.fail(f"wrong bytes in a prompt of which the store gave {hits} tokens")
        if time.monotonic() - began > HANGS_S:
            self.tally.fail("a request hung")
        self.tally.hits += hits // SPEC.block_size
        self.tally.add("requests")


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Requests until so many blocks were asked of the store, served or not."""
    tally = Tally()
    with contextlib.ExitStack() as undo:
        try:
            servers.redis_server()
            import redis as redis
        except BaseException as missing:
            tally.skipped = (f"a server: {missing}",)
            return tally
        world = World(seed, tally, undo)
        closed: dict[str, int] = {}
        while tally.count < count and not tally.wrong:
            if world.rng.random() < 0.25:
                before = list(world.caches)
                world.fault()
                for cache in before:
                    if cache not in world.caches:
                        add_up(closed, cache)
            world.request()
            if world.rng.random() < 0.01:
                for cache in world.caches:
                    cache.check_integrity()
            totals = dict(closed)
            for cache in world.caches:
                add_up(totals, cache)
            asked = sum(totals.get(name, 0) for name in ("read", *(f"missed: {why}" for why in MISSES)))
            tick(asked - tally.count)
            tally.count = asked
        for name, number in totals.items():
            tally.add(name, number)
    tally.require("read", "values flipped", "deduplicated", "missed: sum", "missed: key")
    if count >= 10_000:  # these are rare: whether a short run meets each of them depends on the clock
        tally.require(*(f"missed: {why}" for why in MISSES))
        tally.require("servers stopped", "servers killed", "servers emptied", "answers damaged by the link")
    return tally


def add_up(totals: dict[str, int], cache: pk.KVCache) -> None:
    """Add a cache's counters of its store."""
    found = cache.stats().remote
    assert found is not None
    counts = {
        "read": found["read_blocks"], "written": found["written_blocks"], "deduplicated": found["deduplicated"],
        "calls without an answer": sum(found["failures"].values()),
        **{f"missed: {why}": number for why, number in found["misses"].items()},
    }  # fmt: skip
    for name, number in counts.items():
        totals[name] = totals.get(name, 0) + number


PROOF = Proof(
    claim="a store that caches share loses, changes, exchanges and cuts values, stops, dies, evicts and answers late, "
    "and its link damages answers: whatever is served was computed for exactly that namespace and prefix, nothing "
    "raises, and no request hangs",
    unit="remote reads of a block",
    quick=2_000,
    full=100_000,
    run=run,
)
