"""Rank: one process's part of the KV of a tensor-parallel cache."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core.tier import Tier
from pagedkv.cache.layout import with_layout
from pagedkv.cache.parts import THREADS
from pagedkv.cache.ranks.budgets import rank_blocks
from pagedkv.cache.ranks.storage import hello
from pagedkv.cache.reach import bind_step
from pagedkv.cache.storage import KV, BoundStep
from pagedkv.cache.tiered import TieredStorage
from pagedkv.errors import ClosedError, LayoutMismatch, RankLost, WrongType
from pagedkv.kernels.backend import Backend
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.ranks import Ranks
from pagedkv.spec.sizes import Size, number_of_seconds
from pagedkv.tiers.ranks.hands import Hands
from pagedkv.tiers.ranks.handshake import Opened, failed, join, opened


@dataclass(frozen=True, slots=True, eq=False)
class _StepArrays:
    """The arrays of a step, as a device's KV reads them."""

    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    q_indptr: NDArray[np.int32]


class _Blocks:
    """Copies and clears device blocks, and returns when that is done."""

    def __init__(self, kv: KV) -> None:
        self._kv = kv

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks, (source, destination) int32 [n, 2]."""
        self._kv.copy_blocks(pairs)
        self._wait()

    def zero_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Fill whole blocks with zeros, int32 [n]."""
        self._kv.zero_blocks(blocks)
        self._wait()

    def _wait(self) -> None:
        backend: Backend | None = getattr(self._kv, "backend", None)  # of a GPU's KV
        if backend is not None:
            backend.synchronize()


class Rank:
    """One rank's tiers, which hold its part of every block's KV heads.

    Made in the rank's process with the arguments that the deciding process gives its ``KVCache(ranks=...)``: both
    compute from them which part a rank holds. It waits until all ranks are there. From then on the deciding process has
    blocks moved, copied and cleared in here, on threads of the rank's; the caller writes and attends.

    Parameters
    ----------
    spec : KVSpec
        Of the whole KV, as the cache has it.
    device_memory, host_memory : Size
        Of all ranks together, as the cache has them.
    disk : Disk, optional
        As the cache has it. A rank's part lies in a directory ``rank<r>of<n>`` inside it.
    ranks : Ranks
    rank : int
        Which one this is, from 0.
    device : str
        Where this rank's device tier lies: ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``.
    backend : Backend, optional
        As that of KVCache.
    threads : int
        Threads that move blocks.

    Attributes
    ----------
    spec : KVSpec
        Of this rank's part: its KV heads alone.

    Raises
    ------
    WrongType, InvalidArgument, TierError, LayoutMismatch
    RanksDisagree
        The deciding process was given other arguments, another secret or version, or has this rank already.
    RankLost
        It did not come within ``ranks.open_s``, or ended.
    """

    def __init__(
        self,
        spec: KVSpec,
        device_memory: Size,
        host_memory: Size | None = None,
        disk: Disk | None = None,
        *,
        ranks: Ranks,
        rank: int,
        device: str = "cpu",
        backend: Backend | None = None,
        threads: int = THREADS,
    ) -> None:
        blocks = rank_blocks(ranks, device_memory, host_memory, disk, spec)
        spec = with_layout(spec, disk, on_gpu=False, shared=True)
        self.spec = ranks.shard_spec(spec, rank)
        self._storage = TieredStorage(device, backend, threads)
        until = time.monotonic() + ranks.open_s
        wire = join(str(ranks.address), ranks.secret_bytes(), hello(spec, blocks, disk, ranks, rank), until)
        try:
            found = self._storage.open(self.spec, blocks, None if disk is None else ranks.disk_of(disk, rank))
        except BaseException as problem:
            failed(wire, problem)
            raise
        try:
            store = self._storage.store
            write_bytes, secret = (0, bytes(32)) if store is None else (store.write_bytes, store.secret)
            on_device, on_host, on_disk = found[: Tier.DISK + 1]
            opened(wire, rank, Opened((on_device, on_host, on_disk), store is not None, write_bytes, secret), until)
            self._hands = Hands(wire, self._mover_of, _Blocks(self._storage.kv), store)
        except BaseException:
            wire.close()
            self._storage.close()
            raise
        self._is_closed, self._pid = False, os.getpid()

    def _mover_of(self, describe: Any) -> Any:
        self._storage.start(describe)
        return self._storage.carrier

    def step(
        self, slot_mapping: ArrayLike, block_tables: ArrayLike, seq_lens: ArrayLike, q_indptr: ArrayLike
    ) -> BoundStep:
        """This rank's part of a step that the deciding process has begun.

        Its ``write(layer, k, v)`` and ``attend(layer, q)`` are those of :class:`pagedkv.Step`, for this rank's heads.

        Parameters
        ----------
        slot_mapping : int64 [num_tokens]
        block_tables : int32 [num_seqs, max_blocks]
        seq_lens : int32 [num_seqs]
        q_indptr : int32 [num_seqs + 1]
            All as the attributes of :class:`pagedkv.Step`.

        Raises
        ------
        LayoutMismatch
            The arrays do not fit together, or name a block that this rank does not have.
        ClosedError, RankLost
        """
        self.check()
        try:
            slots = np.ascontiguousarray(slot_mapping, np.int64)
            tables, lens, indptr = (
                np.ascontiguousarray(array, np.int32) for array in (block_tables, seq_lens, q_indptr)
            )
        except (TypeError, ValueError) as problem:
            raise LayoutMismatch(f"the arrays of a step are integers: {problem}") from None
        num_blocks = self._storage.tiers[Tier.DEVICE].num_blocks
        fits = slots.ndim == lens.ndim == indptr.ndim == 1 and tables.ndim == 2
        if not fits or len(indptr) != len(lens) + 1 or len(tables) != len(lens) or indptr[-1] != len(slots):
            raise LayoutMismatch(
                f"slot_mapping {slots.shape}, block_tables {tables.shape}, seq_lens {lens.shape} and q_indptr "
                f"{indptr.shape} are not the arrays of one step"
            )
        if slots.max(initial=-1) >= num_blocks * self.spec.block_size or tables.max(initial=-1) >= num_blocks:
            raise LayoutMismatch(f"a step names a block that is not among this rank's {num_blocks}")
        return bind_step(self._storage.kv, _StepArrays(slots, tables, lens, indptr), self.spec)

    @property
    def device_arena(self) -> Any:
        """The device's bytes, uint8 [num_blocks, block_bytes], by the cache's block ids."""
        return self._storage.device_arena

    def layer(self, layer: int) -> tuple[Any, Any]:
        """K and V that a layer of the model reads, as views.

        Each [num_blocks, block_size, num_kv_heads, head_dim].
        """
        return self._storage.kv.layer(self.spec.own_layer(layer))

    def layer_scales(self, layer: int) -> tuple[Any, Any] | None:
        """Scales of K and V of a layer, of this rank's heads.

        As :meth:`pagedkv.KVCache.layer_scales`.
        """
        return self._storage.kv.layer_scales(self.spec.own_layer(layer))

    def used_on(self, stream: Any = None) -> None:
        """As :meth:`pagedkv.KVCache.used_on`, for this rank's device."""
        self._storage.used_by(stream)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the cache is closed or its process gone; whether that came in time.

        Raises
        ------
        WrongType, InvalidArgument
        """
        return self._hands.wait(None if timeout_s is None else number_of_seconds(timeout_s, "timeout_s"))

    def check(self) -> None:
        """Raise unless the deciding process is there.

        Raises
        ------
        RankLost, ClosedError
        """
        if self._is_closed:
            raise ClosedError("this rank is closed")
        if self._hands.lost is not None:
            raise RankLost(None, self._hands.lost.problem)

    def close(self) -> None:
        """End the connection, the threads and the tiers. A second call does nothing.

        The cache is told nothing but that the connection is closed: close the cache first.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        self._hands.close()
        self._storage.close()

    def __enter__(self) -> Rank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise WrongType("a Rank belongs to its process, and cannot be pickled or copied")

