"""What a simulation says of small workloads whose results can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.lab.replay.progress import Silent
from pagedkv.lab.simulate import SYSTEMS, Workload, load_workload, simulate
from pagedkv.lab.simulate.contiguous import MOST_TOGETHER, ContiguousServer, Regions, region_length
from pagedkv.lab.simulate.hardware import GPUS, MODELS, Hardware
from pagedkv.lab.simulate.links import LATENCY_S, Rates, TierSize
from pagedkv.lab.simulate.table import rows as table_rows
from pagedkv.spec.sizes import format_size

ALL = [name for name, system in SYSTEMS.items() if not system.by_group]  # which is for other models: test_groups.py


def run(workload, hardware, *systems, **options):
    options.setdefault("max_running", 8)
    options.setdefault("max_batch_tokens", 64)
    return simulate(workload, hardware, systems, **options)


@pytest.mark.parametrize("system", ALL)
def test_one_request_takes_the_steps_it_must(machine, requests, system):
    hardware = machine(400)
    workload = requests((0, 100, 5))
    (result,) = run(workload, hardware, system)
    chunks = ((64, 64), (36, 100), (1, 101), (1, 102), (1, 103), (1, 104))
    steps = [hardware.step_s(np.array([q]), np.array([c])) for q, c in chunks]
    assert (result.requests, result.refused, result.steps) == (1, 0, 6)
    assert result.computed_tokens == 104
    assert result.ttft_s["mean"] == pytest.approx(sum(steps[:2]))
    assert result.seconds == pytest.approx(sum(steps))
    assert result.tpot_s["mean"] == pytest.approx(sum(steps[2:]) / 4)
    assert result.output_tokens_per_s == pytest.approx(5 / sum(steps))


@pytest.mark.parametrize("system", ALL)
def test_everybody_is_served_whatever_the_system(machine, requests, system):
    random = np.random.default_rng(3)
    rows = [(20 * i, int(random.integers(1, 90)), int(random.integers(1, 30))) for i in range(40)]
    (result,) = run(requests(*rows), machine(400, 2000), system)
    assert (result.requests, result.refused) == (40, 0)
    outputs = sum(row[2] for row in rows)
    assert result.output_tokens_per_s * result.seconds == pytest.approx(outputs)
    assert result.ttft_s["p50"] <= result.ttft_s["p99"]
    assert 0 < result.mean_running <= result.most_running <= 8


def test_a_request_that_can_never_fit_is_refused_and_counted(machine, requests):
    for result in run(requests((0, 500, 10), (1, 20, 5)), machine(400), *ALL):
        assert (result.requests, result.refused) == (1, 1)


def test_a_simulation_says_the_same_every_time(machine, requests):
    rows = [(7 * i, 20 + i % 50, 5 + i % 11, *((i - 1, 1) if i % 3 else ())) for i in range(50)]
    first, second = (run(requests(*rows), machine(300, 900), *ALL) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        ours, theirs = a.to_json(), b.to_json()
        assert {**ours, "wall_s": 0} == {**theirs, "wall_s": 0}


def both_ways(*arguments):
    """Results with steps reckoned together and one by one, without the time that took."""
    servers = (ContiguousServer(*arguments, Silent(), together=together) for together in (True, False))
    return [{**server.run().to_json(), "wall_s": 0} for server in servers]


@pytest.mark.parametrize("system", ["contiguous", "pow2", "exact"])
@pytest.mark.parametrize("speed", [0.0, 0.5, 20.0])
def test_steps_reckoned_together_come_to_the_same_as_one_by_one(machine, requests, system, speed):
    random = np.random.default_rng(5)
    rows = [(40 * i, int(random.integers(1, 300)), int(random.integers(1, 60))) for i in range(60)]
    rows[30] = (1200, 2000, 3)
    workload = requests(*rows, speed=speed)
    together, apart = both_ways(workload, SYSTEMS[system], machine(1000), 400, 6, 50)
    assert together == apart
    assert together["refused"] == 1
    assert together["steps"] > 200


def test_lengths_beyond_what_is_reckoned_at_once_are_the_same_too(machine, requests):
    rows = [(0, 10, 3 * MOST_TOGETHER), (5, 9, MOST_TOGETHER)]
    together, apart = both_ways(requests(*rows), SYSTEMS["exact"], machine(6000), 6000, 4, 8)
    assert together == apart


def test_what_a_run_of_steps_costs_is_what_its_steps_cost(machine):
    roofline = machine(400).roofline()
    q, seq_lens = np.array([1, 1, 30, 0]), np.array([40, 7, 90, 11])
    by_step = [roofline.step_s(q, seq_lens + j * q) for j in range(5)]
    j = np.arange(5.0)
    keys = (int(q @ (2 * seq_lens - q + 1)) + 2 * int(q @ q) * j) / 2
    assert roofline.run_s(32, keys, int(seq_lens.sum()) + 32 * j).tolist() == by_step


def test_models_are_those_that_are_sized_with_the_widths_of_their_compute():
    for name, model in MODELS.items():
        shape = model.shape
        assert model.name == name
        assert sum(group.num_layers for group in model.sizes.groups) == shape.num_layers
        assert {(group.num_kv_heads, group.head_dim) for group in model.sizes.groups} == {
            (shape.num_kv_heads, shape.head_dim)
        }
        rest = 1 - shape.matmul_weights / model.sizes.params_per_token
        assert 0 < rest < (0.2 if shape.num_mlps == 1 else 0.3), "embeddings, norms and biases"


def test_contiguous_regions_waste_what_blocks_do_not(machine, requests):
    rows = [(0, 30, 20)] * 12 + [(0, 10, 180)]
    results = {r.system: r for r in run(requests(*rows), machine(600), "contiguous", "pow2", "exact", "paged")}
    waste = {name: 1 - result.tokens_per_slot for name, result in results.items()}
    assert waste["contiguous"] > 0.6
    assert waste["contiguous"] > waste["pow2"] > waste["exact"] > waste["paged"]
    assert waste["paged"] < 0.25
    assert results["contiguous"].most_running == 600 // 190
    assert results["paged"].most_running > 2 * results["contiguous"].most_running
    assert results["paged"].seconds < results["contiguous"].seconds


def test_shared_prefixes_are_computed_once(machine, requests):
    rows = [(0, 85, 4), *((200 * i, 85, 4, 0, 5) for i in range(1, 6))]
    paged, shared = run(requests(*rows), machine(2000), "paged", "shared")
    assert paged.hit_rate["total"] == 0
    assert shared.hit_rate["total"] == pytest.approx(5 * 80 / (6 * 85))
    assert shared.computed_tokens == paged.computed_tokens - 5 * 80
    assert shared.ttft_s["p50"] < paged.ttft_s["p50"]


def test_a_colder_tier_keeps_what_the_device_cannot(machine, requests):
    rows = [(1000 * i, 161, 2) for i in range(4)]
    rows += [(1000 * i, 161, 2, i - 4, 10) for i in range(4, 8)]
    shared, tiered = run(requests(*rows), machine(200, 2000), "shared", "tiered")
    assert shared.hit_rate["total"] < 0.02
    assert tiered.hit_rate["host"] > 0.4
    assert tiered.moved_bytes["host_to_device"] > 0
    slow = run(requests(*rows), machine(200, 2000, rate=1e4), "tiered")[0]
    assert slow.seconds > tiered.seconds, "moves take time"


def test_a_disk_takes_what_its_admission_lets_through(machine, requests):
    rows = [(1000 * i, 161, 2, *((i - 6, 10) if i >= 6 else ())) for i in range(12)]
    hardware = machine(200, 320)
    disk = TierSize("disk", 4000 * hardware.model.kv_bytes_per_token, Rates(1e9, 1e9))
    found = {}
    for mode in ("all", "second_hit"):
        with_disk = replace(hardware, tiers=(*hardware.tiers, disk), disk_admission=mode)
        found[mode] = run(requests(*rows), with_disk, "tiered")[0]
    assert found["all"].hit_rate["disk"] > 0.2
    assert found["second_hit"].moved_bytes.get("host_to_disk", 0) < found["all"].moved_bytes["host_to_disk"]


def test_a_write_budget_is_a_day_s_of_the_simulated_clock(machine, requests):
    rows = [(1000 * i, 161, 2, *((i - 6, 10) if i >= 6 else ())) for i in range(40)]
    hardware = machine(200, 320)
    block_bytes = 16 * hardware.model.kv_bytes_per_token
    disk = TierSize("disk", 4000 * hardware.model.kv_bytes_per_token, Rates(1e9, 1e9))
    written = {}
    for blocks_per_hour in (None, 15, 25):
        budget = None if blocks_per_hour is None else 24 * blocks_per_hour * block_bytes
        with_disk = replace(
            hardware, tiers=(*hardware.tiers, disk),
            disk_admission="all", disk_write="evicted", disk_write_budget=budget,
        )  # fmt: skip
        written[blocks_per_hour] = run(requests(*rows), with_disk, "tiered")[0].disk_written_bytes // block_bytes
    assert written[None] == 40
    assert written[15] == 15, "an hour's share at once; the 40 s after it are worth nothing yet"
    assert written[25] == 25


def test_without_preemption_fewer_run_and_nobody_is_suspended(machine, requests):
    rows = [(0, 20, 120)] * 8
    reserved, paged = run(requests(*rows), machine(500), "reserved", "paged")
    assert sum(reserved.preemptions.values()) == 0
    assert sum(paged.preemptions.values()) > 0
    assert reserved.most_running < paged.most_running


def test_suspensions_are_counted_by_what_was_decided_and_by_what_became_of_them(machine, requests):
    rows = [(0, 20, 120)] * 8
    shared, swapping, recomputing = run(
        requests(*rows), machine(500, 5000), "shared", "swapping", "recomputing"
    )  # fmt: skip
    assert (shared.preemptions["swap"], shared.restored_blocks) == (0, 0)
    assert (swapping.preemptions["swap"] > 0, swapping.preemptions["recompute"]) == (True, 0)
    assert (recomputing.preemptions["swap"], recomputing.preemptions["recompute"] > 0) == (0, True)
    assert swapping.restored_blocks > 0
    assert 0 < swapping.recomputed_tokens < shared.recomputed_tokens
    for result in (shared, swapping, recomputing):
        assert result.computed_tokens == 8 * (20 + 120 - 1) + result.recomputed_tokens


def test_what_was_measured_decides_where_nothing_else_does(machine, requests):
    workload = requests(*[(0, 160, 400)] * 8)
    fast, slow = (
        run(workload, machine(1500, 9000, rate=rate), "tiered", max_batch_tokens=512)[0] for rate in (1e9, 1e4)
    )
    assert fast.preemptions["recompute"] == 0 < fast.preemptions["swap"]
    assert slow.preemptions["recompute"] > 0


def test_arrivals_come_as_fast_as_wanted(machine, requests):
    rows = [(1000 * i, 10, 2) for i in range(5)]
    slow, fast, at_once = (run(requests(*rows, speed=s), machine(400), "paged")[0] for s in (1.0, 4.0, 0.0))
    assert slow.seconds == pytest.approx(4, rel=0.1)
    assert fast.seconds == pytest.approx(1, rel=0.1)
    assert at_once.seconds < 0.1


def test_a_step_costs_what_the_roofline_says():
    hardware = Hardware(GPUS["h100"], 1, MODELS["llama-3-8b"])
    decode = hardware.step_s(np.ones(1, np.int32), np.array([1], np.int32))
    weights = MODELS["llama-3-8b"].weight_bytes
    assert decode == pytest.approx((weights + 131_072) / (0.8 * 3.35e12) + 0.002)
    assert 15.5e9 < weights < 16.5e9, "8 billion weights of 2 bytes"
    prefill = hardware.step_s(np.array([4096]), np.array([4096]))
    shape = MODELS["llama-3-8b"].shape
    flops = 2 * shape.matmul_weights * 4096 + 4 * 32 * 32 * 128 * (4096 * 4097 / 2)
    assert prefill == pytest.approx(flops / (0.5 * 989e12) + 0.002)
    both = hardware.step_s(np.array([1, 4096]), np.array([5000, 4096]))
    assert both > prefill
    four = Hardware(GPUS["h100"], 4, MODELS["llama-3-8b"])
    assert (four.step_s(np.array([4096]), np.array([4096])) - 0.002) * 4 * 0.9 == pytest.approx(prefill - 0.002)
    assert MODELS["llama-13b"].kv_bytes_per_token == 819_200


def test_a_model_that_leaves_no_memory_is_refused():
    with pytest.raises(pk.InvalidArgument, match="take more GPUs"):
        _ = Hardware(GPUS["l4"], 1, MODELS["llama-3-70b"]).kv_bytes


@pytest.mark.parametrize(
    "options",
    [{"block_size": 0}, {"block_size": 1000}, {"max_running": 0}, {"max_batch_tokens": 8}, {"longest": 0}],
    ids=repr,
)
def test_options_that_make_no_sense_are_refused(machine, requests, options):
    with pytest.raises(pk.InvalidArgument):
        run(requests((0, 10, 2)), machine(400), "paged", **options)


def test_unknown_systems_are_refused(machine, requests):
    with pytest.raises(pk.InvalidArgument, match="unknown system 'magic'"):
        run(requests((0, 10, 2)), machine(400), "paged", "magic")
    with pytest.raises(pk.InvalidArgument, match="at least one system"):
        run(requests((0, 10, 2)), machine(400))


# ---- regions


def test_regions_are_taken_first_fit_and_holes_are_used_again():
    regions = Regions(100)
    starts = [regions.take(30) for _ in range(3)]
    assert starts == [0, 30, 60]
    assert regions.take(30) == -1
    assert regions.take(10) == 90
    regions.give_back(30)
    assert regions.held == 70
    assert regions.take(31) == -1, "30 are free in one piece"
    assert regions.take(20) == 30
    assert regions.take(10) == 50
    for start in (0, 30, 50, 60, 90):
        regions.give_back(start)
    assert (regions.held, regions.take(100)) == (0, 0)


def test_regions_are_as_long_as_their_system_says():
    assert [region_length(kind, 30, 20, 200) for kind in ("max", "exact", "pow2")] == [200, 50, 64]
    assert region_length("pow2", 32, 32, 200) == 64


# ---- workloads


def test_prompts_share_tokens_exactly_as_far_as_the_trace_says(requests):
    workload = requests((0, 50, 2), (1, 50, 2, 0, 2), (2, 40, 3, 1, 1))
    first, second, third = (workload.prompt(i).tolist() for i in range(3))
    assert [len(first), len(second), len(third)] == [50, 50, 40]
    assert first[:32] == second[:32]
    assert first[32] != second[32]
    assert third[:16] == first[:16]
    assert third[16] != first[16]
    apart = Workload(workload.trace, shared=False)
    assert not set(apart.prompt(0).tolist()) & set(apart.prompt(1).tolist())


def test_prompts_may_end_with_the_trace_s_last_whole_block(requests):
    rows = (0, 50, 2), (1, 48, 3, 0, 3), (2, 9, 4), (3, 16, 1), (4, 17, 1)
    whole = replace(requests(*rows), whole_blocks=True)
    assert [whole.num_tokens(i) for i in range(5)] == [(48, 2), (48, 3), (9, 4), (16, 1), (16, 1)]
    assert whole.prompt(0).tolist() == whole.prompt(1).tolist() == requests(*rows).prompt(0)[:48].tolist()
    assert load_workload("synthetic:chat:0:20", whole_blocks=True).num_tokens(0)[0] % 512 == 0


def test_lengths_alone_are_a_workload_without_prefixes(tmp_path):
    path = tmp_path / "lengths.npz"
    np.savez(path, t_ms=np.array([0, 5, 9]), input_tokens=np.array([40, 1, 0]), output_tokens=np.array([3, 0, 2]))
    workload = load_workload(path, speed=2.0)
    assert [workload.num_tokens(i) for i in range(3)] == [(40, 3), (1, 1), (1, 2)]
    assert workload.arrivals_s.tolist() == [0.0, 0.0025, 0.0045]
    assert not set(workload.prompt(0).tolist()) & set(workload.prompt(1).tolist())


@pytest.mark.parametrize(
    ("field", "values"),
    [("t_ms", [5, 1, 9]), ("input_tokens", [1.5, 2, 3]), ("output_tokens", [1, -2, 3]), ("input_tokens", [1, 2]),
     ("input_tokens", [1, 2, 10**12]), ("t_ms", [[1], [2], [3]])],
    ids=repr,
)  # fmt: skip
def test_lengths_that_are_wrong_name_their_field(tmp_path, field, values):
    fields = {"t_ms": [0, 5, 9], "input_tokens": [40, 1, 0], "output_tokens": [3, 0, 2], field: values}
    path = tmp_path / "lengths.npz"
    np.savez(path, **{name: np.array(value) for name, value in fields.items()})
    with pytest.raises(pk.TraceFormatError, match=field):
        load_workload(path)


def test_short_requests_have_the_means_of_instructions():
    trace = load_workload("synthetic:short:1:4000").trace
    assert trace.input_tokens.mean() == pytest.approx(19.3, rel=0.05)
    assert trace.output_tokens.mean() == pytest.approx(58.5, rel=0.05)
    assert load_workload("synthetic:short:1:4000").trace.sha256 == trace.sha256
    assert load_workload("synthetic:short:2:4000").trace.sha256 != trace.sha256


def test_short_requests_may_have_other_means():
    trace = load_workload("synthetic:short:1:4000:150:30").trace
    assert trace.input_tokens.mean() == pytest.approx(150, rel=0.05)
    assert trace.output_tokens.mean() == pytest.approx(30, rel=0.05)


def test_users_come_once_and_then_come_back_with_their_session():
    workload = load_workload("synthetic:users:1:5000")
    prompts = [workload.prompt(i) for i in range(5000)]
    assert {len(prompt) for prompt in prompts} == {528}
    first = {prompt[0]: prompt[:512] for prompt in prompts[:4000]}
    assert len(first) == 4000
    back = prompts[4000:]
    assert all(np.array_equal(first[prompt[0]], prompt[:512]) for prompt in back)
    assert len({prompt[0] for prompt in back}) > 800
    assert len({prompt[512] for prompt in prompts}) == 5000
    assert len(load_workload("synthetic:users:1:30")) == 30


@pytest.mark.parametrize("rest", [":x", ":1:0", "er", ":1:2:3", ":1:2:0:3", ":1:2:3:4:5"])
def test_short_requests_that_are_none_are_refused(rest):
    with pytest.raises(pk.InvalidArgument):
        load_workload(f"synthetic:short{rest}")


def returning(requests):
    """Twelve prompts that come twice, and a long answer beside them."""
    first = [(10 * i, 160, 2) for i in range(12)]
    again = [(4000 + 40 * i, 170, 2, i + 1, 10) for i in range(12)]
    return requests((0, 20, 400), *first, *again)


def test_a_load_holds_up_no_other_request_unless_it_is_asked_to(machine, requests):
    stalling, beside = run(returning(requests), machine(1000, 4000, rate=2e5), "stalling", "tiered")
    assert stalling.requests == beside.requests == 25
    assert stalling.hit_rate["host"] > 0
    assert beside.hit_rate["host"] > 0
    assert stalling.stalled_s > 0
    assert beside.stalled_s == 0
    assert beside.tpot_s["p99"] < stalling.tpot_s["p99"]
    assert beside.ttft_s["p99"] <= stalling.ttft_s["p99"]


def test_over_links_that_take_no_time_it_makes_no_difference_who_waits(machine, requests, monkeypatch):
    monkeypatch.setitem(LATENCY_S, "host", 0.0)
    stalling, beside = run(returning(requests), machine(1000, 4000, rate=1e18), "stalling", "tiered")
    for name in ("seconds", "ttft_s", "tpot_s", "computed_tokens", "hit_rate", "steps"):
        assert getattr(stalling, name) == pytest.approx(getattr(beside, name)), name


def test_a_disk_is_written_when_it_was_asked_to_be_and_its_bytes_are_told_by_day(machine, requests):
    rows = [(1000 * i, 161, 2, *((i - 6, 10) if i >= 6 else ())) for i in range(12)]
    hardware = machine(200, 320)
    disk = TierSize("disk", 4000 * hardware.model.kv_bytes_per_token, Rates(1e9, 1e9))
    written, shown = {}, {}
    for word in (None, "never", "evicted", "reused", "all"):
        tiers = replace(hardware, tiers=(*hardware.tiers, disk), disk_admission="all", disk_write=word)
        (result,) = run(requests(*rows), tiers, "tiered")
        written[word] = result.disk_written_bytes
        shown[word] = table_rows([result])[0]["disk/day"]
        if word == "never":
            assert (result.hit_rate["disk"], shown[word]) == (0, "0 B")
    assert 0 == written["never"] < written["evicted"] < written["reused"] <= written["all"]
    assert written[None] == written["reused"], "the disk has more than 4 times the blocks of memory"
    block_bytes = 16 * hardware.model.kv_bytes_per_token
    assert written["all"] >= 60 * block_bytes, "the whole blocks of six different prompts"
    assert shown["all"] == format_size(int(written["all"] * 86_400 / result.seconds))
    (without,) = run(requests(*rows), hardware, "tiered")
    assert without.disk_written_bytes is None
    assert "disk/day" not in table_rows([without])[0]
