"""When blocks are written to the disk, and that what a crash leaves there is found again."""

from __future__ import annotations

import shutil
import time
from functools import partial

import pytest

import pagedkv as pk
from pagedkv.cache.admission import BURST_S, DAY_S, Admission, Reason, WriteBudget
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.journal import note_opened
from pagedkv.cache.records import Found
from pagedkv.errors import InvalidArgument, WrongType

from .conftest import BLOCK, SPEC, Toy, prompt, where
from .test_cost_model import Clock

DISK, LIMIT_S = 2, 60


def settled(cache):
    """Wait until nothing is to be copied, or on its way; only a hang reaches the limit."""
    until = time.monotonic() + LIMIT_S
    while (counts := cache.stats().placement)["wanted"] or counts["in_flight"]:
        assert time.monotonic() < until, counts
        time.sleep(0.001)
    return counts


@pytest.fixture
def open_cache(open_cache):
    """Opens caches that keep whole blocks alone: these tests count blocks."""
    return partial(open_cache, partial_hits=False)


@pytest.fixture
def opened(open_cache, tmp_path):
    """Opens toys over a disk of 100 blocks; `crash` opens what a kill would leave."""

    class Opened:
        def __init__(self):
            self.copies = 0

        def __call__(self, device=16, host=None, blocks=100, where=None, **options):
            path = str(tmp_path / "kv") if where is None else where
            return Toy(open_cache(device, host=host, disk=pk.Disk(path, pk.Blocks(blocks), **options)))

        def crash(self, **options):
            """A toy over a copy of the directory, made while its cache is open."""
            self.copies += 1
            into = tmp_path / f"copy{self.copies}"
            shutil.copytree(tmp_path / "kv", into, ignore=shutil.ignore_patterns("LOCK"))
            (into / "LOCK").touch(0o600)
            into.chmod(0o700)
            return self(where=str(into), **options)

    return Opened()


# ---- when


def test_what_a_second_request_uses_is_copied_while_it_stays_on_the_device(opened):
    toy = opened(write="reused")
    toy.use(prompt(1))
    toy.use(prompt(2))
    assert settled(toy.cache)["copied"]["disk"] == 0
    toy.use(prompt(1))
    assert settled(toy.cache)["copied"]["disk"] == 3
    assert where(toy.cache, prompt(1)) == [("device", 3)]
    after = opened.crash()
    assert after.use(prompt(1)) == {"disk": 3 * BLOCK}
    assert after.use(prompt(2)) == {}


def test_a_suspended_request_a_prefetch_a_pin_and_a_look_are_no_second_use(open_cache, tmp_path):
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(100), write="reused")
    toy = Toy(open_cache(16, disk=disk, pin_budget=8))
    toy.use(prompt(1))
    toy.cache.prefetch(prompt(1)).wait()
    toy.cache.pin(prompt(1)).release()
    toy.cache.explain(prompt(1))
    toy.cache.match(prompt(1))
    toy.cache.sequence(prompt(1), on_trial=True).release()
    assert settled(toy.cache)["copied"]["disk"] == 0
    with toy.cache.sequence(prompt(1), on_trial=True) as seq:
        toy.cache.count(seq)
    assert settled(toy.cache)["copied"]["disk"] == 3


def test_two_requests_that_compute_the_same_prompt_have_used_it_twice(opened):
    toy = opened(write="reused")
    first, second = toy.cache.sequence(prompt(1)), toy.cache.sequence(prompt(1))
    toy.run(first, second)
    first.release()
    second.release()
    assert settled(toy.cache)["copied"]["disk"] == 3


def test_all_is_copied_once_it_is_committed(opened):
    toy = opened(write="all")
    toy.use(prompt(1))
    assert settled(toy.cache)["copied"]["disk"] == 3
    with toy.cache.sequence(prompt(2, 2 * BLOCK)) as seq:
        for step in range(3 * BLOCK):
            toy.run(seq)
            seq.append(100 + step)
        assert settled(toy.cache)["copied"]["disk"] == 3 + 4, "also of a sequence that is under way"
        told = seq.tokens
    assert opened.crash().use([*told[: 4 * BLOCK], 5]) == {"disk": 4 * BLOCK}


def test_evicted_copies_nothing_before_it_is_evicted(opened):
    toy = opened(write="evicted", device=8)
    toy.use(prompt(1))
    toy.use(prompt(1))
    assert settled(toy.cache)["copied"]["disk"] == 0
    toy.use(prompt(2, 6 * BLOCK))
    assert settled(toy.cache)["demoted"]["device"] > 0


def test_never_writes_nothing_and_reads_what_is_there(opened):
    first = opened(write="all")
    first.use(prompt(1))
    first.cache.close()
    toy = opened(write="never", device=8)
    assert toy.use(prompt(1)) == {"disk": 3 * BLOCK}
    for start in range(2, 8):
        toy.use(prompt(start))
        toy.use(prompt(start))
    assert toy.cache.checkpoint() == 3
    assert toy.cache.stats().disk["blocks_written"] == 0
    toy.cache.close()
    assert opened().use(prompt(1)) == {"disk": 3 * BLOCK}


@pytest.mark.parametrize(("blocks", "rule"), [(63, "evicted"), (64, "reused")])
def test_the_default_goes_by_four_times_memory(opened, caplog, blocks, rule):
    with caplog.at_level("INFO", "pagedkv.cache"):
        opened(device=10, host=6, blocks=blocks)
    assert f"write={rule!r}" in caplog.text


def test_a_block_evicted_takes_its_beginning_along(opened):
    toy = opened(device=8, write="evicted")
    for start in range(6):  # a beginning that stays hot, and tails that go down
        toy.use([*prompt(0, 4 * BLOCK), *prompt(start + 1, 2 * BLOCK)])
    settled(toy.cache)
    after = opened.crash(device=8)
    assert after.cache.stats().orphans == 0
    assert after.use([*prompt(0, 4 * BLOCK), *prompt(1, 2 * BLOCK)]) == {"disk": 5 * BLOCK}


# ---- what it may cost


@pytest.mark.parametrize(
    ("options", "admission"),
    [
        ({}, "cost"),
        ({"write_budget": "1GiB"}, "second_hit"),
        ({"write_budget": "1GiB", "write": "evicted"}, "second_hit"),
        ({"write_budget": "1GiB", "write": "all"}, "all"),
        ({"write_budget": "1GiB", "admission": "cost"}, "cost"),
    ],
)
def test_the_default_admission_with_a_budget_is_for_reuse(options, admission):
    assert pk.Disk("/kv", "1GiB", **options).admission == admission


def test_reuse_spends_all_of_the_budget_and_evictions_its_upper_half():
    clock = Clock()
    asked = Admission("all", CostModel(16, 1000, 3e4), 1, WriteBudget(DAY_S, 1, clock), copies=True)
    half = BURST_S // 2
    assert asked.admits(DISK, half - 1, 0, False, False)
    assert asked.admits(DISK, 1, 0, False, False)
    assert not asked.admits(DISK, 1, 0, False, False), "the lower half is not for evictions"
    assert asked.admits(DISK, half, 0, False, True, reason=Reason.WANTED)
    assert not asked.admits(DISK, 1, 0, False, True, reason=Reason.WANTED)


def test_where_only_evictions_write_they_have_the_whole_budget():
    asked = Admission("all", CostModel(16, 1000, 3e4), 1, WriteBudget(DAY_S, 1, Clock()))
    assert asked.admits(DISK, BURST_S - 1, 0, False, False)
    assert asked.admits(DISK, 1, 0, False, False)


def test_a_checkpoint_asks_the_budget_alone():
    asked = Admission("second_hit", CostModel(16, 1000, 3e4), 1, WriteBudget(DAY_S, 1, Clock()))
    assert asked.admits(DISK, BURST_S, 0, False, False, reason=Reason.ASKED)
    assert not asked.admits(DISK, 1, 0, False, False, reason=Reason.ASKED)
    assert asked.refused() == {"refused_by_admission": 0, "refused_by_write_budget": 1}


def test_a_prefix_is_paid_for_as_a_whole_or_not_written(opened):
    toy = opened(device=8, write="evicted", admission="all", write_budget=pk.Bytes(24 * 3 * SPEC.block_bytes))
    for start in range(6):
        toy.use([*prompt(0, 4 * BLOCK), *prompt(start + 1, 2 * BLOCK)])
    counts = settled(toy.cache)
    stats = toy.cache.stats()
    assert stats.disk["refused_by_write_budget"] == counts["refused_copies"] + counts["refused_demotions"] > 0
    toy.cache.check_integrity()
    after = opened.crash(device=8).cache
    assert after.stats().orphans == 0
    found = [after.match([*prompt(0, 4 * BLOCK), *prompt(start, 2 * BLOCK)])["disk"] for start in range(1, 7)]
    assert max(found) > 4 * BLOCK, "what the full bucket gave was enough for an end"


# ---- checkpoint and close


def test_a_checkpoint_copies_everything_and_demotes_nothing(opened):
    toy = opened(write="evicted")
    toy.use(prompt(1))
    toy.use(prompt(2))
    with toy.cache.sequence(prompt(3)) as seq:
        toy.run(seq)
        assert toy.cache.checkpoint() == 9
        toy.check(seq)
    assert [where(toy.cache, prompt(start)) for start in (1, 2, 3)] == [[("device", 3)]] * 3
    written = toy.cache.stats().disk["blocks_written"]
    assert toy.cache.checkpoint() == 9
    assert toy.cache.stats().disk["blocks_written"] == written
    after = opened.crash()
    for start in (1, 2, 3):
        assert after.use(prompt(start)) == {"disk": 3 * BLOCK}


def test_a_checkpoint_of_more_than_the_disk_holds_keeps_what_was_used_last(opened):
    toy = opened(device=40, blocks=7, write="evicted")
    for start in range(1, 6):
        toy.use(prompt(start))
    assert toy.cache.checkpoint() == 7
    after = opened.crash(device=40, blocks=7)
    assert [after.cache.match(prompt(start))["disk"] for start in range(1, 6)] == [0, 0, BLOCK, 3 * BLOCK, 3 * BLOCK]


def test_a_checkpoint_replaces_what_was_used_before_what_it_brings(opened):
    first = opened(blocks=6, write="all")
    for start in (1, 2):  # one after the other: closing would write the latest first
        first.use(prompt(start))
        settled(first.cache)
    first.cache.close()
    toy = opened(blocks=6, write="evicted")
    toy.use(prompt(3))
    assert toy.cache.checkpoint() == 6
    toy.cache.close(write_s=0)
    after = opened(blocks=6)
    assert [after.cache.match(prompt(start))["disk"] for start in (2, 3)] == [3 * BLOCK, 3 * BLOCK]


def test_a_checkpoint_ends_where_the_budget_does(opened):
    toy = opened(device=100, write="evicted", write_budget=pk.Bytes(24 * 4 * SPEC.block_bytes))
    for start in range(1, 30):
        toy.use(prompt(start))
    toy.cache.checkpoint()
    stats = toy.cache.stats()
    assert stats.disk["blocks_written"] <= 64
    assert 0 < stats.disk["refused_by_write_budget"] < 64, "it ended behind the first that were refused"
    assert stats.placement["in_flight"] == 0


def test_without_a_disk_there_is_nothing_to_write(open_cache):
    toy = Toy(open_cache(8, host=8))
    toy.use(prompt(1))
    assert toy.cache.checkpoint() == 0
    toy.cache.close()
    with pytest.raises(pk.ClosedError):
        toy.cache.checkpoint()


def test_a_cache_closed_and_opened_again_has_its_prompts(opened, caplog):
    toy = opened()
    toy.use(prompt(1))
    toy.use(prompt(2))
    with caplog.at_level("INFO", "pagedkv.cache"):
        toy.cache.close()
    assert "closing: 6 of 6 blocks written in" in caplog.text
    again = opened()
    assert again.use(prompt(1)) == again.use(prompt(2)) == {"disk": 3 * BLOCK}


def test_closing_at_once_says_what_is_lost(opened, caplog):
    toy = opened()
    toy.use(prompt(1))
    with caplog.at_level("WARNING", "pagedkv.cache"):
        toy.cache.close(write_s=0)
    assert f"3 blocks (up to {3 * BLOCK} tokens) were only in memory and are lost" in caplog.text
    assert opened().use(prompt(1)) == {}


def test_closing_a_cache_that_never_writes_says_what_is_lost(opened, caplog):
    toy = opened(write="never")
    toy.use(prompt(1))
    with caplog.at_level("INFO", "pagedkv.cache"):
        toy.cache.close()
    assert f"3 blocks (up to {3 * BLOCK} tokens) were only in memory and are lost, as asked" in caplog.text


def test_a_close_that_may_take_no_longer_has_written_what_was_used_last(opened, monkeypatch):
    toy = opened(device=300, blocks=400)
    for start in range(1, 60):
        toy.use(prompt(start))
    now = [0.0]
    monkeypatch.setattr("pagedkv.cache.checkpoint.time", type("Time", (), {"monotonic": staticmethod(lambda: now[0])}))
    step = type(toy.cache._checkpoint)._step

    def slow(self, nodes):
        now[0] += 1.0
        return step(self, nodes)

    monkeypatch.setattr(type(toy.cache._checkpoint), "_step", slow)
    toy.cache.close(write_s=1.0)
    after = opened(device=300, blocks=400)
    found = [after.cache.match(prompt(start))["disk"] // BLOCK for start in range(1, 60)]
    assert sum(found) == 64
    assert found == sorted(found), "the prompts used last, each from its beginning"


@pytest.mark.parametrize("wrong", ["5", True, -1, float("nan"), [5]])
def test_an_odd_time_to_close_in_is_refused_and_the_cache_stays_open(opened, wrong):
    toy = opened()
    with pytest.raises((WrongType, InvalidArgument)):
        toy.cache.close(write_s=wrong)
    toy.use(prompt(1))


@pytest.mark.parametrize("wrong", ["reuse", "", 3, ["all"]])
def test_an_unknown_rule_is_refused(wrong):
    with pytest.raises((WrongType, InvalidArgument), match="write"):
        pk.Disk("/kv", "1GiB", write=wrong)


# ---- what is logged


def test_opening_logs_tiers_policy_and_what_was_found(opened, caplog):
    toy = opened(write="all")
    toy.use(prompt(1))
    settled(toy.cache)
    with caplog.at_level("INFO", "pagedkv.cache"):
        opened.crash(host=8, write="all")
    line = caplog.messages[0]
    for part in ("device 16 blocks", "host 8 blocks", "disk 100 blocks", "policy lru", "3 blocks found", "none freed"):
        assert part in line
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("no_parent", "3 without the block before them"), ("wrong_key", "3 with a wrong key"), ("doubled", "3 doubled"),
    ],
)  # fmt: skip
def test_opening_logs_why_blocks_were_freed(opened, caplog, reason, said):
    cache = opened().cache
    found = Found(400, 1, {**dict.fromkeys(("no_parent", "wrong_key", "doubled"), 0), reason: 3})
    with caplog.at_level("INFO", "pagedkv.cache"):
        note_opened(cache.placement, cache.spec, pk.Disk("kv", "1GiB"), "all", found)
    assert caplog.messages[-1].endswith(f"400 blocks found in 1 prefix, freed: {said}")
