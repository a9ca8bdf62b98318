"""Steps that compute a register from registers, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim import ftz
from tests.ptxsim.active import Active
from tests.ptxsim.registry import Step

Row = NDArray[Any]


def ufunc_step(ufunc: Any, target: Row, *sources: Row) -> Step:
    """Return a step of a NumPy ufunc whose result has the target's type.

    It writes straight into the register when it may.
    """
    if len(sources) == 1:
        (a,) = sources

        def unary(active: Active) -> None:
            if active.where is None:
                ufunc(a, target)
            else:
                np.putmask(target, active.where, ufunc(a))

        return unary
    a, b = sources

    def binary(active: Active) -> None:
        if active.where is None:
            ufunc(a, b, out=target)
        else:
            np.putmask(target, active.where, ufunc(a, b))

    return binary


def function_step(function: Callable[..., Any], target: Row, *sources: Row) -> Step:
    """Any function of rows; its result is converted to the target's type."""

    def step(active: Active) -> None:
        values = function(*sources)
        if active.where is None:
            target[...] = values
        else:
            np.putmask(target, active.where, np.asarray(values).astype(target.dtype, copy=False))

    return step


def preserving_subnormals(step: Step) -> Step:
    """The same step in a floating point mode that keeps subnormals."""

    def wrapped(active: Active) -> None:
        with ftz.preserving():
            step(active)

    return wrapped
