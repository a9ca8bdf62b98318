"""Row tiles in parts: the list is that of the oracle, and the merged results are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument
from pagedkv.kernels import decode_simt, prefill_mma, prefill_wgmma, schedules
from pagedkv.kernels.attention import AttentionPlan
from pagedkv.kernels.attention import Batch as DeviceBatch
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import AttentionConfig, Tiling
from tests.kernels.cases import Case, Problem, assert_close, problem, run
from tests.kernels.part_split import Batch, Device, work_list
from tests.slices import one_in

LONG = Case((700,), (9,), num_kv_heads=1)
MIXED = Case((1300, 70, 0, 33, 1), (1, 21, 1, 33, 0), group_size=2, num_kv_heads=1)


@pytest.fixture(params=["prefill_mma", "prefill_wgmma"])
def kernel(request: pytest.FixtureRequest, backend: Backend) -> str:
    if request.param == "prefill_wgmma" and backend.capability != (9, 0):
        pytest.skip("prefill_wgmma needs compute capability 9.0")
    return str(request.param)


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile is enough for a part, so that short sequences are divided."""
    monkeypatch.setattr(schedules, "MIN_PART_KEYS", 1)


def tiling_of(kernel: str, config: AttentionConfig) -> Tiling:
    return prefill_wgmma.tiling(config) if kernel == "prefill_wgmma" else prefill_mma.tiling(config, row_tile=32)


def plan_of(backend: Backend, given: Problem, kernel: str, **limits: Any) -> AttentionPlan:
    case = given.case
    sizes = {"num_kv_heads": case.num_kv_heads, "max_sequences": len(case.seq_lens), "max_tokens": len(given.q)}
    return AttentionPlan(backend, case.config, tiling_of(kernel, case.config), "listed", **(sizes | limits))


def items(backend: Backend, plan: AttentionPlan) -> list[list[int]]:
    count = int(backend.to_host(plan.division.arrays["num_items"])[0])
    return backend.to_host(plan.division.arrays["work_list"])[:count].tolist()


def check(backend: Backend, case: Case, kernel: str) -> AttentionPlan:
    """Run a case and compare it with float64; the counters must be zero again."""
    given = problem(case)
    plan = plan_of(backend, given, kernel)
    assert_close(given, *run(backend, given, plan=plan))
    for name in ("arrivals", "next_item"):
        assert not backend.to_host(plan.division.arrays[name]).any()
    return plan


def check_divided(backend: Backend, case: Case, kernel: str) -> None:
    """The same, and some row tile must have been divided."""
    assert max(item[3] for item in items(backend, check(backend, case, kernel))) > 1


@pytest.mark.parametrize("head_dim", one_in(2, [128, 64]))
@pytest.mark.parametrize("causal", one_in(2, [True, False]))
def test_a_row_tile_in_parts_is_right(backend: Backend, kernel: str, head_dim: int, causal: bool) -> None:
    check_divided(backend, replace(LONG, head_dim=head_dim, causal=causal), kernel)


@pytest.mark.parametrize("causal", one_in(2, [False, True]))
def test_a_long_decode_beside_prefills_is_right(backend: Backend, kernel: str, causal: bool) -> None:
    check_divided(backend, replace(MIXED, causal=causal), kernel)


@pytest.mark.parametrize(
    "variant",
    one_in(3, [
        {"window": 300},
        {"window": 100, "causal": False},
        {"sinks": True},
        {"alibi": True},
        {"soft_cap": 2.0},
        {"mask": True},
        {"kv_dtype": "int8", "scale_mode": "token_head"},
        {"kv_dtype": "float8_e4m3", "scale_mode": "head"},
        {"head_dim": 96, "head_dim_v": 48},
        {"q_lens": (40,), "window": 200, "sinks": True, "alibi": True, "mask": True},
    ]),
    ids=str,
)
def test_every_variant_in_parts(backend: Backend, variant: dict[str, Any]) -> None:
    check_divided(backend, replace(LONG, group_size=2, **variant), "prefill_mma")


@pytest.mark.slow
def test_parts_without_a_key_and_parts_that_some_rows_do_not_see(backend: Backend, kernel: str) -> None:
    given = problem(Case((300,), (40,), group_size=8, num_kv_heads=1))
    plan = plan_of(backend, given, kernel)
    division, most = plan.division, 9  # more parts than tiles
    update = division.update

    def forge(*arguments: Any) -> None:
        update(*arguments)
        row_tiles = sorted({tuple(item[:2]) for item in items(backend, plan)})
        slots = division.part_slots // most
        forged = [
            [seq, tile, part, most if at < slots else 1, at * most if at < slots else 0]
            for at, (seq, tile) in enumerate(row_tiles)
            for part in range(most if at < slots else 1)
        ]
        assert slots >= 1
        division.arrays["work_list"][: len(forged)] = backend.asarray(np.array(forged, np.int32))
        division.arrays["num_items"][:] = len(forged)

    division.arrays["work_list"] = backend.empty((64, schedules.ITEM_FIELDS), np.int32)
    division.update = forge  # type: ignore[method-assign]
    assert_close(given, *run(backend, given, plan=plan))


@pytest.mark.slow
def test_a_small_workspace_holds_fewer_parts(backend: Backend, kernel: str) -> None:
    given = problem(LONG)
    all_parts = plan_of(backend, given, kernel)
    slot = all_parts.tiling.row_tile * (64 + 2) * 4
    plan = plan_of(backend, given, kernel, max_workspace_bytes=all_parts.workspace_bytes - 10 * slot)
    assert plan.workspace_bytes <= all_parts.workspace_bytes - 10 * slot
    assert 0 < plan.division.part_slots < all_parts.division.part_slots - 9
    assert_close(given, *run(backend, given, plan=plan))
    none = plan_of(backend, given, kernel, max_workspace_bytes=slot)
    assert none.division.part_slots == 0
    assert_close(given, *run(backend, given, plan=none))


@pytest.mark.parametrize("schedule", ["listed", "even", "partitioned"])
def test_a_workspace_that_is_too_small_is_refused(backend: Backend, schedule: Any) -> None:
    config = AttentionConfig(64, 64, 4)
    tiling = prefill_mma.tiling(config) if schedule == "listed" else decode_simt.tiling(config)
    sizes = {"num_kv_heads": 1, "max_sequences": 3, "max_seq_len": 600}
    with pytest.raises(InvalidArgument, match=r"needs .* bytes or more, and max_workspace_bytes is 40: raise it"):
        AttentionPlan(backend, config, tiling, schedule, **sizes, max_workspace_bytes=40)
    enough = AttentionPlan(backend, config, tiling, schedule, **sizes).workspace_bytes
    exact = AttentionPlan(backend, config, tiling, schedule, **sizes, max_workspace_bytes=enough)
    assert exact.workspace_bytes == enough
    if schedule == "listed":  # it holds fewer parts
        less = AttentionPlan(backend, config, tiling, schedule, **sizes, max_workspace_bytes=enough - 1)
        assert less.workspace_bytes < enough
    else:
        with pytest.raises(InvalidArgument, match=f"max_workspace_bytes is {enough - 1}"):
            AttentionPlan(backend, config, tiling, schedule, **sizes, max_workspace_bytes=enough - 1)
    whole = AttentionPlan(backend, config, tiling, "whole", **sizes, max_workspace_bytes=40)
    assert whole.workspace_bytes == 0


def test_one_cta_may_compute_all_parts(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.capability != (9, 0):
        pytest.skip("prefill_wgmma needs compute capability 9.0")
    given = problem(LONG)
    plan = plan_of(backend, given, "prefill_wgmma")
    monkeypatch.setattr(plan.division, "grid", lambda *_: (1, 1, 1))
    assert_close(given, *run(backend, given, plan=plan))


@pytest.mark.slow
def test_the_same_plan_divides_other_lengths(backend: Backend, kernel: str) -> None:
    first, second = (
        problem(Case(lens, q_lens, num_kv_heads=1)) for lens, q_lens in (((700, 40), (50, 3)), ((20, 175), (4, 49)))
    )
    plan = plan_of(backend, first, kernel)
    for given in (first, second, first):
        assert_close(given, *run(backend, given, plan=plan))


def test_the_same_inputs_give_the_same_bits(backend: Backend, kernel: str) -> None:
    given = problem(MIXED)
    results = [run(backend, given, plan=plan_of(backend, given, kernel)) for _ in range(2)]
    for first, second in zip(*results, strict=True):
        assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("seq_lens", "q_lens", "window", "causal", "num_sms", "num_kv_heads"),
    [
        ((5,), (1,), 0, True, 4, 1),
        ((32768,), (64,), 0, True, 132, 8),
        ((32768,), (64,), 0, False, 132, 8),
        ((131072, 20000), (1, 2048), 0, True, 132, 8),
        ((131072, 20000), (1, 2048), 4096, True, 132, 8),
        ((9000, 0, 8000, 100), (7, 0, 300, 100), 0, True, 16, 2),
        ((40000,), (1,), 0, True, 132, 1),
        ((40000,) * 40, (1,) * 40, 0, True, 8, 2),
        ((3000,) * 1100, (5,) * 1100, 0, True, 132, 1),
        ((60000, *range(0, 4000, 9)), (1, *(1, 0, 3) * 148, 1), 0, True, 132, 4),
        ((700, 700), (1000, 30), 300, False, 4, 3),
    ],
)
@pytest.mark.parametrize("min_keys", [1, 1024])
def test_the_list_is_that_of_the_oracle(
    backend: Backend,
    seq_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    window: int,
    causal: bool,
    num_sms: int,
    num_kv_heads: int,
    min_keys: int,
) -> None:
    check_list(backend, seq_lens, q_lens, window, causal, num_sms, num_kv_heads, min_keys)


def check_list(
    backend: Backend,
    seq_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    window: int = 0,
    causal: bool = True,
    num_sms: int = 132,
    num_kv_heads: int = 1,
    min_keys: int = 1024,
    slots_per_sm: int = schedules.PART_SLOTS_PER_SM,
) -> list[tuple[int, ...]]:
    """Compare the list of a batch with the oracle's; the list."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "MIN_PART_KEYS", min_keys)
        patch.setattr(schedules, "PART_SLOTS_PER_SM", slots_per_sm)
        patch.setattr(backend, "num_sms", num_sms)
        config = AttentionConfig(128, 128, 4, causal=causal, window=window > 0)
        plan = AttentionPlan(
            backend, config, prefill_mma.tiling(config), "listed", num_kv_heads=num_kv_heads,
            max_sequences=len(seq_lens), max_tokens=sum(q_lens),
        )  # fmt: skip
    indptr = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    plan.update(DeviceBatch(backend.asarray(np.array(seq_lens, np.int32)), q_indptr=backend.asarray(indptr)), window)
    found = [(*item[:4], item[4] if item[3] > 1 else 0) for item in items(backend, plan)]
    division = plan.division
    device = Device(
        4, plan.tiling.row_tile, plan.tiling.tile_tokens, num_kv_heads, division.num_ctas, division.part_slots,
        division.min_part_tiles, causal, window,
    )  # fmt: skip
    assert found == work_list(device, Batch(seq_lens, q_lens))
    used = [slot + part for _, _, part, parts, slot in found if parts > 1]
    assert len(used) == len(set(used)), "two parts in one slot"
    assert max(used, default=-1) < division.part_slots
    assert len(found) <= len(division.arrays["work_list"])
    return found


def test_row_tiles_that_find_no_slots_stay_whole(backend: Backend) -> None:
    """Costs are counted by the last row tile, which here sees fewer tiles than the others."""
    found = check_list(backend, (1455,), (135,), window=1000, num_sms=13, min_keys=1, slots_per_sm=1)
    assert [item[3] for item in found] == [2] * 2 + [3] * 9 + [1]


def planning_steps(backend: Any, longest: int) -> int:
    """Steps of the interpreter for the list of 1,024 sequences of 512 keys, one of them longer."""
    config = AttentionConfig(128, 128, 4)
    plan = AttentionPlan(
        backend, config, prefill_mma.tiling(config, 64), "listed", num_kv_heads=1, max_sequences=1024, max_tokens=1024
    )
    lens = np.full(1024, 512, np.int32)
    lens[0] = longest
    before = backend.steps
    plan.update(DeviceBatch(lens, q_indptr=np.arange(1025, dtype=np.int32)))
    return int(backend.steps - before)


def test_a_longer_sequence_makes_the_list_no_dearer(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of 512 parts are worked out in the time of those of 32: some are not tried."""
    if backend.name != "ptxsim":
        pytest.skip("counts steps of the interpreter")
    monkeypatch.setattr(schedules, "MIN_PART_KEYS", 1024)
    monkeypatch.setattr(backend, "num_sms", 132)
    whole, short, long = (planning_steps(backend, longest) for longest in (512, 32768, 1 << 20))
    assert long < 1.25 * short  # one thread lists 512 parts
    assert short < 3.5 * whole


def test_every_part_is_stored_in_its_slot_alone(backend: Backend, kernel: str) -> None:
    given = problem(LONG)
    plan = plan_of(backend, given, kernel)
    slots = plan.division.arrays["partial_ml"]
    slots[:] = np.float32(7)
    assert_close(given, *run(backend, given, plan=plan))
    rows = {item[1]: min(plan.tiling.row_tile, 36 - item[1] * plan.tiling.row_tile) for item in items(backend, plan)}
    used = {item[4] + item[2]: rows[item[1]] for item in items(backend, plan) if item[3] > 1}
    untouched = (backend.to_host(slots) == 7).all(axis=-1)
    for slot, rows_untouched in enumerate(untouched):
        assert rows_untouched[used.get(slot, 0) :].all()
        assert not rows_untouched[: used.get(slot, 0)].any()
