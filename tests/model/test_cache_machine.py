"""The whole cache as a hypothesis state machine: real bytes over device, host and a disk that is closed and reopened.

What every sequence holds is gathered after every rule and compared with what was computed for exactly its
namespace and prefix; nothing is ever found that was not computed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedkv as pk
from pagedkv.core import POLICIES
from tests.model.machine import run_histories
from tests.model.toy_kv import SPEC, kv

NAMESPACES = (None, pk.Namespace(tenant="a"))
MAX_SEQUENCES = 4
tokens_of = st.lists(st.integers(0, 1), max_size=8)
long_tokens = st.lists(st.integers(0, 1), min_size=8, max_size=20)
which = st.integers(0, 63)


seen: Counter[str] = Counter()


class Failing(Exception):
    """Raised in the body of a step."""


class CacheMachine(RuleBasedStateMachine):
    """Requests of two namespaces over small budgets."""

    cache: pk.KVCache

    @initialize(
        device=st.integers(4, 10),
        host=st.sampled_from([None, 2, 5]),
        disk=st.sampled_from([None, 6, 12]),
        policy=st.sampled_from(POLICIES),
        demotion=st.sampled_from(["leaf_first", "oldest_first"]),
        inclusive=st.none() | st.tuples(st.booleans(), st.booleans(), st.booleans()),
        partial_hits=st.booleans(),
    )
    def start(self, device: int, host: int | None, disk: int | None, **options: object) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pagedkv-machine-"))
        store = None if disk is None else pk.Disk(str(self.folder / "kv"), disk)
        self.open_cache = lambda: pk.KVCache(SPEC, device, host, store, pin_budget=4, threads=1, **options)  # type: ignore[arg-type]
        self.cache = self.open_cache()
        self.on_disk = disk is not None
        self.live: list[tuple[pk.Sequence, int, int]] = []  # sequence, namespace, its epoch
        self.epochs = [0, 0]  # a purge begins a new one
        self.computed: list[set[tuple[int, ...]]] = [set(), set()]  # prefixes, since the last purge
        self.prompts: list[list[tuple[int, ...]]] = [[], []]  # lately computed, by namespace
        self.pins: list[int] = []

    # ---- what must be true

    def prompt(self, namespace: int, known: int, cut: int, more: Seq[int]) -> list[int]:
        """A prefix that was computed once, perhaps cut, with something else behind it."""
        prompts = self.prompts[namespace]
        prefix = prompts[known % len(prompts)] if prompts else ()
        return [*prefix[: len(prefix) - cut % 4], *more][:24]

    def read(self, seq: pk.Sequence, namespace: int) -> None:
        tokens, done = seq.tokens.tolist(), seq.num_computed
        for found, wanted in zip(seq.gather(), kv(namespace, tokens, 0, done), strict=True):
            assert np.array_equal(found, wanted), f"wrong KV in {tokens}, of which {done} are computed"
        seen["reads"] += done

    def remember(self, seq: pk.Sequence, namespace: int, epoch: int) -> None:
        tokens = tuple(seq.tokens.tolist())
        if epoch == self.epochs[namespace]:
            self.computed[namespace].update(tokens[:i] for i in range(1, seq.num_computed + 1))
            self.prompts[namespace] = [*self.prompts[namespace][-8:], tokens[: seq.num_computed]]

    def known(self, namespace: int, tokens: Seq[int]) -> bool:
        return not tokens or tuple(tokens) in self.computed[namespace]

    @invariant()
    def every_sequence_holds_what_was_computed_for_it(self) -> None:
        if hasattr(self, "cache"):
            seen["rules"] += 1
            for seq, namespace, _ in self.live:
                self.read(seq, namespace)
            self.cache.check_integrity()

    # ---- requests

    @rule(namespace=st.integers(0, 1), known=which, cut=which, more=tokens_of)
    def open(self, namespace: int, known: int, cut: int, more: list[int]) -> None:
        if len(self.live) == MAX_SEQUENCES:
            self.live.pop(0)[0].release()
        tokens = self.prompt(namespace, known, cut, more)
        try:
            seq = self.cache.sequence(tokens, NAMESPACES[namespace])
        except pk.OutOfBlocks:
            return
        self.live.append((seq, namespace, self.epochs[namespace]))
        seen.update({f"hits {tier}": int(count > 0) for tier, count in seq.hit_tokens.items()})
        assert seq.num_computed == sum(seq.hit_tokens.values())
        assert seq.num_computed < len(tokens) or not tokens
        assert self.known(namespace, tokens[: seq.num_computed]), "a hit on what was never computed"

    @rule(namespace=st.integers(0, 1), known=which, cut=which, more=long_tokens)
    def serve(self, namespace: int, known: int, cut: int, more: list[int]) -> None:
        """A whole request at once, so that older ones are demoted."""
        held = len(self.live)
        self.open(namespace, known, cut, more)
        if len(self.live) > min(held, MAX_SEQUENCES - 1):
            self.scatter(len(self.live) - 1)
            self.read(*self.live[-1][:2])
            self.live.pop()[0].release()

    @rule(namespace=st.integers(0, 1), known=which, cut=which, more=tokens_of)
    def serve_again(self, namespace: int, known: int, cut: int, more: list[int]) -> None:
        self.serve(namespace, known, cut, more)

    @rule(chosen=which, share=st.integers(1, 4), lookahead=st.sampled_from([0, 0, 2]), fail=st.integers(0, 7))
    @precondition(lambda self: self.live)
    def step(self, chosen: int, share: int, lookahead: int, fail: int) -> None:
        """Some of the sequences, all or the first part of their tokens; now and then the body raises half-way."""
        batch = [entry for i, entry in enumerate(self.live) if chosen >> i & 1]
        left = [seq.num_tokens - seq.num_computed for seq, _, _ in batch]
        q_lens = None if share < 3 else np.array([count // (share - 1) for count in left], np.int32)
        try:
            with self.cache.step([seq for seq, _, _ in batch], q_lens=q_lens, lookahead=lookahead) as step:
                parts = []
                for i, (seq, namespace, _) in enumerate(batch):
                    first, count = seq.num_computed, int(step.q_indptr[i + 1] - step.q_indptr[i])
                    parts.append(kv(namespace, seq.tokens.tolist(), first, first + count))
                for layer in range(SPEC.num_layers if batch else 0):
                    if fail == layer:
                        raise Failing
                    step.write(layer, *(np.concatenate([part[i][layer] for part in parts]) for i in (0, 1)))
        except pk.OutOfBlocks:
            self.live.pop(chosen % len(self.live))[0].release()
        except Failing:
            assert [seq.num_tokens - seq.num_computed for seq, _, _ in batch] == left
        else:
            for entry in batch:
                self.remember(*entry)

    @rule(who=which)
    @precondition(lambda self: self.live)
    def scatter(self, who: int) -> None:
        seq, namespace, epoch = self.live[who % len(self.live)]
        try:
            seq.scatter(*kv(namespace, seq.tokens.tolist(), seq.num_computed, seq.num_tokens))
        except pk.OutOfBlocks:
            return
        self.remember(seq, namespace, epoch)

    @rule(who=which, tokens=tokens_of)
    @precondition(lambda self: self.live)
    def append(self, who: int, tokens: list[int]) -> None:
        seq = self.live[who % len(self.live)][0]
        if seq.num_tokens + len(tokens) < 30:
            seq.append(tokens)

    @rule(who=which, count=st.integers(1, 2))
    @precondition(lambda self: 0 < len(self.live) < MAX_SEQUENCES - 1)
    def fork(self, who: int, count: int) -> None:
        seq, namespace, epoch = self.live[who % len(self.live)]
        self.live += [(fork, namespace, epoch) for fork in seq.fork(count)]

    @rule(who=which, cut=st.integers(0, 30))
    @precondition(lambda self: self.live)
    def truncate(self, who: int, cut: int) -> None:
        seq = self.live[who % len(self.live)][0]
        seq.truncate(max(0, seq.num_tokens - cut))

    @rule(who=which, priority=st.integers(0, 100))
    @precondition(lambda self: self.live)
    def retain(self, who: int, priority: int) -> None:
        self.live[who % len(self.live)][0].retain(priority=priority)

    @rule(who=which)
    @precondition(lambda self: self.live)
    def release(self, who: int) -> None:
        self.live.pop(who % len(self.live))[0].release()

    # ---- the cache itself

    @rule(namespace=st.integers(0, 1), known=which, cut=which, more=tokens_of)
    def prefetch(self, namespace: int, known: int, cut: int, more: list[int]) -> None:
        tokens = self.prompt(namespace, known, cut, more)
        there = self.cache.prefetch(tokens, NAMESPACES[namespace]).wait(60)
        assert self.known(namespace, tokens[:there])
        runs = self.cache.explain(tokens, NAMESPACES[namespace]).runs
        assert there <= sum(run.num_tokens for run in runs if run.tier == "device")

    @rule(namespace=st.integers(0, 1), known=which, cut=which, more=tokens_of)
    def explain(self, namespace: int, known: int, cut: int, more: list[int]) -> None:
        tokens = self.prompt(namespace, known, cut, more)
        told = self.cache.explain(tokens, NAMESPACES[namespace])
        assert self.known(namespace, tokens[: told.cached_tokens])
        assert sum(run.num_tokens for run in told.runs) == told.cached_tokens <= told.num_tokens == len(tokens)

    @rule(namespace=st.integers(0, 1), known=which)
    def pin(self, namespace: int, known: int) -> None:
        tokens = self.prompt(namespace, known, 0, ())
        try:
            self.pins.append(self.cache.pin(tokens, NAMESPACES[namespace]))
        except pk.PinBudgetExceeded:
            return
        assert self.cache.stats().placement["pinned_blocks"] <= 4

    @rule()
    @precondition(lambda self: self.pins)
    def unpin(self) -> None:
        self.cache.unpin(self.pins.pop())

    @rule(namespace=st.integers(0, 1), blocks=st.none() | st.integers(1, 6))
    def set_quota(self, namespace: int, blocks: int | None) -> None:
        if NAMESPACES[namespace] is not None:
            self.cache.set_quota(NAMESPACES[namespace], blocks)

    @rule(namespace=st.integers(0, 1))
    def purge(self, namespace: int) -> None:
        """Nothing of the namespace is ever found again, not even when the disk is reopened."""
        self.cache.purge(NAMESPACES[namespace])
        self.epochs[namespace] += 1
        forgotten, self.computed[namespace] = self.computed[namespace], set()
        self.prompts[namespace] = sorted(forgotten, key=len)[-8:]

    @precondition(lambda self: self.on_disk)
    @rule(first=st.booleans(), damage=st.none() | st.integers(0, 1 << 20))
    def close_and_reopen(self, first: bool, damage: int | None) -> None:
        """Only what is on disk is found again, but for what was damaged meanwhile."""
        if not first:
            self.count_and_close()
        for seq, _, _ in self.live:
            seq.release()
        self.live.clear()
        if first:
            self.count_and_close()
        if damage is not None:
            self.damage(damage)
        self.pins.clear()
        self.cache = self.open_cache()

    @precondition(lambda self: self.on_disk)
    @rule(where=st.integers(0, 1 << 20))
    def damage(self, where: int) -> None:
        """Some bytes of the store are overwritten; nobody may ever read them as KV."""
        files = sorted(path for path in self.folder.rglob("data.*"))
        if files:
            with files[where % len(files)].open("r+b") as file:
                file.seek(where % (files[where % len(files)].stat().st_size - 64))
                file.write(b"\xa5" * 64)

    def count_and_close(self) -> None:
        stats = self.cache.stats()
        for kind in ("promoted", "demoted", "dropped"):
            seen.update({f"{kind} {tier}": int(count) for tier, count in stats.placement[kind].items()})
        seen.update({"failed promotions": stats.placement["failed_promotions"], "adopted": stats.placement["adopted"]})
        self.cache.close()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for seq, _, _ in self.live:
            seq.release()
        for handle in self.pins:
            self.cache.unpin(handle)
        self.cache.check_integrity()
        stats = self.cache.stats()  # a quota may have decided on moves that nobody has needed to run
        assert stats.placement["in_flight"] or not any(counts["live"] for counts in stats.blocks.values()), "a leak"
        self.count_and_close()
        shutil.rmtree(self.folder)


def test_every_read_of_a_cache_over_three_tiers_is_right() -> None:
    seen.clear()
    run_histories(CacheMachine, 200, 50)
    expected = {f"hits {tier}" for tier in ("device", "host", "disk", "partial")}
    expected |= {"promoted host", "promoted disk", "demoted device", "demoted host", "dropped disk", "adopted"}
    assert {kind for kind in expected if not seen[kind]} == set(), seen


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_every_read_of_a_cache_over_three_tiers_is_right_in_long_histories(part: int) -> None:
    run_histories(CacheMachine, 1000, 100)
