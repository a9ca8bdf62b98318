"""What the EVEN schedule should do, in plain Python.

An oracle for schedule.cuh, written from its description.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

OVERHEAD_UNITS = 2
LEAST_UNITS = 4  # of a slice, if there are so many in all


@dataclass(frozen=True)
class Part:
    """One CTA's share of a row tile, and which other CTAs have one.

    Its key tiles are ``tile_begin..tile_end - 1``.
    """

    cta: int
    seq: int
    kv_head: int
    row_tile: int
    tile_begin: int
    tile_end: int
    first_cta: int
    last_cta: int

    @property
    def slot(self) -> int:
        """Where its state goes; -1 where there is no other part."""
        return -1 if self.first_cta == self.last_cta else 2 * self.cta + (self.cta == self.first_cta)


def key_tiles(seq_len: int, q_len: int, window: int, tile_tokens: int) -> range:
    """Tiles of a sequence that some query sees; none without a query."""
    if not q_len:
        return range(0)
    begin = max(seq_len - q_len + 1 - window, 0) if window else 0
    return range(min(begin, seq_len) // tile_tokens, -(-seq_len // tile_tokens))


def row_tiles(q_len: int, group_size: int, row_tile: int) -> int:
    """Row tiles of a sequence and KV head."""
    return -(-q_len * group_size // row_tile)


def unit_indptr(
    seq_lens: Sequence[int], q_lens: Sequence[int], window: int, group_size: int, row_tile: int, tile_tokens: int
) -> list[int]:
    """Running sum of the sequences' units per KV head."""
    sums = [0]
    for seq_len, q_len in zip(seq_lens, q_lens, strict=True):
        tiles = len(key_tiles(seq_len, q_len, window, tile_tokens))
        sums.append(sums[-1] + row_tiles(q_len, group_size, row_tile) * (tiles + OVERHEAD_UNITS))
    return sums


def parts(
    seq_lens: Sequence[int],
    q_lens: Sequence[int],
    window: int,
    group_size: int,
    row_tile: int,
    tile_tokens: int,
    num_kv_heads: int,
    num_ctas: int,
) -> Iterator[Part]:
    """All parts, CTA by CTA, each CTA's in the order of its work.

    The list of all units is written out and cut into slices, the longer ones first. A unit is a key tile, or overhead
    (None).
    """
    units: list[tuple[int, int, int, int | None]] = []
    for seq, (seq_len, q_len) in enumerate(zip(seq_lens, q_lens, strict=True)):
        tiles = key_tiles(seq_len, q_len, window, tile_tokens)
        for head in range(num_kv_heads):
            for rows in range(row_tiles(q_len, group_size, row_tile)):
                units += [(seq, head, rows, None)] * OVERHEAD_UNITS + [(seq, head, rows, tile) for tile in tiles]
    ctas = min(num_ctas, max(len(units) // LEAST_UNITS, min(len(units), 1)))
    owned: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    rest = iter(units)
    for cta in range(ctas):
        for *item, tile in islice(rest, len(units) // ctas + (cta < len(units) % ctas)):
            shares = owned.setdefault((item[0], item[1], item[2]), {})
            if tile is not None:
                shares.setdefault(cta, []).append(tile)
            elif not key_tiles(seq_lens[item[0]], q_lens[item[0]], window, tile_tokens) and not shares:
                shares[cta] = []  # no keys: the CTA that has the first unit writes the output
    found = [
        Part(cta, *item, *((tiles[0], tiles[-1] + 1) if tiles else (0, 0)), min(shares), max(shares))
        for item, shares in owned.items()
        for cta, tiles in shares.items()
    ]
    yield from sorted(found, key=lambda part: (part.cta, part.seq, part.kv_head, part.row_tile))
