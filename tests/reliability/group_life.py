"""A cache over groups of layers from step to step, in a directory that meets faults.

The bytes of all groups are compared with those computed for exactly that prefix. A purge that returned ends a version
of its namespace's content: from then on not one byte of it may be served. All that a close has left on a disk with room
for everything has to be found again, unless a fault met it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

import pagedkv as pk
from pagedkv.errors import TierError
from tests.reliability import churn
from tests.reliability.life import Faulty
from tests.reliability.proof import Tally
from tests.reliability.token_kv import GROUPED, serve, wrong_in_pages

TENANTS = [pk.Namespace(tenant=name) for name in churn.TENANTS[:2]]
PROMPTS = churn.PROMPTS[:6]
WHOLE = len(PROMPTS[0]) // GROUPED.block_size * GROUPED.block_size  # tokens of a prompt that can be found
MEMORY = 12  # blocks of all layers
NARROW, ROOMY = 20, 120  # blocks of a disk: with too little room extents change hands, with enough nothing leaves
HITS = "hit tokens, disk by groups"


class Step(NamedTuple):
    """One call. `tenant` and `prompt` are those of a request; a purge has a tenant alone."""

    kind: Literal["open", "ask", "purge", "checkpoint", "close"]
    tenant: int = 0
    prompt: int = 0


OPEN, CHECKPOINT, CLOSE = Step("open"), Step("checkpoint"), Step("close")
Script = tuple[Step, ...]
KINDS: tuple[Literal["ask", "purge", "checkpoint", "reopen"], ...] = ("ask", "purge", "checkpoint", "reopen")
CHANCES = (0.8, 0.06, 0.07, 0.07)


def asks(tenant: int, *prompts: int) -> Script:
    """Requests one after the other."""
    return tuple(Step("ask", tenant, prompt) for prompt in prompts)


LIFE = (
    OPEN, *asks(0, 0, 1, 2), *asks(1, 1, 2), CHECKPOINT, Step("purge", 0), *asks(0, 2, 0), CLOSE,
    OPEN, *asks(0, 0, 2), *asks(1, 1, 5), Step("purge", 1), *asks(1, 2), CLOSE,
)  # fmt: skip


def random_script(rng: np.random.Generator, num_steps: int) -> Script:
    """Return steps that begin with opening and end with closing."""
    steps = [OPEN]
    for number in rng.choice(len(KINDS), num_steps, p=CHANCES).tolist():
        tenant, prompt = int(rng.integers(len(TENANTS))), int(rng.integers(len(PROMPTS)))
        kind = KINDS[number]
        if kind == "reopen":
            steps += [CLOSE, OPEN]
        else:
            steps.append(Step(kind, tenant, prompt))
    return (*steps, CLOSE)


@dataclass
class Known:
    """What follows from the steps.

    Attributes
    ----------
    versions : of each tenant's content.
    asked : (tenant, prompt) that were computed since the tenant's last purge.
    stored : those of them that a close has left on the disk.
    """

    versions: list[int] = field(default_factory=lambda: [0] * len(TENANTS))
    asked: set[tuple[int, int]] = field(default_factory=set)
    stored: set[tuple[int, int]] = field(default_factory=set)

    def begin(self, step: Step) -> None:
        """From now on the step may have happened, or a part of it."""
        if step.kind == "purge":
            for kept in (self.asked, self.stored):
                kept -= {(step.tenant, prompt) for prompt in range(len(PROMPTS))}

    def end(self, step: Step) -> None:
        """It has happened."""
        if step.kind == "purge":
            self.versions[step.tenant] += 1
        elif step.kind == "ask":
            self.asked.add((step.tenant, step.prompt))
        elif step.kind == "close":
            self.stored = set(self.asked)

    def weights(self, tenant: int) -> str:
        """The name of a tenant's content."""
        return churn.source(tenant, self.versions[tenant])


def after(steps: Iterable[Step], done: int, before: Known | None = None) -> Known:
    """The knowledge left after a process that ended within step number `done`."""
    known = copy.deepcopy(before or Known())
    for index, step in enumerate(steps):
        if index <= done:
            known.begin(step)
        if index < done:
            known.end(step)
    known.asked = set(known.stored)  # memory is gone
    return known


class GroupLife:
    """One directory from step to step.

    Parameters
    ----------
    room : blocks of the disk.

    Attributes
    ----------
    known : from the steps so far.
    complaints : mistakes in words; has to stay empty.
    hits, refused, tokens : blocks served and compared, openings refused, hit tokens by tier.
    misses : by reason, of the caches that were closed.
    """

    def __init__(self, path: Path, faults: Faulty, room: int, known: Known | None = None) -> None:
        self.path, self.room, self.known = path, room, known or Known()
        self.complaints: list[str] = []
        self.tokens: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.hits = self.refused = 0
        self._faults, self._was_open, self._met = faults, False, False
        self._cache: pk.KVCache | None = None

    def run(self, steps: Sequence[Step]) -> None:
        """Do the steps. A cache that cannot be opened leaves out those that need it."""
        for step in steps:
            if step.kind == "open" or self._cache is not None:
                self.do(step)

    def do(self, step: Step) -> None:
        """Do one step. Only opening and purging may raise: a `TierError`, because of a fault."""
        self.known.begin(step)
        try:
            self._ask(step)
        except TierError as problem:
            if step.kind not in ("open", "purge"):
                raise
            self.refused += step.kind == "open"
            if not self._faults.fired:
                self.complaints.append(f"{step} was refused without any fault: {problem}")
            if step.kind == "purge":
                self._check_forgotten(step)
        else:
            self.known.end(step)
            if step.kind == "purge":
                self._check_forgotten(step)

    def settle(self) -> None:
        """End all faults, and look at everything: in this cache, and in one opened again."""
        self._met = self._faults.fired > 0
        self._faults.off()
        if self._cache is not None:
            self.look("the open cache")
            self.abandon()
        try:
            self._open()
        except TierError as problem:
            self.refused += 1
            if self._was_open or not self._met or self.known.stored:
                self.complaints.append(f"cannot be opened again: {problem}")
            return
        self.look("opened again")
        self._ask(Step("ask", 1, 4))  # it works; `known` stays as it was
        self.abandon()

    def abandon(self) -> None:
        """Close the cache if it is open, and ask nothing more."""
        cache, self._cache = self._cache, None
        if cache is not None:
            stats = cache.stats().disk
            assert stats is not None
            self.misses.update(stats["misses"])
            cache.close(write_s=None)

    def look(self, place: str) -> None:
        """Ask for everything, and compare all that is found."""
        cache = self._cache
        assert cache is not None
        must = self.known.stored if self.room == ROOMY and not self._met else ()
        for tenant, namespace in enumerate(TENANTS):
            for number, prompt in enumerate(PROMPTS):
                with cache.sequence(prompt, namespace) as seq:
                    what = f"{place}: prompt {number} of tenant {tenant}, version {self.known.versions[tenant]}"
                    if wrong := wrong_in_pages(cache, seq, self.known.weights(tenant)):
                        self.complaints.append(f"{what}: wrong KV of {wrong} tokens")
                    if (tenant, number) in must and seq.num_computed < WHOLE:
                        self.complaints.append(f"{what}: {seq.num_computed} of {WHOLE} stored tokens are found")
                    self._count(seq.hit_tokens)
        try:
            cache.check_integrity()
        except AssertionError as problem:
            self.complaints.append(f"{place}: the books do not agree: {problem}")

    def tell(self, tally: Tally) -> None:
        """Add the counts to a proof's."""
        tally.hits += self.hits
        tally.add("openings refused by groups", self.refused)
        tally.add(HITS, self.tokens["disk"])

    def _ask(self, step: Step) -> None:
        if step.kind == "open":
            self._open()
            return
        cache = self._cache
        assert cache is not None
        if step.kind == "ask":
            found = serve(cache, PROMPTS[step.prompt], TENANTS[step.tenant], self.known.weights(step.tenant))
            if found.wrong:
                self.complaints.append(f"{step}: wrong KV of {found.wrong} tokens")
            self._count(found.hits)
        elif step.kind == "purge":
            cache.purge(TENANTS[step.tenant])
        elif step.kind == "checkpoint":
            cache.checkpoint()
        else:
            self.abandon()

    def _open(self) -> None:
        disk = pk.Disk(
            str(self.path), pk.Blocks(self.room), segment_size=pk.Bytes(8 * 8192), write="all", admission="all"
        )
        self._cache = pk.KVCache(GROUPED, pk.Blocks(MEMORY), disk=disk, partial_hits=False, threads=1, by_group=True)
        self._was_open = True

    def _check_forgotten(self, step: Step) -> None:
        """In this process nothing of a purged namespace is left, whatever the disk says."""
        assert self._cache is not None
        for number, prompt in enumerate(PROMPTS):
            if found := self._cache.explain(prompt, TENANTS[step.tenant]).cached_tokens:
                self.complaints.append(f"{step}: {found} tokens of prompt {number} are there still")

    def _count(self, hit_tokens: dict[str, int]) -> None:
        self.tokens.update(hit_tokens)
        self.hits += sum(hit_tokens.values()) // GROUPED.block_size
