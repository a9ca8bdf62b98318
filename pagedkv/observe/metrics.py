"""Counters and latencies of caches and schedulers for Prometheus.

Counters and never ratios: Prometheus divides them over any window.

    from prometheus_client import REGISTRY
    REGISTRY.register(CacheCollector(llama=scheduler, draft=another_cache))

A scrape is one ``stats()`` per cache and scheduler; between scrapes nothing is done. Needs the extra ``metrics``.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pagedkv import extras
from pagedkv.errors import WrongType
from pagedkv.observe.latency import Latency
from pagedkv.observe.stats import CacheStats, SchedulerStats

# counters of the core: name there -> name here, help text
BY_TIER = {
    "hit_blocks": ("matched_blocks", "Whole blocks matched, by the tier they were found in."),
    "promoted": ("promoted_blocks", "Blocks brought to the device, by the tier they came from."),
    "demoted": ("demoted_blocks", "Blocks moved one tier down, by the tier they came from."),
    "dropped": ("dropped_blocks", "Blocks lost, by the tier that held them last."),
    "trimmed": ("trimmed_blocks", "Redundant copies given up, by tier."),
    "copied": ("copied_blocks", "Blocks copied to a colder tier while they stayed in memory, by that tier."),
}
TOLD = {
    "acquired": ("matches", "Prompts that were matched with the prefix tree."),
    "inserted": ("inserted_blocks", "Blocks that joined the prefix tree."),
    "adopted": ("adopted_blocks", "Blocks that a sequence gave up because the tree had the same tokens."),
    "failed_promotions": ("failed_promotion_blocks", "Blocks whose promotion failed."),
    "failed_demotions": ("failed_demotion_blocks", "Blocks whose demotion failed."),
    "late_promotions": ("late_promotion_blocks", "Blocks whose promotion came too late."),
    "refused_demotions": ("refused_demotion_blocks", "Blocks that were dropped instead of demoted."),
    "failed_copies": ("failed_copy_blocks", "Blocks whose copy to a colder tier failed."),
    "refused_copies": ("refused_copy_blocks", "Blocks that were not worth a copy to a colder tier."),
    "blocked_matches": ("blocked_matches", "Matches that ended early at blocks on their way."),
    "refused_by_quota": ("refused_by_quota_blocks", "Blocks that a quota did not admit."),
    "expired": ("expired_blocks", "Blocks whose time to live ended."),
    "events_lost": ("events_lost", "KV events that the ring had no room for."),
    "lagging": ("lagging_blocks", "Blocks of prompts behind a hit, which some groups of layers had let go of."),
    "sends_dropped": ("dropped_sends", "Prefixes that left the device before they were sent to the remote store."),
}
NOW = {  # what there is of it now
    "wanted": ("wanted_copies", "Prefixes that are to be copied to a colder tier."),
    "sends_wanted": ("wanted_sends", "Prefixes that are to be sent to the remote store."),
    "owners": ("prefix_owners", "Prefixes that sequences, pins and prefetches own now."),
    "in_flight": ("transfers_in_flight", "Transfers between tiers that are under way now."),
    "pinned_blocks": ("pinned_blocks", "Blocks that pins hold now."),
    "points": ("points", "Boundaries of prefixes that stay usable in every group of layers."),
    "cached_blocks": ("tree_blocks", "Blocks that the prefix tree has now, in whatever tiers."),
}
DISK = {
    "blocks_read": ("disk_read_blocks", "Blocks served from the disk."),
    "blocks_written": ("disk_written_blocks", "Blocks stored on the disk."),
    "misses": ("disk_missed_blocks", "Reads from the disk that were no hit, by reason."),
    "write_errors": ("disk_write_errors", "Writes to the disk that failed, by the name of the errno."),
    "hung": ("disk_hung_blocks", "Blocks of disk calls that did not return in time and were given up."),
    "writes_refused": ("disk_refused_writes", "Blocks not written because of the state that the disk tier was in."),
    "disk_hits_declined": ("disk_declined_tokens", "Tokens computed because loading them would have taken longer."),
    "refused_by_admission": ("disk_refused_by_admission_blocks", "Blocks that admission did not let be written."),
    "refused_by_write_budget": ("disk_refused_by_write_budget_blocks", "Blocks that the write budget had no room for."),
    "progress_failures": ("disk_progress_failures", "Calls of on_progress that raised."),
    "admission_failures": ("disk_admission_failures", "Times that what goes to the disk could not be judged."),
}
REMOTE = {
    "lookups": ("remote_lookups", "Times that the remote store was asked which blocks it has."),
    "lookup_blocks": ("remote_found_blocks", "Blocks that lookups have found."),
    "lookups_spared": ("remote_spared_lookups", "Lookups that the memory of recent misses has answered."),
    "refused_off": ("remote_calls_not_made", "Calls not made because the store was not answering."),
    "read_blocks": ("remote_read_blocks", "Blocks served from the remote store."),
    "read_bytes": ("remote_read_bytes", "Bytes of them, with heads."),
    "written_blocks": ("remote_written_blocks", "Blocks stored there."),
    "written_bytes": ("remote_written_bytes", "Bytes of them, with heads."),
    "deduplicated": ("remote_deduplicated_blocks", "Blocks not sent because the store had them."),
    "refused": ("remote_refused_blocks", "Blocks that the store would not store, by its word."),
    "misses": ("remote_missed_blocks", "Blocks that were claimed and did not come, by reason."),
    "failures": ("remote_failures", "Calls that the store did not answer, by kind."),
    "left_behind": ("remote_wrong_values_left", "Wrong values that could not be deleted."),
    "not_worth_sending": ("remote_blocks_not_worth_sending", "Blocks not sent because computing them is faster."),
    "send_failures": ("remote_send_failures", "Rounds of sending that raised."),
}
REMOTE_NOW = {
    "claims": ("remote_claims", "Blocks of the store that this cache knows now."),
    "queued_bytes": ("remote_queued_bytes", "Bytes on their way to the store now."),
}
HAZARD = {
    "hits": ("hazard_hit_blocks", "Blocks of requests that were matched, as compared with plain LRU."),
    "lru_hits": ("hazard_lru_hit_blocks", "Blocks that plain LRU over the same blocks would have matched."),
    "held_back": ("hazard_held_back", "Victims chosen in LRU's order because the bound left no choice."),
    "left_behind": ("hazard_left_behind", "Runs that their session went on without."),
    "learned": ("hazard_learned_samples", "Samples learned."),
    "samples_lost": ("hazard_lost_samples", "Samples that were never learned because there were too many at once."),
    "visits_lost": ("hazard_lost_visits", "Requests that could not be remembered."),
    "clock_steps_back": ("hazard_clock_steps_back", "Times that the clock went back."),
    "clock_failures": ("hazard_clock_failures", "Times that the clock failed."),
    "outputs_clamped": ("hazard_clamped_outputs", "Outputs longer than can be."),
    "tables_read": ("hazard_tables_read", "Files of learned tables that were read."),
    "tables_refused": ("hazard_tables_refused", "Files of learned tables that could not be used."),
    "tables_written": ("hazard_tables_written", "Files of learned tables that were written."),
    "table_write_failures": ("hazard_table_write_failures", "Files of learned tables that could not be written."),
}
HAZARD_NOW = {
    "lacking": ("hazard_lacking_blocks", "Blocks that plain LRU would have now and the cache has not."),
    "room": ("hazard_room_blocks", "Blocks that may be evicted out of LRU's order now."),
    "remembered_blocks": ("hazard_remembered_blocks", "Blocks, cached or not, that are remembered."),
    "remembered_runs": ("hazard_remembered_runs", "Runs of blocks that are remembered as one."),
    "bytes": ("hazard_bytes", "Memory of the policy."),
}
SCHEDULER_NOW = {
    "waiting": ("scheduler_waiting", "Requests that wait to begin."),
    "loading": ("scheduler_loading", "Requests whose cached prefixes are on their way to the device."),
    "running": ("scheduler_running", "Requests that run."),
    "suspended": ("scheduler_suspended", "Requests that gave their blocks up and go on later."),
    "sequences": ("scheduler_sequences", "Sequences that run: one for each branch of a request."),
}
TIMES = {
    "match": ("match_seconds", "Time that matching a prompt took."),
    "promotion": ("promotion_seconds", "Time that bringing a prompt's blocks to the device took."),
    "disk_read": ("disk_read_seconds", "Time that reading some blocks from the disk took, with its wait."),
    "disk_write": ("disk_write_seconds", "Time that writing some blocks to the disk took, with its wait."),
    "lookup": ("remote_lookup_seconds", "Time that asking the remote store about a prompt took."),
    "remote_read": ("remote_read_seconds", "Time that reading some blocks from the remote store took, with its wait."),
    "remote_write": ("remote_write_seconds", "Time that sending some blocks to the remote store took, with its wait."),
    "queue": ("scheduler_queue_seconds", "Time from a request's submission until it first runs."),
    "first_token": ("scheduler_first_token_seconds", "Time from a request's submission to its first token."),
    "token": ("scheduler_token_seconds", "Time from one token of a sequence to the next."),
}
DISK_STATES = ("ok", "read_only", "off", "left_out")
REMOTE_STATES = ("ok", "off", "left_out")


class Source(Protocol):
    """The scraped object: a KVCache or a Scheduler."""

    def stats(self) -> CacheStats | SchedulerStats:
        """Counters so far, and the content now."""


def _sources(name: str, given: Source) -> tuple[Source, ...]:
    """The sources under a name; a Scheduler brings its cache along.

    Raises
    ------
    WrongType
        It is none of the two: it says so now, and not in the middle of a scrape.
    """
    stats = given.stats() if callable(getattr(given, "stats", None)) and not isinstance(given, type) else None
    if isinstance(stats, CacheStats):
        return (given,)
    if isinstance(stats, SchedulerStats):
        cache: Source | None = getattr(given, "cache", None)
        return (given,) if cache is None else (given, cache)
    raise WrongType(f"{name} must be a KVCache or a Scheduler, not {type(given).__name__}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of one cache."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    words: str
    labels: Mapping[str, str]
    value: float | Latency


class CacheCollector:
    """Gives Prometheus the counters of caches and schedulers, by the label ``cache``.

    Parameters
    ----------
    caches : KVCache or Scheduler by name. A Scheduler brings its cache along, under the same name. A cache that comes
        under several names is scraped under the first of them only, so that sums are right.

    Raises
    ------
    ImportError
        prometheus_client is not installed; names the extra that brings it.
    WrongType
        One of them is neither a cache nor a scheduler.
    """

    def __init__(self, **caches: Source) -> None:
        try:
            self._families: Any = importlib.import_module("prometheus_client.metrics_core")
        except ImportError:
            raise ImportError(f"metrics need prometheus_client: {extras.command('metrics')}") from None
        self._changing = threading.Lock()
        self._caches = {name: _sources(name, given) for name, given in caches.items()}

    def add(self, name: str, cache: Source) -> None:
        """Scrape this cache or scheduler too; in place of the one that had the name before."""
        sources = _sources(name, cache)
        with self._changing:
            self._caches = {**self._caches, name: sources}

    def remove(self, name: str) -> None:
        """Stop collecting it, and drop the reference to it. Does nothing for an unknown name."""
        with self._changing:
            self._caches = {known: cache for known, cache in self._caches.items() if known != name}

    def describe(self) -> Iterable[Any]:
        """Nothing: what there is depends on the caches' tiers, so registering scrapes nothing."""
        return ()

    def collect(self) -> Iterable[Any]:
        """One family per name, with the samples of all caches."""
        families: dict[str, Any] = {}
        seen: list[Source] = []
        for name, sources in self._caches.items():
            for source in [one for one in sources if not any(one is known for known in seen)]:
                seen.append(source)
                for sample in samples(source.stats()):
                    self._add(families, sample, {"cache": name, **sample.labels})
        return list(families.values())

    def _add(self, families: dict[str, Any], sample: Sample, labels: dict[str, str]) -> None:
        family = families.get(sample.name)
        if family is None:
            kind = getattr(self._families, f"{sample.kind.capitalize()}MetricFamily")
            family = families[sample.name] = kind(f"pagedkv_{sample.name}", sample.words, labels=list(labels))
        if isinstance(sample.value, Latency):
            family.add_metric(list(labels.values()), sample.value.cumulative(), sample.value.total_s)
        else:
            family.add_metric(list(labels.values()), sample.value)


def samples(stats: CacheStats | SchedulerStats) -> list[Sample]:
    """All counts of a snapshot by their names here, without ``pagedkv_`` and ``_total``."""
    return _of_cache(stats) if isinstance(stats, CacheStats) else _of_scheduler(stats)


def _of_scheduler(stats: SchedulerStats) -> list[Sample]:
    found = [Sample(name, "gauge", words, {}, getattr(stats, key)) for key, (name, words) in SCHEDULER_NOW.items()]
    words = "Requests that ended, by reason; refused: those that were not queued for want of room."
    found += [Sample("scheduler_ended", "counter", words, {"reason": key}, n) for key, n in stats.ended.items()]
    words = "Times that a request gave its blocks up, by how it was to get them back."
    for way, n in (("swap", stats.preempted_by_swap), ("recompute", stats.preempted_by_recompute)):
        found.append(Sample("scheduler_preemptions", "counter", words, {"by": way}, n))
    found.append(Sample("scheduler_new_tokens", "counter", "Tokens generated.", {}, stats.new_tokens))
    words = "Prompt tokens that requests took from others under way, instead of computing them."
    found.append(Sample("scheduler_shared_tokens", "counter", words, {}, stats.shared_tokens))
    words = "Readings of the scheduler's clock that failed."
    found.append(Sample("scheduler_clock_failures", "counter", words, {}, stats.clock_failures))
    return found + _times(stats.latency)


def _times(latency: Mapping[str, Latency]) -> list[Sample]:
    there = [(key, *told) for key, told in TIMES.items() if key in latency]
    return [Sample(name, "histogram", words, {}, latency[key]) for key, name, words in there]


def _of_cache(stats: CacheStats) -> list[Sample]:
    found: list[Sample] = []

    def count(name: str, words: str, value: float, **labels: str) -> None:
        found.append(Sample(name, "counter", words, labels, value))

    def gauge(name: str, words: str, value: float, **labels: str) -> None:
        found.append(Sample(name, "gauge", words, labels, value))

    gauge("sequences", "Live sequences.", stats.sequences)
    count("prompt_tokens", "Tokens of all prompts opened.", stats.prompt_tokens)
    count("computed_tokens", "Tokens whose KV was written by steps.", stats.computed_tokens)
    for tier, tokens in stats.hit_tokens.items():
        count("tier_hit_tokens", "Prompt tokens served from the cache, by the tier they came from.", tokens, tier=tier)
    count("missed_promotion_blocks", "Blocks matched in a colder tier that could not be brought up.",
          stats.missed_promotions)  # fmt: skip
    count("failed_move_blocks", "Blocks whose move failed, came late or was cancelled.", stats.failed_moves)
    count("clock_failures", "Readings of the caller's clock that failed.", stats.clock_failures)
    count("hook_failures", "Calls of hooks that raised an Exception.", stats.hook_failures)
    count("steps_that_waited", "Steps for which no room had been made ahead.", stats.steps_that_waited)
    count("orphan_blocks", "Blocks of the disk that were dropped when it was opened.", stats.orphans)
    count("overflowing_writes", "Writes that stored a finite number as infinity.", stats.overflowing_writes)
    for way, num_bytes in stats.moved_bytes.items():
        source, _, destination = way.partition("_to_")
        count("moved_bytes", "Bytes moved between tiers.", num_bytes, source=source, destination=destination)
    for tier, counts in stats.blocks.items():
        gauge("tier_max_blocks", "Blocks that a tier may come to have.", counts["max"], tier=tier)
        gauge("tier_capacity_blocks", "Blocks that a tier has now.", counts["capacity"], tier=tier)
        gauge("tier_available_blocks", "Free blocks that are not reserved.", counts["available"], tier=tier)
        for state in ("free", "live", "cached", "reserved"):
            words = "Blocks by state: free; live, in use; cached, owned by the tree alone; reserved."
            gauge("tier_blocks", words, counts[state], tier=tier, state=state)
    for tier, groups in stats.groups.items():
        for number, group in enumerate(groups):
            words = "Extents of a tier's memory that belong to a group of layers."
            gauge("group_extents", words, group["extents"], tier=tier, group=str(number))
            for state in ("live", "cached"):
                words = "Pages of a group of layers by state: live, in use; cached, held by points or the tree alone."
                gauge("group_pages", words, group[state], tier=tier, group=str(number), state=state)
    for key, (name, words) in BY_TIER.items():
        for tier, num_blocks in stats.placement[key].items():
            count(f"tier_{name}", words, num_blocks, tier=tier)
    for key, (name, words) in TOLD.items():
        count(name, words, stats.placement[key])
    for key, (name, words) in NOW.items():
        gauge(name, words, stats.placement[key])
    if stats.disk is not None:
        found += _of_tier("disk", stats.disk, DISK_STATES, DISK)
    if stats.remote is not None:
        found += _of_tier("remote", stats.remote, REMOTE_STATES, REMOTE)
        for key, (name, words) in REMOTE_NOW.items():
            if key in stats.remote:
                gauge(name, words, stats.remote[key])
    if stats.hazard is not None:
        for key, (name, words) in HAZARD.items():
            count(name, words, stats.hazard[key])
        for key, (name, words) in HAZARD_NOW.items():
            gauge(name, words, stats.hazard[key])
    return found + _times(stats.latency)


def _of_tier(
    tier: str, counts: Mapping[str, Any], states: tuple[str, ...], told: Mapping[str, tuple[str, str]]
) -> list[Sample]:
    words = f"1 for the state that the {tier} tier is in."
    found = [
        Sample(f"{tier}_state", "gauge", words, {"state": state}, float(counts["state"] == state)) for state in states
    ]
    for key, (name, words) in told.items():
        if key in counts:  # a tier that was left out counts less
            by_reason = counts[key]
            if isinstance(by_reason, Mapping):
                found += [Sample(name, "counter", words, {"reason": reason}, n) for reason, n in by_reason.items()]
            else:
                found.append(Sample(name, "counter", words, {}, by_reason))
    return found
