"""Counters of a cache and of a scheduler, as one snapshot each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pagedkv.observe.latency import Latency


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of a cache since it was opened, and its content now.

    Attributes
    ----------
    sequences : int
        Live sequences.
    prompt_tokens : int
        Tokens of all prompts opened.
    hit_tokens : mapping of tier name to int
        Prompt tokens served from the cache, by the tier they came from; ``"partial"`` counts tokens copied out of a
        block that agreed only in its first tokens.
    missed_promotions : int
        Blocks that were matched in a colder tier and could not be brought up: counted as misses.
    computed_tokens : int
        Tokens whose KV was written by steps.
    blocks : mapping of tier name to mapping
        ``capacity, max, free, live, cached, reserved, available`` per tier (``BlockPool.counts``).
        With ``KVCache(by_group=True)`` these are the blocks of group 0, as if it had all of the memory.
    groups : mapping of tier name to tuple of mappings
        With ``KVCache(by_group=True)``: of each group of layers ``live`` and ``cached`` pages, the ``extents`` that
        belong to it, and ``pages_per_extent``; group 0 comes first. Empty without.
    placement : mapping
        Counters of the core (``Placement.stats``), in blocks.
    moved_bytes : mapping of ``"source_to_destination"`` to int
        Bytes moved between tiers.
    failed_moves : int
        Blocks whose move failed, came late or was cancelled.
    disk : mapping or None
        None without a disk tier. ``state``: ``"ok"``, ``"read_only"``, ``"off"``, or ``"left_out"`` where it could not
        be opened; counters of the store (``DiskStats``), such as ``misses`` and ``write_errors`` by reason; and what
        was not worth it: ``disk_hits_declined`` (tokens that were computed instead of loaded),
        ``refused_by_admission`` and ``refused_by_write_budget`` (blocks dropped instead of written).
        ``admission_failures`` counts blocks that admission could not judge.
    remote : mapping or None
        None without a remote store. ``state``: ``"ok"``, ``"off"``, or ``"left_out"`` where it could not be used;
        counters of the store (:class:`pagedkv.tiers.remote.stats.RemoteStats`); ``claims`` (blocks known to be there),
        ``queued_bytes`` (on their way), ``not_worth_sending`` (blocks that compute faster than they load) and
        ``send_failures``.
    hazard : mapping or None
        None with other policies. The figures of the policy ``hazard``, also beside plain LRU's
        (``HazardPolicy.stats``), ``clock_failures``, and its files: ``tables_read``, ``tables_refused`` (could not be
        used), ``tables_written``, ``table_write_failures``.
    clock_failures : int
        Readings of the caller's clock that failed; time stood still meanwhile.
    hook_failures : int
        Calls of hooks that raised an Exception.
    steps_that_waited : int
        Steps for which no room had been made ahead: they waited for demotions.
    lagging_tokens : int
        With ``KVCache(by_group=True)``: tokens of prompts that the layers with full attention held behind the hit, and
        that had to be computed again because another group of layers had let go of its tail there.
    orphans : int
        Blocks that the disk held when the cache was opened and that were dropped: the block before them was not there,
        their key was not that of their content, or they were there twice.
    overflowing_writes : int
        Layers of steps (``write``, ``scatter``) in which a finite number was stored as infinity, because the cache's
        dtype ends below it (float16 at 65,504). Counted on the CPU only.
    latency : mapping of str to Latency
        ``"match"`` and ``"promotion"`` of a prompt; ``"disk_read"`` and ``"disk_write"`` of the blocks that one ticket
        carries; ``"lookup"``, ``"remote_read"`` and ``"remote_write"`` with a remote store
        (:class:`pagedkv.observe.latency.CacheLatencies`). It is of no account to ``==``.
    """

    sequences: int
    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    missed_promotions: int
    computed_tokens: int
    blocks: Mapping[str, Mapping[str, int]]
    placement: Mapping[str, Any]
    moved_bytes: Mapping[str, int]
    failed_moves: int
    disk: Mapping[str, Any] | None = None
    remote: Mapping[str, Any] | None = None
    hazard: Mapping[str, int] | None = None
    clock_failures: int = 0
    hook_failures: int = 0
    steps_that_waited: int = 0
    lagging_tokens: int = 0
    groups: Mapping[str, tuple[Mapping[str, int], ...]] = field(default_factory=dict)
    orphans: int = 0
    overflowing_writes: int = 0
    latency: Mapping[str, Latency] = field(default_factory=dict, compare=False)

    @property
    def token_hit_rate(self) -> float:
        """Share of all prompt tokens that came from the cache, 0..1; 0 before the first prompt."""
        return sum(self.hit_tokens.values()) / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "token_hit_rate": self.token_hit_rate}

    def __str__(self) -> str:
        hits = ", ".join(f"{tier} {count}" for tier, count in self.hit_tokens.items() if count) or "none"
        held = ", ".join(
            f"{tier} {counts['live']} live + {counts['cached']} cached of {counts['max']}"
            for tier, counts in self.blocks.items()
        )
        held += "".join(f"; {tier} {_of_groups(groups)}" for tier, groups in self.groups.items())
        return (
            f"{self.sequences} sequences; hit tokens: {hits} of {self.prompt_tokens} ({self.token_hit_rate:.1%}); "
            f"blocks: {held}; failed moves: {self.failed_moves}{self._disk_in_words()}{self._hazard_in_words()}"
            f"{f'; {self.clock_failures} readings of the clock failed' if self.clock_failures else ''}"
        )

    def _disk_in_words(self) -> str:
        """Whatever is out of the ordinary about the disk tier."""
        if self.disk is None:
            return ""
        flat = {**self.disk, "misses": _total(self.disk, "misses"), "write_errors": _total(self.disk, "write_errors")}
        told = [f"{flat[name]} {words}" for name, words in _DISK_WORDS.items() if flat.get(name)]
        return f"; disk {', '.join([str(self.disk['state']), *told])}"

    def _hazard_in_words(self) -> str:
        """How the policy hazard compares with LRU."""
        if self.hazard is None:
            return ""
        won, held = self.hazard["hits"] - self.hazard["lru_hits"], self.hazard["held_back"]
        return f"; hazard {won:+d} hit blocks beside LRU, {held} victims in its order"


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The work of a scheduler: waiting, running, and done.

    Attributes
    ----------
    waiting, loading, running, suspended : requests now.
    sequences : that run now.
    finished, aborted, expired : requests so far.
    preempted_by_swap, preempted_by_recompute : suspensions so far.
    clock_failures : readings of the clock that failed.
    ended : mapping of str to int
        Requests so far by ``Request.finish_reason``: ``"stop"`` and ``"length"`` (together `finished`), ``"aborted"``,
        ``"deadline"`` (`expired`); and ``"refused"``, those that `submit` did not queue for want of room.
    new_tokens : int
        Generated so far.
    shared_tokens : int
        Prompt tokens that requests took from others under way so far, instead of computing them.
    latency : mapping of str to Latency
        ``"queue"``: from the submission until a request first runs. ``"first_token"``: from the submission to the
        report of its first token. ``"token"``: from one token of a branch to the next, also over a suspension; tokens
        that came together share the time.
    """

    waiting: int
    running: int
    suspended: int
    sequences: int
    finished: int
    aborted: int
    expired: int
    preempted_by_swap: int
    preempted_by_recompute: int
    clock_failures: int = 0
    loading: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)
    new_tokens: int = 0
    shared_tokens: int = 0
    latency: Mapping[str, Latency] = field(default_factory=dict, compare=False)


_DISK_WORDS = {
    "misses": "misses",
    "write_errors": "write errors",
    "disk_hits_declined": "tokens declined",
    "refused_by_admission": "blocks refused by admission",
    "refused_by_write_budget": "blocks refused by the write budget",
    "admission_failures": "runs that could not be judged",
}


def _of_groups(groups: tuple[Mapping[str, int], ...]) -> str:
    """Pages of a tier by group."""
    return ", ".join(
        f"group {number}: {group['live']} live + {group['cached']} cached pages in {group['extents']} extents"
        for number, group in enumerate(groups)
    )


def _total(disk: Mapping[str, Any], name: str) -> int:
    return sum(disk.get(name, {}).values())
