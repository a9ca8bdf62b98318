"""What a cache is made of, opened from its budgets.

The core's pools and tree, and the tiers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from pagedkv._core.block_pool import BlockPool
from pagedkv._core.placement import Placement
from pagedkv._core.policies.hazard.face import HazardPolicy
from pagedkv._core.policies.registry import policy_needs_chain
from pagedkv._core.radix_tree import RadixTree
from pagedkv._core.tier import Tier
from pagedkv.cache.admission import Admission, Likeliest, Turnover, WriteBudget
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.learned import Folder, Learned
from pagedkv.errors import InvalidArgument, TierError, WrongType
from pagedkv.observe.callbacks import Log
from pagedkv.spec.budgets import Disk, blocks_for
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import Blocks, Size, format_size, parse_size, whole_number
from pagedkv.tiers import DeviceTier, DiskTier, HostTier
from pagedkv.tiers import Tier as OpenTier
from pagedkv.tiers.disk.directory import path_text
from pagedkv.tiers.disk.format import PAGE, SHORTEST_SUM, Geometry

log = Log(logging.getLogger("pagedkv.cache"))

SMALL_FILES_BYTES = 5 * PAGE  # of a disk tier's directory: LOCK, KEY, SUPER and the directory itself


def blocks_of(device: Size, host: Size | None, disk: Disk | None, spec: KVSpec) -> list[int]:
    """Blocks of device, host and disk; 0 for a tier that is not wanted.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if not isinstance(spec, KVSpec):
        raise WrongType(f"spec must be a KVSpec, not {type(spec).__name__}")
    if disk is not None and not isinstance(disk, Disk):
        raise WrongType(f"disk must be a pagedkv.Disk, not {type(disk).__name__}")
    if disk is not None and not spec.model and not disk.unnamed_model:
        raise InvalidArgument(
            f"the KV in {disk.path!r} would not say whose it is, and KV of other weights of the same shape would be "
            f"served: name the model and the revision of its weights in KVSpec(model=...), or see to it yourself and "
            f"say Disk(..., unnamed_model=True)"
        )
    on_device = blocks_for(device, spec, "device_memory")
    on_host = 0 if host is None else blocks_for(host, spec, "host_memory")
    return [on_device, on_host, 0 if disk is None else _disk_blocks(disk, spec)]


def _disk_blocks(disk: Disk, spec: KVSpec) -> int:
    """Blocks of a disk tier: a size in bytes is for headers, padding and the small files, too."""
    if isinstance(disk.size, Blocks):
        return blocks_for(disk.size, spec, "size")
    slot_bytes = Geometry(1, spec.block_bytes, spec.block_size, _shards(disk, spec), 1).slot_bytes
    num_blocks = (parse_size(disk.size) - SMALL_FILES_BYTES) // slot_bytes
    if num_blocks < 1:
        needed = format_size(slot_bytes + SMALL_FILES_BYTES)
        raise InvalidArgument(f"a disk tier of {disk.size!r} does not hold one block with its header: {needed}")
    return blocks_for(Blocks(num_blocks), spec, "size")


def _shards(disk: Disk, spec: KVSpec) -> int:
    """Checksum shards: as asked, or one per layer.

    Fewer where a layer is so short that its sum would cost more than its bytes.
    """
    if disk.shards is not None:
        return disk.shards
    return spec.num_layers if spec.block_bytes // spec.num_layers >= SHORTEST_SUM else 1


def open_placement(sizes: list[int], block_size: int, policy: str, inclusive: Any, **options: Any) -> Placement:
    """The core over pools of these sizes; `options` as Placement's.

    Raises
    ------
    WrongType, InvalidArgument
    """
    pools = [BlockPool(size) if size else None for size in sizes]
    while pools[-1] is None:
        pools.pop()
    tree = RadixTree(block_size, len(pools), keep_chain=policy_needs_chain(policy))
    kept = None if inclusive is None else tuple(inclusive)[: len(pools)]
    return Placement(tree, pools, policy=policy, inclusive=kept, **options)


def open_tiers(
    spec: KVSpec,
    sizes: list[int],
    disk: Disk | None,
    gpu: int | None,
    undo: contextlib.ExitStack,
    store: type[DiskTier] = DiskTier,
) -> dict[int, OpenTier]:
    """The tiers by number, the disk a `store`; `undo` closes them.

    A disk tier that is not required and cannot be opened is left out, with a line in the log.

    Raises
    ------
    TierError, LayoutMismatch, ImportError
    """
    tiers: dict[int, OpenTier] = {}
    for number, kind in ((Tier.DEVICE, DeviceTier), (Tier.HOST, HostTier)):
        if sizes[number]:
            tiers[number] = kind(sizes[number], spec.block_bytes, gpu=gpu)
            undo.callback(tiers[number].close)
    if disk is not None:
        try:
            tiers[Tier.DISK] = _open_disk(store, spec, sizes[Tier.DISK], disk)
        except (TierError, OSError) as problem:
            if disk.required:
                raise
            log.warning("the disk tier %s is left out: %s", disk.path, problem)
        else:
            undo.callback(tiers[Tier.DISK].close)
    return tiers


def _open_disk(store: type[DiskTier], spec: KVSpec, num_blocks: int, disk: Disk) -> DiskTier:
    return store(
        disk.path,
        num_blocks,
        spec.block_bytes,
        fingerprint=spec.fingerprint(),
        block_tokens=spec.block_size,
        segment_bytes=disk.segment_bytes,
        shards=_shards(disk, spec),
        on_mismatch=disk.on_mismatch,
        network_fs=disk.network_fs,
        page_cache=disk.page_cache,
        on_progress=disk.on_progress,
    )


def open_admission(
    disk: Disk | None,
    write_bytes: int,
    num_blocks: int,
    costs: CostModel,
    policy: HazardPolicy | None,
    clock: Callable[[], float] | None,
) -> Admission:
    """The admission of a disk tier of so many blocks.

    Each block takes so many bytes to write.
    """
    if disk is None:
        return Admission("all", costs, write_bytes)
    clock, per_day = time.monotonic if clock is None else clock, disk.write_bytes_per_day
    budget = None if per_day is None else WriteBudget(per_day, write_bytes, clock)
    likeliest = None
    if disk.admission == "hazard" and policy is not None:
        likeliest = Likeliest(policy.chance, Turnover(num_blocks, clock), costs, budget)
    return Admission(disk.admission, costs, write_bytes, budget, likeliest)


def open_learned(
    policy: HazardPolicy | None,
    folder: str,
    disk: Disk | None,
    store: DiskTier | None,
    block_size: int,
    now_ns: Callable[[], int],
) -> Learned | None:
    """What the policy hazard goes on from.

    The files of this folder, or else of the disk tier's. None with others.
    """
    if policy is None:
        return None
    if folder or store is None or disk is None:
        files = Folder(folder)
    else:
        files = Folder(disk.path, make=False, may_write=lambda: store.state == "ok")
    return Learned(policy, block_size, now_ns, files)


def check_learning(policy: Any, learned: Any, disk: Disk | None) -> str:
    """The directory that was given for learned tables, "" without one.

    Raise where no cache can learn like this.

    Raises
    ------
    WrongType, InvalidArgument
    """
    learns = policy == "hazard"
    if disk is not None and disk.admission == "hazard" and not learns:
        raise InvalidArgument(
            f"Disk(admission='hazard') goes by what policy='hazard' learns, and this cache has policy {policy!r}: "
            "take that policy, or admission='cost'"
        )
    if learned is None:
        return ""
    folder = path_text(learned, "learned")
    above = os.path.dirname(os.path.abspath(folder))
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InvalidArgument(f"learned: {folder} is no directory; name one that the tables may lie in")
    if not os.path.isdir(above):
        raise InvalidArgument(f"learned: there is no directory {above} for {folder} to be made in; make it first")
    return folder


def check_options(deadline_s: Any, max_sequences: Any, threads: Any, inclusive: Any, **flags: Any) -> None:
    """Raise unless a cache can be opened with these; `flags` are booleans by name.

    Raises
    ------
    WrongType, InvalidArgument
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise WrongType(f"{name} must be a bool, not {type(flag).__name__}")
    if deadline_s is not None:
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float):
            raise WrongType(f"deadline_s must be a number of seconds, not {type(deadline_s).__name__}")
        if not 0 <= deadline_s < 1e9:
            raise InvalidArgument(f"deadline_s must be a number of seconds, 0 or more, not {deadline_s}")
    whole_number(max_sequences, "max_sequences", 1, 1 << 20)
    whole_number(threads, "threads", 1, 64)
    if inclusive is not None and not (
        isinstance(inclusive, tuple | list) and all(isinstance(keep, bool) for keep in inclusive)
    ):
        raise WrongType(f"inclusive must be a tuple of bools by tier, not {type(inclusive).__name__}")
