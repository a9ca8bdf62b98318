"""Kernels are checked beside decode_simt and timed when a device first uses them.

The interpreter runs the checks; the times are made up.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache import gpu_kv
from pagedkv.errors import InvalidArgument
from pagedkv.kernels import attention, autotune, driver, select, trial, tuning
from pagedkv.kernels.backend import Dim3
from pagedkv.kernels.captures import CaptureBroken
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.params import Params
from pagedkv.kernels.recipe import Recipe
from pagedkv.kernels.select import choose, make_plan
from pagedkv.kernels.trial import Budget, difference
from pagedkv.kernels.tuning import Verdict, Verdicts
from pagedkv.kernels.variant import Variant
from pagedkv.tools import doctor
from tests.kernels.test_parts import items
from tests.mutants.kernels import mutated
from tests.ptxsim.backend import PtxsimBackend
from tests.ptxsim.fixture import interpreted_backend
from tests.slices import one_in

CONFIG = AttentionConfig(64, 64, 4)
COMPILING_S = 1000.0
DIVIDED_LEN = trial.DIVIDED_LEN
SIZES = {"num_kv_heads": 1, "max_sequences": 1}
backend = interpreted_backend()  # skips where there is no NVRTC


class Timed(PtxsimBackend):
    """The interpreter as a device with a name and times by kernel.

    Attributes
    ----------
    tried : kernels in the order of their launches, attention kernels alone.
    wrong : kernels whose output is spoilt after a launch; broken: those that do not launch.
    computes : whether launches run; else all outputs are 0.
    timing : whether a time is being taken.
    clock : seconds of a launch (`each_s`), of compiling, and of the timings, which take all that they are given.
    """

    device_name, driver, compiler, l2_bytes = "a device", "12.8", "12.9", 4 << 20

    def __init__(self, us: dict[str, float], wrong: tuple[str, ...] = (), broken: tuple[str, ...] = ()) -> None:
        super().__init__((9, 0), races=False)
        self.us, self.wrong, self.broken = us, wrong, broken
        self.tried: list[str] = []
        self.computes = True
        self.clock, self.each_s, self.given_s = 0.0, 0.0, []
        self.error: Exception = RuntimeError("an illegal instruction")
        self.timing = False

    def free_bytes(self) -> int:
        return 1 << 30

    def launch(
        self,
        variant: Variant,
        grid: Dim3,
        block: Dim3,
        params: Params,
        *,
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        if not variant.kernel.startswith(("decode", "prefill_m", "prefill_w")):
            if self.computes:
                super().launch(variant, grid, block, params, shared_bytes=shared_bytes)
            return
        self.tried.append(variant.kernel)
        self.clock += self.each_s
        if variant.kernel in self.broken:
            raise self.error
        if self.timing:
            return
        if self.computes:
            super().launch(variant, grid, block, params, shared_bytes=shared_bytes)
        if variant.kernel in self.wrong:
            params.arrays[1][-1, -1, -1] += 1  # the output, in one place

    def prepare(self, variants: Iterable[Variant], threads: int = 1) -> None:
        self.clock += COMPILING_S

    def time_us(self, launch: Callable[[Any], None], runs: int, most_s: float) -> float:
        self.given_s.append(most_s)
        self.clock += most_s
        self.timing = True
        launch(5)
        launch(5)
        self.timing = False
        return self.us[self.tried[-1]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Any) -> Path:
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("PAGEDKV_AUTOTUNE", raising=False)
    monkeypatch.setattr(autotune, "Budget", lambda seconds: Budget(seconds, lambda: 0.0))  # no test times anything
    monkeypatch.setattr(trial, "DIVIDED_LEN", 300)  # which the interpreter computes in a second
    monkeypatch.setattr(autotune, "CHECKED_CTAS", [trial.FEW_CTAS])  # of the two runs the one that finds more
    monkeypatch.setattr(autotune, "_put_off", {})
    monkeypatch.setattr(autotune, "_settled_at", 0.0)
    again(monkeypatch)
    return tmp_path


def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process: verdicts come from the file."""
    monkeypatch.setattr(autotune, "_verdicts", {})


def chosen(device: Any, config: AttentionConfig = CONFIG, **options: Any) -> str:
    return str(make_plan(device, config, **{**SIZES, **options}).tiling.kernel)


@pytest.mark.parametrize(
    ("us", "kernel"),
    [
        ({"decode_mma": 20.0, "decode_tma": 15.0}, "decode_tma"),
        ({"decode_mma": 20.0, "decode_tma": 19.9}, "decode_mma"),
        ({"decode_mma": 20.0, "decode_tma": 25.0}, "decode_mma"),
    ],
    ids=["faster", "as fast", "slower"],
)
def test_the_kernel_that_is_clearly_faster_is_taken_and_tried_once(
    us: dict[str, float], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Timed(us)
    assert chosen(device) == kernel
    assert set(device.tried) == {"decode_simt", "decode_mma", "decode_tma"}
    device.tried.clear()
    assert chosen(device) == kernel
    again(monkeypatch)
    assert chosen(device) == kernel
    assert device.tried == []


@pytest.mark.parametrize(
    ("wrong", "broken", "kernel"),
    [
        (("decode_tma",), (), "decode_mma"),
        ((), ("decode_tma",), "decode_mma"),
        (("decode_mma",), ("decode_tma",), "decode_simt"),
    ],
    ids=["wrong", "does not run", "none is right"],
)
def test_a_kernel_that_is_wrong_here_is_demoted_with_a_warning(
    wrong: tuple[str, ...], broken: tuple[str, ...], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 5.0}, wrong, broken)
    with pytest.warns(RuntimeWarning) as told:
        assert chosen(device) == kernel
    assert {str(one.message).partition(" ")[0] for one in told} == {*wrong, *broken}
    assert all(f"{kernel} is taken" in str(one.message) for one in told)
    again(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(Timed({})) == kernel
    (verdict,) = autotune.verdicts_of(device).all().values()
    assert set(verdict.wrong) == {*wrong, *broken}


def named(name: str, status: int) -> Exception:
    """As CuPy raises it, which need not be here."""
    error: Any = type(name, (RuntimeError,), {})("of the driver")
    error.status = status
    return error  # type: ignore[no-any-return]


@pytest.fixture
def failing() -> Timed:
    """A device on which a kernel fails; it computes nothing."""
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    return device


@pytest.mark.parametrize("kernel", ["decode_simt", "decode_tma"])
@pytest.mark.parametrize(
    "error",
    [MemoryError("no room"), named("CUDADriverError", 2), named("CUDARuntimeError", 2), named("CUDARuntimeError", 900),
     OSError(28, "No space left on device")],
    ids=["memory", "driver", "runtime", "capture", "files"],
)  # fmt: skip
def test_a_trial_that_fails_for_want_of_something_is_put_off(
    error: Exception, kernel: str, failing: Timed, folder: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    failing.broken, failing.error = (kernel,), error
    now = [0.0]
    monkeypatch.setattr(autotune, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: 0.0))
    assert chosen(failing) == "decode_simt"
    assert "kernels cannot be tried now for decode 64/64" in caplog.text
    assert list(folder.glob("tuning-*.json")) == []
    failing.broken = ()
    failing.tried.clear()
    assert (chosen(failing), failing.tried, autotune.is_due(0.0)) == ("decode_simt", [], False)
    now[0] = autotune.REST_S
    assert autotune.is_due(0.0)
    assert not autotune.is_due(now[0]), "to one who asked since"
    assert chosen(failing) == "decode_tma"
    assert autotune.is_due(now[0] - 1), "as others of this config take the verdict now"
    assert not autotune.is_due(now[0])


def test_a_trial_that_another_process_made_is_not_due(failing: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    failing.broken, failing.error = ("decode_tma",), MemoryError("no room")
    monkeypatch.setattr(autotune, "REST_S", 0.0)
    assert chosen(failing) == "decode_simt"
    assert autotune.is_due(0.0)
    ((verdicts, config),) = autotune._put_off
    verdicts.put(config, Verdict("decode_mma", {"decode_mma": 9.0}))
    assert chosen(failing) == "decode_mma"
    assert autotune._put_off == {}


@pytest.mark.parametrize("error", [named("CUDADriverError", 715), named("Error", 2)], ids=["instruction", "no CUDA"])
def test_a_kernel_that_cannot_run_is_demoted_for_good(error: Exception, failing: Timed, folder: Path) -> None:
    failing.broken, failing.error = ("decode_tma",), error
    with pytest.warns(RuntimeWarning, match="decode_tma is wrong on a device"):
        assert chosen(failing) == "decode_mma"
    (verdict,) = Verdicts(folder, "a device", "12.8", "12.9").all().values()
    assert set(verdict.wrong) == {"decode_tma"}


def test_a_kernel_that_breaks_the_device_is_not_the_fault_of_the_next(failing: Timed, folder: Path) -> None:
    failing.broken, failing.error = ("decode_mma", "decode_tma"), named("CUDADriverError", 700)

    def synchronize() -> None:
        if "decode_mma" in failing.tried:
            raise failing.error

    failing.synchronize = synchronize  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="decode_mma is wrong on a device"):
        assert chosen(failing) == "decode_simt"
    (verdict,) = Verdicts(folder, "a device", "12.8", "12.9").all().values()
    assert (set(verdict.wrong), verdict.late) == ({"decode_mma"}, ("decode_tma",))


def test_a_device_on_which_decode_simt_fails_is_named(failing: Timed) -> None:
    failing.broken, failing.error = ("decode_simt",), named("CUDADriverError", 715)
    with pytest.raises(
        pk.errors.KernelsUnavailable,
        match=r"decode_simt, .* not run on a device .*CUDADriverError: of the driver\. See",
    ):
        chosen(failing)
    failing.error = pk.errors.UnsupportedVariant("of our own")
    with pytest.raises(pk.errors.UnsupportedVariant, match="of our own"):
        chosen(failing)


@pytest.fixture
def on_the_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Timed], Timed]:
    """Has a device's own clock count the seconds of trials."""

    def watched(device: Timed) -> Timed:
        again(monkeypatch)
        monkeypatch.setattr(autotune, "Budget", lambda seconds: Budget(seconds, lambda: device.clock))
        device.computes = False
        return device

    return watched


def test_a_trial_takes_its_seconds_and_compiling_does_not_count(on_the_clock: Callable[[Timed], Timed]) -> None:
    device = on_the_clock(Timed({"decode_mma": 20.0, "decode_tma": 15.0}))
    device.each_s = 0.1
    assert chosen(device) == "decode_tma"
    compiled = round(device.clock // COMPILING_S)
    assert compiled == 5, "the reference, and two plans of each candidate"
    counted = device.clock - compiled * COMPILING_S
    assert counted <= autotune.TRIAL_S + 2 * device.each_s + 1e-9, "and two timed runs that were begun in time"
    first, second = device.given_s
    assert first == pytest.approx((autotune.TRIAL_S - 0.2) / 2), "half of the time left, as two are to be timed"
    assert second == pytest.approx(autotune.TRIAL_S - 0.2 - first - 3 * 0.1)


def test_a_kernel_that_there_is_no_time_for_is_tried_by_the_next_process(
    on_the_clock: Callable[[Timed], Timed], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    us = {"decode_mma": 20.0, "decode_tma": 15.0}
    slow = on_the_clock(Timed(us))
    slow.each_s = 0.6 * autotune.TRIAL_S
    assert chosen(slow) == "decode_mma"
    assert "[decode_mma, decode_tma]: decode_tma; the next process does it" in caplog.text
    (check,) = doctor.verdict_checks(slow, False)
    assert check.detail.endswith("decode_mma (decode_mma 20.0 us); decode_tma was not tried yet")
    slow.tried.clear()
    assert (chosen(slow), slow.tried) == ("decode_mma", []), "not again by this process"
    device = on_the_clock(Timed(us))
    assert chosen(device) == "decode_tma"
    assert set(device.tried) == {"decode_simt", "decode_tma"}
    another = on_the_clock(Timed(us))
    assert (chosen(another), another.tried) == ("decode_tma", [])


def test_without_time_for_any_kernel_decode_simt_is_taken_by_this_process(
    on_the_clock: Callable[[Timed], Timed],
) -> None:
    slow = on_the_clock(Timed({}))
    slow.each_s = autotune.TRIAL_S
    assert chosen(slow) == "decode_simt"
    assert slow.tried == ["decode_simt"]
    assert chosen(on_the_clock(Timed({"decode_mma": 20.0, "decode_tma": 15.0}))) == "decode_tma"


def test_a_kernel_found_wrong_earlier_is_told_once(
    on_the_clock: Callable[[Timed], Timed], recwarn: pytest.WarningsRecorder
) -> None:
    slow = on_the_clock(Timed({"decode_tma": 15.0}, wrong=("decode_mma",)))
    slow.each_s = 0.6 * autotune.TRIAL_S
    assert chosen(slow) == "decode_simt"
    assert chosen(on_the_clock(Timed({"decode_tma": 15.0}))) == "decode_tma"
    assert [str(one.message).partition(" ")[0] for one in recwarn] == ["decode_mma"]


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


def test_prefill_has_candidates_of_its_own() -> None:
    device = Timed({"prefill_mma": 20.0, "prefill_wgmma": 5.0})
    assert chosen(device, AttentionConfig(64, 64, 2), max_q_len=32) == "prefill_wgmma"
    assert set(device.tried) == {"decode_simt", "prefill_mma", "prefill_wgmma"}


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
    ]),
)  # fmt: skip
def test_a_kernel_that_is_wrong_in_places_is_caught(
    kernel: str, config: AttentionConfig, max_q_len: int, edit: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "CHECKED_CTAS", trial.CHECKED_CTAS)
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

    def small_problem(backend: Any, config: AttentionConfig, lens: list[int], q_lens: list[int]) -> Any:
        asked.append(q_lens)
        raise MemoryError("not wanted here")

    monkeypatch.setattr(trial, "small_problem", small_problem)
    config = AttentionConfig(64, 64, group_size)
    assert chosen(Timed({}), config, max_q_len=2048) == "decode_simt"
    ((first, second, last),) = asked
    assert (first, second) == (1, 5)
    assert 128 < last * group_size <= max(128 + group_size + 2, 5 * group_size)


def test_a_kernel_that_computes_once_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Once(Timed):
        def launch(self, variant: Variant, grid: Dim3, block: Dim3, params: Params, **options: Any) -> None:
            if variant.kernel.startswith("decode"):
                self.tried.append(variant.kernel)
                if variant.kernel != "decode_tma" or self.tried.count("decode_tma") == 1:
                    params.arrays[1][...] = 1  # the output

    monkeypatch.setattr(autotune, "CHECKED_CTAS", trial.CHECKED_CTAS)
    with pytest.warns(RuntimeWarning, match="^decode_tma is wrong on a device"):
        assert chosen(Once({"decode_mma": 20.0, "decode_tma": 15.0})) == "decode_mma"


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


def test_nothing_is_tried_for_a_named_kernel_or_schedule_or_when_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Timed({})
    assert chosen(device, kernel="decode_tma") == "decode_tma"
    assert chosen(device, schedule="whole") == "decode_mma"
    monkeypatch.setenv("PAGEDKV_AUTOTUNE", "0")
    assert chosen(device) == "decode_mma"
    assert device.tried == []


def test_a_kernel_found_wrong_is_not_taken_where_none_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Timed({"decode_tma": 15.0}, wrong=("decode_mma",))
    with pytest.warns(RuntimeWarning, match="decode_mma"):
        assert chosen(device) == "decode_tma"
    assert chosen(device, schedule="whole") == "decode_tma"
    monkeypatch.setenv("PAGEDKV_AUTOTUNE", "off")
    assert chosen(device) == "decode_tma"
    assert chosen(device, kernel="decode_mma") == "decode_mma", "by name the caller takes it"


def test_a_schedule_whose_kernels_were_found_wrong_is_refused_with_the_reason() -> None:
    device = Timed({}, broken=("prefill_mma", "prefill_wgmma"))
    device.computes = False
    with pytest.warns(RuntimeWarning):
        assert chosen(device, max_q_len=64) == "decode_simt"
    assert chosen(device, max_q_len=64, schedule="whole") == "decode_simt"
    with pytest.raises(InvalidArgument, match=r"decode_simt takes .* got 'listed'; .* found wrong here"):
        chosen(device, max_q_len=64, schedule="listed")
    assert chosen(device, max_q_len=64, schedule="listed", kernel="prefill_mma") == "prefill_mma"


def test_autotune_is_on_or_off_by_words_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"": True, "1": True, "TRUE": True, "0": False, "off": False, "False": False, " no ": False}
    for word, on in words.items():
        monkeypatch.setenv("PAGEDKV_AUTOTUNE", word)
        assert autotune.is_on(Timed({})) is on
    monkeypatch.setenv("PAGEDKV_AUTOTUNE", "nope")
    with pytest.raises(pk.errors.InvalidArgument, match="PAGEDKV_AUTOTUNE='nope'"):
        chosen(Timed({}))


def test_a_device_without_tensor_maps_tries_no_kernel_that_needs_them() -> None:
    device: Any = Timed({"decode_mma": 20.0, "decode_tma": 1.0})
    device.has_tensor_maps = False
    assert chosen(device) == "decode_mma"
    assert "decode_tma" not in device.tried


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: "\x00" + text,
        lambda text: text.replace('"us"', '"ms"'),
        lambda text: text.replace('"kernel": "decode_tma"', '"kernel": 3'),
        lambda text: text.replace('"kernel": "decode_tma"', '"kernel": "magic"'),
        lambda text: text.replace('"kernel": "decode_tma"', '"kernel": "decode_mla"'),
        lambda text: text.replace('"decode_tma"', '"prefill_wgmma"'),
        lambda text: text.replace('"wrong": {}', '"wrong": {"decode_tma": "spoilt"}'),
        lambda text: text.replace("15.0", "NaN"),
        lambda text: text.replace("15.0", "-1"),
        lambda text: text.replace("15.0", "1" + 400 * "0"),
    ],
    ids=[
        "cut", "empty", "a list", "nested", "a byte", "a field", "a type", "no kernel", "not tried", "no candidate",
        "taken and wrong", "NaN", "negative", "no float",
    ],
)  # fmt: skip
def test_a_damaged_file_is_made_again(
    damage: Callable[[str], str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    chosen(device)
    (path,) = folder.glob("tuning-*.json")
    whole = path.read_text()
    assert damage(whole) != whole
    path.write_text(damage(whole))
    again(monkeypatch)
    device.tried.clear()
    assert chosen(device) == "decode_tma"
    assert device.tried
    assert caplog.text.count("are damaged (") == 1
    assert path.read_text() == whole


@pytest.mark.parametrize(
    ("field", "value"),
    one_in(3, map(pytest.param, ("driver", "compiler", "sources", "version"), ("13.0", "13.5", "0" * 32, 0))),
)
def test_a_file_of_another_driver_or_source_is_made_again(
    field: str, value: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    chosen(device)
    (path,) = folder.glob("tuning-*.json")
    whole = path.read_text()
    path.write_text(json.dumps({**json.loads(whole), field: value}))
    again(monkeypatch)
    device.us = {"decode_mma": 10.0, "decode_tma": 15.0}
    assert chosen(device) == "decode_mma"
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert f"are of another {field}: they are made again" in told[0]
    assert json.loads(path.read_text())[field] == json.loads(whole)[field]


def test_a_verdict_is_of_one_compiler_and_of_what_chooses_tilings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    chosen(device)
    device.tried.clear()
    device.compiler = "13.1"
    chosen(device)
    assert device.tried
    kept = [json.loads(path.read_bytes())["compiler"] for path in folder.glob("tuning-*.json")]
    assert sorted(kept) == ["12.9", "13.1"], "two environments may share a home"
    before = tuning.sources_digest()
    copy = tmp_path_factory.mktemp("kernels")
    for module in Path(tuning.__file__).parent.glob("*.py"):
        (copy / module.name).write_bytes(module.read_bytes())
    monkeypatch.setattr(tuning, "__file__", str(copy / "tuning.py"))
    (copy / ".#autotune.py").symlink_to("user@machine")  # an editor's lock
    assert tuning.sources_digest() == before
    with (copy / "decode_tma.py").open("a") as file:
        file.write("MAX_STAGES = 3\n")
    assert tuning.sources_digest() != before


def test_the_log_says_what_to_do_where_a_kernel_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    class Hangs(Timed):
        def launch(self, variant: Variant, *arguments: Any, **options: Any) -> None:
            super().launch(variant, *arguments, **options)
            if variant.kernel == "decode_tma":
                assert told.wait(60.0)

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "decode_tma has not come back" in record.getMessage():
                told.set()

    monkeypatch.setattr(autotune, "HANGS_S", 0.01)
    logger, handler = logging.getLogger("pagedkv.kernels"), Telling()
    logger.addHandler(handler)
    try:
        device = Hangs({"decode_mma": 20.0, "decode_tma": 15.0})
        device.computes = False
        assert chosen(device) == "decode_tma"
    finally:
        logger.removeHandler(handler)
    assert "set PAGEDKV_AUTOTUNE=0, or name another kernel=" in caplog.text
    monkeypatch.setattr(autotune, "HANGS_S", 1e6)
    with autotune._watched("decode_mma"):
        pass
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)


def test_without_a_thread_to_watch_it_a_kernel_is_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", start)
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    assert chosen(device) == "decode_tma"
    (verdict,) = autotune.verdicts_of(device).all().values()
    assert not verdict.wrong


@pytest.mark.parametrize("kernel", ["decode_simt", "decode_mma", "decode_tma"])
@pytest.mark.parametrize("kind", [RuntimeError, TimeoutError])
def test_an_error_of_a_signals_handler_comes_out_of_a_trial(kernel: str, kind: type[Exception], folder: Path) -> None:
    def handler(number: int, frame: Any) -> None:
        raise kind("deadline")

    class Interrupted(Timed):
        def launch(self, variant: Variant, *arguments: Any, **options: Any) -> None:
            super().launch(variant, *arguments, **options)
            if variant.kernel == kernel:
                signal.raise_signal(signal.SIGUSR1)

    device = Interrupted({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(kind, match="deadline"):
            chosen(device)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (list(folder.iterdir()), autotune._put_off) == ([], {})


ONE, TWO, THREE = "one [decode_mma, decode_tma]", "two [decode_mma]", "three [decode_mma]"
RIGHT = Verdict("decode_mma", {"decode_mma": 9.0})


def test_verdicts_of_two_processes_are_both_kept_and_the_newer_one_of_a_config(folder: Path) -> None:
    first, second = (Verdicts(folder, "a device", "12.8", "12.9") for _ in range(2))
    first.put(ONE, Verdict("decode_simt", late=("decode_mma", "decode_tma")))
    wrong = Verdict("decode_mma", {"decode_mma": 9.0}, {"decode_tma": "output[0] is nan"})
    second.put(ONE, wrong)
    first.put(TWO, RIGHT)
    assert Verdicts(folder, "a device", "12.8", "12.9").all() == {ONE: wrong, TWO: RIGHT}
    assert first.get(ONE) == wrong


def test_no_process_takes_back_what_another_found_wrong(folder: Path) -> None:
    first, second = (Verdicts(folder, "a device", "12.8", "12.9") for _ in range(2))
    wrong = Verdict("decode_simt", {}, {"decode_mma": "output[0] is nan"})
    first.put(TWO, wrong)
    second.put(TWO, RIGHT)
    first.put(THREE, RIGHT)
    assert first.get(TWO) == second.get(TWO) == Verdicts(folder, "a device", "12.8", "12.9").get(TWO) == wrong


def test_a_capture_that_breaks_a_trial_demotes_no_kernel() -> None:
    device = Timed({"decode_mma": 1.0, "decode_tma": 2.0}, broken=("decode_mma",))
    device.error = CaptureBroken("a graph is being captured on another stream")
    assert chosen(device) == "decode_simt"
    assert not autotune.verdicts_of(device).all(), "it is tried again"


def test_a_verdict_that_was_forgotten_does_not_come_back(folder: Path) -> None:
    first, second = (Verdicts(folder, "a device", "12.8", "12.9") for _ in range(2))
    first.put(ONE, Verdict("decode_mma", {"decode_mma": 9.0}, {"decode_tma": "output[0] is nan"}))
    second.forget()
    second.put(TWO, RIGHT)
    first.put(THREE, RIGHT)
    assert Verdicts(folder, "a device", "12.8", "12.9").all() == {TWO: RIGHT, THREE: RIGHT}


def test_a_file_of_verdicts_is_whole_at_any_moment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = Verdicts(folder, "a device", "12.8", "12.9")
    verdicts.put(ONE, RIGHT)
    assert verdicts.path is not None
    whole, seen = verdicts.path.read_bytes(), []
    replace = os.replace

    def replacing(source: str, target: Path) -> None:
        seen.append(target.read_bytes())
        replace(source, target)

    monkeypatch.setattr(os, "replace", replacing)
    verdicts.put(TWO, RIGHT)
    assert seen == [whole]
    assert set(json.loads(verdicts.path.read_bytes())["verdicts"]) == {ONE, TWO}
    assert [path.name for path in folder.iterdir()] == [verdicts.path.name]


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
    (expected,) = trial.results(device, config, plan, 1, budget, [trial.ALL_CTAS])

    def blind(*arguments: Any) -> trial.Problem:
        problem = make(*arguments)
        if mistake == "keys":
            problem.k[...] = 0
        else:
            problem.options.sinks[...] = -1e4
        return problem

    monkeypatch.setattr(trial, "small_problem", blind)
    (found,) = trial.results(device, config, plan, 1, budget, [trial.ALL_CTAS])
    rows = np.concatenate([expected[:-1], found[-1:]])  # the long sequence alone
    assert difference(rows, expected, "bfloat16").startswith("output[2")


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


def test_the_doctor_shows_verdicts_and_tries_again_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0, "prefill_mma": 9.0, "prefill_wgmma": 3.0}, ("decode_tma",))
    device.computes = False
    monkeypatch.setattr(doctor, "TUNED_AGAIN", CONFIG)
    monkeypatch.setattr(doctor, "TUNED_AGAIN_Q_LEN", 32)
    (none,) = doctor.verdict_checks(device, False)
    assert (none.status, none.detail[:8]) == ("ok", "none yet")
    found = list(doctor.verdict_checks(device, True))
    assert [check.status for check in found] == ["warning", "ok"]
    assert "decode_mma (decode_mma 20.0 us); decode_tma is wrong: output[" in found[0].detail
    assert "prefill_wgmma (prefill_mma 9.0 us, prefill_wgmma 3.0 us)" in found[1].detail
    device.wrong = ()
    assert [check.status for check in doctor.verdict_checks(device, False)] == ["warning", "ok"]
    assert [check.status for check in doctor.verdict_checks(device, True)] == ["ok", "ok"]
    monkeypatch.setenv("PAGEDKV_AUTOTUNE", "0")
    off, *kept = doctor.verdict_checks(device, True)
    assert (off.status, off.detail[:17]) == ("failed", "PAGEDKV_AUTOTUNE=")
    assert kept == list(doctor.verdict_checks(device, False))[1:]
    assert [check.status for check in doctor.verdict_checks(device, False)] == ["skipped", "ok", "ok"]


def test_the_doctor_names_a_file_that_cannot_be_forgotten(folder: Path) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    chosen(device)
    path = autotune.verdicts_of(device).path
    assert path is not None
    path.unlink()
    path.mkdir()
    device.tried.clear()
    (check,) = doctor.verdict_checks(device, True)
    assert (check.status, device.tried) == ("failed", [])
    assert f"{path} cannot be removed (" in check.detail
    assert "set PAGEDKV_CACHE_DIR; nothing was tried again" in check.detail
    assert len(autotune.verdicts_of(device).all()) == 1


def test_a_cache_takes_the_chosen_kernel_or_the_named_one() -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    spec = pk.KVSpec(1, 1, 64, "float16", 16)
    kv, q = np.ones((1, 1, 64), np.float16), np.ones((1, 4, 64), np.float16)
    with (
        pk.KVCache(spec, pk.Blocks(4), backend=device) as cache, cache.sequence([1]) as seq, cache.step([seq]) as step
    ):  # fmt: skip
        step.write(0, kv, kv)
        for asked, taken in (("auto", "decode_tma"), ("decode_mma", "decode_mma"), ("decode_simt", "decode_simt")):
            assert (np.asarray(step.attend(0, q, kernel=asked)) == 1).all()
            assert device.tried[-1] == taken
        with pytest.raises(pk.errors.UnsupportedVariant, match="kernel 'magic': there are 'auto'"):
            step.attend(0, q, kernel="magic")
        with pytest.raises(pk.errors.WrongType, match="kernel must be a name, not int"):
            step.attend(0, q, kernel=3)  # type: ignore[arg-type]
    with pk.KVCache(spec, pk.Blocks(4)) as cache, cache.sequence([1]) as seq, cache.step([seq]) as step:
        step.write(0, kv, kv)
        with pytest.raises(pk.errors.UnsupportedVariant, match="this cache is in CPU memory"):
            step.attend(0, q, kernel="decode_mma")


def test_a_cache_takes_the_best_kernel_once_there_is_memory_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0}, broken=("decode_mma",))
    device.error, device.computes = MemoryError("no room"), False
    kv, q = np.ones((1, 1, 64), np.float16), np.ones((1, 4, 64), np.float16)
    with pk.KVCache(pk.KVSpec(1, 1, 64, "float16", 16), pk.Blocks(4), backend=device) as cache:

        def taken() -> str:
            with cache.sequence([1]) as seq, cache.step([seq]) as step:
                step.write(0, kv, kv)
                step.attend(0, q)
            return device.tried[-1]

        assert taken() == "decode_simt"
        device.broken = ()
        assert taken() == "decode_simt"
        monkeypatch.setattr(gpu_kv, "is_due", lambda asked_at: True)
        monkeypatch.setattr(autotune, "_put_off", {})
        device.is_capturing = lambda stream=None: True  # type: ignore[method-assign]
        assert taken() == "decode_simt"
        del device.is_capturing
        assert taken() == "decode_tma"
        device.tried.clear()
        assert (taken(), device.tried) == ("decode_tma", ["decode_tma"])


def test_a_trial_put_off_that_no_call_asks_for_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Timed({}, broken=("decode_mma",))
    device.error, device.computes = MemoryError("no room"), False
    asked: list[AttentionConfig] = []

    def kernel_on(backend: object, config: AttentionConfig, max_q_len: int) -> SimpleNamespace:
        asked.append(config)
        return SimpleNamespace(name="decode_simt")

    with pk.KVCache(pk.KVSpec(1, 1, 64, "float16", 16), pk.Blocks(4), backend=device) as cache:

        def attend() -> None:
            with cache.sequence([1]) as seq, cache.step([seq]) as step:
                step.write(0, np.ones((1, 1, 64), np.float16), np.ones((1, 1, 64), np.float16))
                step.attend(0, np.ones((1, 4, 64), np.float16))

        attend()
        monkeypatch.setattr(gpu_kv, "kernel_on", kernel_on)
        for number in (1, 2):
            monkeypatch.setattr(autotune, "_put_off", {(None, "unused"): time.monotonic()})
            for _ in range(3):
                attend()
            assert len(asked) == number


def test_a_driver_older_than_tensor_maps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = object()
    monkeypatch.setattr(driver, "load_driver", lambda: old)
    monkeypatch.setattr(driver, "driver_version", lambda: (11, 8))
    assert not driver.has_tensor_maps()
    with pytest.raises(
        pk.errors.KernelsUnavailable, match=r"is for CUDA 11\.8, and kernels with TMA need one for CUDA 12\.0"
    ):
        driver.tensor_map_encoder(old)
    config = AttentionConfig(64, 64, 4)
    with pytest.raises(pk.errors.UnsupportedVariant, match="decode_simt"):
        choose(AttentionConfig(1000, 64, 4), (9, 0), has_tensor_maps=False)
    only_tma = [kernel for kernel in select.KERNELS if kernel.name in ("decode_tma", "decode_simt")]
    monkeypatch.setattr(select, "KERNELS", only_tma)
    assert choose(config, (9, 0)).name == "decode_tma"
    assert choose(config, (9, 0), has_tensor_maps=False).name == "decode_simt"
    assert choose(config, (9, 0), "decode_tma", has_tensor_maps=False).name == "decode_tma"
