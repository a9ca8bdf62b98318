"""Budgets: how much a tier may use, in bytes (a string) or in blocks (an integer)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import format_size, parse_size, whole_number

Budget: TypeAlias = str | int

MAX_BLOCKS = 2**31 - 1
_CHOICES = {
    "admission": ("all", "cost", "second_hit", "hazard"),
    "on_mismatch": ("refuse", "reset"),
    "page_cache": ("drop", "keep"),
}


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk tier: a directory of ours and how much of it may be used.

    Parameters
    ----------
    path : directory; made when the tier opens. There is no default, least of all a shared temporary one.
    size : string of bytes (``"200GiB"``) for everything in the directory, or integer number of blocks.
    segment_size : bytes of one file, as a string or an integer.
    shards : equal parts of a block with a checksum each, 1..1024, dividing its bytes. Default: one per layer.
    admission : ``"cost"``, ``"second_hit"``, ``"all"`` or ``"hazard"``
        What is written: blocks that load faster than they are computed again (all of them until both rates are known);
        blocks asked for again since they were computed; everything; blocks whose chance of being asked for again makes
        up for writing them, the likeliest first where there is a `write_budget` (with ``KVCache(policy="hazard")``).
        What is not written is dropped, and counted.
    write_budget : bytes per day, as a string or an integer; None for no limit. At most an hour's share comes at once.
    on_mismatch : ``"refuse"`` or ``"reset"``
        What becomes of a store there that cannot be used: an error, or a new store. Old bytes are never reinterpreted.
    unnamed_model : allow a KVSpec that names no model. Then nothing tells KV of other weights of the same shape apart:
        whoever opens the directory must know.
    network_fs : allow a network file system, whose locks and syncs cannot be trusted.
    page_cache : ``"drop"`` or ``"keep"`` what was read and written in the system's memory.
    required : False leaves out a disk tier that cannot be opened (no space, no permission, read-only, in use), with one
        line in the log. A store of another model or layout is an error all the same.
    on_progress : called with ``(done, total)`` slots while an existing store is scanned.

    Raises
    ------
    WrongType, InvalidArgument
        The path is empty or no path, or another value cannot be used.
    """

    path: str
    size: Budget
    _: KW_ONLY
    segment_size: str | int = "1GiB"
    shards: int | None = None
    admission: Literal["all", "cost", "second_hit", "hazard"] = "cost"
    write_budget: str | int | None = None
    on_mismatch: Literal["refuse", "reset"] = "refuse"
    unnamed_model: bool = False
    network_fs: bool = False
    page_cache: Literal["drop", "keep"] = "drop"
    required: bool = True
    on_progress: Callable[[int, int], object] | None = None

    def __post_init__(self) -> None:
        try:
            path = os.fspath(self.path)
        except TypeError:
            raise WrongType(f"path must be a path, not {type(self.path).__name__}") from None
        if not isinstance(path, str):
            raise WrongType("path must be text, not bytes")
        if not path or "\0" in path:
            raise InvalidArgument("path must not be empty or hold a NUL")
        object.__setattr__(self, "path", path)
        _check_budget(self.size)
        if parse_size(self.segment_size) < 1:
            raise InvalidArgument("segment_size must be at least one byte")
        if self.shards is not None:
            object.__setattr__(self, "shards", whole_number(self.shards, "shards", 1, 1024))
        if self.write_budget is not None and parse_size(self.write_budget) < 1:
            raise InvalidArgument("write_budget must be at least one byte per day")
        for name, words in _CHOICES.items():
            check_choice(name, getattr(self, name), words)
        for name in ("unnamed_model", "network_fs", "required"):
            if not isinstance(value := getattr(self, name), bool):
                raise WrongType(f"{name} must be a bool, not {type(value).__name__}")
        if self.on_progress is not None and not callable(self.on_progress):
            raise WrongType(f"on_progress must be callable, not {type(self.on_progress).__name__}")

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment file."""
        return parse_size(self.segment_size)

    @property
    def write_bytes_per_day(self) -> int | None:
        """Bytes that may be written per day; None for no limit."""
        return None if self.write_budget is None else parse_size(self.write_budget)


def blocks_for(budget: Budget, spec: KVSpec) -> int:
    """Whole blocks in a budget: an integer is blocks already, a string is bytes, rounded down.

    Returns
    -------
    int
        1..2**31 - 1.

    Raises
    ------
    WrongType
        Neither a string nor an integer.
    InvalidArgument
        Not a size, less than one block, or more blocks than ids.
    """
    amount = _check_budget(budget)
    num_blocks = amount // spec.block_bytes if isinstance(budget, str) else amount
    if num_blocks < 1:
        one = format_size(spec.block_bytes)
        raise InvalidArgument(f"a budget of {budget!r} does not hold one block of {one}")
    if num_blocks > MAX_BLOCKS:
        raise InvalidArgument(f"a budget of {budget!r} is {num_blocks} blocks; at most {MAX_BLOCKS}")
    return num_blocks


def check_choice(name: str, value: Any, words: tuple[str, ...]) -> None:
    """Raise unless `value` is one of these words.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if not isinstance(value, str):
        raise WrongType(f"{name} must be one of {words}, not {type(value).__name__}")
    if value not in words:
        raise InvalidArgument(f"{name} must be one of {words}, not {value!r}")


def _check_budget(budget: Budget) -> int:
    """Bytes of a string, blocks of an integer."""
    if isinstance(budget, str):
        return parse_size(budget)
    return whole_number(budget, "a budget in blocks", 1, MAX_BLOCKS)
