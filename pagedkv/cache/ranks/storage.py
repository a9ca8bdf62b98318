"""The storage of a cache that decides for ranks: it holds no bytes of its own."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.tier import Tier
from pagedkv.cache.storage import KV, StepTables
from pagedkv.errors import ClosedError, InvalidArgument, RanksDisagree
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.ranks import Ranks
from pagedkv.tiers import Name, OpenTier, Record
from pagedkv.tiers.ranks.frames import Kind, pack_ids
from pagedkv.tiers.ranks.group import Call, Group
from pagedkv.tiers.ranks.handshake import Hello, digest_of, gather, open_all
from pagedkv.tiers.ranks.mover import FarMemory, FarStore, RankMover
from pagedkv.tiers.ranks.store import RankStore
from pagedkv.tiers.ranks.wire import Listener


def hello(spec: KVSpec, blocks: Sequence[int], disk: Disk | None, ranks: Ranks, rank: int = 0) -> Hello:
    """The arguments that the deciding process and a rank must have in common."""
    options = b"" if disk is None else digest_of(disk.path, str(disk.size), disk.shards, disk.segment_bytes)
    device, host, store = blocks
    return Hello(rank, ranks.size, spec.fingerprint(), (device, host, store), options.ljust(32, b"\0"), str(spec))


class RankStorage:
    """The tiers of a cache, at its ranks.

    Parameters
    ----------
    ranks : Ranks

    Attributes
    ----------
    store : the ranks' disk tiers as one, from `open` on; None without.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._spec: KVSpec | None = None
        self._group: Group | None = None
        self._kv: RankKV | None = None
        self._mover: RankMover | None = None
        self._tiers: dict[int, OpenTier] = {}
        self.store: RankStore | None = None

    def open(self, spec: KVSpec, blocks: Sequence[int], disk: Disk | None) -> list[int]:
        """Wait for the ranks, and have them open their tiers.

        Raises
        ------
        InvalidArgument, RanksDisagree, RankLost, TierError, AddressInUse
        """
        ranks = self._ranks
        ranks.shard_spec(spec, 0)
        until = time.monotonic() + ranks.open_s
        listener = Listener(str(ranks.address))
        try:
            wires = gather(listener, ranks.secret_bytes(), hello(spec, blocks, disk, ranks), until)
        finally:
            listener.close()
        told = open_all(wires, until)
        opened = list(blocks)
        if disk is not None and not all(each.has_store for each in told):
            opened[Tier.DISK] = 0
        self._group = Group(wires, ranks.silent_s)
        weakref.finalize(self, self._group.stop).atexit = False
        for number, name in ((Tier.DEVICE, "device"), (Tier.HOST, "host")):
            if blocks[number]:
                self._tiers[number] = FarMemory(name, blocks[number], spec.block_bytes)
        if opened[Tier.DISK]:
            self._tiers[Tier.DISK] = FarStore("disk", opened[Tier.DISK], spec.block_bytes)
            self.store = RankStore(self._group, told)
        for rank, each in enumerate(told):
            if list(each.blocks[: Tier.DISK]) != list(blocks[: Tier.DISK]):
                self.close()
                raise RanksDisagree(rank, f"it opened {list(each.blocks)} blocks, and the cache has {list(blocks)}")
        self._spec, self._kv = spec, RankKV(self._group)
        return opened

    def start(self, describe: Callable[[NDArray[np.void]], list[Record | Name]] | None) -> None:
        """Begin to take moves."""
        self._mover = RankMover(self._opened, self._tiers, describe)

    @property
    def _opened(self) -> Group:
        if self._group is None:
            raise ClosedError("this storage is not open")
        return self._group

    @property
    def kv(self) -> KV:
        """Has the ranks copy and clear blocks; from `open` on."""
        if self._kv is None:
            raise ClosedError("this storage is not open")
        return self._kv

    @property
    def carrier(self) -> RankMover:
        """What moves blocks; from `start` on."""
        if self._mover is None:
            raise ClosedError("this storage was not started")
        return self._mover

    @property
    def device_arena(self) -> NoReturn:
        """There is none in this process.

        Raises
        ------
        InvalidArgument
        """
        _refuse()

    def used_by(self, stream: Any) -> None:
        """Each rank tells this of its own device.

        Raises
        ------
        InvalidArgument
        """
        _refuse()

    def close(self) -> None:
        """Close the connections to the ranks. A second call does nothing."""
        if self._mover is not None:
            self._mover.close()
        if self._group is not None:
            self._group.close()


class RankKV:
    """The device's K and V, at the ranks.

    Parameters
    ----------
    group : Group
    """

    decode = None
    is_synchronous = False  # the ranks compute when the caller tells them to

    def __init__(self, group: Group) -> None:
        self._group = group
        self._under_way: list[Call] = []  # of callers that were interrupted, perhaps

    def layer(self, layer: int) -> NoReturn:
        """There is none in this process.

        Raises
        ------
        InvalidArgument
        """
        _refuse()

    def layer_scales(self, layer: int) -> NoReturn:
        """There are none in this process.

        Raises
        ------
        InvalidArgument
        """
        _refuse()

    def bind(self, arrays: StepTables, part: int = 0) -> FarStep:
        """A step of which the ranks write and read the KV.

        Raises
        ------
        RankLost
        """
        self._finish()
        self._group.check()
        return FarStep()

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Have every rank copy whole blocks, (source, destination) int32 [n, 2], and wait for it.

        Raises
        ------
        RankLost, TierError
        """
        self._do(Kind.COPY, pairs)

    def zero_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Have every rank fill whole blocks with zeros, int32 [n], and wait for it.

        Raises
        ------
        RankLost, TierError
        """
        self._do(Kind.ZERO, blocks)

    def gather(self, *_: object, **__: object) -> NoReturn:
        """There is no KV in this process.

        Raises
        ------
        InvalidArgument
        """
        _refuse()

    def _do(self, kind: Kind, ids: NDArray[np.int32]) -> None:
        self._finish()
        call = self._group.call(kind, pack_ids(ids))
        self._under_way.append(call)
        self._finish()
        self._group.check()
        self._group.require(call, "copy or clear device blocks")

    def _finish(self) -> None:
        """Wait for calls under way: no rank may write a block of theirs when others use it.

        A rank answers at once, or is lost.
        """
        for call in list(self._under_way):
            self._group.wait(call)
            if call in self._under_way:
                self._under_way.remove(call)


class FarStep:
    """A step of which the ranks write and read the KV."""

    def write(self, *_: object, **__: object) -> NoReturn:
        """There is no KV in this process.

        Raises
        ------
        InvalidArgument
        """
        _refuse()

    def attend(self, *_: object, **__: object) -> NoReturn:
        """There is no KV in this process.

        Raises
        ------
        InvalidArgument
        """
        _refuse()


def _refuse() -> NoReturn:
    raise InvalidArgument(
        "the KV of this cache lies in its ranks' processes: write and attend there with Rank.step(), and say here "
        "step.mark_written(layer) for each layer"
    )
