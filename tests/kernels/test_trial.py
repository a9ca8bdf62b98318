"""The check and the timing of a trial, and the mistakes that it sees."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.kernels import attention, autotune, select, trial
from pagedkv.kernels.backend import Dim3
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.params import Params
from pagedkv.kernels.recipe import Recipe
from pagedkv.kernels.select import make_plan
from pagedkv.kernels.trial import Budget, difference
from pagedkv.kernels.variant import Variant
from tests.kernels.test_parts import items
from tests.kernels.timed import CONFIG, Timed, chosen, tuning_folder
from tests.mutants.kernels import mutated
from tests.ptxsim.backend import PtxsimBackend
from tests.ptxsim.fixture import interpreted_backend
from tests.slices import one_in

backend = interpreted_backend()  # skips where there is no NVRTC
folder = tuning_folder()
DIVIDED_LEN = trial.DIVIDED_LEN
LATENTS = AttentionConfig(320, 256, 1, kv_dtype="float8_e4m3", scale_mode="tensor", v_in_k=True)


def test_kernels_for_latents_are_right_in_their_trial() -> None:
    device = Timed({"decode_mla": 5.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(device, LATENTS) == "decode_mla"
    assert set(device.tried) == {"decode_simt", "decode_mla"}


@pytest.mark.slow
def test_for_many_heads_both_kernels_for_latents_are_tried() -> None:
    device = Timed({"decode_mla": 20.0, "decode_mla_wgmma": 5.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(device, AttentionConfig(320, 256, 64, v_in_k=True)) == "decode_mla_wgmma"


@pytest.mark.slow
def test_a_trial_of_prefill_has_row_tiles_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "DIVIDED_LEN", DIVIDED_LEN)
    plans, launch = [], trial.Problem.launch

    def watched(problem: trial.Problem, plan: Any) -> Callable[[Any], None]:
        plans.append(plan)
        return launch(problem, plan)

    monkeypatch.setattr(trial.Problem, "launch", watched)
    device = Timed({"prefill_mma": 20.0, "prefill_wgmma": 5.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(device, AttentionConfig(64, 64, 2), max_q_len=32) == "prefill_wgmma"
    checked = {plan.tiling.kernel: plan for plan in reversed(plans)}
    for kernel in ("prefill_mma", "prefill_wgmma"):
        assert max(item[3] for item in items(device, checked[kernel])) > 1


@pytest.mark.parametrize(
    ("kernel", "config", "max_q_len", "edit"),
    one_in(2, [
        pytest.param(
            "decode_tma", CONFIG, 1,
            ("next.buffer * kBufferBytes;\n    next.adv", "(next.buffer ^ next.parity) * kBufferBytes;\n    next.adv"),
            id="the second round of a ring",
        ),
        pytest.param(
            "prefill_wgmma", AttentionConfig(64, 64, 2), 32,
            ("kWarpTileBytes}, 1.f)", "kWarpTileBytes}, turn ? 2.f : 1.f)"),
            id="the second item",
        ),
        pytest.param(
            "decode_tma", CONFIG, 1,
            ("while (schedule.next(segment)) attend(", "while (schedule.next(segment) && blockIdx.x < 2) attend("),
            id="the third CTA",
        ),
        pytest.param(
            "prefill_wgmma", AttentionConfig(64, 64, 2), 32,
            ("if (i == tiles - 1 && s.end % BOX_TOKENS) zero_behind(v, s.end - first_key - i * TILE_TOKENS);", ""),
            id="behind the last key",
        ),
        pytest.param(
            "prefill_wgmma", AttentionConfig(64, 64, 2), 32,
            ("factor *= normaliser(sum) * v_scale;", "factor *= normaliser(sum) * v_scale * (p.lse ? 1.f : 2.f);"),
            id="without log-sum-exps",
        ),
        pytest.param(
            "decode_mma", CONFIG, 1,
            ("return l > 0.f ? __fdividef(1.f, l) : 0.f;", "return __fdividef(1.f, l);"),
            id="an empty sequence",
        ),
        pytest.param(
            "prefill_mma", AttentionConfig(64, 64, 2, mask=True), 32,
            ("largest == neg_inf() ? 0.f : largest * fold", "largest * fold"),
            id="a tile that a mask hides",
        ),
        pytest.param(
            "decode_mma", CONFIG, 1,
            ("kv.p.k_block_stride, kv.p.k_token_stride, i);", "kv.p.k_block_stride, i64(HEAD_DIM), i);"),
            id="blocks that lie token by token",
        ),
    ]),
)  # fmt: skip
def test_a_kernel_that_is_wrong_in_places_is_caught(
    kernel: str, config: AttentionConfig, max_q_len: int, edit: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "CHECKED_RUNS", trial.CHECKED_RUNS)
    monkeypatch.setattr(select, "KERNELS", [one for one in select.KERNELS if one.name in (kernel, "decode_simt")])
    device = Timed({kernel: 5.0})
    device.num_sms = 8  # as many CTAs as find work, as on a larger device
    with mutated(kernel, (edit,)), pytest.warns(RuntimeWarning, match=rf"^{kernel} is wrong on a device .*output\["):
        assert chosen(device, config, max_q_len=max_q_len) == "decode_simt"


@pytest.mark.parametrize("group_size", [1, 4, 16, 128])
def test_a_check_has_more_rows_than_a_row_tile_and_not_many_more(
    group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def small_problem(backend: Any, config: AttentionConfig, lens: list[int], q_lens: list[int], layout: str) -> Any:
        asked.append(q_lens)
        raise MemoryError("not wanted here")

    monkeypatch.setattr(trial, "small_problem", small_problem)
    config = AttentionConfig(64, 64, group_size)
    assert chosen(Timed({}), config, max_q_len=2048) == "decode_simt"
    ((*first, last),) = asked
    assert first == [1, 1, 5]
    assert 128 < last * group_size <= max(128 + group_size + 2, 5 * group_size)


def test_a_kernel_that_computes_nothing_in_one_of_the_runs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(Timed):
        def launch(self, variant: Variant, grid: Dim3, block: Dim3, params: Params, **options: Any) -> None:
            if variant.kernel.startswith("decode"):
                self.tried.append(variant.kernel)
                _, out, lse = params.arrays[:3]
                if variant.kernel != "decode_tma" or lse is not None:
                    out[...] = 1

    monkeypatch.setattr(autotune, "CHECKED_RUNS", trial.CHECKED_RUNS)
    with pytest.warns(RuntimeWarning, match="^decode_tma is wrong on a device"):
        assert chosen(Lazy({"decode_mma": 20.0, "decode_tma": 15.0})) == "decode_mma"


def test_a_timed_run_works_nothing_out_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    made: list[bool] = []

    def recipe(*arguments: Any) -> Recipe:
        made.append(device.timing)
        return Recipe(*arguments)

    monkeypatch.setattr(attention, "Recipe", recipe)
    assert chosen(device) == "decode_tma"
    assert made == [False] * 5, "of the reference, and of two plans of each candidate"


def timed_sizes(
    device: Timed, config: AttentionConfig, max_q_len: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int, int]:
    """Sequences, keys and queries of each, of the batch that would be timed."""
    asked: list[tuple[int, int, int]] = []

    def zero_problem(backend: Any, config: AttentionConfig, *sizes: int) -> Any:
        asked.append(sizes)  # type: ignore[arg-type]
        raise MemoryError("not wanted here")

    monkeypatch.setattr(trial, "zero_problem", zero_problem)
    with pytest.raises(MemoryError):
        trial.microseconds(device, config, None, max_q_len, Budget(1.0), 1.0)  # type: ignore[arg-type]
    return asked[0]


@pytest.mark.parametrize(
    ("l2", "free", "size"),
    [(4 << 20, 1 << 30, 64 << 20), (50 << 20, 70 << 30, 200 << 20), (126 << 20, 1 << 40, 504 << 20),
     (256 << 20, 1 << 40, 512 << 20), (50 << 20, 400 << 20, 100 << 20), (50 << 20, 0, 16 << 20)],
    ids=["small", "H100", "B200", "capped", "a quarter of the memory", "no memory"],
)  # fmt: skip
@pytest.mark.parametrize(("config", "max_q_len"), [(CONFIG, 1), (AttentionConfig(64, 64, 1, kv_dtype="int8"), 128)])
def test_what_is_timed_does_not_fit_into_the_l2_unless_memory_is_short(
    l2: int, free: int, size: int, config: AttentionConfig, max_q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Timed({})
    device.l2_bytes, device.free_bytes = l2, lambda: free
    num_seqs, length, q_len = timed_sizes(device, config, max_q_len, monkeypatch)
    each = trial.TIMED_HEADS * 128 * (2 if config is CONFIG else 1)
    whole = num_seqs * length * each
    assert size - trial.TIMED_KEYS * each < whole <= size or num_seqs * q_len == trial.TIMED_TOKENS


@pytest.mark.parametrize("free", [1 << 40, 0])
@pytest.mark.parametrize("max_q_len", [1, 2048])
def test_queries_that_are_timed_take_no_more_memory_than_keys(
    free: int, max_q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Timed({})
    device.free_bytes = lambda: free  # type: ignore[method-assign]
    num_seqs, _, q_len = timed_sizes(device, AttentionConfig(576, 512, 128, v_in_k=True), max_q_len, monkeypatch)
    size = num_seqs * q_len * trial.TIMED_HEADS * 128 * (576 + 512) * 2
    assert 0 < size <= trial.timed_bytes(device)
    assert max_q_len == 1 or size > trial.timed_bytes(device) / 2


def test_a_trials_blocks_lie_as_a_cache_on_a_gpu_lays_them() -> None:
    problem = trial.small_problem(PtxsimBackend((9, 0)), CONFIG, (1, 37), (1, 1))
    for array in (problem.k, problem.v):
        _, size, heads, dim = array.shape
        assert array.strides == (heads * size * dim * 2, dim * 2, size * dim * 2, 2)
    flat = trial.small_problem(PtxsimBackend((9, 0)), AttentionConfig(64, 64, 4, block_size=0), (1, 37), (1, 1))
    assert flat.k.flags.c_contiguous
    by_token = trial.small_problem(PtxsimBackend((9, 0)), CONFIG, (1, 37), (1, 1), "NHD")
    for array, same in ((by_token.k, problem.k), (by_token.v, problem.v)):
        assert array.flags.c_contiguous
        assert np.array_equal(array, same, equal_nan=True)


@pytest.mark.parametrize(
    "config",
    [
        AttentionConfig(64, 64, 4, "bfloat16", "bfloat16", window=True, soft_cap=True, alibi=True, sinks=True),
        AttentionConfig(64, 32, 2, "float16", "float8_e4m3", scale_mode="token_head", mask=True, causal=False),
        AttentionConfig(64, 64, 1, "bfloat16", "int8", scale_mode="head", block_size=0),
        AttentionConfig(64, 64, 4, causal=False, window=True, alibi=True, positions=True),
    ],
    ids=["variants", "fp8", "int8 contiguous", "a level of a cascade"],
)
def test_right_kernels_pass_whatever_the_config(config: AttentionConfig) -> None:
    device = Timed({"decode_mma": 1.0, "decode_tma": 2.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(device, config) == "decode_mma"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ("a tile is not read", "output"),
        ("a tile's V is another's", "output"),
        ("parts have equal weights", "output"),
        ("no log-sum-exp of the second part", "log-sum-exp"),
    ],
)
def test_a_mistake_in_a_long_row_is_no_rounding(mistake: str, where: str, dtype: str) -> None:
    """A row of 1 key, whose output is large, beside one of 2,200, whose output is small."""
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal(2200) * 1.2, rng.standard_normal((2200, 64))

    def row(scores: Any, values: Any) -> Any:
        shares = np.exp(scores)
        return np.append(shares @ values / shares.sum(), np.log(shares.sum()))

    short, right = row(scores[:1], 3 * values[:1]), row(scores, values)
    if mistake == "a tile is not read":
        wrong = row(np.delete(scores, slice(640, 704)), np.delete(values, slice(640, 704), axis=0))
    elif mistake == "a tile's V is another's":
        moved = values.copy()
        moved[640:704] = values[576:640]
        wrong = row(scores, moved)
    elif mistake == "parts have equal weights":
        wrong = (row(scores[:1408], values[:1408]) + row(scores[1408:], values[1408:])) / 2
        wrong[-1] = right[-1]
    else:
        wrong = np.append(right[:-1], row(scores[:2000], values[:2000])[-1])
    expected, found = (np.array([[short], [one]], np.float32) for one in (right, wrong))
    rounded = expected.copy()
    rounded[..., :-1] *= 1 + trial.TOLERANCES[dtype] / 2
    assert difference(rounded, expected, dtype) == ""
    assert difference(found, expected, dtype).startswith(f"{where}[1, 0")


@pytest.mark.parametrize(
    ("mistake", "kv_dtype", "scale_mode"),
    one_in(3, [
        pytest.param("keys", "float8_e4m3", "tensor"),
        pytest.param("keys", "float8_e5m2", "head"),
        pytest.param("keys", "int8", "token_head"),
        pytest.param("sinks", "bfloat16", "none"),
    ]),
)  # fmt: skip
def test_a_kernel_that_misses_its_keys_or_sinks_is_seen(
    mistake: str, kv_dtype: str, scale_mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AttentionConfig(64, 64, 4, "bfloat16", kv_dtype, scale_mode=scale_mode, sinks=True)  # type: ignore[arg-type]
    device, make, budget = Timed({}), trial.small_problem, Budget(1e9)
    plan = functools.partial(make_plan, device, config, kernel="decode_simt")
    (expected,) = trial.results(device, config, plan, 1, budget)

    def blind(*arguments: Any) -> trial.Problem:
        problem = make(*arguments)
        if mistake == "keys":
            problem.k[...] = 0
        else:
            problem.options.sinks[...] = -1e4
        return problem

    monkeypatch.setattr(trial, "small_problem", blind)
    (found,) = trial.results(device, config, plan, 1, budget)
    rows = np.concatenate([expected[:-1], found[-1:]])  # the long sequence alone
    assert difference(rows, expected, "bfloat16").startswith("output[3")


def test_a_difference_is_told_by_its_place_and_no_nan_passes() -> None:
    same = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)
    assert difference(same, same, "float16") == ""
    for value in (np.nan, np.inf, same[1, 2, 1] + 0.1):
        other = same.copy()
        other[1, 2, 1] = value
        assert difference(other, same, "float16").startswith("output[1, 2, 1] is ")
    empty = same.copy()
    empty[0, 0, 3] = -np.inf
    assert difference(empty, empty, "float16") == ""
    assert difference(same, empty, "float16").startswith("log-sum-exp[0, 0]")
