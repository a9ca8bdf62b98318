"""Log lines of a cache that is opened or closed."""

from __future__ import annotations

import logging

from pagedkv._core.block_pool import ExtentPool
from pagedkv._core.placement import Placement
from pagedkv._core.tier import TIER_NAMES
from pagedkv.cache.checkpoint import Written
from pagedkv.cache.records import Found
from pagedkv.observe.callbacks import Log
from pagedkv.spec.budgets import Disk
from pagedkv.spec.groups import groups_of
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import format_size

log = Log(logging.getLogger("pagedkv.cache"))

MANY_ORPHANS = 100  # of so many blocks one without the block before it is worth a warning
REASONS = {"no_parent": "without the block before them", "wrong_key": "with a wrong key", "doubled": "doubled",
           "no_tail": "behind the last boundary where all groups of layers have their tails"}  # fmt: skip


def note_opened(placement: Placement, spec: KVSpec, disk: Disk | None, write: str, found: Found | None) -> None:
    """Log tiers, sizes and policy, and the blocks found on the disk."""
    tiers = ", ".join(
        f"{TIER_NAMES[tier]} {pool.max_blocks:,} blocks ({format_size(pool.max_blocks * spec.block_bytes)})"
        if pool.extents is None
        else f"{TIER_NAMES[tier]} {_of_groups(pool.extents, spec)}"
        for tier, pool in enumerate(placement.pools)
        if pool is not None
    )
    if disk is None or found is None:
        log.info("opened: %s; policy %s", tiers, placement.policy)
        return
    freed = ", ".join(f"{count:,} {REASONS[reason]}" for reason, count in found.orphans.items() if count)
    log.info(
        "opened: %s; policy %s; disk %s, write=%r, admission=%r: %s blocks found in %s %s, %s",
        tiers, placement.policy, disk.path, write, disk.admission, f"{found.blocks:,}", f"{found.prefixes:,}",
        "prefix" if found.prefixes == 1 else "prefixes",
        f"freed: {freed}" if freed else "none freed",
    )  # fmt: skip
    lost = found.orphans["no_parent"]
    if lost * MANY_ORPHANS > found.blocks + lost:
        log.warning(
            "%s: %s of %s blocks were written without the block before them and are freed; a power failure can leave "
            "such blocks", disk.path, f"{lost:,}", f"{found.blocks + lost:,}",
        )  # fmt: skip


def _of_groups(extents: ExtentPool, spec: KVSpec) -> str:
    """Extents of groups of layers, and the KV that they hold, to 1 %."""
    groups = groups_of(spec)
    held = extents.num_extents * extents.per_extent[0] * groups[0].page_bytes
    return f"{extents.num_extents:,} extents ({format_size(held)}) of {len(groups)} groups of layers"


def note_closed(written: Written, block_size: int) -> None:
    """Log the blocks written at the end, and those lost: a warning unless the disk is full."""
    if not written.blocks and not written.lacking:
        return
    total = f"{written.blocks:,} of {written.blocks + written.lacking:,} blocks written in {written.seconds:.1f} s"
    if written.lacking:
        say = log.warning if written.is_cut else log.info
        say("closing: %s; %s", total, _lost(written.lacking, block_size))
    else:
        log.info("closing: %s", total)


def note_unwritten(num_blocks: int, block_size: int) -> None:
    """Log how many blocks are lost as the disk is never written."""
    if num_blocks:
        log.info("closing: %s, as asked: write='never'", _lost(num_blocks, block_size))


def _lost(num_blocks: int, block_size: int) -> str:
    return f"{num_blocks:,} blocks (up to {num_blocks * block_size:,} tokens) were only in memory and are lost"
