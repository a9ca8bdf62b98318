"""The storage of a real cache.

Arenas on the device and in host memory, a directory on disk, kernels for the device, and threads that move blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.tier import Tier
from pagedkv.cache.device_kv import DeviceKV
from pagedkv.cache.disk_lanes import disk_lanes, shards_of
from pagedkv.cache.group_kv import GroupKV
from pagedkv.cache.group_mover import GroupMover
from pagedkv.cache.storage import KV
from pagedkv.errors import ClosedError, TierError, WrongType
from pagedkv.kernels.backend import Backend, is_backend
from pagedkv.observe.callbacks import Log
from pagedkv.spec.budgets import Disk
from pagedkv.spec.groups import GroupLayout
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.place import cuda_number
from pagedkv.spec.remote import Remote
from pagedkv.spec.sizes import whole_number
from pagedkv.tiers import DeviceTier, DiskTier, HostTier, Mover, Name, OpenTier, Record
from pagedkv.tiers.disk.lane import Lane
from pagedkv.tiers.mover.mover import MOST_THREADS
from pagedkv.tiers.remote.tier import RemoteTier

log = Log(logging.getLogger("pagedkv.cache"))


class TieredStorage:
    """The tiers of one cache, opened from its budgets.

    Parameters
    ----------
    device : ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``.
    backend : what launches the kernels; default: CuPy on a CUDA `device`, else none.
    threads : that move blocks.
    remote : the store that other caches share, if there is one.
    layout : of groups of layers; sizes are then in extents.

    Attributes
    ----------
    tiers : those that are open, by number.
    remote : the remote tier, from `open` on; None without one.

    Raises
    ------
    WrongType, InvalidArgument
    """

    def __init__(
        self,
        device: str = "cpu",
        backend: Backend | None = None,
        threads: int = 2,
        remote: Remote | None = None,
        layout: GroupLayout | None = None,
    ) -> None:
        if backend is not None and not is_backend(backend):
            raise WrongType(f"backend must be a pagedkv.kernels.backend.Backend, not {type(backend).__name__}")
        self._place, self._gpu, self._backend = device, cuda_number(device), backend
        self._layout = layout
        self._threads = whole_number(threads, "threads", 1, MOST_THREADS)
        self.tiers: dict[int, OpenTier] = {}
        self._kv: KV | None = None
        self._mover: Mover | GroupMover | None = None
        self.store: DiskTier | None = None
        self._shared = remote
        self.remote: RemoteTier | None = None

    def open(self, spec: KVSpec, blocks: Sequence[int], disk: Disk | None) -> list[int]:
        """Open the tiers.

        A disk tier that is not required and cannot be opened is left out, with a line in the log.

        Raises
        ------
        InvalidArgument, TierError, LayoutMismatch, ImportError
        """
        self.tiers, self.store, self._kv, self._mover = {}, None, None, None
        self.remote = None
        try:
            return self._open(spec, blocks, disk)
        except BaseException:
            self.close()
            raise

    def _open(self, spec: KVSpec, blocks: Sequence[int], disk: Disk | None) -> list[int]:
        opened = list(blocks)
        each = spec.block_bytes if self._layout is None else self._layout.extent_bytes
        if self._gpu is not None and self._backend is None:
            from pagedkv.attention.places import cuda_backend  # only here: it loads the kernels' modules

            self._backend = cuda_backend(self._gpu)  # before the tier: its errors name CuPy or the driver
        device = self.tiers[Tier.DEVICE] = DeviceTier(blocks[Tier.DEVICE], each, device=self._place)
        if blocks[Tier.HOST]:
            self.tiers[Tier.HOST] = HostTier(blocks[Tier.HOST], each, device=self._place)
        if disk is not None:
            try:
                lanes = () if self._layout is None else disk_lanes(spec, disk)
                self.store = self.tiers[Tier.DISK] = _open_disk(spec, blocks[Tier.DISK], disk, lanes)
            except (TierError, OSError) as problem:
                if disk.required:
                    raise
                opened[Tier.DISK] = 0
                log.warning("the disk tier %s is left out: %s", disk.path, problem)
        if self._shared is not None:
            from pagedkv.tiers.remote.opening import open_remote  # with the stores' clients

            self.remote = open_remote(self._shared, spec.fingerprint(), spec.block_bytes)
            if self.remote is not None:
                self.tiers[Tier.REMOTE] = self.remote
        self._kv = self._kv_of(spec, device)
        return opened

    def start(self, describe: Callable[[NDArray[np.void]], list[Record | Name]] | None) -> None:
        """Start the threads that move blocks."""
        if self._layout is None:
            self._mover = Mover(self.tiers, threads=self._threads, describe=describe)
        else:
            self._mover = GroupMover(self.tiers, self._layout, self._threads, describe)

    def _kv_of(self, spec: KVSpec, tier: DeviceTier) -> KV:
        """The device's K and V: computed by kernels if there is something to launch them."""
        if not self.on_gpu:
            return DeviceKV(spec, tier.arena) if self._layout is None else GroupKV(spec, self._layout, tier.arena)
        from pagedkv.cache.gpu_group_kv import GpuGroupKV  # only here: only GPU caches load the kernels' modules
        from pagedkv.cache.gpu_kv import GpuKV
        from pagedkv.kernels.block_moves import BlockMoves

        backend = self._backend
        assert backend is not None
        tier.copy_small_by(BlockMoves(backend))
        device = (backend, tier.launched_on, tier.before_use)
        if self._layout is None:
            return GpuKV(spec, tier.arena, *device)
        return GpuGroupKV(spec, self._layout, tier.arena, *device)

    @property
    def on_gpu(self) -> bool:
        """Whether kernels on a GPU read and write the blocks."""
        return self._gpu is not None or self._backend is not None

    @property
    def shares(self) -> bool:
        """Whether other caches read its blocks, in a remote store."""
        return self._shared is not None

    @property
    def kv(self) -> KV:
        """What writes and attends; from `open` on."""
        if self._kv is None:
            raise ClosedError("this storage is not open")
        return self._kv

    @property
    def carrier(self) -> Mover | GroupMover:
        """What moves blocks; from `start` on."""
        if self._mover is None:
            raise ClosedError("this storage was not started")
        return self._mover

    @property
    def device_arena(self) -> Any:
        """The device's bytes, uint8 [num_blocks, block_bytes]."""
        return self._device.arena

    def used_by(self, stream: Any) -> None:
        """Make moves wait for kernels that the caller launched on a stream."""
        self._device.used_by(stream)

    @property
    def _device(self) -> DeviceTier:
        tier = self.tiers.get(Tier.DEVICE)
        if not isinstance(tier, DeviceTier):
            raise ClosedError("this storage is not open")
        return tier

    def close(self) -> None:
        """End the threads, then close the tiers, the coldest last."""
        if self._mover is not None:
            self._mover.close()
        for tier in self.tiers.values():
            tier.close()


def _open_disk(spec: KVSpec, num_blocks: int, disk: Disk, lanes: tuple[Lane, ...]) -> DiskTier:
    return DiskTier(
        disk.path,
        num_blocks,
        lanes[0].page_bytes if lanes else spec.block_bytes,
        fingerprint=spec.fingerprint(),
        block_tokens=spec.block_size,
        segment_bytes=disk.segment_bytes,
        shards=shards_of(disk, spec),
        on_mismatch=disk.on_mismatch,
        network_fs=disk.network_fs,
        page_cache=disk.page_cache,
        on_progress=disk.on_progress,
        lanes=lanes,
    )
