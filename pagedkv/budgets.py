"""Budgets: how much a tier may use, in bytes (a string) or in blocks (an integer)."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.sizes import format_size, parse_size, whole_number
from pagedkv.spec import KVSpec

Budget: TypeAlias = str | int

MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk tier: a directory of ours and how much of it may be used.

    Parameters
    ----------
    path : directory; made when the tier opens. There is no default, least of all a shared temporary one.
    size : string of bytes (``"200GiB"``) or integer number of blocks.
    segment_size : bytes of one file, as a string or an integer.
    shards : equal parts of a block with a checksum each, 1..64; their number must divide a block's bytes.

    Raises
    ------
    WrongType, InvalidArgument
        The path is empty or no path, or a number cannot be used.
    """

    path: str
    size: Budget
    _: KW_ONLY
    segment_size: str | int = "1GiB"
    shards: int = 1

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
        segment_bytes = parse_size(self.segment_size)
        if segment_bytes < 1:
            raise InvalidArgument("segment_size must be at least one byte")
        object.__setattr__(self, "shards", whole_number(self.shards, "shards", 1, 64))

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment file."""
        return parse_size(self.segment_size)


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


def _check_budget(budget: Budget) -> int:
    """Bytes of a string, blocks of an integer."""
    if isinstance(budget, str):
        return parse_size(budget)
    return whole_number(budget, "a budget in blocks", 1, MAX_BLOCKS)
