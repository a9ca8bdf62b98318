"""Tier sizes as a user types them: ``5000 blocks``, ``5%`` of the unique blocks, ``40GiB``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from pathlib import Path

from pagedkv.core import Tier
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.replay.trace import Trace
from pagedkv.spec.paths import path_text
from pagedkv.spec.sizes import UNITS, Blocks, Bytes, Size, whole_number

LLAMA_3_8B_BYTES_PER_TOKEN = 131_072  # 32 layers x 2 (K, V) x 8 heads x 128 x 2 bytes
MAX_BLOCKS = 2**31 - 1  # block ids are int32
MAX_BYTES_PER_TOKEN = 1 << 30
TIER_NAMES = tuple(str(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
ARGUMENTS = ("device_memory", "host_memory", "disk")
EXAMPLES = "'5000 blocks', a share of the unique blocks ('5%') or bytes ('40GiB')"
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,12})?)\s*([A-Za-z%]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Blocks per tier, and where the disk tier's files go.

    0 blocks: no such tier. No path: a temporary folder. `sizes` has the bytes that were typed, for caches whose pages
    are not blocks of all layers; None: the blocks' own.
    """

    device: int
    host: int = 0
    disk: int = 0
    disk_dir: Path | None = None
    sizes: tuple[int, int, int] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, blocks in zip(TIER_NAMES, self.blocks, strict=True):
            whole_number(blocks, f"{name} blocks", 0, MAX_BLOCKS, unit=Blocks)
        if self.device == 0:
            raise InvalidArgument("device: a cache needs at least 1 block on the device")

    @property
    def blocks(self) -> tuple[int, int, int]:
        return (self.device, self.host, self.disk)

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk

    def memory(self, block_bytes: int) -> tuple[int, int, int]:
        """Bytes of each tier, whose blocks have so many."""
        device, host, disk = (blocks * block_bytes for blocks in self.blocks)
        return (device, host, disk) if self.sizes is None else self.sizes

    def tiers(self) -> Iterator[tuple[str, int]]:
        """Name and blocks of each tier that exists, hottest first."""
        return ((name, blocks) for name, blocks in zip(TIER_NAMES, self.blocks, strict=True) if blocks)


def resolve(
    trace: Trace,
    *,
    device_memory: Size,
    host_memory: Size | None = None,
    disk: Size | None = None,
    bytes_per_token: int = LLAMA_3_8B_BYTES_PER_TOKEN,
    names: tuple[str, str, str] = ARGUMENTS,
) -> Capacity:
    """Turn typed sizes into blocks of this trace.

    Parameters
    ----------
    device_memory, host_memory, disk : ``"5000 blocks"`` or ``Blocks(5000)``, ``"5%"`` (of the unique blocks, rounded
        down), ``"40GiB"`` or ``Bytes(n)`` (rounded down to whole blocks). ``disk`` may name its folder:
        ``"20%:/nvme/kv"``, where ``~`` is the user's home.
    bytes_per_token : KV bytes of one token over all layers.
    names : of the options that the sizes came from, for errors.

    Raises
    ------
    InvalidArgument : not a size, without a unit, zero, negative or absurd; names the option.
    WrongType : neither a string nor Blocks nor Bytes.
    """
    whole_number(bytes_per_token, "bytes per token", 1, MAX_BYTES_PER_TOKEN, unit=Bytes)
    folder = None
    if isinstance(disk, str) and ":" in disk:
        disk, where = disk.split(":", 1)
        if not where:
            raise InvalidArgument(f"{names[2]}: the folder after ':' is empty")
        folder = Path(path_text(where, f"{names[2]}: the folder"))
    block_bytes = trace.block_size * bytes_per_token
    device, device_bytes = _blocks(names[0], device_memory, trace, block_bytes)
    host, host_bytes = _blocks(names[1], host_memory, trace, block_bytes) if host_memory is not None else (0, 0)
    last, last_bytes = _blocks(names[2], disk, trace, block_bytes) if disk is not None else (0, 0)
    return Capacity(device, host, last, folder, (device_bytes, host_bytes, last_bytes))


def _blocks(name: str, size: Size, trace: Trace, block_bytes: int) -> tuple[int, int]:
    """Whole blocks, and bytes."""
    if isinstance(size, Blocks | Bytes):
        text = f"{int(size)} {'B' if isinstance(size, Bytes) else 'blocks'}"
    elif isinstance(size, str):
        text = size
    else:
        raise not_a_size(name, size)
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise InvalidArgument(f"{name}: {text[:40]!r} is not a size: write {EXAMPLES}")
    number, unit = Fraction(found[1]), found[2]
    exact = None
    if unit == "%":
        if number > 100:
            raise InvalidArgument(f"{name}: {text} is more than all of the trace's unique blocks")
        blocks = int(number * trace.num_unique / 100)
        meaning = f"{text} of {trace.num_unique} unique blocks"
    elif unit == "":
        raise InvalidArgument(f"{name}: {text!r} has no unit: write {EXAMPLES}")
    elif unit in ("block", "blocks"):
        if number.denominator != 1:
            raise InvalidArgument(f"{name}: {text} is not a whole number")
        blocks, meaning = int(number), text
    elif unit in UNITS:
        exact = int(number * UNITS[unit])
        blocks, meaning = exact // block_bytes, f"{text} in blocks of {block_bytes} bytes"
    else:
        raise InvalidArgument(f"{name}: unknown unit {unit!r} in {text!r}; known: blocks, %, {', '.join(UNITS)}")
    if blocks < 1:
        raise InvalidArgument(f"{name}: {meaning} is less than one block")
    if blocks > MAX_BLOCKS:
        raise InvalidArgument(f"{name}: {meaning} is absurd (more than {MAX_BLOCKS} blocks)")
    return blocks, blocks * block_bytes if exact is None else exact


def not_a_size(name: str, value: object) -> WrongType:
    """The error for a bare number, or for a value of another type."""
    bare = isinstance(value, Real) and not isinstance(value, bool)
    what = f"{value!r:.40} has no unit" if bare else f"a size is not of type {type(value).__name__}"
    return WrongType(f"{name}: {what}: write {EXAMPLES}, pagedkv.Blocks or pagedkv.Bytes")
