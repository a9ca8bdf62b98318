"""Kernels are checked beside decode_simt and timed when a device first uses them.

The interpreter runs the checks; the times are made up.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache import gpu_kv
from pagedkv.errors import InvalidArgument
from pagedkv.kernels import autotune, driver, select
from pagedkv.kernels.captures import CaptureBroken
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.select import choose
from pagedkv.kernels.shipped import FLAGSHIP
from pagedkv.kernels.trial import Budget
from pagedkv.kernels.tuning import Verdict, Verdicts
from pagedkv.kernels.variant import Variant
from pagedkv.tools import doctor
from tests.kernels.timed import COMPILING_S, CONFIG, Timed, again, chosen, tuning_folder
from tests.ptxsim.fixture import interpreted_backend

backend = interpreted_backend()  # skips where there is no NVRTC
folder = tuning_folder()


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


@pytest.mark.parametrize("each_s", [0.3, 0.5, 0.74])
def test_a_trial_of_slow_launches_ends_with_the_kernel_under_way(
    on_the_clock: Callable[[Timed], Timed], each_s: float
) -> None:
    """Beyond the limit lie at most the rest of its check and two timed runs."""
    device = on_the_clock(Timed({"decode_mma": 20.0, "decode_tma": 15.0}))
    device.each_s = each_s
    assert chosen(device) == "decode_mma"
    assert "decode_tma" not in device.tried
    counted = device.clock - round(device.clock // COMPILING_S) * COMPILING_S
    assert counted <= autotune.TRIAL_S + 3 * each_s + 1e-9


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


def test_prefill_has_candidates_of_its_own() -> None:
    device = Timed({"prefill_mma": 20.0, "prefill_wgmma": 5.0})
    assert chosen(device, AttentionConfig(64, 64, 2), max_q_len=32) == "prefill_wgmma"
    assert set(device.tried) == {"decode_simt", "prefill_mma", "prefill_wgmma"}


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


def test_the_log_says_what_to_do_where_a_kernel_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    told, said = threading.Event(), []

    class Hangs(Timed):
        def launch(self, variant: Variant, *arguments: Any, **options: Any) -> None:
            super().launch(variant, *arguments, **options)
            if variant.kernel == "decode_tma":
                assert told.wait(60.0)

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if "decode_tma has not come back" in said[-1]:
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
    assert "name kernel='decode_simt' (PAGEDKV_AUTOTUNE=0 may take" in "".join(said)
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


def test_a_capture_that_breaks_a_trial_demotes_no_kernel() -> None:
    device = Timed({"decode_mma": 1.0, "decode_tma": 2.0}, broken=("decode_mma",))
    device.error = CaptureBroken("a graph is being captured on another stream")
    assert chosen(device) == "decode_simt"
    assert not autotune.verdicts_of(device).all(), "it is tried again"


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


def test_retune_tries_the_most_common_config() -> None:
    assert doctor.TUNED_AGAIN == FLAGSHIP
    assert FLAGSHIP.q_dtype == "bfloat16"


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


def test_few_queries_after_a_prefill_are_decoded() -> None:
    device = Timed(dict.fromkeys(("decode_mma", "decode_tma", "prefill_mma", "prefill_wgmma"), 10.0))
    device.computes = False
    taken = []
    with pk.KVCache(pk.KVSpec(1, 1, 64, "float16", 16), pk.Blocks(64), backend=device) as cache:
        for first, count in ((0, 200), (1000, 4), (2000, 5), (3000, 1)):
            kv, q = np.ones((count, 1, 64), np.float16), np.ones((count, 4, 64), np.float16)
            with cache.sequence(range(first, first + count)) as seq, cache.step([seq]) as step:
                step.write(0, kv, kv)
                step.attend(0, q)
            taken.append(device.tried[-1])
    assert taken == ["prefill_mma", "decode_mma", "prefill_mma", "decode_mma"]


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
