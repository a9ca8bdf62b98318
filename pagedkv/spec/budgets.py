"""How much each tier may use, and the disk tier's options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.paths import path_text
from pagedkv.spec.sizes import Blocks, Bytes, Size, check_size, format_size, num_bytes_of, parse_size, whole_number

MAX_BLOCKS = 2**31 - 1
LARGE = 4  # times memory: from there on a copy of all that memory holds costs the disk's hit rate little
WRITES = ("reused", "evicted", "all", "never")
_CHOICES = {
    "write": WRITES,
    "admission": ("all", "cost", "second_hit", "hazard"),
    "on_mismatch": ("refuse", "reset"),
    "page_cache": ("drop", "keep"),
}


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk tier: a directory of ours and how much of it may be used.

    Parameters
    ----------
    path : directory; made when the tier opens, with the folders above it. ``~`` is the user's home. There is no
        default, least of all a shared temporary one.
    size : Size
        ``"200GiB"`` or ``Bytes(n)`` for everything in the directory, or ``Blocks(n)`` for KV blocks alone.
    segment_size : str or Bytes
        Of one file.
    shards : equal parts of a block with a checksum each, 1..1024, dividing its bytes. Default: one per layer.
    write : ``"reused"``, ``"evicted"``, ``"all"`` or ``"never"``
        When blocks are written. ``"evicted"``: as they leave memory. ``"reused"``: then, and while they are in memory
        as soon as a second request uses them, in the background. ``"all"``: then, and once they are computed.
        ``"never"``: the tier is read only. A block is always written behind the blocks before it in its prompt, so what
        a crash leaves is found again. Default: ``"reused"`` where the tier holds at least 4 times as many blocks as
        device and host memory together, else ``"evicted"``: copies of what memory holds take too much of a small disk.
    admission : ``"cost"``, ``"second_hit"``, ``"all"`` or ``"hazard"``
        Blocks to write: those that load faster than they are computed again (all of them until both rates are known);
        blocks asked for again since they were computed; everything; blocks whose chance of being asked for again makes
        up for writing them, the likeliest first where there is a `write_budget` (with ``KVCache(policy="hazard")``).
        The cache drops and counts the others as they leave memory. Default: ``"cost"``; with a `write_budget`
        ``"second_hit"``, or ``"all"`` where ``write="all"`` is given.
    write_budget : str or Bytes
        Bytes per day; None for no limit. At most an hour's share comes at once. Blocks that are used again are written
        from all of it, blocks that leave memory only while more than half of that share is left, unless
        ``write="evicted"``.
    on_mismatch : ``"refuse"`` or ``"reset"``
        What becomes of a store there that cannot be used: an error, or a new store. Old bytes are never reinterpreted.
    unnamed_model : allow a KVSpec that names no model. Then nothing tells KV of other weights of the same shape apart:
        the caller must.
    network_fs : allow a network file system, whose locks and syncs cannot be trusted.
    page_cache : ``"drop"`` or ``"keep"`` the pages read and written in the system's memory.
    required : False leaves out a disk tier that cannot be opened (no space, no permission, read-only, in use), with one
        line in the log. A store of another model or layout is an error all the same.
    on_progress : called with ``(done, total)`` slots while an existing store is scanned.

    Raises
    ------
    WrongType, InvalidArgument
        The path is empty or no path, or another value cannot be used.
    """

    path: str
    size: Size
    _: KW_ONLY
    segment_size: str | Bytes = "1GiB"
    shards: int | None = None
    write: Literal["reused", "evicted", "all", "never"] | None = None
    admission: Literal["all", "cost", "second_hit", "hazard"] | None = None
    write_budget: str | Bytes | None = None
    on_mismatch: Literal["refuse", "reset"] = "refuse"
    unnamed_model: bool = False
    network_fs: bool = False
    page_cache: Literal["drop", "keep"] = "drop"
    required: bool = True
    on_progress: Callable[[int, int], object] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", path_text(self.path, "path"))
        check_size(self.size, "size")
        if num_bytes_of(self.segment_size, "segment_size") < 1:
            raise InvalidArgument("segment_size must be at least one byte")
        if self.shards is not None:
            object.__setattr__(self, "shards", whole_number(self.shards, "shards", 1, 1024))
        if self.write_budget is not None and num_bytes_of(self.write_budget, "write_budget") < 1:
            raise InvalidArgument("write_budget must be at least one byte per day")
        for name, words in _CHOICES.items():
            if name not in ("write", "admission") or getattr(self, name) is not None:
                check_choice(name, getattr(self, name), words)
        if self.admission is None:
            with_budget = "all" if self.write == "all" else "second_hit"
            object.__setattr__(self, "admission", "cost" if self.write_budget is None else with_budget)
        for name in ("unnamed_model", "network_fs", "required"):
            if not isinstance(value := getattr(self, name), bool):
                raise WrongType(f"{name} must be a bool, not {type(value).__name__}")
        if self.on_progress is not None and not callable(self.on_progress):
            raise WrongType(f"on_progress must be callable, not {type(self.on_progress).__name__}")

    def writes(self, num_blocks: int, in_memory: int) -> str:
        """When a tier of so many blocks is written, over so many of memory; a word."""
        return self.write or ("reused" if num_blocks >= LARGE * in_memory else "evicted")

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment file."""
        return parse_size(self.segment_size)

    @property
    def write_bytes_per_day(self) -> int | None:
        """Bytes that may be written per day; None for no limit."""
        return None if self.write_budget is None else parse_size(self.write_budget)


def blocks_for(size: Size, spec: KVSpec, name: str) -> int:
    """Whole blocks in a size; bytes are rounded down to blocks.

    Parameters
    ----------
    size : Size
    spec : KVSpec
    name : of the argument, for errors.

    Returns
    -------
    int
        1..2**31 - 1.

    Raises
    ------
    WrongType
        It does not say its unit.
    InvalidArgument
        Not a size, less than one block, or more blocks than there are ids.
    """
    check_size(size, name)
    num_blocks = int(size) if isinstance(size, Blocks) else parse_size(size) // spec.block_bytes
    if num_blocks < 1:
        one = format_size(spec.block_bytes)
        raise InvalidArgument(f"{name}={size!r} does not hold one block of {one}")
    if num_blocks > MAX_BLOCKS:
        raise InvalidArgument(f"{name}={size!r} is {num_blocks} blocks; at most {MAX_BLOCKS}")
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
