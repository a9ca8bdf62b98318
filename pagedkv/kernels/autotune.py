"""Picks the fastest kernel of those that are right on this device.

Candidates are checked beside decode_simt and timed (trial.py) when a config is first used on a device; the verdict is
kept (tuning.py). A kernel whose results differ is demoted with a warning. ``PAGEDKV_AUTOTUNE=0`` turns this off.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.jit import default_folder
from pagedkv.kernels.trial import Budget, Make, TimedBackend, difference, is_timed, microseconds, results
from pagedkv.kernels.tuning import REFERENCE, Verdict, Verdicts
from pagedkv.observe.callbacks import Log

log = Log(logging.getLogger("pagedkv.kernels"))
MOST_ROWS = 128  # of a CTA
CLEARLY = 0.97  # of the preferred kernel's time, below which another takes its place
TRIAL_S = 1.5  # of a trial, without compiling and loading; the step under way when they are over is finished

_lock = threading.RLock()  # trials use the device alone
_verdicts: dict[tuple[str, str, str], Verdicts] = {}


def is_on(backend: Any) -> bool:
    """Whether kernels are tried on this backend."""
    return is_timed(backend) and os.environ.get("PAGEDKV_AUTOTUNE", "1") != "0"


def verdicts_of(backend: TimedBackend) -> Verdicts:
    """The verdicts of a backend's device, read once per folder."""
    folder = default_folder()
    key = (str(folder), backend.device_name, backend.driver)
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = Verdicts(folder, backend.device_name, backend.driver)
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
    """
    verdicts, name = verdicts_of(backend), text_of(config, max_q_len, candidates)
    final = verdicts.final(name)
    if final is not None:
        return final.kernel
    taken = verdicts.get(name) or Verdict(REFERENCE)
    with _lock:
        final = verdicts.final(name)
        if final is None:
            try:
                final = _tried(backend, config, max_q_len, candidates, make, taken)
            except MemoryError as error:
                log.warning("no memory to try kernels for %s (%s): %s is taken for now", name, error, taken.kernel)
                return taken.kernel
            verdicts.put(name, final)
            _warn_of_wrong(backend, final, taken)
            if final.late:
                untried = ", ".join(final.late)
                log.warning("no time to try %s for %s: the next process does, %s is taken", untried, name, final.kernel)
    return final.kernel


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
    expected = results(backend, config, make(REFERENCE), max_q_len, budget)
    us, wrong, late = dict(before.us), dict(before.wrong), []
    new = [kernel for kernel in candidates if kernel not in us and kernel not in wrong]
    for number, kernel in enumerate(new):
        if budget.left <= 0:
            late.append(kernel)
            continue
        try:
            why = difference(results(backend, config, make(kernel), max_q_len, budget), expected, config.q_dtype)
            if not why:
                us[kernel] = microseconds(backend, config, make(kernel), max_q_len, budget, 1 / (len(new) - number))
        except MemoryError:  # of the device, too: it says nothing of the kernel
            raise
        except Exception as error:  # of the compiler, CuPy or the driver: a kernel that does not run is not taken
            why = f"{type(error).__name__}: {error}"
        if why:
            wrong[kernel] = why
            us.pop(kernel, None)
    chosen = REFERENCE
    for kernel in filter(us.__contains__, candidates):
        if chosen == REFERENCE or us[kernel] < CLEARLY * us[chosen]:
            chosen = kernel
    log.info("tried %s in %.2f s: %s of %s", ", ".join(candidates), time.perf_counter() - begin, chosen, us)
    return Verdict(chosen, us, wrong, tuple(late))


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
