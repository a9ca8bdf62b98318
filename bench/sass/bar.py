"""The bar: a figure that moves by 5 % has to be committed anew, whether worse or better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TOLERANCE = 0.05
Row = Mapping[str, Any]
KEYS = ("gpu", "arch", "kernel", "variant")
# The figures that are held beside the unit that binds, and whether more of each is better.
MORE_IS_BETTER = {
    "issue_slots": False,
    "tensor_cycles": False,
    "shared_cycles": False,
    "registers": False,
    "spill_bytes": False,
    "rolled_loops": False,
    "ctas_per_sm": True,
    "bytes_in_flight": True,
    "bound": True,
}


def key(row: Row) -> tuple[str, ...]:
    """The loop that a row is about."""
    return tuple(str(row[name]) for name in KEYS)


def compare(committed: Sequence[Row], now: Sequence[Row]) -> list[str]:
    """Lines for worse figures, then for better ones, then for loops without a counterpart."""
    before, after = {key(row): row for row in committed}, {key(row): row for row in now}
    moved = [found for one in after if one in before for found in _moved(before[one], after[one])]
    worse = [text for is_worse, text in moved if is_worse]
    better = [text for is_worse, text in moved if not is_worse]
    new = [f"new: {' '.join(one)} has no committed figures" for one in after if one not in before]
    gone = [f"gone: {' '.join(one)} is committed and no longer counted" for one in before if one not in after]
    return [*worse, *better, *new, *gone]


def _moved(before: Row, after: Row) -> Iterator[tuple[bool, str]]:
    """Another unit that binds, and each figure that moved: whether it is worse, and a line."""
    if before["binds"] != after["binds"]:
        yield True, f"worse or better: {' '.join(key(after))}: binds {before['binds']} -> {after['binds']}"
    for name, more_is_better in MORE_IS_BETTER.items():
        old, new = before[name], after[name]
        if old == new or abs(new - old) < TOLERANCE * abs(old):
            continue
        is_worse = (new < old) == more_is_better
        change = f" ({100 * (new / old - 1):+.1f} %)" if old else ""
        yield is_worse, f"{'worse' if is_worse else 'better'}: {' '.join(key(after))}: {name} {old} -> {new}{change}"
