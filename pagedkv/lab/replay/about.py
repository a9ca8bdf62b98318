"""Lines around a table: what was replayed on which tiers, and how to read the figures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from pagedkv.lab.replay.capacity import Capacity
from pagedkv.lab.replay.options import Options
from pagedkv.lab.replay.pages import model_pages
from pagedkv.lab.replay.result import Result
from pagedkv.lab.replay.trace import Trace
from pagedkv.lab.sizing.models import Model
from pagedkv.spec.sizes import format_size

WIDTH = 80
UNIT = re.compile(r"(\d) (?=%|points?\b|[KMGTPE]?i?B\b)")


def about(trace: Trace, results: Sequence[Result], options: Options) -> list[str]:
    """What was replayed: the trace, the tiers, what a token weighs, odd time stamps."""
    lines = [
        f"{printable(trace.name)}: {trace.num_requests:,} requests, {trace.num_accesses:,} block accesses, "
        f"{trace.num_unique:,} unique blocks of {trace.block_size} tokens{held_and_staked(results)}",
        *tiers(trace, results, options),
    ]
    if back := trace.num_steps_back:
        lines.append(
            f"{back:,} of {trace.num_requests:,} time stamps lie before an earlier one, and count as that one: "
            "lines should be in order of arrival"
        )
    return lines


def tiers(trace: Trace, results: Sequence[Result], options: Options) -> list[str]:
    """The sizes of the tiers where they are the same for all results, and what a token weighs."""
    block_bytes = trace.block_size * options.bytes_per_token
    weight = "" if options.layers is None else of_layers(options.layers, trace.block_size)
    weight = weight or (
        f"{format_size(options.bytes_per_token)} of KV per token (--bytes-per-token), {format_size(block_bytes)} per "
        "block"
    )
    sizes = {r.capacity.blocks: r.capacity for r in results}
    if len(sizes) != 1:
        return [weight]
    (size,) = sizes.values()
    return [f"tiers: {in_blocks_and_bytes(size, block_bytes)}", weight]


def of_layers(model: Model, block_size: int) -> str:
    """Bytes that a model's layers keep of a block; empty where each keeps all of it."""
    pages = model_pages(model.name, model.groups, block_size)
    if pages is None:
        return ""
    kept = [f"{format_size(pages.groups[0].page_bytes)} of each block for layers that see everything"]
    for group in pages.groups[1:]:
        which = f"those since a chunk of {group.chunk} began" if group.chunk else f"the last {group.window}"
        kept.append(f"{format_size(group.page_bytes)} of {which} before a boundary where requests go on, for others")
    return (
        f"{model.name} keeps {'; '.join(kept)}. In the tiers above and for the bounds a block of all layers has "
        f"{format_size(pages.all_bytes)}"
    )


def in_blocks_and_bytes(size: Capacity, block_bytes: int) -> str:
    """Such as ``device 56 blocks (3.50 GiB), host 224 (14.0 GiB)``."""
    held = [f"{name} {blocks:,} ({format_size(blocks * block_bytes)})" for name, blocks in size.tiers()]
    return ", ".join(held).replace(" (", " blocks (", 1)


def held_and_staked(results: Sequence[Result]) -> str:
    """How long requests hold their blocks, and what hazard risks: the end of a line.

    Empty by default.
    """
    times = {r.parameters["generating_ms"] for r in results} - {None}
    stakes = {r.parameters.get("hazard_stake") for r in results if r.policy == "hazard"} - {None}
    held = "".join(f"; held for {ms:g} ms per output token, in lru, min and min-bypass too" for ms in times)
    return held + "".join(f"; hazard with stake {stake}" for stake in stakes)


def notes(results: Sequence[Result], few_points: float) -> list[str]:
    """How to read the column LRU to MIN, whose ends are not rows of a table over several tiers."""
    known = [r for r in results if r.gap_to_min_closed is not None]
    if not known:
        return []
    ends = {(r.lru_hit_blocks, r.min_hit_blocks, r.block_accesses) for r in known}
    few = {100 * (best - lru) / accesses < few_points for lru, best, accesses in ends}
    parts = []
    if False in few:
        parts.append("0 % is LRU and 100 % MIN")
    if True in few:
        parts.append(f"pt: points of hit rate above LRU, where MIN is less than {few_points:g} points above it")
    line = f"LRU to MIN: {'; '.join(parts)}, both on one tier of all blocks"
    if len(ends) == 1:
        ((lru, best, accesses),) = ends
        line += f" ({100 * lru / accesses:.2f} % and {100 * best / accesses:.2f} %)"
    return [line]


def printable(text: str) -> str:
    """Text without what would control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def fitting(line: str) -> str:
    """A line, or several of 80 columns at most; numbers stay with their units."""
    bound = UNIT.sub("\\1\u00a0", line)
    filled = textwrap.fill(bound, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return filled.replace("\u00a0", " ")
