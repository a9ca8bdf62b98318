"""A cache, a disk tier and a mover to try hostile calls on.

Beside each stands a bystander that must never be affected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.core import MOVE_DTYPE
from pagedkv.tiers import DiskTier, HostTier, Mover, Record
from tests.cache.conftest import BLOCK, SPEC, Toy, prompt
from tests.cache.oddities import NAME, kv
from tests.reliability import api_more as more
from tests.reliability import small_store as small

SLOTS, KEPT = 16, 4  # the last slots are the bystander's: no odd number is that large and that small
NEEDED = ("transfer", "src_tier", "dst_tier", "src_block", "dst_block")
MOVE = np.dtype([(name, MOVE_DTYPE[name]) for name in NEEDED])  # a move as a caller may write it: without a tree


@dataclass
class Call:
    """A public call with arguments that are fine.

    Attributes
    ----------
    name : for a report.
    function : what is called.
    arguments, options : fine ones; each place may be given something odd instead.
    after : gives back what the call returned.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None
    after: Callable[[Any], object] = lambda made: None


class ApiWorld:
    """Everything public that a hostile caller can reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = pk.KVCache(
            SPEC,
            pk.Blocks(24),
            pk.Blocks(16),
            pk.Disk(str(folder / "kv"), pk.Blocks(24), admission="all"),
            pin_budget=pk.Blocks(4),
            threads=1,
        )
        self.toy = Toy(self.cache)
        for start in (1, 2, 3, 4):
            self.toy.use(prompt(start, 6 * BLOCK))
        self.bystander = self.cache.sequence(prompt(5, 11))
        self.toy.run(self.bystander)
        self.victim = self.cache.sequence(prompt(1, 9))
        self.toy.run(self.victim)
        self.victim.append(7)
        self.tier = small.open_store(folder / "tier", num_blocks=SLOTS)
        self.records = [small.record_of(number) for number in range(SLOTS)]
        self.arena = small.payloads(self.records)
        every = np.arange(SLOTS)
        assert self.tier.write(every, self.records, self.arena, every).all()
        self.frozen = self.arena[:1].copy()
        self.frozen.flags.writeable = False
        self.hosts = {0: HostTier(SLOTS, small.BLOCK_BYTES), 1: HostTier(SLOTS, small.BLOCK_BYTES)}
        self.hosts[1].arena[-KEPT:] = self.arena[-KEPT:]
        self.mover = Mover(
            {**self.hosts, 2: self.tier}, threads=1, describe=lambda moves: [self.records[0]] * len(moves)
        )

    def near_misses(self) -> list[Any]:
        """Arguments that are almost right."""
        short = Record(bytes(32), bytes(32), bytes(32), np.zeros(3, np.int32))
        far = [(1, 0, 1, -1, 0), (1, 0, 1, 0, SLOTS), (1, 0, 1, 2**31 - 1, 0), (1, 9, 1, 0, 0), (1, 2, 2, 0, 1)]
        doubled = [(1, 0, 1, 0, 5), (2, 0, 1, 1, 5)]
        return [
            self.frozen, self.arena[:, ::-1],
            np.broadcast_to(self.arena[0], (2, small.BLOCK_BYTES)), self.arena[:1, :-1], self.arena[:1].astype(np.int8),
            [short], [self.records[0], short], [0, 0], [SLOTS], [-1], [2**31], np.array(doubled, MOVE),
            *(np.array([move], MOVE) for move in far),
        ]  # fmt: skip

    def calls(self) -> list[Call]:
        """All of them. Sequences and steps are made anew for each call, and let go after it."""
        fork = self._fork
        row, rows = [1], self.arena[:1].copy()
        moves = np.array([(1, 0, 1, 2, 3)], MOVE)
        fields = ("model", "adapter", "tenant", "salt", "modality", "extra")
        return [
            Call("sequence", self.cache.sequence, (prompt(1), NAME), after=self._finish),
            Call("sequence with options", self.cache.sequence, (prompt(1),),
                 {"session": None, "on_trial": False, "trace": None}, after=self._finish),
            Call("load", self.cache.load, (prompt(1), NAME), dict(more.LOAD), after=self._open),
            Call("begin_load", self.cache.begin_load, (prompt(1), NAME), dict(more.LOAD), after=self._open),
            Call("check_request", self.cache.check_request, (NAME, None)),
            Call("count", self.cache.count, (self.victim,)),
            Call("set_kind", self.cache.set_kind, (NAME, "chat")),
            Call("observe_prefill", self.cache.observe_prefill, (100, 0.5, 0)),
            Call("pages", self.cache.pages, (0,), {"read_only": True, "stream": None}),
            Call("layer_scales", self.cache.layer_scales, (0,)),
            Call("checkpoint", self.cache.checkpoint),
            Call("flush", self.cache.flush),
            Call("publish", self.cache.publish, (prompt(1), NAME), {"wait_s": 5.0}),
            Call("save_learned", self.cache.save_learned),
            Call("events", self.cache.events),
            Call("stats", self.cache.stats),
            Call("check_integrity", self.cache.check_integrity),
            Call("views", lambda: (self.cache.costs, self.cache.decode, self.cache.device_arena, self.cache.spec)),
            Call("close", more.close(self.folder), (), {"write_s": 5.0}),
            Call("prefetch_likely", more.learned("prefetch_likely"), (1.0, 4)),
            Call("set_kind of a learner", more.learned("set_kind"), (None, "chat")),
            Call("expect_return", lambda *a: fork().expect_return(*a), (1.0,)),
            Call("export_blocks", lambda **o: fork().export_blocks(**o), (), {"stream": None}),
            Call("prefetch", self.cache.prefetch, (prompt(1), NAME), after=lambda made: made.wait(60)),
            Call("pin", self.cache.pin, (prompt(1), NAME), after=lambda made: made.release()),
            Call("explain", self.cache.explain, (prompt(1), NAME)),
            Call("match", self.cache.match, (prompt(1), NAME)),
            Call("set_quota", self.cache.set_quota, (NAME, "4KiB", pk.Tier.DEVICE)),
            Call("purge", self.cache.purge, (NAME,)),
            Call("layer", self.cache.layer, (0,)),
            Call("used_on", self.cache.used_on, (None,)),
            Call("step", self.cache.step, ([],), {"q_lens": None, "lookahead": 0}, after=self._enter),
            Call("step of one", lambda *a, **o: self._enter(self.cache.step([fork()], *a, **o)), (),
                 {"q_lens": None, "lookahead": 0}),
            Call("append", lambda *a: fork().append(*a), (1,)),
            Call("truncate", lambda *a: fork().truncate(*a), (1,)),
            Call("fork", lambda *a: fork().fork(*a), (1,), after=lambda made: [one.release() for one in made]),
            Call("gather", lambda *a, **o: fork().gather(*a, **o), (0, 1), {"out": None, "layout": "NHD"}),
            Call("scatter", lambda *a, **o: fork().scatter(*a, **o), (kv(2, 1, 2, 4), kv(2, 1, 2, 4), None, None),
                 {"layout": "NHD"}),
            Call("release", lambda: fork().release()),
            Call("retain", lambda **o: fork().retain(**o), (), {"priority": 50, "ttl_s": None}),
            Call("step.write", self._in_step("write"), (0, kv(1, 2, 4), kv(1, 2, 4)), {"stream": None}),
            Call("step.mark_written", self._in_step("mark_written"), (0,)),
            Call("step.to_csr", self._in_step("to_csr")),
            Call("step.tables_of", self._in_step("tables_of"), (0,)),
            Call("step.attend", self._in_step("attend"), (0, kv(1, 2, 4)),
                 {"softmax_scale": None, "causal": True, "window": None, "soft_cap": None, "alibi_slopes": None,
                  "sinks": None, "mask": None, "mask_indptr": None, "return_lse": False, "out": None, "stream": None}),
            Call("forged sequence", self._forged, ([1],)),
            Call("tier.write", self.tier.write, (row, self.records[:1], rows, [0])),
            Call("tier.read", self.tier.read, (row, self.records[:1], rows, [0])),
            Call("tier.invalidate", self.tier.invalidate, (row,)),
            Call("tier.purge", self.tier.purge, (bytes(32),)),
            Call("Record", Record, (bytes(32), bytes(32), bytes(32), np.zeros(4, np.int32)), {"extra": bytes(32)}),
            Call("mover.submit", self.mover.submit, (moves,), {"deadline_s": None}, after=lambda made: made.results()),
            Call("Mover", Mover, ({0: self.hosts[0]},), {"deadline_s": None, "max_queued_blocks": 9},
                 after=lambda made: made.close()),
            Call("Namespace", pk.Namespace, (), dict.fromkeys(fields), after=_is_a_namespace),
            Call("Disk", pk.Disk, ("kv", "4MiB"),
                 {"segment_size": "1MiB", "shards": 1, "admission": "all", "write_budget": None, "required": True,
                  "on_mismatch": "refuse", "network_fs": False, "page_cache": "drop", "on_progress": None},
                 after=_is_a_disk),
            Call("KVSpec", pk.KVSpec, (2, 2, 4, "float16", 16), {"layout": "NHD", "model": ""}, after=_is_a_spec),
            Call("DiskTier", DiskTier, (self.folder / "another", 2, 512),
                 {"fingerprint": bytes(32), "block_tokens": 4, "shards": 1, "segment_bytes": 1 << 20,
                  "read_path": "pread",
                  "page_cache": "drop", "on_mismatch": "refuse", "network_fs": False, "on_progress": None},
                 after=lambda made: made.close()),
            Call("KVCache", pk.KVCache, (SPEC, "8KiB", "4KiB"),
                 {"policy": "lru", "demotion": "leaf_first", "max_sequences": 8, "pin_budget": None, "threads": 1,
                  "deadline_s": None, "require_namespace": False, "partial_hits": True, "event_words": 0,
                  "inclusive": None, "cost_tokens": 100.0, "disk": None, "device": "cpu", "backend": None,
                  "scrub": "never", "prefill_tokens_per_s": None, "clock": None, "storage": None},
                 after=_is_a_cache),
            Call("Scheduler", self._serve, ([1, 2, 3], 2),
                 {"priority": 0, "n": 1, "beams": 1, "namespace": NAME, "session": None, "deadline_s": None,
                  "tenant": "", "stop_tokens": (), "trace": None}),
            Call("Scheduler.abort", more.in_a_scheduler("abort"), ("THE REQUEST", "aborted")),
            Call("Scheduler.cancel", more.in_a_scheduler("cancel"), ("THE PLAN",)),
            Call("Scheduler.draft", more.in_a_scheduler("draft"), ("THE BRANCH", [7])),
            Call("Scheduler.report", more.in_a_scheduler("report"), ("THE PLAN", [7, 7])),
            *(Call(f"Scheduler.{name}", more.in_a_scheduler(name)) for name in ("schedule", "mend", "heard", "wake")),
            Call("Scheduler.set_weight", more.in_a_scheduler("set_weight"), ("", 2.0)),
            Call("Scheduler.step", more.in_a_scheduler("step"), ("THE PLAN",)),
            Call("Scheduler.wait", more.in_a_scheduler("wait"), (1.0,)),
            Call("SchedulerOptions", pk.SchedulerOptions, (),
                 {"max_running": 4, "max_batch_tokens": 64, "order": "first_come", "window": 2, "admission": "prompt",
                  "preemption": "measured", "watermark": 0.0, "lookahead": 0, "priority_tokens": 1}),
        ]  # fmt: skip

    def _serve(self, *arguments: Any, **options: Any) -> None:
        """A request of a scheduler of its own, served to its end."""
        with pk.KVCache(SPEC, pk.Blocks(24)) as cache:
            scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=4, max_batch_tokens=64))
            scheduler.submit(*arguments, **options)
            for _ in range(100):
                if not scheduler.has_work:
                    return
                plan = scheduler.schedule()
                with scheduler.step(plan) as step:
                    for layer in range(SPEC.num_layers):
                        step.mark_written(layer)
                scheduler.report(plan, np.full(len(plan.lanes), 7, np.int32))

    def _fork(self) -> pk.Sequence:
        (made,) = self.victim.fork(1)
        return made

    def _open(self, load: pk.Load) -> None:
        more.load_and_open(load, self.toy)

    def _finish(self, seq: pk.Sequence) -> None:
        with seq:
            self.toy.run(seq)

    @staticmethod
    def _enter(step: pk.Step) -> None:
        with step:
            pass

    def _in_step(self, name: str) -> Callable[..., object]:
        def call(*arguments: Any, **options: Any) -> object:
            seq = self._fork()
            with self.cache.step([seq]) as step:
                self.toy.write(step, seq)
                return getattr(step, name)(*arguments, **options)

        return call

    def _forged(self, tokens: Any) -> None:
        """A row that was let go, or never was; and a sequence around one, which cannot be made."""
        seq = self._fork()
        row, table = seq.row, self.cache.table
        seq.release()
        for handle in (row, row ^ 1 << 40, 2**62, -(2**62)):
            for use in (
                lambda h=handle: table.extend(h, tokens),
                lambda h=handle: table.blocks(h),
                lambda h=handle: table.fork(h, 1),
                lambda h=handle: pk.Sequence(self.cache._engine, h, {}),
            ):
                try:
                    use()
                except pk.PagedKVError:
                    continue
                raise AssertionError(f"row {handle:#x}, which is no sequence's, was served")

    def check(self) -> list[str]:
        """What is not as it must be."""
        wrong = []
        try:
            self.cache.check_integrity()
            self.toy.check(self.bystander)
            self.toy.use(prompt(5, 11))
            self.toy.use(prompt(2, 6 * BLOCK))
            self.cache.check_integrity()
        except (AssertionError, pk.PagedKVError) as problem:
            wrong.append(f"the cache: {problem!r}")
        found, last = np.zeros((KEPT, small.BLOCK_BYTES), np.uint8), np.arange(SLOTS - KEPT, SLOTS)
        if not self.tier.read(last, self.records[-KEPT:], found, range(KEPT)).all():
            wrong.append("the disk tier lost blocks that no call named")
        elif (found != self.arena[-KEPT:]).any():
            wrong.append("the disk tier serves wrong bytes")
        if (self.frozen != self.arena[:1]).any():
            wrong.append("an arena that cannot be written was written")
        if (self.hosts[1].arena[-KEPT:] != self.arena[-KEPT:]).any():
            wrong.append("the mover wrote where no call asked it to")
        return wrong

    def close(self) -> None:
        """Everything, twice."""
        for thing in (self.mover, self.tier, self.cache) * 2:
            thing.close()


def _is_a_namespace(made: pk.Namespace) -> None:
    assert len(made.digest()) == 32
    assert (made.key() == b"") == (made == pk.Namespace())
    hash(made)


def _is_a_disk(made: pk.Disk) -> None:
    assert made.path
    assert made.segment_bytes > 0
    assert made.shards is None or 1 <= made.shards <= 1024


def _is_a_spec(made: pk.KVSpec) -> None:
    assert made.block_bytes == int(np.prod(made.block_shape)) * made.itemsize > 0
    assert len(made.fingerprint()) == 32


def _is_a_cache(made: pk.KVCache) -> None:
    with made:
        if made.stats().blocks["device"]["max"] >= 4:
            toy = Toy(made)
            if not made._require_namespace:
                toy.use(prompt(1))
            toy.use(prompt(1), NAME)
        made.check_integrity()


def reenter(world: ApiWorld, choose: random.Random) -> Any:
    """Return an object that uses the cache while a call converts it.

    The call reads it as a number, an array or a collection.
    """

    def act() -> None:
        choose.choice(actions)()

    actions: list[Callable[[], object]] = [
        lambda: world.toy.use(prompt(3, 9)), lambda: world.victim.append(3), lambda: world.cache.purge(NAME),
        world.cache.check_integrity, lambda: world.cache.explain([1, 2]), lambda: world.tier.invalidate([2]),
        lambda: world.cache.stats(), lambda: world._fork().release(),
    ]  # fmt: skip

    class Calling:
        def __index__(self) -> int:
            act()
            return 3

        def __len__(self) -> int:
            act()
            return 1

        def __iter__(self) -> Iterator[int]:
            act()
            return iter((1,))

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            act()
            return np.array([1], dtype)

    return Calling()
