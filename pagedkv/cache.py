"""KVCache: the conductor. It knows the core, the tiers and the steps; none of them knows it.

One request: own the cached prefix, make room, promote (mover), then open a row on it; per step: make room, allocate and
build arrays, write and attend, commit full blocks into the tree; release.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core.block_pool import BlockPool
from pagedkv._core.block_table import BlockTable
from pagedkv._core.events import TIER_NAMES, KVEvent
from pagedkv._core.placement import Placement
from pagedkv._core.radix_tree import RadixTree
from pagedkv.budgets import Budget, Disk, blocks_for
from pagedkv.device_kv import DeviceKV
from pagedkv.durable import Describer, whole_chains
from pagedkv.engine import KV, Engine
from pagedkv.errors import DoubleRelease, InvalidArgument, NamespaceRequired, OutOfBlocks, WrongType
from pagedkv.explain import Explanation, explain_match
from pagedkv.kernels.backend import Backend
from pagedkv.moving import Conductor
from pagedkv.namespace import Namespace
from pagedkv.prefetch import Prefetch
from pagedkv.sequence import Sequence
from pagedkv.sizes import whole_number
from pagedkv.spec import KVSpec
from pagedkv.stats import CacheStats
from pagedkv.step import Step
from pagedkv.tiers import DeviceTier, DiskTier, HostTier, Mover, Tier

DEVICE, HOST, DISK = 0, 1, 2


class KVCache:
    """A paged KV cache over up to three tiers.

    Parameters
    ----------
    spec : KVSpec
    device, host : str or int
        Budget of the tier: bytes as a string (``"8GiB"``) or blocks as an integer. `host` may be None.
    disk : Disk, optional
        A directory and how much of it to use. Reopening it finds what had been demoted to it.
    policy : ``"lru"``, ``"arc"``, ``"s3fifo"`` or ``"cost"``
    demotion : ``"leaf_first"`` or ``"oldest_first"``
    inclusive : sequence of bool, optional
        By tier: keep the copy there when a block is promoted. Default: on disk only.
    gpu : int, optional
        CUDA device for the device arena (CuPy); the host arena is page-locked then, and `step.write`, `step.attend`,
        `gather` and `scatter` take and give CuPy arrays. Default: CPU memory.
    backend : Backend, optional
        What launches the kernels (:mod:`pagedkv.kernels.backend`). Default: CuPy on `gpu`; without `gpu`, none.
    max_sequences : int
        Live sequences at most.
    pin_budget : int
        Blocks that `pin` may hold at most.
    threads : int
        Threads that move blocks between tiers.
    deadline_s : float, optional
        A promotion that has not started by then is given up, counted as a miss. Default: wait.
    require_namespace : bool
        Refuse calls that name no namespace; for hosts with several tenants.
    partial_hits : bool
        Reuse the agreeing front of a block that agrees only in its first tokens, by copying it.
    event_words : int
        Size of the event ring in int32 words; 0 turns events off.
    cost_tokens : float
        For ``policy="cost"``: tokens of context at which attention costs as much to recompute as everything else.

    Raises
    ------
    WrongType, InvalidArgument, TierError, LayoutMismatch
    """

    def __init__(
        self,
        spec: KVSpec,
        device: Budget,
        host: Budget | None = None,
        disk: Disk | None = None,
        *,
        policy: str = "lru",
        demotion: str = "leaf_first",
        inclusive: Seq[bool] | None = None,
        gpu: int | None = None,
        backend: Backend | None = None,
        max_sequences: int = 1024,
        pin_budget: int = 0,
        threads: int = 2,
        deadline_s: float | None = None,
        require_namespace: bool = False,
        partial_hits: bool = True,
        event_words: int = 0,
        cost_tokens: float = 30000.0,
    ) -> None:
        if not isinstance(spec, KVSpec):
            raise WrongType(f"spec must be a KVSpec, not {type(spec).__name__}")
        if disk is not None and not isinstance(disk, Disk):
            raise WrongType(f"disk must be a pagedkv.Disk, not {type(disk).__name__}")
        _check_options(deadline_s, max_sequences, threads, inclusive)
        self.spec = spec
        for name, flag in (("require_namespace", require_namespace), ("partial_hits", partial_hits)):
            if not isinstance(flag, bool):
                raise WrongType(f"{name} must be a bool, not {type(flag).__name__}")
        self._require_namespace, self._partial_hits = require_namespace, partial_hits
        self._deadline_s = deadline_s
        budgets = [device, host, disk.size if disk is not None else None]
        sizes = [0 if budget is None else blocks_for(budget, spec) for budget in budgets]
        if not sizes[DEVICE]:
            raise InvalidArgument("the device tier needs a budget")
        pools = [BlockPool(size) if size else None for size in sizes]
        while pools[-1] is None:
            pools.pop()
        has_ghosts = isinstance(policy, str) and policy in ("arc", "s3fifo")
        tree = RadixTree(spec.block_size, len(pools), keep_chain=has_ghosts)
        self.placement = Placement(
            tree, pools, policy=policy, demotion=demotion, pin_budget=pin_budget, event_words=event_words,
            cost_tokens=cost_tokens,
            inclusive=None if inclusive is None else tuple(inclusive)[: len(pools)],
        )  # fmt: skip
        self.table = BlockTable(self.placement, max_sequences)
        self._digests: dict[int, bytes] = {}
        self._roots: dict[Namespace | None, int] = {}
        self._counts = threading.Lock()
        self._pins: set[int] = set()
        self._purged: set[bytes] = set()  # digests
        self._prompt_tokens = self._missed_promotions = 0
        self._hit_tokens = dict.fromkeys([*(TIER_NAMES[t] for t, p in enumerate(pools) if p is not None), "partial"], 0)
        self._tiers: dict[int, Tier] = {}
        with contextlib.ExitStack() as undo:
            self._tiers[DEVICE] = DeviceTier(sizes[DEVICE], spec.block_bytes, gpu=gpu)
            undo.callback(self._tiers[DEVICE].close)
            if sizes[HOST]:
                self._tiers[HOST] = HostTier(sizes[HOST], spec.block_bytes, gpu=gpu)
                undo.callback(self._tiers[HOST].close)
            describe = None
            if disk is not None:
                store = DiskTier(
                    disk.path, sizes[DISK], spec.block_bytes, fingerprint=spec.fingerprint(),
                    block_tokens=spec.block_size, segment_bytes=disk.segment_bytes, shards=disk.shards,
                )  # fmt: skip
                undo.callback(store.close)
                self._tiers[DISK] = store
                self._restore(store)
                describe = Describer(self.placement, store.secret, self._digest_of)
            kv = self._kv_of(self._tiers[DEVICE], gpu, backend)  # type: ignore[arg-type]
            self._mover = Mover(self._tiers, threads=threads, describe=describe)
            undo.pop_all()
        self._conductor = Conductor(self.placement, self._mover)
        self._engine = Engine(spec, self.placement, self.table, self._conductor, kv)
        self._background: ThreadPoolExecutor | None = None

    # ---- requests

    def sequence(self, tokens: ArrayLike, namespace: Namespace | None = None) -> Sequence:
        """A sequence for a prompt: its longest cached prefix is brought to the device and owned.

        Parameters
        ----------
        tokens : int32 [n]
            The prompt; at least its last token is left to compute.
        namespace : Namespace, optional
            What must never share KV. Default: the one namespace of everybody who names none.

        Raises
        ------
        OutOfBlocks
            The device has no room for the prefix; nothing is held then.
        WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        root = self._root(namespace)
        prompt = np.ascontiguousarray(self._tokens(tokens))
        owner, hits = self._acquire(prompt, root)
        other = -1
        try:
            kept = self._conductor.promote(owner, self._deadline_s)
            counts = dict.fromkeys(self._hit_tokens, 0)
            for tier, blocks in zip(*np.unique(hits[:kept], return_counts=True), strict=True):
                counts[TIER_NAMES[tier]] = int(blocks) * self.spec.block_size
            rest = prompt[kept * self.spec.block_size : -1]
            block = common = -1
            if self._partial_hits and len(rest):
                other, block, common = self.placement.partial(owner, rest)
            row, _ = self.table.open(prompt, root, owner=owner)
        except BaseException:
            self.placement.release(owner)
            if other >= 0:
                self.placement.release(other)
            raise
        seq = Sequence(self._engine, row, counts)
        if other >= 0:
            try:
                seq.hit_tokens["partial"] = self._engine.reuse_part(row, block, common)
            finally:
                self.placement.release(other)
        with self._counts:
            self._prompt_tokens += len(prompt)
            self._missed_promotions += len(hits) - kept
            for name, count in seq.hit_tokens.items():
                self._hit_tokens[name] += count
        return seq

    def step(self, sequences: Iterable[Sequence], *, q_lens: ArrayLike | None = None, lookahead: int = 0) -> Step:
        """One forward pass over the tokens of these sequences that are not computed yet.

        Parameters
        ----------
        sequences : each once
        q_lens : int32 [num_seqs], optional
            Tokens of each to compute now (chunked prefill). Default: all.
        lookahead : int
            Token slots to allocate beyond them, for speculative tokens.

        Raises
        ------
        OutOfBlocks
            On entering the step: everything else is held. Nothing was changed.
        """
        self._engine.check_open()
        try:
            seqs = list(sequences)
        except TypeError:
            raise WrongType(f"a step takes sequences, not {type(sequences).__name__}") from None
        for seq in seqs:
            if not isinstance(seq, Sequence):
                raise WrongType(f"a step takes Sequence objects, not {type(seq).__name__}")
            if seq._engine is not self._engine:
                raise InvalidArgument("a sequence of another cache")
        return Step(self._engine, seqs, q_lens, lookahead)

    def prefetch(self, tokens: ArrayLike, namespace: Namespace | None = None) -> Prefetch:
        """Bring the cached prefix of `tokens` to the device in the background, so that its sequence opens at once."""
        root = self._root(namespace)
        prompt = np.ascontiguousarray(self._tokens(tokens)).copy()
        with self._counts:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="pagedkv-prefetch")
        return Prefetch(self._background.submit(self._prefetch, prompt, root))

    def pin(self, tokens: ArrayLike, namespace: Namespace | None = None) -> int:
        """Keep the cached prefix of `tokens` where it is until :meth:`unpin`. Returns a handle.

        Raises
        ------
        PinBudgetExceeded
            The budget has no room for its blocks.
        """
        owner, _ = self.placement.acquire(self._tokens(tokens), self._root(namespace))
        try:
            self.placement.pin(owner)
        except BaseException:
            self.placement.release(owner)
            raise
        with self._counts:
            self._pins.add(owner)
        return owner

    def unpin(self, handle: int) -> None:
        """Let go of what :meth:`pin` kept.

        Raises
        ------
        DoubleRelease
            `handle` is not what a `pin` returned, or was let go of before.
        """
        self._engine.check_open()
        handle = whole_number(handle, "handle", -(2**63), 2**63 - 1)
        with self._counts:
            if handle not in self._pins:
                raise DoubleRelease(f"pin {handle} was let go of before, or never made by this cache")
            self._pins.discard(handle)
        self.placement.release(handle)

    def set_quota(self, namespace: Namespace, budget: Budget | None, tier: str = "device") -> None:
        """The namespace may hold at most this much in a tier; beyond it, its own coldest blocks go first."""
        if not isinstance(tier, str) or tier not in TIER_NAMES[: len(self.placement.pools)]:
            raise InvalidArgument(f"tier {tier!r} is not one of {TIER_NAMES[: len(self.placement.pools)]}")
        blocks = None if budget is None else blocks_for(budget, self.spec)
        self._engine.uses_quota = True
        self.placement.set_quota(self._root(namespace), blocks, TIER_NAMES.index(tier))
        self._conductor.drain()

    def purge(self, namespace: Namespace | None) -> int:
        """Forget a namespace: it never matches again. Blocks in use go when released. Returns blocks dropped now."""
        root = self._root(namespace)
        for known, value in list(self._roots.items()):
            if value == root:
                self._roots.pop(known, None)
        store, pool = self._tiers.get(DISK), self.placement.pools[-1]
        if not isinstance(store, DiskTier) or pool is None:
            return self.placement.drop_namespace(root)
        blocks = self.placement.blocks_in(root, DISK)
        with self._counts:
            self._purged.add(self._digests[root])
        dropped = self.placement.drop_namespace(root)
        store.invalidate(blocks[pool.refs(blocks) == 0])  # or a reopened store would bring them back
        return dropped

    # ---- what is there

    def explain(self, tokens: ArrayLike, namespace: Namespace | None = None) -> Explanation:
        """Which blocks of these tokens are in which tier. Touches nothing."""
        prompt = self._tokens(tokens)
        tiers, blocks, common = self.placement.match(prompt, self._root(namespace), partial=True)
        return explain_match(len(prompt), self.spec.block_size, tiers, blocks, common)

    def stats(self) -> CacheStats:
        """Counters so far and what the tiers hold."""
        moved = self._mover.stats()
        with self._counts:
            return CacheStats(
                sequences=self.table.num_rows,
                prompt_tokens=self._prompt_tokens,
                hit_tokens=dict(self._hit_tokens),
                missed_promotions=self._missed_promotions,
                computed_tokens=self._engine.computed_tokens,
                blocks={TIER_NAMES[t]: p.counts() for t, p in enumerate(self.placement.pools) if p is not None},
                placement=self.placement.stats(),
                moved_bytes={f"{TIER_NAMES[a]}_to_{TIER_NAMES[b]}": s.bytes for (a, b), s in moved.items()},
                failed_moves=sum(s.failed + s.late + s.cancelled for s in moved.values()),
            )

    def events(self) -> list[KVEvent]:
        """Changes of what is cached since the last call; needs ``event_words``."""
        return self.placement.drain_events()

    def check_integrity(self) -> None:
        """Recount every reference; AssertionError where the books do not agree. For tests and doubts, not for speed."""
        self.placement.check_integrity()
        self.table.check_integrity()

    @property
    def device_arena(self) -> Any:
        """The device's bytes, uint8 [num_blocks, block_bytes]."""
        return self._tiers[DEVICE].arena  # type: ignore[attr-defined]

    def used_on(self, stream: Any = None) -> None:
        """Say that kernels of the caller's own, or a captured graph, were launched that read or write the device arena.

        Tier moves and later steps wait for them on the device; steps tell this themselves.

        Parameters
        ----------
        stream : CUDA stream
            Default: the current one. On the CPU nothing is asynchronous, and nothing happens.

        Raises
        ------
        ClosedError
        """
        self._engine.check_open()
        self._tiers[DEVICE].used_by(stream)  # type: ignore[attr-defined]

    def layer(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a layer as views into the device arena, [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._engine.kv.layer(layer)

    @property
    def decode(self) -> Any:
        """Turns stored values into floats where NumPy lacks the dtype (bfloat16 bits); else None."""
        return self._engine.kv.decode

    # ---- life

    def close(self) -> None:
        """End the background work, the threads and the tiers. Sequences can then only be released. Twice is fine."""
        if self._engine.closed:
            return
        self._engine.closed = True
        if self._background is not None:
            self._background.shutdown(wait=True, cancel_futures=True)
        self._mover.close()
        self._bury_purged()
        for tier in self._tiers.values():
            tier.close()

    def __enter__(self) -> KVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        tiers = ", ".join(f"{TIER_NAMES[t]} {p.capacity}" for t, p in enumerate(self.placement.pools) if p is not None)
        return f"<KVCache, blocks: {tiers}; policy {self.placement.policy}{', closed' if self._engine.closed else ''}>"

    # ---- inside

    def _kv_of(self, tier: DeviceTier, gpu: int | None, backend: Backend | None) -> KV:
        """The device's K and V: computed by kernels if there is something to launch them."""
        if gpu is None and backend is None:
            return DeviceKV(self.spec, tier.arena)
        from pagedkv.attention.places import cuda_backend  # only here: nobody else pays for the kernels' modules
        from pagedkv.gpu_kv import GpuKV

        return GpuKV(self.spec, tier.arena, backend or cuda_backend(gpu or 0), tier.used_by, tier.before_use)

    def _bury_purged(self) -> None:
        """What was held or moving when its namespace was purged is on the disk still; what came after it may stay."""
        store = self._tiers.get(DISK)
        if not self._purged or not isinstance(store, DiskTier):
            return
        purged = self._purged.copy()
        anew = [self.placement.blocks_in(self._root_of_digest(digest), DISK) for digest in purged]
        there = [found.block for found in store.records() if found.record.namespace in purged]
        store.invalidate(np.setdiff1d(np.array(there, np.int32), np.concatenate(anew)))

    def _acquire(self, prompt: NDArray[np.int32], root: int) -> tuple[int, NDArray[np.uint8]]:
        """Own the cached prefix and say where it was; waits (within the deadline) for runs promoted for others."""
        limit = max(len(prompt) - 1, 0) // self.spec.block_size
        until = None if self._deadline_s is None else time.monotonic() + self._deadline_s
        while True:
            owner, _ = self.placement.acquire(prompt, root, limit)
            try:
                if self.placement.blocked_by(owner) < 0 or (until is not None and time.monotonic() >= until):
                    return owner, self.placement.tiers_of(owner)
            except BaseException:
                self.placement.release(owner)
                raise
            self.placement.release(owner)
            self._conductor.run_moves(self._deadline_s)

    def _prefetch(self, prompt: NDArray[np.int32], root: int) -> int:
        owner, _ = self._acquire(prompt, root)
        try:
            return self._conductor.promote(owner, self._deadline_s) * self.spec.block_size
        except OutOfBlocks:
            return 0
        finally:
            self.placement.release(owner)

    def _restore(self, store: DiskTier) -> None:
        """A reopened store's blocks join the tree; all others are free again."""
        pool = self.placement.pools[DISK]
        assert pool is not None
        stored = list(store.records())
        if not stored:
            return
        chains, orphans = whole_chains(stored, store.secret)
        pool.alloc(pool.capacity)  # a new pool hands out 0, 1, 2, ...: every id is ours for the moment
        for digest, tokens, blocks in chains:
            self.placement.restore(tokens, blocks, self._root_of_digest(digest), DISK)
        if orphans:
            store.invalidate(np.array(orphans, np.int32))
        ids = np.arange(pool.capacity, dtype=np.int32)
        in_tree = np.zeros(pool.capacity, np.bool_)
        for node in self.placement.dump().values():
            in_tree[node["ids"].get(DISK, [])] = True
        pool.free(ids[~in_tree][::-1])

    def _root(self, namespace: Namespace | None) -> int:
        self._engine.check_open()
        if namespace is None and self._require_namespace:
            raise NamespaceRequired("this cache wants every call to name its Namespace: pass namespace=")
        if namespace is not None and not isinstance(namespace, Namespace):
            raise WrongType(f"namespace must be a pagedkv.Namespace, not {type(namespace).__name__}")
        root = self._roots.get(namespace)
        if root is None:
            root = self._root_of_digest((namespace or Namespace()).digest())
            self._roots[namespace] = root
        return root

    def _root_of_digest(self, digest: bytes) -> int:
        root = self.placement.tree.namespace(digest)
        self._digests[root] = digest
        return root

    def _digest_of(self, root: int) -> bytes:
        return self._digests[root]

    def _tokens(self, tokens: ArrayLike) -> NDArray[np.int32]:
        return self.placement.tree.tokens(tokens)


def _check_options(deadline_s: Any, max_sequences: Any, threads: Any, inclusive: Any) -> None:
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
