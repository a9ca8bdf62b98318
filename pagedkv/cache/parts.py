"""Opens the parts of a cache from its options.

The core's pools and tree, the storage, and the admission of writes to disk.
"""

from __future__ import annotations

import os
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
from pagedkv.cache.disk_lanes import shards_of
from pagedkv.cache.grouped import open_groups
from pagedkv.cache.learned import Folder, Learned
from pagedkv.cache.storage import Storage, Store, check_storage
from pagedkv.cache.tiered import TieredStorage
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.kernels.backend import Backend
from pagedkv.spec.budgets import MAX_BLOCKS, Disk, blocks_for
from pagedkv.spec.groups import GroupLayout
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.paths import nearest_existing, path_text
from pagedkv.spec.remote import Remote
from pagedkv.spec.sizes import Blocks, Size, check_flag, check_plain, format_size, parse_size, whole_number
from pagedkv.tiers.disk.format import PAGE, Geometry

THREADS = 2  # that move blocks, by default
SMALL_FILES_BYTES = 5 * PAGE  # of a disk tier's directory: LOCK, KEY, SUPER and the directory itself


def first_memory(memory: Size | None, device: Size | None, host: Size | None, place: str, backend: Any) -> Size | None:
    """How much the first tier holds: `memory` on a host without a device, else `device`.

    Parameters
    ----------
    memory, device, host : the arguments `memory`, `device_memory` and `host_memory`.
    place, backend : where the device tier lies, and what launches its kernels.

    Raises
    ------
    InvalidArgument
        `memory` and another of them were given, or there is a device.
    """
    if memory is None:
        return device
    if device is not None:
        raise InvalidArgument(
            "memory and device_memory both say how much the first tier holds: give memory on a host without a device, "
            "device_memory with one"
        )
    if place != "cpu" or backend is not None:
        raise InvalidArgument(
            f"memory is for a cache without a device, and device={place!r}{' with a backend' * (backend is not None)} "
            f"is one: give device_memory, and host_memory for a tier in the host's memory"
        )
    if host is not None:
        raise InvalidArgument(
            "without a device all memory is one tier: give memory alone, or device_memory and host_memory for two tiers"
        )
    return memory


def blocks_of(
    device: Size | None, host: Size | None, disk: Disk | None, spec: KVSpec, name: str = "device_memory"
) -> list[int]:
    """Blocks of device, host and disk; 0 for a tier that is not wanted.

    `name` is that of the device's size, for errors.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if not isinstance(spec, KVSpec):
        raise WrongType(f"spec must be a KVSpec, not {type(spec).__name__}")
    if disk is not None and not isinstance(disk, Disk):
        raise WrongType(f"disk must be a pagedkv.Disk, such as Disk('kv', '8GiB'), not {type(disk).__name__}")
    if disk is not None and not spec.model and not disk.unnamed_model:
        raise InvalidArgument(
            f"the KV in {disk.path!r} would not say whose it is, and KV of other weights of the same shape would be "
            f"served: name the model and the revision of its weights in KVSpec(model=...), or see to it yourself and "
            f"say Disk(..., unnamed_model=True)"
        )
    if device is None:
        raise WrongType(
            "device_memory is needed: how much KV the device tier holds, such as device_memory='8GiB' or Blocks(5000); "
            "or memory='8GiB' on a host without a device; device= is a place, such as 'cuda:0'"
        )
    on_device = blocks_for(device, spec, name)
    on_host = 0 if host is None else blocks_for(host, spec, "host_memory")
    return [on_device, on_host, 0 if disk is None else disk_blocks(disk, spec)]


def disk_blocks(disk: Disk, spec: KVSpec) -> int:
    """Blocks of a disk tier: a size in bytes is for headers, padding and the small files, too.

    Raises
    ------
    WrongType, InvalidArgument
        Not a size, less than one block, or more blocks than there are ids.
    """
    if isinstance(disk.size, Blocks):
        return blocks_for(disk.size, spec, "size")
    slot_bytes = Geometry(1, spec.block_bytes, spec.block_size, shards_of(disk, spec), 1).slot_bytes
    num_blocks = (parse_size(disk.size) - SMALL_FILES_BYTES) // slot_bytes
    if num_blocks < 1:
        given, needed = format_size(parse_size(disk.size)), format_size(slot_bytes + SMALL_FILES_BYTES)
        raise InvalidArgument(f"a disk tier of {given} does not hold one block with its header, which takes {needed}")
    if num_blocks > MAX_BLOCKS:
        most = format_size(MAX_BLOCKS * slot_bytes)
        raise InvalidArgument(
            f"size={disk.size!r} is {num_blocks} blocks of {format_size(slot_bytes)} with headers; a disk tier has at "
            f"most {MAX_BLOCKS} blocks, {most} here: ask for less, or take a larger block_size"
        )
    return blocks_for(Blocks(num_blocks), spec, "size")


def open_placement(
    sizes: list[int], block_size: int, policy: str, inclusive: Any, *, claims: int = 0,
    layout: GroupLayout | None = None, **options: Any,
) -> Placement:  # fmt: skip
    """The core over pools of these sizes, and of so many claims; `options` as Placement's.

    With a layout of groups the sizes are in extents.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if layout is not None:
        return open_groups(layout, sizes, block_size, policy=policy, **options)
    pools = [BlockPool(size) if size else None for size in sizes]
    while pools[-1] is None:
        pools.pop()
    if claims:
        pools += [None] * (int(Tier.REMOTE) - len(pools)) + [BlockPool(claims)]
        options["beside"] = (False,) * int(Tier.REMOTE) + (True,)
    told = whole_number(options.get("event_words", 0), "event_words", 0, 1 << 31) > 0
    tree = RadixTree(block_size, len(pools), keep_chain=policy_needs_chain(policy), keep_names=told)
    kept = None if inclusive is None else tuple(inclusive)[: len(pools) - bool(claims)]
    if kept is not None and claims:
        kept += (False,) * (len(pools) - len(kept))
    return Placement(tree, pools, policy=policy, inclusive=kept, **options)


def storage_of(
    given: Storage | None,
    device: str,
    backend: Backend | None,
    threads: int,
    remote: Remote | None,
    layout: GroupLayout | None = None,
) -> Storage:
    """The storage that was given, or the usual one made of the other options.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if given is None:
        return TieredStorage(device, backend, threads, remote, layout)
    if device != "cpu" or backend is not None or threads != THREADS or remote is not None:
        raise InvalidArgument(
            "device, backend, threads and remote say how the cache opens a storage of its own: give them to storage= "
            "instead, as in KVCache(..., storage=TieredStorage(device, backend, threads, remote))"
        )
    return check_storage(given)


def open_admission(
    disk: Disk | None,
    write: str,
    write_bytes: int,
    num_blocks: int,
    costs: CostModel,
    policy: HazardPolicy | None,
    clock: Callable[[], float],
) -> Admission:
    """The admission of a disk tier of so many blocks, written as `write` says.

    Each block takes so many bytes to write.
    """
    if disk is None or disk.admission is None:
        return Admission("all", costs, write_bytes)
    per_day = disk.write_bytes_per_day
    budget = None if per_day is None else WriteBudget(per_day, write_bytes, clock)
    likeliest = None
    if disk.admission == "hazard" and policy is not None:
        likeliest = Likeliest(policy.chance, Turnover(num_blocks, clock), costs, budget)
    return Admission(disk.admission, costs, write_bytes, budget, likeliest, copies=write in ("reused", "all"))


def open_learned(
    policy: HazardPolicy | None,
    folder: str,
    disk: Disk | None,
    store: Store | None,
    block_size: int,
    now_ns: Callable[[], int],
) -> Learned | None:
    """The state that the policy hazard starts with.

    The files of this folder, or else of the disk tier's. None with others.
    """
    if policy is None:
        return None
    if folder or store is None or disk is None:
        files = Folder(folder)
    else:
        files = Folder(disk.path, make=False, may_write=lambda: store.state == "ok")
    return Learned(policy, block_size, now_ns, files)


def check_remote(remote: Any, spec: KVSpec) -> Remote | None:
    """Return a cache's remote store, if there is one.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if remote is None:
        return None
    if not isinstance(remote, Remote):
        raise WrongType(f"remote must be a pagedkv.Valkey or the like, not {type(remote).__name__}")
    if not spec.model:
        raise InvalidArgument(
            "a store that caches share cannot tell whose KV it holds: name the model and the revision of its weights "
            "in KVSpec(model=...)"
        )
    return remote


def check_learning(policy: Any, learned: Any, disk: Disk | None) -> str:
    """The directory that was given for learned tables, with ``~`` expanded; "" without one.

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
    there = nearest_existing(folder)
    if not os.path.isdir(there):
        raise InvalidArgument(f"learned: {there} is no directory; name one that the tables may lie in")
    return folder


def check_options(deadline_s: Any, max_sequences: Any, inclusive: Any, **flags: Any) -> None:
    """Raise unless a cache can be opened with these; `flags` are booleans by name.

    Raises
    ------
    WrongType, InvalidArgument
    """
    for name, flag in flags.items():
        check_flag(flag, name)
    if deadline_s is not None:
        check_plain(deadline_s, "deadline_s", "a number of seconds")
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float):
            raise WrongType(f"deadline_s must be a number of seconds, not {type(deadline_s).__name__}")
        if not 0 <= deadline_s < 1e9:
            raise InvalidArgument(f"deadline_s must be a number of seconds, 0 or more, not {deadline_s}")
    whole_number(max_sequences, "max_sequences", 1, 1 << 20)
    if inclusive is not None and not (
        isinstance(inclusive, tuple | list) and all(isinstance(keep, bool) for keep in inclusive)
    ):
        raise WrongType(f"inclusive must be a tuple of bools by tier, not {type(inclusive).__name__}")
