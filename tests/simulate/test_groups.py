"""The system `groups`: the real core and scheduler over groups of layers, without bytes."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cli import main
from pagedkv.core import MOVE_DTYPE
from pagedkv.lab.replay.progress import Silent
from pagedkv.lab.simulate import MODELS, SYSTEMS, Hardware, load_workload, parse_gpus, parse_tiers, simulate
from pagedkv.lab.simulate.found import bytes_by_group
from pagedkv.lab.simulate.links import LATENCY_S, Rates, TierSize
from pagedkv.lab.simulate.paged import PagedServer
from pagedkv.lab.simulate.virtual import VirtualGroupCarrier, virtual_cache
from pagedkv.spec.groups import groups_of
from tests.simulate.conftest import CHUNKS, TINY, WINDOWS, uneven
from tests.simulate.test_sharing import herds

FAR = uneven(window=1 << 20)
MODELS_HERE = pytest.mark.parametrize("model", [WINDOWS, CHUNKS], ids=["window", "chunk"])


def serve(workload, hardware, system="groups", max_running=8, max_batch_tokens=64):
    """A run that is over, with its server; the books agree."""
    server = PagedServer(workload, SYSTEMS[system], hardware, 16, max_running, max_batch_tokens, Silent())
    moved = []
    submit = server.carrier.submit

    def submitted(moves, **options):
        moved.append(moves.copy())
        return submit(moves, **options)

    server.carrier.submit = submitted
    result = server.run()
    server.cache.check_integrity()
    return server, result, np.concatenate(moved) if moved else np.empty(0, MOVE_DTYPE)


def with_disk(hardware, tokens, **options):
    disk = TierSize("disk", tokens * hardware.model.kv_bytes_per_token, Rates(1e9, 1e9))
    return replace(hardware, tiers=(*hardware.tiers, disk), disk_admission="all", **options)


def lengths(workload):
    return np.array([workload.num_tokens(i) for i in range(len(workload))], np.int64).sum(axis=0)


@MODELS_HERE
@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_found_or_computed_and_none_twice_unless_somebody_was_suspended(machine, requests, model, seed):
    workload = requests(*herds(seed))
    hardware = with_disk(machine(420, 900, model=model), 4000)
    server, result, _ = serve(workload, hardware)
    prompts, outputs = lengths(workload)
    assert (result.requests, result.refused) == (len(workload), 0)
    assert result.computed_tokens + server.found.sum() == prompts + outputs - len(workload) + result.recomputed_tokens
    assert result.recomputed_tokens >= 0
    if not sum(result.preemptions.values()):
        assert result.recomputed_tokens == 0


@MODELS_HERE
def test_somebody_is_suspended_and_every_request_still_ends(machine, requests, model):
    workload = requests(*[(0, 20, 150)] * 8)
    _, result, _ = serve(workload, machine(330, 600, model=model))
    assert result.requests == 8
    assert sum(result.preemptions.values()) > 0
    assert result.computed_tokens == 8 * 169 + result.recomputed_tokens


@MODELS_HERE
def test_a_simulation_says_the_same_every_time(machine, requests, model):
    workload, hardware = requests(*herds(3)), machine(420, 900, model=model)
    first, second = (serve(workload, hardware)[1].to_json() for _ in range(2))
    assert {**first, "wall_s": 0} == {**second, "wall_s": 0}


def test_where_no_layer_s_reach_ends_and_nothing_is_shared_it_is_all_the_same(machine, requests):
    """The window is longer than any sequence, so both groups keep all tokens."""
    rows = [(30 * i, 20 + 13 * i % 170, 5 + 7 * i % 30) for i in range(40)]
    hardware = machine(6000, 6000, model=FAR)
    _, tiered, _ = serve(requests(*rows), hardware, "tiered")
    _, groups, _ = serve(requests(*rows), hardware, "groups")
    for name in ("seconds", "ttft_s", "tpot_s", "computed_tokens", "steps", "mean_running", "most_running"):
        assert getattr(groups, name) == getattr(tiered, name), name
    for name in ("tokens_per_slot", "memory_held"):
        assert getattr(groups, name) == pytest.approx(getattr(tiered, name)), name


def test_what_is_found_and_what_lags_are_what_all_layers_with_all_tokens_find(machine, requests):
    """Nothing is evicted, so layers that see everything have the same blocks in both systems."""
    rows = [(0, 640, 2), (2000, 700, 2, 0, 20), (4000, 700, 2, 0, 20), (6000, 650, 2, 0, 40), (8000, 50, 2)]
    workload = requests(*rows)
    tiered, _, _ = serve(workload, machine(9000, 9000, model=WINDOWS), "tiered")
    groups, result, _ = serve(workload, machine(9000, 9000, model=WINDOWS))
    partial = tiered.cache.stats().hit_tokens["partial"]
    assert tiered.found.sum() - partial == groups.found.sum() + result.lagging_tokens
    assert result.lagging_tokens > 0, "the second prompt parts where no point was"
    assert groups.found[2].sum() == 320, "the second made one, and the third hits there"


def test_where_prompts_end_with_whole_blocks_of_the_trace_the_next_turn_goes_on_from_their_points(machine, requests):
    """The trace says of 640 tokens that they are in both prompts, and the first prompt has 650."""
    workload = requests((0, 650, 2), (2000, 800, 2, 0, 40))
    found = {}
    for name, what in (("as it is", workload), ("whole blocks", replace(workload, whole_blocks=True))):
        server = PagedServer(what, SYSTEMS["groups"], machine(9000, 9000, model=WINDOWS), 4, 8, 64, Silent())
        result = server.run()
        found[name] = int(server.found[1].sum()), result.lagging_tokens
    assert found["whole blocks"] == (640, 0)
    assert sum(found["as it is"]) == 640
    assert found["as it is"][0] < 600


@MODELS_HERE
def test_a_sequence_holds_its_full_layers_and_the_reach_of_the_others(machine, model):
    cache, carrier = virtual_cache([100, 0, 0], 16, machine(1600, model=model), by_group=True)
    assert isinstance(carrier, VirtualGroupCarrier)
    full, short = groups_of(cache.spec)
    seq = cache.sequence(np.arange(1000, dtype=np.int32))
    while seq.num_computed < 1000:
        with cache.step([seq], q_lens=[min(40, 1000 - seq.num_computed)]) as step:
            for layer in range(6):
                step.mark_written(layer)
    most = short.need(62) + 2  # the block being filled, and one for the newest boundary
    held = carrier.held_bytes(cache) - 63 * full.page_bytes
    assert short.need(62) * short.page_bytes <= held <= most * short.page_bytes
    assert full.page_bytes + short.page_bytes == 16 * model.kv_bytes_per_token
    seq.release()
    assert carrier.held_bytes(cache) == 0, "a point keeps pages, and no sequence holds them"
    cache.close()


@MODELS_HERE
def test_more_requests_run_at_once_in_the_same_memory(machine, requests, model):
    workload = requests(*[(0, 400, 40)] * 12)
    _, tiered, _ = serve(workload, machine(1400, 9000, model=model), "tiered")
    _, groups, _ = serve(workload, machine(1400, 9000, model=model))
    assert tiered.most_running == 3
    assert groups.most_running >= 5
    assert groups.tokens_per_slot > 1 > tiered.tokens_per_slot
    assert groups.seconds < tiered.seconds


@MODELS_HERE
def test_bytes_moved_are_the_pages_of_their_groups(machine, requests, model):
    workload = requests(*herds(5), *[(9000 + 300 * i, 300, 3) for i in range(12)])
    server, result, moves = serve(workload, with_disk(machine(420, 900, model=model), 4000))
    page_bytes = np.array([group.page_bytes for group in groups_of(server.cache.spec)])
    assert {0, 1} == set(moves["lane"].tolist())
    names = ("device", "host", "disk")
    by_way = dict.fromkeys(result.moved_bytes, 0)
    for move in moves:
        by_way[f"{names[move['src_tier']]}_to_{names[move['dst_tier']]}"] += int(page_bytes[move["lane"]])
    assert dict(result.moved_bytes) == by_way
    assert result.moved_bytes["device_to_host"] > 0
    assert result.disk_written_bytes > 0


def test_moves_of_pages_take_the_time_of_their_bytes(machine):
    cache, carrier = virtual_cache([100, 100, 0], 16, machine(1600, 1600, rate=1e6, model=WINDOWS), by_group=True)
    moves = np.zeros(7, MOVE_DTYPE)
    moves["src_tier"], moves["lane"], moves["transfer"] = 1, [0, 0, 0, 0, 1, 1, 1], np.arange(7)
    handle = carrier.submit(moves)
    full, short = (16 * layers * 2 * 8 * 2 for layers in (2, 4))
    assert carrier.lane_bytes.tolist() == [full, short]
    assert handle.seconds == pytest.approx(LATENCY_S["host"] + (4 * full + 3 * short) / 1e6)
    (stats,) = carrier.stats().values()
    assert (stats.blocks, stats.bytes) == (7, 4 * full + 3 * short)
    cache.close()


def test_a_hit_in_host_memory_loads_its_own_tail_and_no_more(machine, requests):
    workload = requests((0, 641, 2), *[(500 + 500 * i, 641, 2) for i in range(5)], (9000, 641, 2, 0, 40))
    found = {}
    for system in ("tiered", "groups"):
        server, result, _ = serve(workload, machine(700, 9000, model=WINDOWS), system)
        assert server.found[6].tolist() == [0, 640, 0]
        found[system] = result.moved_bytes["host_to_device"]
    full, short = groups_of(server.cache.spec)
    assert found["tiered"] == 40 * 16 * WINDOWS.kv_bytes_per_token
    assert found["groups"] == 40 * full.page_bytes + 4 * short.page_bytes
    assert bytes_by_group(server.found, (full, short))[6].tolist() == [0, found["groups"], 0]
    assert result.found["host"]["load_s"] == pytest.approx(LATENCY_S["host"] + found["groups"] / 1e9)


def test_a_tail_counts_where_the_last_block_of_the_prompt_was_found():
    full, short = groups_of(WINDOWS.spec(16))
    found = np.array([[64, 32, 0], [16, 0, 0], [0, 0, 0], [16, 0, 160]])
    one, other = full.page_bytes, short.page_bytes
    assert bytes_by_group(found, (full, short)).tolist() == [
        [4 * one, 2 * one + 4 * other, 0], [one + other, 0, 0], [0, 0, 0], [one, 0, 10 * one + 4 * other],
    ]  # fmt: skip


def test_a_write_budget_is_of_the_bytes_of_pages(machine, requests):
    """An hour's share is 40 blocks of all layers, and the run takes 40 seconds."""
    workload = requests(*[(1000 * i, 320, 2) for i in range(40)])
    hardware = machine(400, 400, model=WINDOWS)
    block_bytes = 16 * WINDOWS.kv_bytes_per_token
    server, free, _ = serve(workload, with_disk(hardware, 9000, disk_write="evicted"))
    budget = 24 * 40 * block_bytes
    _, tight, _ = serve(workload, with_disk(hardware, 9000, disk_write="evicted", disk_write_budget=budget))
    assert 20 * block_bytes <= tight.disk_written_bytes <= 41 * block_bytes < free.disk_written_bytes / 2
    assert server.carrier.write_bytes.tolist() == [group.page_bytes for group in groups_of(server.cache.spec)]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-27b", "llama-4-scout"])
def test_tiers_take_memory_for_books_alone(name):
    gpu, number = parse_gpus("8xH100")
    hardware = Hardware(gpu, number, MODELS[name], parse_tiers("host=256GiB@50GB/s"))
    tracemalloc.start()
    try:
        cache, carrier = virtual_cache(hardware.blocks(16), 16, hardware, by_group=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
        assert carrier.layout.extent_bytes <= 1 << 27
        cache.close()
    finally:
        tracemalloc.stop()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss-20b", "gemma-3-27b", "gemma-2-9b")]


@pytest.mark.parametrize("name", ["llama-4-scout", *SLOW])
def test_published_models_are_served_by_groups(name):
    gpu, number = parse_gpus("4xH100")
    hardware = Hardware(gpu, number, MODELS[name], parse_tiers("host=64GiB@50GB/s"))
    workload = load_workload("synthetic:chat:2:40")
    tiered, groups = simulate(workload, hardware, ["tiered", "groups"], max_batch_tokens=2304)
    assert groups.requests == tiered.requests == 40
    assert groups.memory_held < tiered.memory_held


@pytest.mark.parametrize("model", [TINY, uneven(window=1 << 20).sizes.groups[1]], ids=["all alike", "no full layer"])
def test_a_model_whose_layers_see_equally_far_is_refused_before_anything_runs(machine, requests, model):
    if model is not TINY:
        model = replace(WINDOWS, sizes=replace(WINDOWS.sizes, groups=(model,)))
    with pytest.raises(pk.InvalidArgument, match="see equally far: take tiered"):
        simulate(requests((0, 10, 2)), machine(400, 400, model=model), ["tiered", "groups"], max_batch_tokens=512)


def test_the_report_says_what_lags_and_how_far_layers_see(capsys):
    command = ["simulate", "synthetic:chat:3:30", "--systems", "tiered,groups", "--json", "-", "--quiet"]
    assert main([*command, "--model", "gpt-oss-20b"]) == 0
    report = json.loads(capsys.readouterr().out)
    tiered, groups = report["results"]
    assert report["hardware"]["layers"] == [
        {"layers": 12, "window": None, "chunk": None}, {"layers": 12, "window": 128, "chunk": None},
    ]  # fmt: skip
    assert report["hardware"]["experts"] == [32, 4]
    assert "lagging_tokens" not in tiered
    assert groups["lagging_tokens"] >= 0
    assert groups["parameters"]["blocks"] == tiered["parameters"]["blocks"]
    assert groups["parameters"]["pages_per_extent"] == [1, 1]
    assert main(command) == 2
    assert "of the layers of llama-3-8b all see equally far: take tiered" in capsys.readouterr().err
    assert main(["simulate", "synthetic:chat:3:30", "--systems", "tiered", "--json", "-", "--quiet"]) == 0
    hardware = json.loads(capsys.readouterr().out)["hardware"]
    assert not {"layers", "experts", "expert_bytes"} & hardware.keys(), "of models that have no such"
