"""The sentences under a replay: each says what further replays of the same trace hit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.lab.replay import Capacity, Options, References, Result, Trace, load_trace, replay
from pagedkv.lab.replay.about import about, fitting
from pagedkv.lab.replay.advice import NOTHING, Advice, advise
from pagedkv.lab.replay.load import DATA
from pagedkv.lab.replay.progress import Silent

TRACE = load_trace("synthetic:agent:0:200")
SIZE = Capacity(200, 300, 400)


def summed_up(results: list[Result], trace: Trace = TRACE, options: Options | None = None) -> Advice:
    options = Options() if options is None else options
    return advise(trace, results, options, References(trace, options.generating), Silent())


def rate(policy: str, *blocks: int) -> float:
    (result,) = replay(TRACE, [policy], Capacity(*blocks))
    return 100 * result.block_hit_rate


@pytest.mark.parametrize("policies", [["lru", "arc", "s3fifo", "min"], ["arc", "s3fifo"], ["lru", "hazard"]])
def test_the_policy_that_hits_most_is_named_with_its_gain_over_lru_or_the_next(policies: list[str]) -> None:
    results = replay(TRACE, policies, SIZE)
    rates = {r.policy: 100 * r.block_hit_rate for r in results if r.policy != "min"}
    best = max(rates, key=lambda name: rates[name])
    first = summed_up(results).sentences[0]
    assert first.startswith(f"Policy: {best} hits {rates[best]:.1f} % of the blocks, ")
    del rates[best]
    other = "lru" if "lru" in rates else max(rates, key=lambda name: rates[name])
    best_rate = rate(best, *SIZE.blocks)
    assert f"{best_rate - rates[other]:.1f} points more than {other}; " in first
    bound = 100 * References(TRACE).total("min", SIZE) / TRACE.num_accesses
    assert f"(min) would hit {bound:.1f} %." in first


def test_without_other_policies_there_is_none_to_compare(make_trace: Callable[..., Trace]) -> None:
    assert summed_up(replay(TRACE, ["min"], SIZE)).sentences[0].startswith("Policy: none was replayed; ")
    assert " more than " not in summed_up(replay(TRACE, ["arc"], SIZE)).sentences[0]
    trace = make_trace([[1, 2], [1, 2], [1, 3]])
    first = summed_up(replay(trace, ["arc", "lru"], "9 blocks"), trace).sentences[0]
    assert first.startswith("Policy: none of these is worth more than lru, which hits 50.0 % of the blocks; ")


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_doubling_a_tier_is_worth_what_a_replay_with_twice_its_blocks_hits_more(policy: str) -> None:
    advice = summed_up(replay(TRACE, [policy, "min"], SIZE))
    now = rate(policy, *SIZE.blocks)
    twice = {"device": (400, 300, 400), "host": (200, 600, 400), "disk": (200, 300, 800)}
    for tier, blocks in twice.items():
        gain = rate(policy, *blocks) - now
        told = "nothing" if abs(gain) < NOTHING else f"{gain:+.1f} points"
        assert f"the {tier} {told}" in advice.sentences[1]
    assert advice.sentences[1].startswith(f"Size: with {policy}, doubling is worth: ")
    assert set(twice.values()) <= {r.capacity.blocks for r in advice.replays}


@pytest.mark.parametrize("size", [SIZE, Capacity(300), Capacity(300, 100)])
def test_more_than_what_is_enough_is_worth_nothing_and_less_is_not_enough(size: Capacity) -> None:
    last = summed_up(replay(TRACE, ["lru"], size)).sentences[2]
    blocks = int((re.search(r"tier of ([\d,]+) blocks", last) or [""])[1].replace(",", ""))
    tiers = [n for n in size.blocks if n]

    def with_coldest(n: int) -> float:
        return rate("lru", *tiers[:-1], n)

    endless = with_coldest(TRACE.num_unique)
    assert with_coldest(blocks) >= endless - NOTHING > with_coldest(blocks // 2)
    assert f"hits {with_coldest(blocks):.1f} %, and an endless one {endless:.1f} %" in last


def test_tiers_that_hold_everything_are_enough() -> None:
    last = summed_up(replay(TRACE, ["lru"], "100%")).sentences[2]
    assert re.fullmatch(
        r"Enough: a larger device tier is worth nothing; an endless one hits [\d.]+ %, as this one does\.", last
    )


def test_a_coldest_tier_that_is_enough_says_nothing_of_the_others_and_the_best_is_named() -> None:
    trace, size = load_trace("synthetic:agent:0:60"), Capacity(71, 143, 287)

    def hits(*blocks: int) -> float:
        (result,) = replay(trace, ["lru"], Capacity(*blocks))
        return 100 * result.block_hit_rate

    last = summed_up(replay(trace, ["lru"], size), trace).sentences[2]
    now, twice = hits(*size.blocks), hits(142, 143, 287)
    assert hits(71, 143, trace.num_unique) < now + NOTHING <= twice
    assert last == (
        f"Enough: a larger disk tier is worth nothing; an endless one hits {now:.1f} %, as this one does. "
        f"Twice the device is worth {twice - now:+.1f} points."
    )


def test_a_real_replay_is_summed_up_without_moving_bytes(data: Path) -> None:
    trace, options = load_trace(data / "chat.npz"), Options(engine="real", block_bytes=4096)
    advice = summed_up(replay(trace, ["lru"], Capacity(50, 60), options=options), trace, options)
    assert advice.replays
    assert {r.engine for r in advice.replays} == {"sim"}


def test_a_sweep_is_summed_up_from_its_own_rows() -> None:
    sizes = [Capacity(n) for n in (100, 400, 2000, TRACE.num_unique)]
    results = replay(TRACE, ["lru", "min"], sizes)
    advice = summed_up(results)
    assert advice.replays == []
    rates = [100 * r.block_hit_rate for r in results if r.policy == "lru"]
    gains = [b - a for a, b in itertools.pairwise(rates)]
    at = max(range(3), key=lambda i: gains[i])
    step = f"from {sizes[at].device:,} to {sizes[at + 1].device:,} blocks: {gains[at]:+.1f} points"
    assert advice.sentences[0] == "Policy: of 4 sizes, most is hit by lru at 4."
    assert step in advice.sentences[1]
    assert advice.sentences[2].startswith("Enough: more than ")
    assert summed_up(results[:4]).sentences[2].startswith("Enough: none of these sizes is; the largest hits ")


def test_time_stamps_that_go_back_are_counted_and_said(write_jsonl: Callable[..., Path]) -> None:
    line = '{"timestamp": %d, "input_length": 512, "output_length": 1, "hash_ids": [%d]}'
    trace = load_trace(write_jsonl(lines=[line % row for row in ((5, 1), (9, 2), (7, 3), (8, 4), (9, 5))]))
    assert trace.num_steps_back == 2
    told = about(trace, replay(trace, ["lru"], "3 blocks"), Options())
    assert told[-1].startswith("2 of 5 time stamps lie before an earlier one, and count as that one")
    assert TRACE.num_steps_back == 0


def test_numbers_stay_with_their_units_where_a_line_is_broken() -> None:
    for length in range(60, 80):
        lines = fitting(" ".join(["x" * length, "1.50 TiB", "8.0 %", "+3.5 points", "of it"])).splitlines()
        assert len(lines) == 2
        assert max(map(len, lines)) <= 80
        assert not {"TiB", "%", "points"} & {line.split()[0] for line in lines}


def test_the_trace_in_the_package_has_its_notice_beside_it() -> None:
    trace = load_trace("mooncake:conversation")
    assert (trace.name, trace.num_requests, trace.num_steps_back) == ("mooncake:conversation", 7_689, 0)
    files = {path.name: path for path in DATA.iterdir()}
    assert sum(path.stat().st_size for path in files.values()) < 300_000
    assert "Copyright 2024 KVCache.AI" in files["NOTICE"].read_text()
    assert "Apache License" in files["LICENSE"].read_text()
    assert "mooncake_conversation.npz" in files["NOTICE"].read_text()
