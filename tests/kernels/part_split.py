"""The list of the LISTED schedule in plain Python.

An oracle for prefill_plan.cu and parts.cuh, written from their description.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OVERHEAD_UNITS = 2
MERGED_PARTS = 3
WARPS = 32


@dataclass(frozen=True)
class Device:
    """Sizes and limits, beside the lengths, on which the list depends."""

    group_size: int
    row_tile: int
    tile_tokens: int
    num_kv_heads: int
    num_ctas: int
    part_slots: int
    min_part_tiles: int
    causal: bool = True
    window: int = 0

    def row_tiles(self, q_len: int) -> int:
        """Row tiles of a sequence and KV head."""
        return -(-q_len * self.group_size // self.row_tile)

    def key_tiles(self, seq_len: int, q_len: int, row_tile: int) -> int:
        """Tiles of the keys that some row of a row tile sees."""
        rows = range(row_tile * self.row_tile, min((row_tile + 1) * self.row_tile, q_len * self.group_size))
        positions = [seq_len - q_len + row // self.group_size for row in (rows[0], rows[-1])]
        end = max(min(positions[1] + 1, seq_len), 0) if self.causal else seq_len
        begin = min(max(positions[0] + 1 - self.window, 0), end) if self.window else 0
        return -(-end // self.tile_tokens) - begin // self.tile_tokens

    def parts(self, key_tiles: int, per_part: int) -> int:
        """Parts of a row tile."""
        return max(min(-(-key_tiles // per_part), key_tiles // self.min_part_tiles), 1)


@dataclass(frozen=True)
class Batch:
    """Keys and queries of each sequence."""

    seq_lens: Sequence[int]
    q_lens: Sequence[int]

    def used(self) -> Iterator[tuple[int, int]]:
        """Sequences that have a query."""
        return ((n, q) for n, q in zip(self.seq_lens, self.q_lens, strict=True) if q)


def cost(device: Device, batch: Batch, per_part: int, longest: int) -> float:
    """Cost in key tiles of a bound on a part; infinite where the workspace is too small."""
    tiles = parts = slots = 0
    for seq_len, q_len in batch.used():
        rows = device.row_tiles(q_len)
        last = device.key_tiles(seq_len, q_len, rows - 1)
        own = device.parts(last, per_part)
        tiles += rows * (device.key_tiles(seq_len, q_len, 0) + last) // 2
        parts += rows * own
        slots += rows * own if own > 1 else 0
    if slots > device.part_slots:
        return float("inf")
    rounds = -(-parts * device.num_kv_heads // device.num_ctas)
    own = device.parts(longest, per_part)
    most = max(-(-longest // own) + OVERHEAD_UNITS, rounds * (tiles + OVERHEAD_UNITS * parts) // parts)
    return most + (own // MERGED_PARTS if own > 1 else 0)


def tried() -> Iterator[int]:
    """Parts of the longest row tile that are tried, one number a warp."""
    parts = 1
    for _ in range(WARPS):
        yield parts
        parts += max(2 ** (parts.bit_length() - 3), 1)


def per_part(device: Device, batch: Batch) -> int:
    """The bound that costs least, of equal ones the largest."""
    lasts = [device.key_tiles(seq_len, q_len, device.row_tiles(q_len) - 1) for seq_len, q_len in batch.used()]
    longest = max([1, *lasts])
    most = max(min(longest // device.min_part_tiles, device.part_slots), 1)
    bounds = sorted({-(-longest // parts) for parts in tried() if parts <= most}, reverse=True)
    return min(bounds, key=lambda bound: cost(device, batch, bound, longest)) if most > 1 else longest


def work_list(device: Device, batch: Batch) -> list[tuple[int, int, int, int, int]]:
    """(sequence, row tile, part, parts, first slot) of every item; slot 0 if there is one part."""
    bound = per_part(device, batch)
    found, slots = [], 0
    for seq in sorted(range(len(batch.seq_lens)), key=lambda seq: (-batch.seq_lens[seq], seq)):
        seq_len, q_len = batch.seq_lens[seq], batch.q_lens[seq]
        for row_tile in reversed(range(device.row_tiles(q_len))):
            wanted = device.parts(device.key_tiles(seq_len, q_len, row_tile), bound)
            parts = wanted if slots + wanted <= device.part_slots else 1
            found += [(seq, row_tile, part, parts, slots if parts > 1 else 0) for part in range(parts)]
            slots += wanted if wanted > 1 else 0
    return found
