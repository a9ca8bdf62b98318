"""Ranges of a runtime's versions that the tests of its adapter have run with."""

from __future__ import annotations

import re


def is_tested(version: str, tested: tuple[str, str]) -> bool:
    """Whether a version is in the range from the first to the last of `tested`, both included."""
    return _numbers(tested[0]) <= _numbers(version) <= _numbers(tested[1])


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
