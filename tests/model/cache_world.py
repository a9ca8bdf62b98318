"""The whole cache under random histories: one seed, one history.

Real bytes lie on the device, on the host and on a disk that has faults.

What every sequence holds is gathered after every step and compared with what was computed for exactly its
namespace and prefix; nothing is ever found that was not computed. The disk is closed, damaged, abandoned as by a
crash, and reopened; its reads and writes fail, come too late, and are cancelled. Nothing of that may raise.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.core import POLICIES
from tests.in_blocks import in_blocks
from tests.model.faults import DAMAGES, KINDS, Faults, damage, note_page
from tests.model.toy_kv import SPEC, kv

NAMESPACES = (None, pk.Namespace(tenant="a"))
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # nothing here depends on a device
MAX_SEQUENCES = 4
MAX_TOKENS = 30
PIN_BUDGET = 4
WEIGHTS = {
    "open": 6, "serve": 16, "step": 10, "scatter": 6, "append": 4, "fork": 3, "truncate": 3, "retain": 2, "release": 6,
    "prefetch": 4, "explain": 2, "pin": 2, "unpin": 2, "quota": 2, "purge": 1, "break_something": 5, "damage": 1,
    "note_page": 1, "close_and_reopen": 1, "crash_and_reopen": 1, "flush": 1, "observe": 1,
}  # fmt: skip
ALWAYS = ("serve", "release", "unpin")  # without these, everything would soon be held


class Failing(Exception):
    """Raised in the body of a step."""


class World:
    """Requests of two namespaces over small budgets.

    Attributes
    ----------
    seen : how often what happened; ``"steps"`` done and tokens read among them.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.rng, self.seen = seed, Random(seed), Counter[str]()
        rng, self.faults, self.undo = self.rng, Faults(), ExitStack()
        self.undo.enter_context(self.faults.installed())
        self.folder = Path(self.undo.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY)))
        self.store, self.stores = self.folder / "0", 1
        self.device, self.host = rng.randint(4, 10), rng.choice([None, None, 2, 5])
        self.disk = rng.choice([None, 6, 12, 12, 24])
        self.admission: Any = rng.choice(["all", "all", "cost", "second_hit"])
        self.options = {
            "policy": rng.choice(POLICIES),
            "demotion": rng.choice(["leaf_first", "oldest_first"]),
            "inclusive": rng.choice([None, tuple(rng.random() < 0.5 for _ in range(3))]),
            "partial_hits": rng.random() < 0.5,
            "deadline_s": rng.choice([None, None, None, None, None, 60.0, 60.0, 0.0]),
            "scrub": rng.choice(["across_namespaces", "across_namespaces", "always", "never"]),
        }
        on_disk = {"damage", "note_page", "close_and_reopen", "crash_and_reopen"}
        weights = {name: rng.choice([0, 1, 1, 2]) * usual + (name in ALWAYS) for name, usual in WEIGHTS.items()}
        names = [name for name in WEIGHTS for _ in range(weights[name]) if self.disk or name not in on_disk]
        self.rules: list[tuple[str, Callable[[], None]]] = [(name, getattr(self, name)) for name in names]
        self.old_pages: dict[tuple[str, int], bytes] = {}
        self.live: list[tuple[pk.Sequence, int, int]] = []  # sequence, namespace, its epoch
        self.epochs = [0, 0]  # a purge begins a new one
        self.computed: list[set[tuple[int, ...]]] = [set(), set()]  # prefixes, since the last purge
        self.prompts: list[list[tuple[int, ...]]] = [[], []]  # lately computed, by namespace
        self.pins: list[int] = []
        self.cache = self.opened()

    def opened(self) -> pk.KVCache:
        place = None
        if self.disk is not None:
            place = pk.Disk(str(self.store), pk.Blocks(self.disk), admission=self.admission)
        return pk.KVCache(
            SPEC, in_blocks(self.device), in_blocks(self.host), place,
            pin_budget=pk.Blocks(PIN_BUDGET), threads=1, **self.options,  # type: ignore[arg-type]
        )  # fmt: skip

    def run(self, num_steps: int) -> None:
        """Do so many steps and end everything.

        Raises
        ------
        AssertionError
            Something is wrong; names seed, step and rule.
        """
        name = "open"
        try:
            for _ in range(num_steps):
                name, rule = self.rng.choice(self.rules)
                rule()
                self.check()
                self.seen["steps"] += 1
            name = "close"
            self.close()
        except Exception as error:
            where = f"history {self.seed}, step {self.seen['steps']}, {name}"
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        finally:
            self.undo.close()

    # ---- what must be true

    def check(self) -> None:
        for seq, namespace, _ in self.live:
            self.read(seq, namespace)
        self.cache.check_integrity()

    def read(self, seq: pk.Sequence, namespace: int) -> None:
        tokens, done = seq.tokens.tolist(), seq.num_computed
        for found, wanted in zip(seq.gather(), kv(namespace, tokens, 0, done), strict=True):
            assert np.array_equal(found, wanted), f"wrong KV in {tokens}, of which {done} are computed"
        self.seen["tokens read"] += done

    def remember(self, seq: pk.Sequence, namespace: int, epoch: int) -> None:
        tokens = tuple(seq.tokens.tolist())
        if epoch == self.epochs[namespace]:
            self.computed[namespace].update(tokens[:i] for i in range(1, seq.num_computed + 1))
            self.prompts[namespace] = [*self.prompts[namespace][-8:], tokens[: seq.num_computed]]

    def known(self, namespace: int, tokens: Seq[int]) -> bool:
        return not tokens or tuple(tokens) in self.computed[namespace]

    # ---- arguments

    def tokens(self, least: int, most: int) -> list[int]:
        return [self.rng.randint(0, 1) for _ in range(self.rng.randint(least, most))]

    def prompt(self, least: int = 0, most: int = 8) -> tuple[int, list[int]]:
        """Return a namespace and tokens.

        Mostly a prefix that was computed once, perhaps cut, with something else behind it.
        """
        namespace = int(self.rng.random() < 0.4)
        prompts = self.prompts[namespace]
        prefix = self.rng.choice(prompts) if prompts and self.rng.random() < 0.8 else ()
        return namespace, [*prefix[: len(prefix) - self.rng.randint(0, 3)], *self.tokens(least, most)][:24]

    def some_sequence(self) -> tuple[pk.Sequence, int, int] | None:
        return self.rng.choice(self.live) if self.live else None

    # ---- requests

    def open(self, least: int = 0, most: int = 8) -> bool:
        if len(self.live) == MAX_SEQUENCES:
            self.live.pop(0)[0].release()
        namespace, tokens = self.prompt(least, most)
        try:
            seq = self.cache.sequence(tokens, NAMESPACES[namespace])
        except pk.OutOfBlocks:
            return False
        self.live.append((seq, namespace, self.epochs[namespace]))
        self.seen.update({f"hits {tier}": int(count > 0) for tier, count in seq.hit_tokens.items()})
        assert seq.num_computed == sum(seq.hit_tokens.values()), "hits miscounted"
        assert seq.num_computed < len(tokens) or not tokens, "nothing is left to compute"
        assert self.known(namespace, tokens[: seq.num_computed]), "a hit on what was never computed"
        self.read(seq, namespace)
        return True

    def serve(self) -> None:
        """A whole request at once, so that older ones are demoted."""
        if self.open(*self.rng.choice([(0, 3), (4, 18)])):
            entry = self.live.pop()
            self.fill(entry)
            self.read(*entry[:2])
            entry[0].release()

    def step(self) -> None:
        """Run a step over some of the sequences; now and then its body raises half-way.

        It computes all of their tokens or the first part.
        """
        batch = [entry for entry in self.live if self.rng.random() < 0.6]
        left = [seq.num_tokens - seq.num_computed for seq, _, _ in batch]
        parts = self.rng.choice([1, 1, 2, 3])
        q_lens = None if parts == 1 else np.array([count // parts for count in left], np.int32)
        fails_at = self.rng.randint(0, 7)
        try:
            with self.cache.step(
                [seq for seq, _, _ in batch], q_lens=q_lens, lookahead=self.rng.choice([0, 0, 2])
            ) as step:
                wanted = []
                for i, (seq, namespace, _) in enumerate(batch):
                    first, count = seq.num_computed, int(step.q_indptr[i + 1] - step.q_indptr[i])
                    wanted.append(kv(namespace, seq.tokens.tolist(), first, first + count))
                for layer in range(SPEC.num_layers if batch else 0):
                    if fails_at == layer:
                        raise Failing
                    step.write(layer, *(np.concatenate([part[i][layer] for part in wanted]) for i in (0, 1)))
        except pk.OutOfBlocks:
            if self.live:
                self.release()
        except Failing:
            assert [seq.num_tokens - seq.num_computed for seq, _, _ in batch] == left, "a failed step committed"
        else:
            for entry in batch:
                self.remember(*entry)

    def fill(self, entry: tuple[pk.Sequence, int, int]) -> None:
        seq, namespace, _ = entry
        try:
            seq.scatter(*kv(namespace, seq.tokens.tolist(), seq.num_computed, seq.num_tokens))
        except pk.OutOfBlocks:
            return
        self.remember(*entry)

    def scatter(self) -> None:
        if entry := self.some_sequence():
            self.fill(entry)

    def append(self) -> None:
        if (entry := self.some_sequence()) and entry[0].num_tokens < MAX_TOKENS - 8:
            entry[0].append(self.tokens(0, 8))

    def fork(self) -> None:
        if 0 < len(self.live) < MAX_SEQUENCES - 1 and (entry := self.some_sequence()):
            self.live += [(fork, *entry[1:]) for fork in entry[0].fork(self.rng.randint(1, 2))]

    def truncate(self) -> None:
        if entry := self.some_sequence():
            entry[0].truncate(max(0, entry[0].num_tokens - self.rng.randint(0, MAX_TOKENS)))

    def retain(self) -> None:
        if entry := self.some_sequence():
            entry[0].retain(priority=self.rng.randint(0, 100))

    def release(self) -> None:
        if entry := self.some_sequence():
            self.live.remove(entry)
            entry[0].release()

    # ---- the cache itself

    def prefetch(self) -> None:
        namespace, tokens = self.prompt()
        ahead = self.cache.prefetch(tokens, NAMESPACES[namespace])
        if self.rng.random() < 0.2:
            ahead.cancel()
        there = ahead.wait(60)
        assert self.known(namespace, tokens[:there]), "prefetched what was never computed"
        runs = self.cache.explain(tokens, NAMESPACES[namespace]).runs
        on_device = sum(run.num_tokens for run in runs if run.tier == pk.Tier.DEVICE)
        assert there <= on_device, "prefetched less than it said"

    def explain(self) -> None:
        namespace, tokens = self.prompt()
        told = self.cache.explain(tokens, NAMESPACES[namespace])
        assert self.known(namespace, tokens[: told.cached_tokens]), "explained what was never computed"
        assert sum(run.num_tokens for run in told.runs) == told.cached_tokens <= told.num_tokens == len(tokens)

    def pin(self) -> None:
        namespace, tokens = self.prompt(0, 0)
        try:
            self.pins.append(self.cache.pin(tokens, NAMESPACES[namespace]))
        except pk.PinBudgetExceeded:
            return
        assert self.cache.stats().placement["pinned_blocks"] <= PIN_BUDGET, "pinned over the budget"

    def unpin(self) -> None:
        if self.pins:
            self.pins.pop().release()

    def quota(self) -> None:
        self.cache.set_quota(NAMESPACES[1], in_blocks(self.rng.choice([None, *range(1, 7)])))

    def purge(self) -> None:
        """Purge a namespace; nothing of it is ever found again.

        That holds even when the disk is reopened after a crash.
        """
        namespace = self.rng.randint(0, 1)
        self.cache.purge(NAMESPACES[namespace])
        self.epochs[namespace] += 1
        forgotten, self.computed[namespace] = self.computed[namespace], set()
        self.prompts[namespace] = sorted(forgotten, key=len)[-8:]
        self.seen["purges"] += 1

    def flush(self) -> None:
        """What is on the disk afterwards is no more than fits, and no sequence notices."""
        assert self.cache.flush() <= (self.disk or 0), "flushed more than fits"
        self.seen["flushes"] += 1

    def observe(self) -> None:
        """Computing is said to be fast or slow, so that loads are declined, or not any more."""
        self.cache.observe_prefill(1000, self.rng.choice([1e-6, 1.0]))

    # ---- what goes wrong

    def break_something(self) -> None:
        """The next move of blocks meets it."""
        self.faults.add(self.rng.choice(KINDS))

    def damage(self) -> None:
        """Change bytes of the store under the open cache, or before it is opened.

        The cache may never read them as KV.
        """
        how = self.rng.choice(DAMAGES)
        damage(self.store, how, self.rng.getrandbits(30), self.old_pages)
        self.seen[f"damage: {how}"] += 1

    def note_page(self) -> None:
        for _ in range(8):
            note_page(self.store, self.rng.getrandbits(30), self.old_pages)

    def close_and_reopen(self) -> None:
        """Only what is on disk is found again."""
        if self.rng.random() < 0.5:
            self.end_sequences()
            self.count_and_close()
        else:
            self.count_and_close()
            self.end_sequences()
        self.seen["closed and reopened"] += 1
        self.reopen()

    def crash_and_reopen(self) -> None:
        """Reopen a copy of the directory, taken from the running cache.

        The copy is what the operating system's kernel has of a process that is killed.
        """
        left, self.store = self.store, self.new_store()
        shutil.copytree(left, self.store)
        self.store.chmod(0o700)
        self.end_sequences()
        self.count_and_close()
        self.seen["crashes"] += 1
        self.reopen()

    def new_store(self) -> Path:
        self.stores += 1
        return self.folder / str(self.stores)

    def reopen(self) -> None:
        """Opens what is there now, or, where that is refused, an empty store instead."""
        self.pins.clear()
        self.faults.clear()
        if self.rng.random() < 0.3:
            self.damage()
        try:
            self.cache = self.opened()
        except pk.TierError:
            self.seen["reopening refused"] += 1
            self.store = self.new_store()
            self.computed = [set(), set()]
            self.cache = self.opened()

    # ---- the end

    def end_sequences(self) -> None:
        for seq, _, _ in self.live:
            seq.release()
        self.live.clear()

    def count_and_close(self) -> None:
        stats = self.cache.stats()
        for kind in ("promoted", "demoted", "dropped"):
            self.seen.update({f"{kind} {tier}": int(count) for tier, count in stats.placement[kind].items()})
        for kind in ("failed_promotions", "failed_demotions", "adopted"):
            self.seen[kind.replace("_", " ")] += int(stats.placement[kind])
        refused = stats.disk["refused_by_admission"] if stats.disk else 0
        self.seen.update({"refused by admission": refused, **self.faults.met})
        if stats.disk:
            self.seen["hits declined"] += int(stats.disk["disk_hits_declined"] > 0)
        self.faults.met.clear()
        self.cache.close()

    def close(self) -> None:
        """Everything is let go of; no block may still be anybody's."""
        self.end_sequences()
        while self.pins:
            self.unpin()
        self.cache.check_integrity()
        stats = self.cache.stats()  # a quota may have decided on moves that no call has needed to run
        assert stats.placement["in_flight"] or not any(counts["live"] for counts in stats.blocks.values()), "a leak"
        self.count_and_close()
