"""Prometheus is given every counter of ``cache.stats()``.

The tests read its exposition text.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import WrongType
from pagedkv.observe.metrics import (
    BY_TIER,
    DISK,
    HAZARD,
    HAZARD_NOW,
    NOW,
    REMOTE,
    REMOTE_NOW,
    SCHEDULER_NOW,
    TIMES,
    TOLD,
    CacheCollector,
    samples,
)
from pagedkv.observe.stats import CacheStats
from pagedkv.tiers.remote.stats import RemoteStats

prometheus_client = pytest.importorskip("prometheus_client", reason="the metrics extra is not installed")
from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

SPEC = pk.KVSpec(1, 1, 2, "float32", 4, model="metrics")

Labels = frozenset[tuple[str, str]]


def serve(cache: pk.KVCache, *starts: int) -> None:
    """Requests of 14 tokens, computed and released."""
    for start in starts:
        with cache.sequence(range(100 * start, 100 * start + 14)) as seq:
            rest = np.zeros((1, len(seq) - seq.num_computed, 1, 2), np.float32)
            seq.scatter(rest, rest)


def scraped(collector: CacheCollector) -> dict[str, dict[Labels, float]]:
    """Samples by name and labels, through the exposition text and Prometheus' own parser."""
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("pagedkv_")
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            labels = frozenset(sample.labels.items())
            assert labels not in found.setdefault(sample.name, {}), "one sample for each set of labels"
            found[sample.name][labels] = sample.value
    return found


def labels(**pairs: str) -> Labels:
    return frozenset(pairs.items())


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[pk.KVCache]:
    """Three tiers, all of which have been used."""
    with pk.KVCache(
        SPEC,
        device_memory=pk.Blocks(8),
        host_memory=pk.Blocks(4),
        disk=pk.Disk(str(tmp_path / "kv"), pk.Blocks(12)),
        threads=1,
    ) as cache:
        serve(cache, 1, 2, 3, 4, 5, 1, 4)
        yield cache


def test_hits_by_tier_moves_and_tokens_are_what_the_cache_counted(cache):
    found, stats = scraped(CacheCollector(llama=cache)), cache.stats()
    for tier, tokens in stats.hit_tokens.items():
        assert found["pagedkv_tier_hit_tokens_total"][labels(cache="llama", tier=tier)] == tokens
    assert found["pagedkv_tier_hit_tokens_total"][labels(cache="llama", tier="disk")] > 0
    assert found["pagedkv_prompt_tokens_total"] == {labels(cache="llama"): 98}
    assert found["pagedkv_computed_tokens_total"] == {labels(cache="llama"): stats.computed_tokens}
    assert found["pagedkv_moved_bytes_total"] == {
        labels(cache="llama", source=way.split("_to_")[0], destination=way.split("_to_")[1]): num_bytes
        for way, num_bytes in stats.moved_bytes.items()
    }
    assert len(found["pagedkv_moved_bytes_total"]) >= 3
    for tier in ("device", "host", "disk"):
        at = {state: labels(cache="llama", tier=tier, state=state) for state in ("free", "live", "cached", "reserved")}
        assert {state: found["pagedkv_tier_blocks"][at[state]] for state in at} == {
            state: stats.blocks[tier][state] for state in at
        }
    assert found["pagedkv_disk_state"][labels(cache="llama", state="ok")] == 1
    assert sum(found["pagedkv_disk_state"].values()) == 1
    assert found["pagedkv_disk_written_blocks_total"] == {labels(cache="llama"): stats.disk["blocks_written"]}


def test_counters_and_no_ratios(cache):
    names = {sample.name for sample in samples(cache.stats())}
    assert not [name for name in names if "rate" in name or "ratio" in name or "percent" in name]
    counts = [sample for sample in samples(cache.stats()) if sample.kind != "histogram"]
    assert not [sample for sample in counts if not float(sample.value).is_integer()]


def test_everything_that_the_cache_counts_is_given(cache):
    stats = cache.stats()
    assert set(stats.placement) == set(BY_TIER) | set(TOLD) | set(NOW)
    assert set(stats.disk) == set(DISK) | {"state"}
    fields = set(stats.to_dict()) - {"token_hit_rate", "placement", "disk", "remote", "hazard"}
    assert fields == {
        "sequences", "prompt_tokens", "hit_tokens", "missed_promotions", "computed_tokens", "blocks", "moved_bytes",
        "failed_moves", "clock_failures", "hook_failures", "steps_that_waited", "lagging_tokens", "groups",
        "orphans", "overflowing_writes", "latency",
    }  # fmt: skip
    assert set(stats.blocks["device"]) == {"capacity", "max", "free", "live", "cached", "reserved", "available"}


def used_by_group() -> CacheStats:
    """While a sequence of 8 tokens runs; a point keeps the window's page of its first block."""
    layers = [pk.Attention(1, 2), pk.Attention(1, 2, window=5)]
    spec = pk.KVSpec.of(layers, dtype="float32", block_size=4)
    with pk.KVCache(spec, device_memory=pk.Blocks(64), by_group=True) as cache, cache.sequence(range(8)) as seq:
        seq.scatter(np.zeros((2, 8, 1, 2), np.float32), np.zeros((2, 8, 1, 2), np.float32))
        return cache.stats()


def test_pages_and_extents_of_each_group_are_given():
    stats = used_by_group()
    first, second = stats.groups["device"]
    assert (first["live"], second["live"], first["extents"], second["extents"]) == (2, 1, 2, 2)
    assert "; device group 0: 2 live + 0 cached pages in 2 extents, group 1: 1 live" in str(stats)
    given = {(one.name, one.labels["group"], one.labels.get("state")): one.value
             for one in samples(stats) if "group" in one.labels}  # fmt: skip
    assert given == {
        ("group_extents", "0", None): 2, ("group_extents", "1", None): 2,
        ("group_pages", "0", "live"): 2, ("group_pages", "0", "cached"): 0,
        ("group_pages", "1", "live"): 1, ("group_pages", "1", "cached"): 1,
    }  # fmt: skip
    json.dumps(stats.to_dict())


@pytest.mark.checkout
def test_the_page_has_every_exported_name_and_no_other(cache):
    with pk.KVCache(SPEC, device_memory=pk.Blocks(8), policy="hazard") as learning:
        stats = [cache.stats(), learning.stats(), pk.Scheduler(learning).stats(), used_by_group()]
    disk = {**stats[0].disk, "misses": {"payload": 1}, "write_errors": {"ENOSPC": 1}}
    counted = {key: {"x": 1} if key in ("misses", "failures", "refused") else 1 for key in [*REMOTE, *REMOTE_NOW]}
    stats[0] = dataclasses.replace(stats[0], disk=disk, remote={"state": "ok", **counted})
    found = [sample for some in stats for sample in samples(some)]
    exported = {f"pagedkv_{one.name}{'_total' if one.kind == 'counter' else ''}" for one in found}
    page = (Path(__file__).parents[1] / "docs" / "observability.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in page.split("\n") if line.startswith("|"))
    assert set(re.findall(r"pagedkv_\w+", rows)) == exported


def test_everything_that_a_remote_tier_counts_is_given(cache):
    names = {field.name for field in dataclasses.fields(RemoteStats)}
    assert names | {"claims", "queued_bytes", "not_worth_sending", "send_failures"} == {"state", *REMOTE, *REMOTE_NOW}
    assert cache.stats().remote is None
    assert not [name for name in scraped(CacheCollector(a=cache)) if "remote_state" in name]


def test_what_the_policy_hazard_counts_is_given_and_nothing_of_it_with_others(cache):
    assert cache.stats().hazard is None
    assert not [name for name in scraped(CacheCollector(a=cache)) if "hazard" in name]
    with pk.KVCache(SPEC, device_memory=pk.Blocks(8), policy="hazard") as learning:
        serve(learning, 1, 1, 2)
        stats, found = learning.stats().hazard, scraped(CacheCollector(a=learning))
    assert set(stats) == set(HAZARD) | set(HAZARD_NOW)
    assert found["pagedkv_hazard_hit_blocks_total"] == {labels(cache="a"): stats["hits"]} == {labels(cache="a"): 3}
    assert found["pagedkv_hazard_remembered_blocks"] == {labels(cache="a"): 6}


def test_several_caches_have_their_own_label_and_one_family_each_name(cache):
    with pk.KVCache(SPEC, device_memory=pk.Blocks(8)) as other:
        serve(other, 1)
        collector = CacheCollector(llama=cache)
        collector.add("draft", other)
        found = scraped(collector)
        assert found["pagedkv_prompt_tokens_total"] == {labels(cache="llama"): 98, labels(cache="draft"): 14}
        assert {dict(some)["cache"] for some in found["pagedkv_disk_state"]} == {"llama"}
        collector.remove("llama")
        collector.remove("absent")
        assert scraped(collector)["pagedkv_prompt_tokens_total"] == {labels(cache="draft"): 14}


def test_a_scrape_is_one_call_and_registering_is_none_beyond_the_one_that_shows_what_it_is(cache):
    class Counting:
        calls = 0

        def stats(self) -> pk.CacheStats:
            self.calls += 1
            return cache.stats()

    counting = Counting()
    registry = CollectorRegistry()
    registry.register(CacheCollector(a=counting))
    assert counting.calls == 1
    for scrape in range(1, 4):
        generate_latest(registry)
        assert counting.calls == 1 + scrape


def test_counters_never_go_down(cache):
    collector = CacheCollector(a=cache)
    before = scraped(collector)
    serve(cache, 6, 7, 1)
    after = scraped(collector)
    for name, values in before.items():
        if name.endswith("_total"):
            assert all(after[name][at] >= value for at, value in values.items()), name
    assert (
        sum(after["pagedkv_prompt_tokens_total"].values()) == sum(before["pagedkv_prompt_tokens_total"].values()) + 42
    )


def test_a_disk_that_was_left_out_says_so(tmp_path):
    (tmp_path / "kv").write_text("no directory")
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(8), required=False)
    with pk.KVCache(SPEC, device_memory=pk.Blocks(8), disk=disk) as cache:
        found = scraped(CacheCollector(a=cache))
    assert found["pagedkv_disk_state"][labels(cache="a", state="left_out")] == 1
    assert sum(found["pagedkv_disk_state"].values()) == 1
    assert "pagedkv_disk_written_blocks_total" not in found


def test_a_closed_cache_can_still_be_scraped(cache):
    cache.close()
    assert scraped(CacheCollector(a=cache))["pagedkv_prompt_tokens_total"] == {labels(cache="a"): 98}


def test_without_the_extra_the_error_names_it_and_importing_needs_nothing():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import pagedkv\n"
        "from pagedkv.observe.metrics import CacheCollector\n"
        "try:\n    CacheCollector()\n"
        "except ImportError as problem:\n    print(problem)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("metrics need prometheus_client: pip install 'prometheus_client>=")
    assert done.stdout.endswith(" (pagedkv's extra [metrics])\n")


def test_importing_the_module_does_not_import_prometheus():
    code = "import sys, pagedkv.observe.metrics; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


class Stranger:
    def stats(self) -> dict[str, int]:
        return {"prompt_tokens": 3}


@pytest.mark.parametrize("no_cache", [None, 5, object(), Stranger(), pk.KVCache], ids=lambda one: type(one).__name__)
def test_what_cannot_be_collected_is_refused_before_it_is_scraped(no_cache):
    with pytest.raises(WrongType, match="x must be a KVCache or a Scheduler, not"):
        CacheCollector(x=no_cache)
    with pytest.raises(WrongType, match="x must be a KVCache or a Scheduler, not"):
        CacheCollector().add("x", no_cache)


def run(scheduler: pk.Scheduler, steps: int) -> None:
    for _ in range(steps):
        plan = scheduler.schedule()
        with scheduler.step(plan) as step:
            step.mark_written(0)
        scheduler.report(plan, np.full(len(plan.lanes), 7, np.int32))


def test_a_scheduler_brings_its_own_counts_and_its_caches():
    with pk.KVCache(SPEC, device_memory=pk.Blocks(16)) as cache:
        now = [0.0]
        scheduler = pk.Scheduler(cache, pk.SchedulerOptions(2, 16, max_waiting=2), clock=lambda: now[0])
        collector = CacheCollector(llama=scheduler)
        for start in (0, 100):
            scheduler.submit(range(start, start + 6), 2, stop_tokens=[7] if start else [])
        with pytest.raises(pk.QueueFull):
            scheduler.submit(range(6), 2)
        now[0] = 3.0
        run(scheduler, 1)
        found = scraped(collector)
        own = labels(cache="llama")
        assert found["pagedkv_scheduler_running"] == {own: 1}
        assert found["pagedkv_scheduler_waiting"] == {own: 0}
        run(scheduler, 1)
        found = scraped(collector)
        ended = found["pagedkv_scheduler_ended_total"]
        assert {dict(at)["reason"]: n for at, n in ended.items()} == {
            "stop": 1, "length": 1, "aborted": 0, "deadline": 0, "refused": 1,
        }  # fmt: skip
        assert found["pagedkv_scheduler_new_tokens_total"] == {own: 3}
        assert {dict(at)["by"] for at in found["pagedkv_scheduler_preemptions_total"]} == {"swap", "recompute"}
        buckets = {dict(at)["le"]: n for at, n in found["pagedkv_scheduler_queue_seconds_bucket"].items()}
        assert (buckets["2"], buckets["5"], buckets["+Inf"]) == (0, 2, 2)
        assert found["pagedkv_scheduler_queue_seconds_sum"] == {own: 6.0}
        assert found["pagedkv_scheduler_first_token_seconds_count"] == {own: 2}
        assert found["pagedkv_scheduler_token_seconds_count"] == {own: 1}
        assert found["pagedkv_prompt_tokens_total"] == {own: cache.stats().prompt_tokens}
        stats = scheduler.stats()
        known = {*SCHEDULER_NOW, "finished", "aborted", "expired", "preempted_by_swap", "preempted_by_recompute"}
        assert {field.name for field in dataclasses.fields(stats)} == known | {
            "clock_failures", "ended", "new_tokens", "shared_tokens", "latency",
        }  # fmt: skip
        assert {*stats.latency, *cache.stats().latency} == set(TIMES)
        shared = [one for one in samples(dataclasses.replace(stats, shared_tokens=9)) if "shared" in one.name]
        assert [(one.name, one.kind, one.value) for one in shared] == [("scheduler_shared_tokens", "counter", 9)]


def test_a_cache_under_two_names_is_scraped_once(cache):
    scheduler = pk.Scheduler(cache)
    found = scraped(CacheCollector(a=scheduler, b=cache, c=pk.Scheduler(cache, pk.SchedulerOptions(4, 16))))
    assert found["pagedkv_prompt_tokens_total"] == {labels(cache="a"): 98}
    assert {dict(at)["cache"] for at in found["pagedkv_scheduler_waiting"]} == {"a", "c"}


def test_matches_promotions_and_the_disk_are_timed(cache):
    cache.flush()
    latency, found = cache.stats().latency, scraped(CacheCollector(a=cache))
    own = labels(cache="a")
    assert found["pagedkv_match_seconds_count"] == {own: 7}
    assert 0 < latency["promotion"].count < 7, "only prompts with blocks in colder tiers"
    assert found["pagedkv_promotion_seconds_count"] == {own: latency["promotion"].count}
    assert found["pagedkv_disk_read_seconds_count"][own] > 0
    assert found["pagedkv_disk_write_seconds_count"][own] > 0
    assert found["pagedkv_match_seconds_sum"][own] == latency["match"].total_s > 0


def test_blocks_that_a_reopened_disk_drops_are_counted(tmp_path):
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(12), admission="all")
    with pk.KVCache(SPEC, pk.Blocks(8), disk=disk, threads=1, partial_hits=False) as cache:
        serve(cache, 1, 2)
        cache.flush()
        assert cache.stats().orphans == 0
        with cache.sequence(range(3)) as seq:
            (root,) = cache.table.roots([seq.row])
        tiers, blocks, _ = cache.placement.match(np.arange(100, 114, dtype=np.int32), int(root))
        assert tiers.tolist() == [pk.Tier.DISK] * 3
        cache._store.invalidate(blocks[:1])
    with pk.KVCache(SPEC, pk.Blocks(8), disk=disk, threads=1) as cache:
        assert cache.stats().orphans == 2
        assert scraped(CacheCollector(a=cache))["pagedkv_orphan_blocks_total"] == {labels(cache="a"): 2}
