"""Which kernel computes a config: by name, or the fastest that can; and its plan.

To add a kernel: write ``unsupported`` and ``tiling`` (as in decode_simt.py) and put a :class:`Kernel` into ``KERNELS``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from pagedkv.errors import InvalidArgument, UnsupportedVariant
from pagedkv.kernels import (
    autotune,
    decode_mla,
    decode_mla_wgmma,
    decode_mma,
    decode_simt,
    decode_tma,
    prefill_mma,
    prefill_wgmma,
)
from pagedkv.kernels.attention import AttentionPlan
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import SCHEDULES, AttentionConfig, Schedule, Tiling
from pagedkv.kernels.trial import TimedBackend
from pagedkv.kernels.tuning import REFERENCE


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute attention.

    Parameters
    ----------
    name : of the .cu, and what callers ask for.
    unsupported : (config, capability) -> why it cannot compute that, None if it can.
    tiling : (config, max_q_len, capability) -> its tiling; called only for configs that it supports there.
    max_rows : rows (query, head of a group) of a sequence up to which it is the best choice; 0: any number.
    plan : makes its plan; every plan has the attributes and methods of :class:`AttentionPlan`.
    schedules : those it takes, the default first.
    """

    name: str
    unsupported: Callable[[AttentionConfig, tuple[int, int]], str | None]
    tiling: Callable[[AttentionConfig, int, tuple[int, int]], Tiling]
    max_rows: int = 0
    plan: Callable[..., Any] = AttentionPlan
    schedules: tuple[Schedule, ...] = ("even", "whole", "partitioned")


def _anywhere(tiling: Callable[[AttentionConfig, int], Tiling]) -> Callable[..., Tiling]:
    """A tiling that is the same on every device."""
    return lambda config, max_q_len, capability: tiling(config, max_q_len)


FEW_ROWS = 16  # of a sequence: the decode kernels take so many at once

# In the order of preference; where kernels cannot be tried, "auto" takes the first that can. A kernel without
# timings stands behind one that takes every case it takes: only a trial puts it first.
KERNELS: list[Kernel] = [
    Kernel("decode_mma", decode_mma.unsupported, _anywhere(decode_mma.tiling), max_rows=FEW_ROWS),
    Kernel("prefill_mma", prefill_mma.unsupported, _anywhere(prefill_mma.tiling), schedules=("listed", "whole")),
    Kernel("decode_tma", decode_tma.unsupported, _anywhere(decode_tma.tiling), max_rows=FEW_ROWS),
    Kernel("prefill_wgmma", prefill_wgmma.unsupported, _anywhere(prefill_wgmma.tiling), schedules=("listed", "whole")),
    Kernel("decode_mla", decode_mla.unsupported, lambda config, _, capability: decode_mla.tiling(config, capability)),
    Kernel("decode_mla_wgmma", decode_mla_wgmma.unsupported, _anywhere(decode_mla_wgmma.tiling)),
    Kernel("decode_simt", decode_simt.unsupported, lambda config, *_: decode_simt.tiling(config)),
]


def choose(
    config: AttentionConfig,
    capability: tuple[int, int],
    name: str = "auto",
    *,
    max_q_len: int = 1,
    has_tensor_maps: bool = True,
) -> Kernel:
    """The kernel called `name`, or the best for a config on a device.

    Parameters
    ----------
    config, capability : the shapes and dtypes to compute, and the device's compute capability.
    name : a kernel's name, or "auto".
    max_q_len : queries of one sequence at most.
    has_tensor_maps : whether the driver makes them; else "auto" passes over kernels that need them.

    Raises
    ------
    UnsupportedVariant
        There is no kernel of that name, it cannot compute this, or none can; the message says why.
    """
    names = [kernel.name for kernel in KERNELS]
    if name != "auto" and name not in names:
        raise UnsupportedVariant(f"kernel {name!r}: there are 'auto', {', '.join(map(repr, names))}")
    reasons = []
    for best_only in (True, False):
        for kernel in KERNELS:
            if name not in ("auto", kernel.name):
                continue
            reason = kernel.unsupported(config, capability)
            if reason is not None:
                reasons.append(f"{kernel.name}: {reason}")
            elif name != "auto":
                return kernel
            elif not has_tensor_maps and kernel.tiling(config, max_q_len, capability).box_tokens:
                reasons.append(f"{kernel.name}: the driver makes no tensor maps")
            elif not best_only or _takes(kernel, config, max_q_len):
                return kernel
    raise UnsupportedVariant("no kernel computes this. " + "; ".join(dict.fromkeys(reasons)))


def select(config: AttentionConfig, capability: tuple[int, int], name: str = "auto", *, max_q_len: int = 1) -> Tiling:
    """Tiling of the kernel that :func:`choose` gives, with its parameters and errors."""
    return choose(config, capability, name, max_q_len=max_q_len).tiling(config, max_q_len, capability)


def _takes(kernel: Kernel, config: AttentionConfig, max_q_len: int) -> bool:
    """Whether a batch has few enough rows."""
    return not kernel.max_rows or max_q_len * config.group_size <= kernel.max_rows


def candidates(backend: Backend, config: AttentionConfig, max_q_len: int) -> list[Kernel]:
    """Kernels to be tried for a config beside decode_simt, the preferred first.

    Those for batches of few rows, where there are few rows; else, or where none is, those for many.
    """
    maps = getattr(backend, "has_tensor_maps", True)
    able = [
        kernel
        for kernel in KERNELS
        if kernel.name != REFERENCE
        and kernel.unsupported(config, backend.capability) is None
        and _takes(kernel, config, max_q_len)
        and (maps or not kernel.tiling(config, max_q_len, backend.capability).box_tokens)
    ]
    few = [kernel for kernel in able if kernel.max_rows]
    return few or able


def kernel_on(
    backend: Backend, config: AttentionConfig, max_q_len: int, name: str = "auto", schedule: str = "auto"
) -> Kernel:
    """The kernel by name; else the best on this device.

    Where none is tried it is the preferred one of those that no earlier trial found wrong.

    Parameters and errors as :func:`make_plan`.
    """
    maps = getattr(backend, "has_tensor_maps", True)
    chosen = choose(config, backend.capability, name, max_q_len=max_q_len, has_tensor_maps=maps)
    if name != "auto":
        return chosen
    reference = choose(config, backend.capability, REFERENCE)
    names = [kernel.name for kernel in candidates(backend, config, max_q_len)]
    if schedule != "auto" or not autotune.is_on(backend):
        wrong = autotune.demoted(backend, config, max_q_len, names)
        right = [kernel for kernel in names if kernel not in wrong] or [REFERENCE]
        return chosen if chosen.name not in wrong else choose(config, backend.capability, right[0])
    if not names:
        return reference
    timed = cast(TimedBackend, backend)
    best = autotune.best(
        timed, config, max_q_len, names, lambda kernel: functools.partial(make_plan, backend, config, kernel=kernel)
    )
    return choose(config, backend.capability, best)


def make_plan(
    backend: Backend,
    config: AttentionConfig,
    *,
    kernel: str = "auto",
    schedule: str = "auto",
    max_q_len: int = 1,
    max_seq_len: int = 0,
    **sizes: Any,
) -> Any:
    """A plan of the chosen kernel, its workspace allocated; `sizes` as :class:`AttentionPlan`.

    Parameters
    ----------
    kernel, max_q_len : as :func:`choose`; with "auto" kernels are tried on the device (autotune.py), where the backend
        can time them and no schedule is asked for.
    schedule : "auto" for the kernel's default.

    Raises
    ------
    UnsupportedVariant
        As :func:`choose`.
    InvalidArgument
        The kernel does not take the schedule; or the schedule needs ``max_seq_len``.
    """
    chosen = kernel_on(backend, config, max_q_len, kernel, schedule)
    if schedule == "auto":
        schedule = chosen.schedules[0]
    if schedule not in SCHEDULES or schedule not in chosen.schedules:
        others = "; the others cannot compute this or were found wrong here (`pagedkv doctor`)"
        raise InvalidArgument(
            f"{chosen.name} takes the schedules {', '.join(chosen.schedules)}, got {schedule[:40]!r}"
            + others * (kernel == "auto" and chosen.name == REFERENCE)
        )
    if schedule == "partitioned" and not max_seq_len:
        raise InvalidArgument("the partitioned schedule needs max_seq_len, which sizes its grid and workspace")
    tiling = chosen.tiling(config, max_q_len, backend.capability)
    return chosen.plan(backend, config, tiling, schedule, max_q_len=max_q_len, max_seq_len=max_seq_len, **sizes)
