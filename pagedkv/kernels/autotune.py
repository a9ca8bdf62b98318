"""Picks the fastest kernel of those that are right on this device.

Candidates are checked beside decode_simt and timed (trial.py) when a config is first used on a device; the verdict is
kept (tuning.py). A kernel whose results differ is demoted with a warning. ``PAGEDKV_AUTOTUNE=0`` turns this off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, KernelsUnavailable, PagedKVError
from pagedkv.kernels.captures import CaptureBroken
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.jit import default_folder
from pagedkv.kernels.trial import (
    CHECKED_RUNS,
    Budget,
    Make,
    TimedBackend,
    difference,
    is_timed,
    microseconds,
    results,
)
from pagedkv.kernels.tuning import REFERENCE, Verdict, Verdicts, fastest
from pagedkv.observe.callbacks import Log, came_from_signal

log = Log(logging.getLogger("pagedkv.kernels"))
MOST_ROWS = 128  # of a CTA
TRIAL_S = 1.5  # of a trial, without compiling and loading; the kernel under way when they are over is finished
HANGS_S = 60.0  # of one kernel's compiling and trial, until the log says that it may hang
REST_S = 60.0  # until a trial that was put off is begun again
ON, OFF = ("", "1", "on", "true", "yes"), ("0", "off", "false", "no")  # of PAGEDKV_AUTOTUNE
PASSING = {2, 46, 304, *range(900, 909)}  # CUDA: no memory, a busy device, the system, a capture

_lock = threading.RLock()  # trials use the device alone
_verdicts: dict[tuple[str, ...], Verdicts] = {}
_put_off: dict[tuple[Verdicts, str], float] = {}  # when trials that could not be made are begun again
_settled_at = 0.0  # when the last of them was made


def is_on(backend: Any) -> bool:
    """Whether kernels are tried on this backend.

    Raises
    ------
    InvalidArgument
        ``PAGEDKV_AUTOTUNE`` is neither yes nor no.
    """
    asked = os.environ.get("PAGEDKV_AUTOTUNE", "").strip()
    if asked.lower() not in (*ON, *OFF):
        raise InvalidArgument(f"PAGEDKV_AUTOTUNE={asked!r} in the environment: 0 turns trials of kernels off, 1 on")
    return is_timed(backend) and asked.lower() in ON


def demoted(backend: Any, config: AttentionConfig, max_q_len: int, candidates: Sequence[str]) -> tuple[str, ...]:
    """The candidates that an earlier trial on this device found wrong; nothing is tried."""
    if not is_timed(backend):
        return ()
    verdict = verdicts_of(backend).get(text_of(config, max_q_len, candidates))
    return () if verdict is None else tuple(name for name in candidates if name in verdict.wrong)


def verdicts_of(backend: TimedBackend) -> Verdicts:
    """The verdicts of a backend's device, read once per folder."""
    folder = default_folder()
    key = (str(folder), backend.device_name, backend.driver, backend.compiler)
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = Verdicts(folder, *key[1:])
        return _verdicts[key]


def best(
    backend: TimedBackend,
    config: AttentionConfig,
    max_q_len: int,
    candidates: Sequence[str],
    make: Callable[[str], Make],
) -> str:
    """Name of the kernel to take.

    Parameters
    ----------
    candidates : names of kernels that compute this, the preferred first, without decode_simt.
    make : gives what makes a kernel's plan for a trial.

    A trial waits for the device, so never within a capture. The next process tries kernels that there was no time for.
    A trial for which there is no memory is put off.

    Raises
    ------
    KernelsUnavailable
        decode_simt itself does not run.
    """
    verdicts, name = verdicts_of(backend), text_of(config, max_q_len, candidates)
    final = verdicts.final(name)
    if final is not None:
        _settle(verdicts, name)
        return final.kernel
    taken = verdicts.get(name) or Verdict(REFERENCE)
    with _lock:
        final = verdicts.final(name)
        if final is None:
            again_at = _put_off.get((verdicts, name))
            if again_at is not None and time.monotonic() < again_at:
                return taken.kernel
            try:
                final = _tried(backend, config, max_q_len, candidates, make, taken)
            except Exception as error:
                if came_from_signal(error) or not _passes(error):
                    raise
                tell = log.warning if again_at is None else log.info
                tell("kernels cannot be tried now for %s (%s): %s is taken for a while", name, error, taken.kernel)
                _put_off[verdicts, name] = time.monotonic() + REST_S
                return taken.kernel
            final = verdicts.put(name, final)
            _settle(verdicts, name)
            _warn_of_wrong(backend, final, taken)
            if final.late:
                log.warning("not tried for %s: %s; the next process does it", name, ", ".join(final.late))
    return final.kernel


def is_due(asked_at: float) -> bool:
    """Whether a trial that was put off, as for want of memory, has become possible or was made.

    Only since `asked_at`, a moment of the monotonic clock: a trial that no call asks for is news once.
    """
    if asked_at < _settled_at:
        return True
    return bool(_put_off) and any(asked_at < at <= time.monotonic() for at in tuple(_put_off.values()))


def _settle(verdicts: Verdicts, name: str) -> None:
    """Note that there is a verdict now, which all attentions of that config wait for."""
    global _settled_at
    if _put_off.pop((verdicts, name), None) is not None:
        _settled_at = time.monotonic()


def text_of(config: AttentionConfig, max_q_len: int, candidates: Sequence[str]) -> str:
    """Key of a verdict: the config, the kind of batch and the candidates."""
    usual = AttentionConfig(config.head_dim, config.head_dim_v, config.group_size)
    fields = [field.name for field in dataclasses.fields(config)]
    shown = [f"{name}={getattr(config, name)}" for name in fields[3:] if getattr(config, name) != getattr(usual, name)]
    rows = min(1 << (max_q_len * config.group_size - 1).bit_length(), MOST_ROWS)  # tilings differ by powers of two
    kind = "decode" if max_q_len == 1 else f"append up to {rows} rows" if rows < MOST_ROWS else "prefill"
    shape = f"{config.head_dim}/{config.head_dim_v} group {config.group_size}"
    return " ".join([kind, shape, config.q_dtype, *shown, f"[{', '.join(candidates)}]"])


def _tried(
    backend: TimedBackend,
    config: AttentionConfig,
    max_q_len: int,
    candidates: Sequence[str],
    make: Callable[[str], Make],
    before: Verdict,
) -> Verdict:
    """The verdict on candidates for which there is time; `before` has those tried."""
    begin, budget = time.perf_counter(), Budget(TRIAL_S)
    expected = _expected(backend, config, make, max_q_len, budget)
    us, wrong, late = dict(before.us), dict(before.wrong), []
    new = [kernel for kernel in candidates if kernel not in us and kernel not in wrong]
    is_lost = False
    for number, kernel in enumerate(new):
        if is_lost or budget.left <= 0:
            late.append(kernel)
            continue
        try:
            with _watched(kernel):
                runs = results(backend, config, make(kernel), max_q_len, budget, CHECKED_RUNS)
                differences = (difference(found, expected, config.q_dtype) for found in runs)
                why = next(filter(None, differences), "")
                if not why:
                    us[kernel] = microseconds(backend, config, make(kernel), max_q_len, budget, 1 / (len(new) - number))
        except Exception as error:  # of the compiler, CuPy or the driver: a kernel that does not run is not taken
            if came_from_signal(error) or _passes(error):
                raise
            why = f"{type(error).__name__}: {error}"
            is_lost = _is_lost(backend)
        if why:
            wrong[kernel] = why
            us.pop(kernel, None)
    chosen = fastest(us, candidates)
    log.info("tried %s in %.2f s: %s of %s", ", ".join(candidates), time.perf_counter() - begin, chosen, us)
    return Verdict(chosen, us, wrong, tuple(late))


@contextlib.contextmanager
def _watched(kernel: str) -> Iterator[None]:
    """Let the log name the way out where a kernel does not come back."""
    told = (
        f"the trial of {kernel} has not come back for {HANGS_S:.0f} s: if it never does, end the process, name "
        "kernel='decode_simt' (PAGEDKV_AUTOTUNE=0 may take the one that hangs), and report it with what "
        "`pagedkv doctor --gpu X.Y --json` prints for this device"
    )
    timer = threading.Timer(HANGS_S, log.warning, (told,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be had: then nothing is told
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _expected(
    backend: TimedBackend, config: AttentionConfig, make: Callable[[str], Make], max_q_len: int, budget: Budget
) -> NDArray[np.float32]:
    """The results of decode_simt.

    Raises
    ------
    KernelsUnavailable
        It does not run, and so nothing is known of the others.
    """
    try:
        with _watched(REFERENCE):
            return results(backend, config, make(REFERENCE), max_q_len, budget)[0]
    except Exception as error:
        if came_from_signal(error) or _passes(error) or isinstance(error, PagedKVError):
            raise
        raise KernelsUnavailable(
            f"{REFERENCE}, beside which kernels are checked, does not run on {backend.device_name} (driver for CUDA "
            f"{backend.driver}): {type(error).__name__}: {error}. See `pagedkv doctor`; kernel= and PAGEDKV_AUTOTUNE=0 "
            f"take a kernel unchecked"
        ) from error


def _passes(error: Exception) -> bool:
    """Whether a failure says nothing of the kernel, as one for want of memory."""
    is_cuda = type(error).__name__ in ("CUDADriverError", "CUDARuntimeError")  # of CuPy, which need not be here
    passes = is_cuda and getattr(error, "status", 0) in PASSING
    return passes or isinstance(error, MemoryError | OSError | CaptureBroken)


def _is_lost(backend: TimedBackend) -> bool:
    """Whether a kernel has broken the device for this process, so that every later one fails."""
    try:
        backend.synchronize()
    except Exception as error:  # whatever the driver says now
        if came_from_signal(error):
            raise
        return True
    return False


def _warn_of_wrong(backend: TimedBackend, verdict: Verdict, before: Verdict) -> None:
    for kernel, why in verdict.wrong.items():
        if kernel in before.wrong:
            continue
        warnings.warn(
            f"{kernel} is wrong on {backend.device_name} (driver for CUDA {backend.driver}) and is not used: {why}; "
            f"{verdict.kernel} is taken. Please report it with the output of `pagedkv doctor`",
            RuntimeWarning,
            stacklevel=5,
        )
