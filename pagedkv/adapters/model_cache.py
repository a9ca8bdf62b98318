"""Opens the KVCache of one model, in its folder of an adapters' directory."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from pagedkv.adapters.failures import log
from pagedkv.adapters.folders import Folder, open_folder
from pagedkv.adapters.probe import Probe
from pagedkv.cache.cache import KVCache
from pagedkv.cache.parts import disk_blocks
from pagedkv.errors import InvalidArgument, TierError, WrongType
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import Bytes, Size

_NAMED = {"spec", "memory", "device_memory", "disk", "require_namespace"}  # the adapter has its own
OPTIONS = frozenset(inspect.signature(KVCache).parameters) - _NAMED
WRITE_BUDGET = "50GiB"  # per day, where the caller sets none: disks wear


def open_model_cache(
    spec: KVSpec, memory: Size, disk: Disk | None, probe: Probe | None, on_mismatch: str, options: dict[str, Any]
) -> tuple[KVCache, Folder | None]:
    """A cache, and its folder where it has a disk; parameters as for ``PrefixStore``.

    Raises
    ------
    WrongType, InvalidArgument, LayoutMismatch, TierError
    """
    unknown = ", ".join(sorted(repr(name) for name in options.keys() - OPTIONS))
    if unknown:
        known = ", ".join(sorted(OPTIONS))
        raise WrongType(f"there is no option {unknown}; beside the adapter's own there are {known}")
    if disk is None:
        return KVCache(spec, memory=memory, **options), None
    if not isinstance(disk, Disk):
        raise WrongType(f"disk must be a pagedkv.Disk, such as Disk('kv', '20GiB'), not {type(disk).__name__}")
    disk = with_defaults(disk)
    folder = None
    try:
        folder = open_folder(disk, spec.fingerprint().hex()[:32], spec.model, probe, on_mismatch)
        if folder.note:
            log.warning("%s; %s is used", folder.note, folder.path.name)
        return _open_in(folder, spec, memory, disk, options), folder
    except BaseException as problem:
        if folder is not None:
            folder.give_up()
        if disk.required or not isinstance(problem, TierError):
            raise
        log.warning("the disk is left out: %s", problem)
    return KVCache(spec, memory=memory, **options), None


def with_defaults(disk: Disk) -> Disk:
    """The disk of an adapter: an option that is given changes no other.

    ``write="all"`` of everything, for a process that is killed, and a budget for the disk's sake. An `admission` that
    is given stays; the one that ``Disk`` chooses by itself cannot be told from the same word.
    """
    by_itself = "cost" if disk.write_budget is None else "all" if disk.write == "all" else "second_hit"
    write = disk.write or "all"
    admission = "all" if write == "all" and disk.admission == by_itself else disk.admission
    budget = WRITE_BUDGET if disk.write_budget is None else disk.write_budget
    return dataclasses.replace(disk, write=write, admission=admission, write_budget=budget)


def _open_in(folder: Folder, spec: KVSpec, memory: Size, disk: Disk, options: dict[str, Any]) -> KVCache:
    while True:
        # a store that cannot be opened is left out by the caller, who gives the folder up, and not by the cache
        place = dataclasses.replace(disk, path=folder.store, size=Bytes(folder.num_bytes), required=True)
        try:
            disk_blocks(place, spec)
        except InvalidArgument as problem:
            raise InvalidArgument(
                f"Disk(size={disk.size!r}) is for all models of the directory, and this one's share is too small: "
                f"{problem}; give it a larger size"
            ) from problem
        try:
            cache = KVCache(spec, memory=memory, disk=place, **options)
        except TierError:
            if not folder.kept_bytes or folder.num_bytes == folder.kept_bytes:
                raise
            folder.keep_size()  # there is no space to grow
            continue
        blocks = cache.stats().blocks.get("disk")
        if blocks is not None:
            folder.note_use(blocks["cached"], blocks["capacity"])
        return cache
