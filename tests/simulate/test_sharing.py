"""When requests end by the virtual clock, with sharing between prompts and without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pagedkv.lab.replay.progress import Silent
from pagedkv.lab.simulate import MODELS, SYSTEMS, Hardware, load_workload, parse_gpus, parse_tiers, simulate
from pagedkv.lab.simulate.paged import PagedServer

SEEDS = range(12)


def served(workload, hardware, system, share, max_running, max_batch_tokens):
    """First tokens and ends of all requests, float64 [n] each, and the result."""
    chosen = replace(SYSTEMS[system], share=share)
    server = PagedServer(workload, chosen, hardware, 16, max_running, max_batch_tokens, Silent())
    result = server.run()
    return server.log.first_s, server.log.ended_s, result


def both(workload, hardware, system="shared", max_running=8, max_batch_tokens=64):
    """Without sharing between prompts under way, and with."""
    return [served(workload, hardware, system, share, max_running, max_batch_tokens) for share in ("never", "step")]


def herds(seed):
    """Groups of requests that come within milliseconds of each other with a prefix in common."""
    random, rows, ms = np.random.default_rng(seed), [], 0
    for _ in range(4):
        ms += int(random.integers(300))
        common, first = int(random.integers(40, 200)), len(rows)
        for i in range(1 + int(random.integers(1, 6))):
            ms += int(random.integers(4)) if i else 0
            rows.append((ms, common + int(random.integers(1, 30)), int(random.integers(1, 30))))
            if i:
                rows[-1] += (first, common // 16)
    return rows


@pytest.mark.parametrize("speed", [1.0, 0.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_where_steps_have_room_for_all_prompts_no_request_of_a_herd_ends_later(machine, requests, seed, speed):
    (first, ended, never), (first_shared, ended_shared, step) = both(
        requests(*herds(seed), speed=speed), machine(4000), max_batch_tokens=2048
    )
    assert np.all(first_shared <= first)
    assert np.all(ended_shared <= ended)
    assert step.computed_tokens <= never.computed_tokens
    assert step.seconds <= never.seconds
    assert step.recomputed_tokens == never.recomputed_tokens == 0, "tokens that were shared were not computed again"


@pytest.mark.parametrize("speed", [1.0, 0.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_where_steps_are_full_herds_end_earlier_as_a_whole(machine, requests, seed, speed):
    """As a whole, but not each: the next test has a request that ends later."""
    (first, ended, never), (first_shared, ended_shared, step) = both(
        requests(*herds(seed), speed=speed), machine(4000), max_running=40
    )
    assert first_shared.mean() <= first.mean()
    assert ended_shared.mean() <= ended.mean()
    assert ended_shared.max() <= ended.max()
    assert step.computed_tokens <= never.computed_tokens


def test_a_request_that_ends_in_a_step_of_more_prompts_waits_for_that_step(machine, requests):
    """With sharing, the first step has more prompts and attends over more tokens."""
    herd = [(0, 77, 1), (0, 210, 4), *[(0, 210, 4, 1, 12)] * 6, *[(0, 210, 4)] * 4]
    (_, ended, _), (_, ended_shared, _) = both(requests(*herd), machine(4000), max_running=40, max_batch_tokens=400)
    assert ended_shared[0] > ended[0]
    assert ended_shared.max() < ended.max()


@pytest.mark.parametrize("system", ["shared", "tiered"])
@pytest.mark.parametrize("seed", SEEDS)
def test_where_nothing_is_shared_it_changes_nothing(machine, requests, seed, system):
    rows = [row[:3] for row in herds(seed)]
    (first, ended, never), (first_shared, ended_shared, step) = both(requests(*rows), machine(700, 3000), system)
    assert np.array_equal(first, first_shared)
    assert np.array_equal(ended, ended_shared)
    assert {**never.to_json(), "wall_s": 0} == {**step.to_json(), "wall_s": 0}


@pytest.mark.parametrize(
    ("trace", "speed", "shares"), [("mooncake:conversation", 1, False), ("synthetic:agent", 20, True)]
)
def test_of_a_trace_no_more_is_computed_and_requests_end_no_later_on_average(trace, speed, shares):
    gpu, number = parse_gpus("2xH100")
    hardware = Hardware(gpu, number, MODELS["llama-3-8b"], parse_tiers("host=64GiB@50GB/s"))
    workload = load_workload(trace, requests=60, speed=speed)
    (first, ended, never), (first_shared, ended_shared, step) = both(workload, hardware, "tiered", 256, 2304)
    assert (step.computed_tokens < never.computed_tokens) is shares
    assert np.array_equal(ended, ended_shared) is not shares
    assert first_shared.mean() <= first.mean()
    assert ended_shared.mean() <= ended.mean()


def test_the_system_without_it_is_one_of_those_compared(machine, requests):
    options = {"max_running": 8, "max_batch_tokens": 64}
    repeating, tiered = simulate(requests(*herds(0)), machine(4000, 4000), ["repeating", "tiered"], **options)
    assert (SYSTEMS["repeating"].share, SYSTEMS["tiered"].share) == ("never", "step")
    assert repeating.computed_tokens > tiered.computed_tokens
    assert repeating.ttft_s["mean"] > tiered.ttft_s["mean"]
