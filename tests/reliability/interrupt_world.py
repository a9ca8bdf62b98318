"""A small cache with bystanders, and its audit.

What every block holds follows from its namespace and tokens.
"""

from __future__ import annotations

import gc
import importlib
import logging
import random
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.cache.prefetch import Prefetch
from pagedkv.cache.scrub import Mode
from tests.reliability.interrupt_kinds import Callbacks
from tests.reliability.interrupt_storage import CopyingStorage
from tests.reliability.small_remote import remote
from tests.toy import chain

SPEC = pk.KVSpec(1, 1, 8, "float32", 4, model="interrupts")
LARGE = pk.KVSpec(4, 4, 64, "float32", 64, model="interrupts")  # 512 KiB a block: a copy takes a while
KERNELS = pk.KVSpec(1, 1, 32, "float16", 4, model="interrupts")
DEVICE, HOST, DISK = 16, 10, 24
PIN_BUDGET = 6
LOG = logging.getLogger("pagedkv")


@dataclass(frozen=True)
class Setup:
    """How a cache of the proof is opened.

    Attributes
    ----------
    host, disk : whether it has these tiers.
    hooks, clock : whether it has a hook, and a clock of the caller's.
    quota : whether the namespace "a" has a quota.
    slow : seconds that a copy between tiers, and a call of the store, waits before it begins, while a call is
        interrupted and just after.
    synchronous : whether callers carry out moves themselves, over a storage of their own.
    remote : whether it shares a store, in this process's memory.
    every : it has its turn in one of so many rounds (heavy ones less often).
    """

    name: str
    host: bool = False
    disk: bool = False
    scrub: Mode = "across_namespaces"
    policy: str = "lru"
    demotion: str = "leaf_first"
    hooks: bool = False
    clock: bool = False
    quota: bool = False
    slow: float = 0.0
    kernels: bool = False
    synchronous: bool = False
    remote: bool = False
    spec: pk.KVSpec = SPEC
    every: int = 1

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers."""
        return ("device", *(("host",) if self.host else ()), *(("disk",) if self.disk else ()))


SETUPS = (
    Setup("one tier", scrub="never"),
    Setup("one tier, hazard", policy="hazard", hooks=True, clock=True),
    Setup("one tier, always scrubbed", scrub="always", hooks=True, quota=True),
    Setup("one tier and a store", remote=True),
    Setup("two tiers", host=True),
    Setup("two tiers, hooks", host=True, scrub="never", hooks=True, demotion="oldest_first"),
    Setup("two tiers, hazard", host=True, scrub="always", policy="hazard", clock=True),
    Setup("two tiers, slow", host=True, scrub="never", slow=0.004),
    Setup("two tiers, very slow", host=True, scrub="never", slow=0.08, every=8),  # signals come in the middle of moves
    Setup("two tiers, slow, quota", host=True, slow=0.004, quota=True, hooks=True),
    Setup("two tiers, synchronous", host=True, scrub="never", synchronous=True),
    Setup("two tiers, synchronous, hooks", host=True, hooks=True, quota=True, synchronous=True, slow=0.001),
    Setup("two tiers, large blocks", host=True, scrub="never", spec=LARGE, every=4),
    Setup("two tiers and a slow store", host=True, remote=True, scrub="always", slow=0.004, hooks=True, quota=True),
    Setup("device, disk and a store, hazard", disk=True, remote=True, policy="hazard", clock=True, every=2),
    Setup("device and disk", disk=True, quota=True, hooks=True, clock=True),
    Setup("three tiers", host=True, disk=True, hooks=True, clock=True),
    Setup("three tiers, hazard", host=True, disk=True, scrub="never", policy="hazard"),
    Setup("three tiers, slow", host=True, disk=True, scrub="always", slow=0.004, clock=True, every=2),
    Setup("kernels", host=True, kernels=True, spec=KERNELS, every=8),
)  # fmt: skip

TENANT = pk.Namespace(tenant="a")
MOST_NAMESPACES = 8  # three, and about as many that were purged and are not forgotten yet
NAMESPACES: tuple[pk.Namespace | None, ...] = (None, TENANT, pk.Namespace(tenant="b", salt=b"salt"))


@lru_cache(maxsize=20000)
def _values(name: str, tokens: bytes) -> NDArray[np.float32]:
    """Return a number per token that follows from the namespace and all tokens so far.

    11 bits, exact in float16.
    """
    return (1 + chain(np.frombuffer(tokens, np.int32), hash_of(name)) % 2046).astype(np.float32)


def hash_of(name: str) -> int:
    """The same in every process."""
    return int.from_bytes(name.encode(), "little") % ((1 << 61) - 1)


class Wrong(AssertionError):
    """The cache served or kept something that it must not."""


class Leaked(AssertionError):
    """A row, an owner, a pin or a block is held, but has no holder."""


@dataclass
class Slowness:
    """What makes copies between tiers wait: so many seconds, now."""

    delay_s: float = 0.0


SLOWNESS = Slowness()


def slow_transfers() -> None:
    """From now on, delay each part of a move before its bytes are copied.

    `SLOWNESS` sets the delay. Call it once in a process.
    """
    worker: Any = importlib.import_module("pagedkv.tiers.mover.worker")
    real = worker.transfer

    def transfer(*arguments: Any) -> Any:
        if SLOWNESS.delay_s:
            time.sleep(SLOWNESS.delay_s)
        return real(*arguments)

    worker.transfer = transfer


class Hook:
    """The caller's hook: counted, and told to raise now and then."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks

    def begin(self, span: Any) -> None:
        """A callback."""
        self._callbacks("hook.begin")

    def end(self, span: Any, state: Any) -> None:
        """A callback."""
        self._callbacks("hook.end")


class Listener(logging.Handler):
    """The caller's logging handler: counts warnings, and raises where it is told to."""

    def __init__(self, callbacks: Callbacks) -> None:
        super().__init__()
        self._callbacks = callbacks
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """A callback."""
        self.count += record.levelno >= logging.WARNING
        self._callbacks("log")

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing is written to stderr."""


@dataclass
class World:
    """A cache under interruption, with sequences and prefixes of others that must never notice."""

    setup: Setup
    folder: Path
    backend: Any = None
    seed: int = 0
    callbacks: Callbacks = field(default_factory=Callbacks)

    def __post_init__(self) -> None:
        setup = self.setup
        self.choose = random.Random(self.seed)
        self.spec, self.block = setup.spec, setup.spec.block_size
        self._number = 0
        self._now = 1000.0
        self.cache = self.open(self.folder / "kv")
        self.listener = Listener(self.callbacks)
        LOG.addHandler(self.listener)
        self.told: dict[str, int] = {}  # warnings after exceptions of a callback
        if setup.hooks:
            self.cache.hooks.add(Hook(self.callbacks))
        self.tickets: list[Prefetch] = []
        self.background = False  # whether something may be let go of a moment later: a prefetch, a send
        for namespace in NAMESPACES:
            self.serve(self.prompt(1), namespace)
        if setup.quota:
            self.cache.set_quota(TENANT, pk.Blocks(4))
        self.bystanders = [self.cache.sequence(self.prompt(2), namespace) for namespace in NAMESPACES[1:]]
        for seq, namespace in zip(self.bystanders, NAMESPACES[1:], strict=True):
            self.run([(seq, namespace)])
        self.held = [(seq, namespace) for seq, namespace in zip(self.bystanders, NAMESPACES[1:], strict=True)]
        self.cached = [(self.prompt(2), namespace) for namespace in NAMESPACES]
        for prompt, namespace in self.cached:
            self.serve(prompt, namespace)
        self.settle(60)
        self.background = self.setup.remote  # sends come and go by themselves
        self._only_bystanders_own(60)
        self.books = self._books()

    # ---- opening

    def open(self, path: Path) -> pk.KVCache:
        """A cache as the setup says; its disk is at `path`."""
        setup = self.setup
        disk = None
        if setup.disk:
            disk = pk.Disk(
                str(path), pk.Blocks(DISK), segment_size="256KiB", admission="all", on_progress=self._progress,
                write_budget="1GiB" if setup.clock else None,
            )  # fmt: skip
        own: dict[str, Any] = {"threads": 1, "backend": self.backend if setup.kernels else None}
        if setup.remote:
            own["remote"] = remote(str(self.folder))
        if setup.synchronous:
            own = {"storage": CopyingStorage(lambda: SLOWNESS.delay_s)}
        return pk.KVCache(
            self.spec, pk.Blocks(DEVICE), pk.Blocks(HOST) if setup.host else None, disk, policy=setup.policy,
            demotion=setup.demotion, scrub=setup.scrub, pin_budget=pk.Blocks(PIN_BUDGET),
            max_sequences=24, event_words=1024,
            clock=self._clock if setup.clock else None, **own,
        )  # fmt: skip

    def _clock(self) -> float:
        self.callbacks("clock")
        self._now += 0.5
        return self._now

    def _progress(self, done: int, total: int) -> None:
        self.callbacks("progress")

    # ---- contents

    def prompt(self, blocks: int = 2) -> list[int]:
        """Tokens that no other prompt of this world begins with: whole blocks and one more."""
        self._number += 1
        return [self._number * 1000 + i for i in range(blocks * self.block + 1)]

    def wanted(self, tokens: Any, namespace: pk.Namespace | None) -> NDArray[np.float32]:
        """What each token's K holds everywhere; V holds the negative."""
        name = "" if namespace is None else f"{namespace.tenant!r} {namespace.salt!r}"
        return _values(name, np.ascontiguousarray(tokens, np.int32).tobytes())

    def check(self, seq: pk.Sequence, namespace: pk.Namespace | None) -> int:
        """Compare all that a sequence has computed; how many tokens. Raises Wrong."""
        tokens, computed = seq.tokens, seq.num_computed
        k, v = seq.gather()
        wanted = self.wanted(tokens, namespace)[:computed]
        shape = (1, computed, 1, 1)
        wrong = (np.asarray(k, np.float32) != wanted.reshape(shape)) | (
            np.asarray(v, np.float32) != -wanted.reshape(shape)
        )
        if wrong.any():
            where = np.flatnonzero(wrong.any(axis=(0, 2, 3)))
            whose = "no namespace" if namespace is None else namespace.tenant
            raise Wrong(
                f"wrong KV of {whose!r}: tokens {where.tolist()[:6]} of {computed}, prompt {tokens[:1].tolist()}"
            )
        return int(computed)

    def write(self, step: pk.Step, seqs: list[tuple[pk.Sequence, pk.Namespace | None]]) -> None:
        """Write every layer of a step that is under way."""
        parts = []
        for i, (seq, namespace) in enumerate(seqs):
            count = int(step.q_indptr[i + 1] - step.q_indptr[i])
            done = seq.num_computed
            parts.append(self.wanted(seq.tokens, namespace)[done : done + count])
        rows = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        kv = np.empty((len(rows), self.spec.num_kv_heads, self.spec.head_dim), self.spec.np_dtype)
        kv[:] = rows[:, None, None]
        for layer in range(self.spec.num_layers):
            step.write(layer, kv, -kv)

    def run(self, seqs: list[tuple[pk.Sequence, pk.Namespace | None]], **options: Any) -> None:
        """One step over these sequences."""
        with self.cache.step([seq for seq, _ in seqs], **options) as step:
            self.write(step, seqs)

    def serve(self, prompt: list[int], namespace: pk.Namespace | None) -> int:
        """A whole request; tokens that were found and compared."""
        with self.cache.sequence(prompt, namespace) as seq:
            found = self.check(seq, namespace)
            self.run([(seq, namespace)])
            self.check(seq, namespace)
            return found

    def where(self, prompt: list[int], namespace: pk.Namespace | None) -> str:
        """The coldest tier that holds some of a prompt; "" where none does."""
        runs = self.cache.explain(prompt, namespace).runs
        return str(max((run.tier for run in runs), default=""))

    def put_into(self, tier: str, namespace: pk.Namespace | None, blocks: int = 2) -> list[int]:
        """Return a prompt whose cached prefix lies in this tier.

        As far as requests can bring the cache to that.
        """
        prompt = self.prompt(blocks)
        self.serve(prompt, namespace)
        for _ in range(24):
            if self.where(prompt, namespace) in (tier, ""):
                break
            self.serve(self.prompt(3), None)
        return prompt

    def fill(self, room: int = 0) -> None:
        """Use the device until no more than `room` blocks are free."""
        for _ in range(12):
            if self.cache.stats().blocks["device"]["available"] <= room:
                break
            self.serve(self.prompt(3), None)

    # ---- the audit

    def settle(self, patience_s: float) -> None:
        """Wait until nothing is under way. Raises Leaked where something is for ever.

        Where there is no dispatcher's thread, what an interrupted caller has decided waits for the next caller's round.
        """
        end = time.monotonic() + patience_s
        placement = self.cache.placement
        while placement.num_in_flight or self._num_sent() or not all(ticket.done() for ticket in self.tickets):
            self.cache.moves.carry_out()
            if time.monotonic() > end:
                raise Leaked(f"{placement.num_in_flight} moves and {self._num_sent()} sends are under way for ever")
            time.sleep(0.0002)
        self.tickets.clear()

    def _only_bystanders_own(self, patience_s: float) -> None:
        """Wait until the last send has let go of its path. Raises Leaked."""
        end = time.monotonic() + patience_s
        while (owners := self.cache.stats().placement["owners"]) != len(self.bystanders):
            if time.monotonic() > end:
                raise Leaked(f"{owners} owners in a new world of {len(self.bystanders)} sequences")
            time.sleep(0.0002)

    def _num_sent(self) -> int:
        """Blocks on their way to the store, or waiting for that."""
        found = self.cache.stats().remote
        return 0 if found is None else self.cache.placement.num_unsent + int(found["queued_bytes"])

    def _books(self) -> dict[str, int]:
        stats, placement = self.cache.stats(), self.cache.stats().placement
        books = {"rows": stats.sequences, "owners": placement["owners"], "pinned blocks": placement["pinned_blocks"]}
        known, in_core = len(self.cache._roots._known), self.cache.placement.tree.num_namespaces
        books["namespaces that no name leads to"] = max(0, in_core - known - 1)  # 1: the core's own first
        books["namespaces too many"] = max(0, len(self.cache._roots) - MOST_NAMESPACES)
        return books | {f"live on {tier}": counts["live"] for tier, counts in stats.blocks.items()}

    def check_books(self, patience_s: float) -> bool:
        """Check that nothing is held but what the bystanders hold.

        Returns whether that took the garbage collector. Raises Leaked.
        """
        if self._books() == self.books:
            return False
        gc.collect()
        end = time.monotonic() + (patience_s / 3 if self.background else 0.0)
        while (found := self._books()) != self.books:
            if time.monotonic() >= end:
                more = {what: (found[what], self.books[what]) for what in found if found[what] != self.books[what]}
                raise Leaked(f"held now and before: {more}")
            time.sleep(0.001)
        return True

    def press(self) -> list[list[int]]:
        """Let new prompts of another tenant take whatever blocks were released.

        Old copies may still be coming.
        """
        prompts = [self.prompt(2), self.prompt(3)]
        for prompt in prompts:
            self.serve(prompt, NAMESPACES[2])
        return prompts

    def check_bystanders(self, prompts: list[list[int]]) -> int:
        """Live sequences, cached prefixes and the new prompts hold what they must; tokens compared."""
        compared = sum(self.check(seq, namespace) for seq, namespace in self.held)
        for prompt in prompts:
            compared += self.serve(prompt, NAMESPACES[2])
        prompt, namespace = self.cached[self._number % len(self.cached)]
        return compared + self.serve(prompt, namespace)

    def close(self) -> None:
        """Close, and open the directory again.

        A cache that could not close everything holds its lock.
        """
        LOG.removeHandler(self.listener)
        for seq in self.bystanders:
            seq.release()
        self.cache.check_integrity()
        self.cache.close()
        if self.setup.disk:
            self.open(self.folder / "kv").close()
