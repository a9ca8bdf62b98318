"""Checks on a trace's numbers that every file format shares.

Each failure names its line or field.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TraceFormatError
from pagedkv.lab.replay.trace import MAX_ACCESSES, MAX_REQUESTS


def first_bad(path: Path, field: str, values: NDArray[np.generic], bad: NDArray[np.bool_], problem: str) -> None:
    """Raise for the first True in ``bad`` (bool [num_requests]).

    ``problem`` may use ``{value}``.
    """
    if bad.any():
        i = int(bad.argmax())
        raise TraceFormatError(path, f"field {field}[{i}]", problem.format(value=values[i]))


def bounded(path: Path, field: str, values: NDArray[np.int64], lowest: int, highest: int) -> None:
    """Every value lies in ``lowest..highest``."""
    first_bad(path, field, values, values < lowest, f"{{value}} is below {lowest}")
    first_bad(path, field, values, values > highest, f"{{value}} is absurd (more than {highest})")


def totals(path: Path, where: str, num_requests: int, num_accesses: int) -> None:
    """The whole trace fits in memory as int32 paths, and is not empty."""
    if num_requests == 0:
        raise TraceFormatError(path, "", "there are no requests in it")
    if num_requests > MAX_REQUESTS:
        raise TraceFormatError(path, where, f"more than {MAX_REQUESTS} requests")
    if num_accesses == 0:
        raise TraceFormatError(path, where, "no request has a block")
    if num_accesses > MAX_ACCESSES:
        raise TraceFormatError(path, where, f"more than {MAX_ACCESSES} block accesses in total")


def file_sha256(path: Path) -> str:
    """Hex digest of the file's bytes."""
    with path.open("rb") as file:
        h = hashlib.sha256()
        while chunk := file.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()
