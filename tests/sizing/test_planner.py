"""The planner: one case counted by hand, then what must hold for every plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import InvalidArgument, WrongType
from pagedkv.lab.sizing import (
    GPUS,
    MODELS,
    Gpu,
    KVFormat,
    LayerGroup,
    Machines,
    Model,
    Plan,
    Users,
    blocks_needed,
    find_gpu,
    find_model,
    plan,
    token_bytes,
)
from pagedkv.lab.sizing.replica import session_bytes

GB = 10**9
EASY = Gpu("easy", 1000, 100.0, 2000.0, 10.0)  # bytes, bytes/s, operations/s, bytes/s
TINY = Model("tiny", (LayerGroup(1, 2, 1),), params=50, context=64)  # 100 bytes of weights; 8 bytes of KV per token


def test_a_plan_counted_by_hand() -> None:
    """A GPU of 1,000 bytes: 900 for weights and KV, 800 for KV.

    Sessions of 5 tokens are 3 blocks of 16 bytes.
    """
    machines = Machines(EASY, 3, gpus_per_server=2, host_bytes=200, disk_bytes=500, disk_bytes_per_s=4.0)
    found = plan(TINY, machines, Users(80, 5, max_tokens=10, active=0.25), block_size=2, tensor_parallel=1)
    assert (found.num_replicas, found.weight_bytes) == (3, 100)
    assert (found.token_bytes, found.block_bytes, found.session_bytes) == (8, 16, 48)
    device, host, disk, none = found.tiers
    assert (device.tier, device.kv_bytes, device.capacity, device.users) == ("device", 2400, 3 * (800 // 48), 48)
    assert (host.tier, host.kv_bytes, host.capacity, host.users) == ("host", 400, 2 * (200 // 48), 8)
    assert (disk.tier, disk.kv_bytes, disk.capacity, disk.users) == ("disk", 1000, 2 * (500 // 48), 20)
    assert (none.tier, none.capacity, none.users) == ("none", 0, 80 - 48 - 8 - 20)
    running = 7  # 20 active users over three replicas
    step = (100 + running * 48) / 100
    assert device.first_token_s == pytest.approx(step)
    assert host.first_token_s == pytest.approx(step + 48 / 10)
    assert disk.first_token_s == pytest.approx(step + 48 / 10 + 48 / 4)
    assert none.first_token_s == pytest.approx(step + 2 * 50 * 5 / 2000)
    waits = [tier.users * tier.first_token_s for tier in found.tiers]
    assert found.mean_first_token_s == pytest.approx(sum(waits) / 80)
    assert found.contiguous_capacity == 3 * (800 // 80)
    assert (found.gpus_for_active, found.gpus_for_all) == (2, 5)
    assert found.disk_bytes_for_all == 12 * 48  # the 24 sessions of disk and none, over two servers


def test_users_who_come_back_load_links_and_disks() -> None:
    machines = Machines(EASY, 3, gpus_per_server=2, host_bytes=200, disk_bytes=500, disk_bytes_per_s=4.0)
    users = Users(80, 5, max_tokens=10, turns_per_hour=360)  # one in ten seconds
    _, host, disk, _ = plan(TINY, machines, users, block_size=2, tensor_parallel=1).tiers
    assert host.load_bytes_per_s == pytest.approx((8 + 20) * 48 / 10 / 2)  # what comes from disk passes the link too
    assert host.limit_bytes_per_s == 20
    assert disk.load_bytes_per_s == pytest.approx(20 * 48 / 10 / 2)
    assert disk.limit_bytes_per_s == 4


def test_a_shared_prefix_is_kept_once_per_replica_and_server() -> None:
    machines = Machines(EASY, 2, gpus_per_server=1, host_bytes=200, disk_bytes=0)
    found = plan(TINY, machines, Users(80, 9, max_tokens=10, shared_prefix=5), block_size=2, tensor_parallel=1)
    assert (found.shared_bytes, found.session_bytes) == (2 * 16, 3 * 16)  # two full blocks of the prefix
    assert found.tiers[0].capacity == 2 * ((800 - 32) // 48)
    assert found.tiers[1].capacity == 2 * ((200 - 32) // 48)
    assert found.tiers[3].first_token_s - found.tiers[0].first_token_s == pytest.approx(2 * 50 * 5 / 2000)


def test_a_session_that_is_all_prefix_keeps_a_last_block_of_its_own() -> None:
    found = plan(TINY, Machines(EASY), Users(1, 8, shared_prefix=8), block_size=2, tensor_parallel=1)
    assert (found.shared_bytes, found.session_bytes) == (3 * 16, 16)


def test_the_least_power_of_two_is_taken_whose_gpus_hold_weights_and_the_longest_session() -> None:
    model = find_model("llama-3.1-70b")
    machines = Machines(find_gpu("h100"), 64)
    assert model.weight_bytes() > 0.9 * 80 * GB  # not one
    assert plan(model, machines, Users(1, 512, max_tokens=8192)).tensor_parallel == 2
    assert plan(model, machines, Users(1, 512)).tensor_parallel == 4  # a session of 131,072 tokens is 43 GB
    assert plan(model, machines, Users(1, 512), weight_bits=4).tensor_parallel == 2
    assert plan(model, machines, Users(1, 512), kv_share=0.3).tensor_parallel == 4


@pytest.mark.parametrize(
    ("heads", "gpus", "times"), [(8, 1, 1), (8, 4, 1), (8, 8, 1), (8, 16, 2), (1, 8, 8), (9, 2, 10 / 9), (3, 2, 4 / 3)]
)
def test_gpus_of_a_replica_that_are_more_than_the_heads_keep_a_head_twice(heads: int, gpus: int, times: float) -> None:
    model = Model("m", (LayerGroup(4, heads, 64),), 1)
    alone, _ = session_bytes(model, 100, 0, 16, KVFormat())
    together, _ = session_bytes(model, 100, 0, 16, KVFormat(), gpus)
    assert together == pytest.approx(times * alone)


def test_a_latent_is_kept_by_every_gpu_of_a_replica_and_once_in_colder_tiers() -> None:
    found = plan(find_model("deepseek-v3"), Machines(find_gpu("h200"), 8), Users(1000, 512), weight_bits=8)
    assert found.tensor_parallel == 8
    assert found.session_bytes == 512 * 70_272
    assert found.device_session_bytes == 8 * found.session_bytes


@settings(deadline=None)
@given(num_tokens=st.integers(1, 200), common=st.integers(0, 12), window=st.none() | st.integers(1, 80))
def test_own_and_shared_blocks_are_all_the_session_s(num_tokens: int, common: int, window: int | None) -> None:
    model = Model("m", (LayerGroup(2, 1, 1), LayerGroup(3, 1, 1, window=window)), 1)
    common = min(common, (num_tokens - 1) // 16)
    own, shared = session_bytes(model, num_tokens, common, 16, KVFormat())
    seen = range(0 if window is None else max(num_tokens - window, 0), num_tokens)
    near = {token // 16 for token in seen}
    full = set(range(blocks_needed(num_tokens, 16)))
    layer = 16 * 4
    assert own == 2 * layer * len(full - set(range(common))) + 3 * layer * len(near - set(range(common)))
    assert shared == 2 * layer * len(full & set(range(common))) + 3 * layer * len(near & set(range(common)))


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    gpu=st.sampled_from(sorted(GPUS)),
    gpus=st.integers(16, 4096),
    count=st.integers(1, 10**8),
    tokens=st.integers(1, 2048),
    prefix=st.integers(0, 2048),
    block_size=st.sampled_from([1, 16, 64]),
    active=st.floats(0, 1),
    host=st.integers(0, 10**13),
    disk=st.integers(0, 10**14),
)
def test_every_plan_adds_up(
    name: str, gpu: str, gpus: int, count: int, tokens: int, prefix: int, block_size: int, active: float, host: int,
    disk: int,
) -> None:  # fmt: skip
    machines = Machines(GPUS[gpu], gpus, 8, host, disk)
    users = Users(count, tokens, max_tokens=2048, active=active, shared_prefix=min(prefix, tokens))
    found = plan(find_model(name), machines, users, block_size=block_size, weight_bits=4)  # which fits 16 of any GPU
    assert sum(tier.users for tier in found.tiers) == count
    for above, below in zip(found.tiers, found.tiers[1:], strict=False):
        assert not below.users or above.users == above.capacity  # hotter tiers are filled first
    waits = [tier.first_token_s for tier in found.tiers[:3]]
    assert waits == sorted(waits)
    assert found.num_replicas * found.tensor_parallel <= gpus
    assert found.tiers[0].capacity >= found.num_replicas
    assert found.session_bytes * found.tiers[2].users <= found.tiers[2].kv_bytes
    _adding_machines_never_makes_it_worse(found)
    assert json.loads(json.dumps(found.to_dict()))["num_active"] == users.num_active


def _adding_machines_never_makes_it_worse(found: Plan) -> None:
    more = replace(found.machines, num_gpus=2 * found.machines.num_gpus)
    grown = plan(
        found.model, more, found.users, block_size=found.block_size, weight_bits=found.weight_bits,
        tensor_parallel=found.tensor_parallel,
    )  # fmt: skip
    assert grown.tiers[0].users >= found.tiers[0].users
    assert grown.tiers[3].users <= found.tiers[3].users


def test_gpus_for_all_users_are_enough_and_one_replica_less_is_not() -> None:
    model, users = find_model("llama-3.1-8b"), Users(100_000, 512, max_tokens=2048, active=0.5)
    found = plan(model, Machines(GPUS["h100"], 8), users)
    enough = plan(model, Machines(GPUS["h100"], found.gpus_for_all), users)
    assert enough.tiers[0].users == users.count
    short = plan(model, Machines(GPUS["h100"], found.gpus_for_all - found.tensor_parallel), users)
    assert short.tiers[0].users < users.count
    assert plan(model, Machines(GPUS["h100"], found.gpus_for_active), users).tiers[0].capacity >= users.num_active


def test_the_disk_for_all_users_is_enough_and_a_session_less_is_not() -> None:
    model, users = find_model("llama-3.1-8b"), Users(1_000_000, 512, max_tokens=2048)
    machines = Machines(GPUS["h100"], 64, host_bytes=GB, disk_bytes=GB)
    found = plan(model, machines, users)
    assert found.tiers[3].users
    enough = replace(machines, disk_bytes=found.disk_bytes_for_all)
    assert plan(model, enough, users).tiers[3].users == 0
    short = replace(machines, disk_bytes=found.disk_bytes_for_all - found.session_bytes)
    assert plan(model, short, users).tiers[3].users > 0


def test_a_step_of_a_mixture_reads_no_more_weights_than_its_tokens_meet() -> None:
    model, machines = find_model("mixtral-8x7b"), Machines(GPUS["h200"], 1)
    one = plan(model, machines, Users(1, 1, active=1)).tiers[0].first_token_s
    many = plan(model, machines, Users(100, 1, active=1)).tiers[0].first_token_s
    assert one * 4.8e12 == pytest.approx(2 * model.params_per_token + token_bytes(model.groups) * 16, rel=1e-9)
    assert many * 4.8e12 == pytest.approx(2 * model.params + 100 * token_bytes(model.groups) * 16, rel=1e-9)


@pytest.mark.parametrize(("count", "share", "active"), [(100, 0.07, 7), (10**6, 0.01, 10**4), (3, 0.5, 2), (9, 0, 0)])
def test_active_users_are_rounded_up_and_rounding_errors_are_not(count: int, share: float, active: int) -> None:
    assert Users(count, 1, active=share).num_active == active


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan(TINY, Machines(EASY), Users(1, 65)), "65 tokens do not fit into a context of 64"),
        (lambda: plan(find_model("gpt3-175b"), Machines(find_gpu("l4"), 8), Users(1, 1)), "no power of two up to 8"),
        (lambda: plan(find_model("gpt3-175b"), Machines(find_gpu("h100"), 8), Users(1, 1), tensor_parallel=4),
         "325 GiB of weights leave nothing for KV on 4 GPUs"),
        (lambda: plan(TINY, Machines(EASY), Users(1, 1), kv_share=0.95, tensor_parallel=1), "leave nothing"),
        (lambda: plan(TINY, Machines(EASY), Users(1, 1), memory_share=0.1, tensor_parallel=1), "leave nothing"),
        (lambda: plan(replace(TINY, context=600), Machines(EASY), Users(1, 600), tensor_parallel=1),
         "1 GPUs have 800 B for KV; a session of 600 tokens needs"),
        (lambda: plan(TINY, Machines(EASY), Users(1, 1), tensor_parallel=2), "tensor_parallel must be in 1..1"),
        (lambda: plan(TINY, Machines(EASY), Users(1, 1), memory_share=1.1), "memory_share"),
        (lambda: plan(TINY, Machines(EASY), Users(1, 1), kv_share=-0.1), "kv_share"),
        (lambda: plan(TINY, Machines(EASY), Users(1, 1), step_s=-1), "step_s"),
        (lambda: plan(TINY, Machines(EASY), Users(1, 1), block_size=0), "block_size"),
        (lambda: Users(0, 1), "users"),
        (lambda: Users(1, 0), "tokens"),
        (lambda: Users(1, 5, 4), "max_tokens"),
        (lambda: Users(1, 5, shared_prefix=6), "shared_prefix"),
        (lambda: Users(1, 5, active=1.1), "active"),
        (lambda: Machines(EASY, 0), "num_gpus"),
        (lambda: Machines(EASY, disk_bytes=-1), "disk_bytes"),
        (lambda: Machines(EASY, disk_bytes_per_s=0), "disk_bytes_per_s"),
        (lambda: Gpu("g", 0, 1, 1, 1), "memory_bytes"),
        (lambda: Gpu("g", 1, 1, 0, 1), "flops_per_s"),
        (lambda: find_gpu("abacus"), "no GPU 'abacus'"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_the_numbers(call: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call()


def test_arguments_of_another_type_are_refused() -> None:
    for arguments in ((1, Machines(EASY), Users(1, 1)), (TINY, 1, Users(1, 1)), (TINY, Machines(EASY), 1)):
        with pytest.raises(WrongType):
            plan(*arguments)
    with pytest.raises(WrongType):
        Machines("h100")  # type: ignore[arg-type]
    with pytest.raises(WrongType):
        find_gpu(1)  # type: ignore[arg-type]
