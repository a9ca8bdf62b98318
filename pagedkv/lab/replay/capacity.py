"""Tier sizes as a user types them: ``5000`` blocks, ``5%`` of the unique blocks, ``40GiB``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from pagedkv.core import Tier
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.replay.trace import Trace
from pagedkv.spec.sizes import UNITS, Bytes, whole_number

LLAMA_3_8B_BYTES_PER_TOKEN = 131_072  # 32 layers x 2 (K, V) x 8 heads x 128 x 2 bytes
MAX_BLOCKS = 2**31 - 1  # block ids are int32
MAX_BYTES_PER_TOKEN = 1 << 30
TIER_NAMES = tuple(str(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,12})?)\s*([A-Za-z%]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Blocks per tier, and where the disk tier's files go.

    0 blocks: no such tier. No path: a temporary folder.
    """

    device: int
    host: int = 0
    disk: int = 0
    disk_dir: Path | None = None

    def __post_init__(self) -> None:
        for name, blocks in zip(TIER_NAMES, self.blocks, strict=True):
            whole_number(blocks, f"{name} blocks", 0, MAX_BLOCKS)
        if self.device == 0:
            raise InvalidArgument("device: a cache needs at least 1 block on the device")

    @property
    def blocks(self) -> tuple[int, int, int]:
        return (self.device, self.host, self.disk)

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk

    def tiers(self) -> Iterator[tuple[str, int]]:
        """Name and blocks of each tier that exists, hottest first."""
        return ((name, blocks) for name, blocks in zip(TIER_NAMES, self.blocks, strict=True) if blocks)


def resolve(
    trace: Trace,
    *,
    device: str | int,
    host: str | int | None = None,
    disk: str | int | None = None,
    bytes_per_token: int = LLAMA_3_8B_BYTES_PER_TOKEN,
) -> Capacity:
    """Turn typed sizes into blocks of this trace.

    Parameters
    ----------
    device, host, disk : ``5000`` or ``Blocks(5000)`` (a trace has no bytes, so a bare number is blocks), ``"5%"``
        (of the unique blocks, rounded down), ``"40GiB"`` or ``Bytes(n)`` (rounded down to whole blocks). ``disk`` may
        name its folder: ``"20%:/nvme/kv"``.
    bytes_per_token : KV bytes of one token over all layers.

    Raises
    ------
    InvalidArgument : not a size, zero, negative or absurd; names the tier.
    """
    whole_number(bytes_per_token, "bytes per token", 1, MAX_BYTES_PER_TOKEN)
    folder = None
    if isinstance(disk, str) and ":" in disk:
        disk, where = disk.split(":", 1)
        if not where:
            raise InvalidArgument("disk: the folder after ':' is empty")
        folder = Path(where)
    block_bytes = trace.block_size * bytes_per_token
    return Capacity(
        _blocks("device", device, trace, block_bytes),
        0 if host is None else _blocks("host", host, trace, block_bytes),
        0 if disk is None else _blocks("disk", disk, trace, block_bytes),
        folder,
    )


def _blocks(tier: str, size: str | int, trace: Trace, block_bytes: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise WrongType(f"{tier}: a size is a string, Bytes(n) or a number of blocks, not {type(size).__name__}")
    text = size if isinstance(size, str) else f"{int(size)}{'B' if isinstance(size, Bytes) else ''}"
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise InvalidArgument(f"{tier}: {text!r} is not a size; write blocks (5000), a share (5%) or bytes (40GiB)")
    number, unit = Fraction(found[1]), found[2]
    if unit == "%":
        if number > 100:
            raise InvalidArgument(f"{tier}: {text} is more than all of the trace's unique blocks")
        blocks = int(number * trace.num_unique / 100)
        meaning = f"{text} of {trace.num_unique} unique blocks"
    elif unit == "":
        if number.denominator != 1:
            raise InvalidArgument(f"{tier}: {text} blocks is not a whole number")
        blocks, meaning = int(number), f"{text} blocks"
    elif unit in UNITS:
        blocks, meaning = int(number * UNITS[unit] / block_bytes), f"{text} in blocks of {block_bytes} bytes"
    else:
        raise InvalidArgument(f"{tier}: unknown unit {unit!r} in {text!r}; known: %, {', '.join(UNITS)}")
    if blocks < 1:
        raise InvalidArgument(f"{tier}: {meaning} is less than one block")
    if blocks > MAX_BLOCKS:
        raise InvalidArgument(f"{tier}: {meaning} is absurd (more than {MAX_BLOCKS} blocks)")
    return blocks
