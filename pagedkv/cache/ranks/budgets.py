"""From the arguments of a cache with ranks: the blocks of each tier, and its storage."""

from __future__ import annotations

from typing import Any

from pagedkv.cache.parts import THREADS, blocks_of
from pagedkv.cache.ranks.storage import RankStorage
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.ranks import Ranks
from pagedkv.spec.sizes import Size


def rank_blocks(
    ranks: Ranks, device: Size | None, host: Size | None, disk: Disk | None, spec: KVSpec, name: str = "device_memory"
) -> list[int]:
    """Blocks of device, host and disk at every rank, from budgets of all ranks together.

    `name` is that of the device's size, for errors.

    Raises
    ------
    WrongType, InvalidArgument
    """
    if not isinstance(ranks, Ranks):
        raise WrongType(f"ranks must be a pagedkv.Ranks, not {type(ranks).__name__}")
    if device is None or not isinstance(spec, KVSpec) or not (disk is None or isinstance(disk, Disk)):
        return blocks_of(device, host, disk, spec, name)  # raises
    if disk is not None and not spec.model and not disk.unnamed_model:
        return blocks_of(device, host, disk, spec, name)  # raises: the spec of a part has a name in any case
    on_host = None if host is None else ranks.share(host, "host_memory")
    part = None if disk is None else ranks.disk_of(disk, 0)
    return blocks_of(ranks.share(device, name), on_host, part, ranks.shard_spec(spec, 0), name)


def rank_storage(ranks: Ranks, given: Any, device: str, backend: Any, threads: int, remote: Any) -> RankStorage:
    """The storage of a cache with ranks.

    Raises
    ------
    InvalidArgument
        Another option says how this process would hold the KV itself.
    """
    if given is not None or device != "cpu" or backend is not None or threads != THREADS:
        raise InvalidArgument("device, backend, threads and storage are the ranks' own: give them to Rank(...) instead")
    if remote is not None:
        raise InvalidArgument("a cache with ranks has no remote store: leave out remote=, or ranks=")
    return RankStorage(ranks)
