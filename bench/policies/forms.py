"""How figures of the policies are written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.policies.serving import STRICT, UNBOUNDED

Row = Mapping[str, Any]
OURS = ("arc", "s3fifo", "hazard", STRICT, UNBOUNDED)


def points(value: float | None) -> str:
    """Whole percent, ``-`` where there is no gap."""
    return "-" if value is None else str(round(value))


def decimal(value: float, digits: int = 1) -> str:
    """So many digits, and no minus before a zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def spaced(size: str) -> str:
    """A size's name with a space before its %."""
    return size.replace("%", " %")
