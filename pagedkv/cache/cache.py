"""KVCache: a prompt becomes core calls, moves and steps.

It knows the core, the tiers and the steps; none of them knows it.

One request: own the cached prefix, make room, promote (mover), then open a row on it; per step: make room, allocate and
build arrays, write and attend, commit full blocks into the tree; release.
"""
# Over 400 lines: KVCache's public methods, a third of it their docstrings; the modules beside it do the work.

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core.block_table import BlockTable
from pagedkv._core.dispatch import Dispatch
from pagedkv._core.events import KVEvent
from pagedkv._core.held import open_row, own, own_partial
from pagedkv._core.tier import TIER_NAMES, Tier
from pagedkv.cache.checkpoint import Checkpoint
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.disk_lanes import disk_lanes
from pagedkv.cache.dispatcher import Dispatcher
from pagedkv.cache.engine import Engine
from pagedkv.cache.explain import Explanation, explain_match
from pagedkv.cache.grouped import group_layout, groups_in_use
from pagedkv.cache.journal import note_closed, note_opened, note_unwritten
from pagedkv.cache.layout import with_layout
from pagedkv.cache.learned import DEFAULT, Learned
from pagedkv.cache.load import Load
from pagedkv.cache.matcher import Matcher
from pagedkv.cache.moves import Moves
from pagedkv.cache.parts import (
    THREADS,
    blocks_of,
    check_learning,
    check_options,
    check_remote,
    first_memory,
    open_admission,
    open_learned,
    open_placement,
    storage_of,
)  # fmt: skip
from pagedkv.cache.pin import Pin
from pagedkv.cache.points_found import LaneStore, restore_points
from pagedkv.cache.prefetch import LikelyPrefetcher, Prefetch, Prefetcher
from pagedkv.cache.records import Found, RecordMaker, restore
from pagedkv.cache.remote.claims import Describer
from pagedkv.cache.remote.sharing import Shared
from pagedkv.cache.roots import DEFAULT as DEFAULT_NAMESPACE
from pagedkv.cache.roots import Root, Roots
from pagedkv.cache.runtime import SYSTEM, Runtime
from pagedkv.cache.scrub import MODES, PageScrub, Scrub
from pagedkv.cache.scrub import Mode as ScrubMode
from pagedkv.cache.sequence import Batch, Sequence, session_number
from pagedkv.cache.step import Step
from pagedkv.cache.storage import Storage, Store, check_opened, claim_storage, holds_groups, release_storage
from pagedkv.cache.traced_step import TracedStep
from pagedkv.errors import (
    ClosedError,
    InvalidArgument,
    NamespaceRequired,
    TierError,
    UnsupportedVariant,
    WrongType,
)  # fmt: skip
from pagedkv.interop import Pages, export, pages_of
from pagedkv.kernels.backend import Backend
from pagedkv.observe.clock import Clock
from pagedkv.observe.hooks import Hooks
from pagedkv.observe.stats import CacheStats
from pagedkv.spec.budgets import Disk, blocks_for, check_choice
from pagedkv.spec.groups import GroupLayout
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.namespace import Namespace
from pagedkv.spec.policies import Hazard, named
from pagedkv.spec.ranks import Ranks
from pagedkv.spec.remote import Remote
from pagedkv.spec.sizes import Blocks, Size, check_flag, number_of_seconds, whole_number
from pagedkv.threads.crew import Errand
from pagedkv.tiers.remote.tier import RemoteTier


class KVCache:
    """A paged KV cache over up to three tiers.

    Parameters
    ----------
    spec : KVSpec
    device_memory, host_memory : Size
        How much KV the tier holds: a string such as ``"8GiB"``, ``Bytes(n)`` or ``Blocks(n)``. A bare number has no
        unit and is refused. `device_memory` is needed, or `memory`; no `host_memory`, no host tier.
    disk : Disk, optional
        A directory and how much of it to use. Reopening it finds the blocks written to it before.
    remote : Valkey or the like, optional
        A store that other processes and machines share (:mod:`pagedkv.spec.remote`): blocks that one of them has sent
        there are found by all.
    memory : Size, optional
        On a host without a device, in place of `device_memory`: how much KV the first tier holds, which lies in the
        host's memory and is called ``device`` all the same.
    policy : ``"lru"``, ``"arc"``, ``"s3fifo"``, ``"hazard"``, a :class:`Hazard`, or one that another package registers
        What goes first where room is needed. ``"hazard"`` learns online when prefixes are used again.
    demotion : ``"leaf_first"`` or ``"oldest_first"``
    inclusive : sequence of bool, optional
        By tier: keep the copy there when a block is promoted. Default: on disk only.
    device : str
        Where the device tier lies: ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``. On a CUDA device the device arena is
        CuPy's, the host arena is page-locked, and `step.write`, `step.attend`, `gather` and `scatter` take and give
        CuPy arrays.
    backend : Backend, optional
        What launches the kernels (:mod:`pagedkv.kernels.backend`). Default: CuPy on a CUDA `device`, else none.
    max_sequences : int
        Live sequences at most.
    pin_budget : Size, optional
        How much KV all pins together may hold. Default: nothing can be pinned.
    threads : int
        Threads that move blocks between tiers.
    deadline_s : float, optional
        A promotion that has not arrived from disk, or not started from memory, by then is given up, counted as a
        miss. Default: wait, but never for a disk that hangs (10 s).
    require_namespace : bool
        Refuse calls that name no namespace; for hosts with several tenants.
    partial_hits : bool
        Reuse the agreeing front of a block that agrees only in its first tokens, by copying it. Over a disk tier that
        is written, the last, partly filled block of a sequence is kept for that when it is released.
    event_words : int
        Size of the event ring in int32 words; 0 turns events off.
    cost_tokens : float
        Tokens of context at which attention costs as much to recompute as everything else: weighs loads from disk.
    prefill_tokens_per_s : float, optional
        The rate at which prompts are computed, where it is known beforehand; see :meth:`observe_prefill`.
    scrub : ``"across_namespaces"``, ``"always"`` or ``"never"``
        When a device block is zeroed before a sequence fills it: if it held another namespace's KV; in any case; never.
    clock : callable, optional
        Seconds, a number that never falls: what times to live, ages and bytes per day go by. Default: the system's.
        One that fails or goes back fails no call: time stands still meanwhile (docs/observability.md).

    storage : Storage, optional
        What holds, computes and moves the KV's bytes, in place of the tiers that `device`, `backend` and `threads`
        describe: an engine's own memory, or none at all (:mod:`pagedkv.cache.storage`). It serves one cache. With
        `by_group` it must be a ``GroupStorage``.
    by_group : bool
        Keep each layer's reach alone, for models with full attention in some layers and a window or chunks in
        others: of these layers a sequence holds its last tokens alone, and a prefix its last tokens where a request
        began, ended or parted from another (docs/models.md). In memory and on disk, with ``policy="lru"``. Default:
        every layer keeps all tokens.
    ranks : Ranks, optional
        The KV lies in other processes, the ranks, each of which holds an equal part of every block's KV heads
        (:class:`pagedkv.Rank`, docs/ranks.md). Budgets are those of all ranks together. The cache waits for its ranks.

    Attributes
    ----------
    spec : KVSpec
        As given, with the layout that the cache chose where it was left to it.
    hooks : Hooks
        Told when the cache begins and ends a piece of work: ``cache.hooks.add(hook)`` (:mod:`pagedkv.observe.hooks`).
    moves : Moves
        Makes room on the device and waits for moves between tiers, for schedulers (:mod:`pagedkv.cache.moves`).

    Raises
    ------
    WrongType, InvalidArgument, TierError, LayoutMismatch
    KernelsUnavailable
        The device is a GPU, and CuPy or a driver is missing; the message says which.
    """

    def __init__(
        self,
        spec: KVSpec,
        device_memory: Size | None = None,
        host_memory: Size | None = None,
        disk: Disk | None = None,
        *,
        remote: Remote | None = None,
        memory: Size | None = None,
        policy: str | Hazard = "lru",
        demotion: str = "leaf_first",
        inclusive: Seq[bool] | None = None,
        device: str = "cpu",
        backend: Backend | None = None,
        max_sequences: int = 1024,
        pin_budget: Size | None = None,
        threads: int = THREADS,
        deadline_s: float | None = None,
        require_namespace: bool = False,
        partial_hits: bool = True,
        event_words: int = 0,
        cost_tokens: float = 30000.0,
        prefill_tokens_per_s: float | None = None,
        scrub: ScrubMode = "across_namespaces",
        clock: Callable[[], float] | None = None,
        storage: Storage | None = None,
        by_group: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        first = first_memory(memory, device_memory, host_memory, device, backend)
        if ranks is not None:
            from pagedkv.cache.ranks import budgets  # with sockets and wire formats, for such a cache alone
        blocks_in = blocks_of if ranks is None else partial(budgets.rank_blocks, ranks)
        sizes = blocks_in(first, host_memory, disk, spec, "device_memory" if memory is None else "memory")
        remote = check_remote(remote, spec)
        is_gpu = backend is not None or (isinstance(device, str) and device != "cpu")
        on_gpu = is_gpu or getattr(storage, "on_gpu", False)
        shared = remote is not None or ranks is not None or getattr(storage, "shares", False)
        spec = with_layout(spec, disk, on_gpu=on_gpu, shared=shared)
        write = "never" if disk is None else disk.writes(sizes[Tier.DISK], sum(sizes[: Tier.DISK]))  # counts blocks
        layout = None
        check_flag(by_group, "by_group")
        if by_group:
            other = "" if policy == "lru" else "policy"
            layout, sizes = group_layout(
                spec, sizes, disk, remote=remote, policy=other,
                storage=storage is not None and not holds_groups(storage), ranks=ranks, inclusive=inclusive,
            )  # fmt: skip
        if ranks is None:
            self._storage = storage_of(storage, device, backend, threads, remote, layout)
        else:
            self._storage = budgets.rank_storage(ranks, storage, device, backend, threads, remote)
        pinned = 0 if pin_budget is None else blocks_for(pin_budget, spec, "pin_budget")
        check_options(
            deadline_s, max_sequences, inclusive,
            require_namespace=require_namespace, partial_hits=partial_hits,
        )  # fmt: skip
        check_choice("scrub", scrub, MODES)
        policy, hazard = named(policy)
        folder = check_learning(policy, None if hazard is None else hazard.learned, disk)
        self._clock = None if clock is None else Clock(clock)
        self.spec, self.hooks = spec, Hooks()
        self._require_namespace, self._partial_hits = require_namespace, partial_hits
        self._max_sequences = max_sequences
        core: dict[str, Any] = {
            "policy": policy, "inclusive": inclusive, "demotion": demotion, "pin_budget": pinned,
            "event_words": event_words, "write": write, "claims": 0 if remote is None else remote.claims,
            "send": "never" if remote is None else remote.write,
        }  # fmt: skip
        if layout is not None:
            core["layout"] = layout
            core["on_disk"] = () if disk is None else [lane.per_extent for lane in disk_lanes(spec, disk)]
        self.placement = open_placement(sizes, spec.block_size, **core)
        self._costs = CostModel(spec.block_size, spec.block_bytes, cost_tokens, prefill_tokens_per_s)
        self._scrub = Scrub(scrub, sizes[Tier.DEVICE], spec.block_size)
        if layout is not None:
            self._scrub = PageScrub(scrub, spec.block_size)
        self._roots = Roots(self.placement, self._scrub)
        self._counts = threading.Lock()
        self._prompt_tokens = self._missed_promotions = 0
        self._store: Store | None = None
        self._shared: Shared | None = None  # with others, in a remote store
        self._found: Found | None = None  # by the store, when it was opened
        self._left_out = self._remote_left_out = self._is_over = False
        self._closing: Errand | None = None
        with contextlib.ExitStack() as undo:  # whatever interrupts it, no thread and no locked directory is left
            claim_storage(self._storage, self)
            undo.callback(release_storage, self._storage, self)
            if layout is not None and storage is not None and holds_groups(storage):
                storage.lay_out(layout)
            opened = self._storage.open(spec, sizes, disk)
            undo.callback(self._storage.close)
            opened = check_opened(opened, sizes, disk)
            remote_tier: RemoteTier | None = getattr(self._storage, "remote", None)
            if opened != sizes or (remote is not None and remote_tier is None):
                core["claims"] = 0 if remote_tier is None else remote_tier.num_blocks
                self.placement = open_placement(opened, spec.block_size, **core)
                self._roots = Roots(self.placement, self._scrub)
                self._left_out, self._remote_left_out = opened != sizes, remote is not None and remote_tier is None
            if remote is not None and remote_tier is not None:
                self._shared = Shared(self.placement, remote_tier, remote, spec.block_bytes)
            self._storage.start(self._take_over(layout))
            there = [(tier, TIER_NAMES[tier]) for tier, pool in enumerate(self.placement.pools) if pool is not None]
            self._tiers_there = tuple(there)
            self._hit_tokens = dict.fromkeys([*self._tier_names(), "partial"], 0)
            self.table = BlockTable(self.placement, max_sequences)
            each = spec.block_bytes if self._store is None else self._store.write_bytes
            policy_told, hooks = self.placement.hazard, self.hooks
            if hazard is not None and policy_told is not None:
                policy_told.set_bound(slack=hazard.slack, stake=hazard.stake, window=hazard.window)
            runtime: Runtime = getattr(self._storage, "runtime", SYSTEM)
            clock = self._clock or runtime.seconds
            self._admission = open_admission(disk, write, each, sizes[Tier.DISK], self._costs, policy_told, clock)
            self._checkpoint: Checkpoint | None = None
            dispatch = Dispatch(self.placement)
            self._dispatcher = Dispatcher(
                self.placement, dispatch, self._storage.carrier, self._admission, self._costs, self._scrub, hooks,
                runtime,
            )  # fmt: skip
            self.moves = Moves(self.placement, dispatch, self._dispatcher, hooks, self._clock, runtime)
            if self._store is not None and write != "never":
                self._checkpoint = Checkpoint(self.placement, self.moves, self._admission, self._store)
            lookups = None
            if self._shared is not None:
                self._shared.connect(self._storage.carrier, self._costs, dispatch, runtime)
                self._dispatcher.sender, lookups = self._shared.sender, self._shared.lookups
            self._matcher = Matcher(
                self.placement, self.moves, self._costs, spec.block_size, deadline_s, partial_hits, hooks, lookups,
                None if layout is None else [group.page_bytes for group in layout.groups],
            )  # fmt: skip
            self._prefetcher = Prefetcher(self._matcher, runtime)
            self._learned = open_learned(
                self.placement.hazard, folder, disk, self._store, spec.block_size, self.moves.now_ns
            )  # fmt: skip
            self._likely_prefetcher = LikelyPrefetcher(self.placement, self._prefetcher)
            self._engine = Engine(
                spec, self.placement, self.table, self.moves, self._storage.kv, self._scrub, hooks, self._costs,
                self._learned, partial_hits and self._store is not None and write != "never" and layout is None,
            )  # fmt: skip
            undo.callback(self._dispatcher.close)
            if (any(opened[Tier.HOST :]) or self._shared is not None) and not self._storage.carrier.is_synchronous:
                self._dispatcher.start()
            note_opened(self.placement, spec, disk, write, self._found)
            undo.pop_all()

    # ---- requests

    def sequence(
        self,
        tokens: ArrayLike,
        namespace: Namespace | None = None,
        *,
        session: str | bytes | int | None = None,
        on_trial: bool = False,
        trace: object = None,
        await_remote_s: float = 0.0,
    ) -> Sequence:
        """A sequence for a prompt: its longest cached prefix is brought to the device and owned.

        Parameters
        ----------
        tokens : int32 [n]
            The prompt; at least its last token is left to compute. Any int32 is a token, also one below 0, which some
            engines use for images and the like: it matches itself alone.
        namespace : Namespace, optional
            Requests of two namespaces never share KV. Default: the namespace of all requests that name none.
        session : optional
            The conversation or agent that this request belongs to, by any name that is the same each time, within its
            namespace. Default: none. With
            ``policy="hazard"`` the blocks that a session's last request used and this one does not count as left
            behind; other policies ignore it. It changes the choice of victims, and nothing else.
        on_trial : bool
            Its prompt and hits are not in the statistics before :meth:`count` says that it is kept: for schedulers
            that open a sequence to see whether there is room for it.
        trace : optional
            Anything that names the request to hooks: the spans of this sequence's work carry it.
        await_remote_s : float
            With a remote store: for so many seconds blocks that it lacks are asked for again, with pauses. For the
            decoding side of a prompt that another process is computing.

        Raises
        ------
        OutOfBlocks
            The device has no room for the prefix; nothing is held then.
        WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        root = self._root(namespace)
        number = session_number(session)
        check_flag(on_trial, "on_trial")
        await_s = number_of_seconds(await_remote_s, "await_remote_s")
        prompt = np.ascontiguousarray(self._tokens(tokens))
        load = self._matcher.begin_load(prompt, root, None, trace, await_s)
        seq = self._traced_open(load, prompt, root, number, trace)
        if not on_trial:
            self.count(seq)
        return seq

    def count(self, seq: Sequence) -> None:
        """A sequence that was opened on trial is kept.

        Its prompt and hits count, once, before anything is appended.
        """
        if not isinstance(seq, Sequence):
            raise WrongType(f"count takes a Sequence, not {type(seq).__name__}")
        self._engine.arrive(seq.row, seq._found, seq._session)
        with self._counts:
            self._prompt_tokens += len(seq)
            for name, count in seq.hit_tokens.items():
                self._hit_tokens[name] += count
        if self.hooks.all:
            with self.hooks.on_behalf_of(seq.trace), self.hooks.span("request", seq, row=seq.row, tokens=len(seq)):
                pass

    def load(
        self,
        tokens: ArrayLike,
        namespace: Namespace | None = None,
        *,
        session: str | bytes | int | None = None,
        deadline_s: float | None = None,
        on_trial: bool = False,
        trace: object = None,
        await_remote_s: float = 0.0,
    ) -> Load:
        """Begin to bring the cached prefix of a prompt to the device, and do not wait for it.

        The load owns the prefix from now on, so nothing of it is evicted. Ask ``load.done()`` between other work, and
        open the sequence with ``load.sequence()``: :meth:`sequence` is both at once. A run that is being promoted for
        another caller is waited for, not read again.

        Parameters
        ----------
        tokens, namespace, session, on_trial, trace, await_remote_s
            As for :meth:`sequence`.
        deadline_s : float, optional
            Seconds from now: blocks that have not arrived by then are given up, and left to compute. Default: that
            of the cache.

        Raises
        ------
        WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        load = self.begin_load(
            tokens, namespace, session=session, deadline_s=deadline_s, on_trial=on_trial, trace=trace,
            await_remote_s=await_remote_s,
        )  # fmt: skip
        try:
            load.awaits_reads = True
            load.done()
        except BaseException:
            load.cancel()
            raise
        return load

    def begin_load(
        self,
        tokens: ArrayLike,
        namespace: Namespace | None = None,
        *,
        session: str | bytes | int | None = None,
        deadline_s: float | None = None,
        on_trial: bool = False,
        trace: object = None,
        await_remote_s: float = 0.0,
    ) -> Load:
        """As :meth:`load`, but nothing is moved before the first ``load.done()`` or ``wait()``.

        For schedulers, which look for room first: the load owns the cached prefix and knows what there is to bring.

        Parameters
        ----------
        tokens, namespace, session, deadline_s, on_trial, trace, await_remote_s : as for :meth:`load`.

        Raises
        ------
        WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        root = self._root(namespace)
        number = session_number(session)
        check_flag(on_trial, "on_trial")
        limit_s = None if deadline_s is None else number_of_seconds(deadline_s, "deadline_s")
        await_s = number_of_seconds(await_remote_s, "await_remote_s")
        prompt = np.array(self._tokens(tokens), order="C")  # a copy: its caller goes on
        load = self._matcher.begin_load(prompt, root, limit_s, trace, await_s)

        def opens(load: Load) -> Sequence:
            seq = self._traced_open(load, prompt, root, number, trace)
            if not on_trial:
                self.count(seq)
            return seq

        load.opens_by(opens)
        load.awaits_reads = False
        load.match()
        return load

    def _traced_open(
        self, load: Load, prompt: NDArray[np.int32], root: int, session: int | None, trace: object
    ) -> Sequence:
        if not self.hooks.all:
            return self._open(load, prompt, root, session, trace)
        with self.hooks.on_behalf_of(trace), self.hooks.span("sequence", tokens=len(prompt)) as span:
            seq = self._open(load, prompt, root, session, trace)
            span.set(row=seq.row, **{f"hit_tokens_{name}": count for name, count in seq.hit_tokens.items()})
        return seq

    def _open(
        self, load: Load, prompt: NDArray[np.int32], root: int, session: int | None, trace: object
    ) -> Sequence:
        try:
            load.bring()
            return self._opened(load, prompt, root, session, trace)
        finally:  # the row has taken over its part
            load.cancel()

    def _opened(
        self, load: Load, prompt: NDArray[np.int32], root: int, session: int | None, trace: object
    ) -> Sequence:
        held, tiers, found = load.held, load.tiers, load.found
        self._engine.check_open()
        with held:  # lets go of the blocks that the row does not take over
            wanted, kept = found if tiers is None else len(tiers), load.kept
            counts = dict.fromkeys(self._hit_tokens, 0)
            if tiers is None:
                counts["device"] = kept * self.spec.block_size
            else:
                for tier, blocks in enumerate(np.bincount(tiers[:kept]).tolist()):
                    if blocks:
                        counts[TIER_NAMES[tier]] = blocks * self.spec.block_size
            rest = prompt[kept * self.spec.block_size : -1]
            other, block, common = None, -1, 0
            if self._partial_hits and len(rest):
                other, block, common = own_partial(self.placement, held, rest)
            seq = Sequence(self._engine, open_row(self.table, prompt, root, held), counts, found, session, trace)
        try:
            if other is not None:
                with other:
                    reads = load.awaits_reads
                    seq.hit_tokens["partial"] = self._engine.reuse_part(seq.row, block, common, awaits_reads=reads)
            with self._counts:
                self._missed_promotions += wanted - kept
        except BaseException:  # it would let go by itself, but only once the traceback is gone
            seq._let_go()
            raise
        return seq

    def step(
        self, sequences: Iterable[Sequence] | Batch, *, q_lens: ArrayLike | None = None, lookahead: int = 0
    ) -> Step:
        """One forward pass over the tokens of these sequences that are not computed yet.

        Parameters
        ----------
        sequences : each once; a Batch of them saves the asking.
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
        kind = TracedStep if self.hooks.all else Step
        if isinstance(sequences, Batch):
            if len(sequences) and sequences.sequences[0]._engine is not self._engine:
                raise InvalidArgument("a batch of another cache's sequences")
            return kind(self._engine, sequences, q_lens, lookahead)
        try:
            seqs = list(sequences)
        except TypeError:
            hint = ": write step([sequence])" if isinstance(sequences, Sequence) else ""
            raise WrongType(f"a step takes several sequences, not one {type(sequences).__name__}{hint}") from None
        for seq in seqs:
            if not isinstance(seq, Sequence):
                raise WrongType(f"a step takes Sequence objects, not {type(seq).__name__}")
            if seq._engine is not self._engine:
                raise InvalidArgument("a sequence of another cache")
        return kind(self._engine, seqs, q_lens, lookahead)

    def prefetch(self, tokens: ArrayLike, namespace: Namespace | None = None) -> Prefetch:
        """Bring the cached prefix of `tokens` to the device in the background.

        A sequence of it opens at once then.
        """
        root = self._root(namespace)
        prompt = np.ascontiguousarray(self._tokens(tokens)).copy()
        return self._prefetcher.start(prompt, root)

    def prefetch_likely(self, within_s: float, max_blocks: int) -> list[Prefetch]:
        """Prefetch the prefixes most likely to be requested soon.

        In the background, with ``policy="hazard"``. For idle times.

        Prefixes in colder tiers come into free device blocks, and into those of prefixes that are less likely to be
        asked for. They count as no requests, so the policy learns nothing of them.

        Parameters
        ----------
        within_s : how soon.
        max_blocks : that are brought up, at most.

        Returns
        -------
        list of Prefetch
            The prefetches that this call started.

        Raises
        ------
        WrongType, InvalidArgument, ClosedError
        """
        self._engine.check_open()
        learned = self._learning("prefetch_likely")
        seconds = number_of_seconds(within_s, "within_s")
        most = whole_number(max_blocks, "max_blocks", 0, 2**31 - 1, unit=Blocks)
        learned.tick()
        return self._likely_prefetcher.start(learned.policy, seconds, most)

    def publish(self, tokens: ArrayLike, namespace: Namespace | None = None, wait_s: float | None = None) -> int:
        """Send the cached prefix of `tokens` to the remote store, and wait for that.

        Committed blocks are sent by themselves; this is for a process that hands a prompt over to another one now.
        Blocks in slower tiers are brought to the device first.

        Parameters
        ----------
        tokens, namespace : as for :meth:`sequence`.
        wait_s : float, optional
            Seconds after which to return; the send goes on. Default: until it is over.

        Returns
        -------
        int
            Leading blocks of `tokens` that the store has; 0 without a remote store, or if it does not confirm any.

        Raises
        ------
        OutOfBlocks, WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        root = self._root(namespace)
        limit_s = None if wait_s is None else number_of_seconds(wait_s, "wait_s")
        prompt = np.array(self._tokens(tokens), order="C")
        if self._shared is None:
            return 0
        self.moves.check_may_wait()
        with self.hooks.span("publish", tokens=len(prompt)) as span:
            with self._matcher.begin_load(np.append(prompt, np.int32(0)), root, None) as load:
                load.bring()
                stored = self._shared.publish(prompt, root, load.kept, limit_s)
            span.set(blocks=stored)
        return stored

    def observe_prefill(self, num_tokens: int, seconds: float, context: int = 0) -> None:
        """Report how long computing a prompt took.

        Loads from disk that would take longer are not made.

        Steps on the CPU that attend every layer tell this themselves. Before the first report, everything is loaded.

        Parameters
        ----------
        num_tokens : computed in one go.
        seconds : that it took.
        context : tokens before them.

        Raises
        ------
        WrongType, InvalidArgument
        """
        computed = whole_number(num_tokens, "num_tokens", 1, 2**40)
        self._costs.observe_prefill(computed, seconds, whole_number(context, "context", 0, 2**40))

    def pin(self, tokens: ArrayLike, namespace: Namespace | None = None) -> Pin:
        """Keep the cached prefix of `tokens` where it is, as long as the Pin is held.

        Raises
        ------
        PinBudgetExceeded
            The budget has no room for its blocks.
        WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        held = own(self.placement, self._tokens(tokens), self._root(namespace))
        try:
            self.placement.pin(held.handle)
            return Pin(held, self.spec.block_size)
        except BaseException:  # not by the collector, which would come later
            held.release()
            raise

    def set_kind(self, namespace: Namespace | None, kind: str = DEFAULT) -> None:
        """Namespaces of one kind are asked for alike.

        With ``policy="hazard"`` they teach and ask the same tables.

        By default, all are of the kind ``"default"``. Prefixes that the policy remembers already stay
        with the kind they had.

        Parameters
        ----------
        namespace : Namespace or None
        kind : str
            1 to 40 of ``a-z0-9_-``, such as ``"agents"``; 8 kinds at most. It names the file of its tables.

        Raises
        ------
        WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        digest, learned = self._digest(namespace), self._learning("set_kind")
        self._roots.set_kind(digest, learned.kind_number(kind))

    def save_learned(self) -> int:
        """Write down what ``policy="hazard"`` learned, as :meth:`close` does; files written.

        What fails costs the file and nothing else, and is counted in :meth:`stats`.

        Raises
        ------
        InvalidArgument, ClosedError
        """
        self._engine.check_open()
        return self._learning("save_learned").save()

    def set_quota(self, namespace: Namespace, size: Size | None, tier: Tier = Tier.DEVICE) -> None:
        """The namespace may have at most this much cached in a tier.

        Beyond it, its own coldest blocks go first.

        A quota bounds the cached blocks, not the blocks in use. Blocks of live sequences that are not committed do not
        count, and blocks in use are not taken away: the live sequences of a namespace can hold the whole device under
        any quota. The host bounds those by the number of sequences that it opens for the namespace. Blocks on their
        way out of the tier, to a colder one, do not count either.

        Parameters
        ----------
        namespace : Namespace
        size : Size or None
            None lifts the quota. Bytes are those of blocks of all layers. With ``by_group=True`` the blocks are those
            of the layers that see everything, and pages of the others do not count.
        tier : Tier

        Raises
        ------
        WrongType, InvalidArgument, ClosedError
        """
        if not isinstance(tier, Tier):
            raise WrongType(f"tier must be a pagedkv.Tier, such as Tier.HOST, not {tier!r:.40}")
        if tier >= len(self.placement.pools) or self.placement.pools[tier] is None:
            raise InvalidArgument(f"this cache has no {tier} tier; it has {', '.join(self._tier_names())}")
        blocks = None if size is None else blocks_for(size, self.spec, "size")
        if namespace is None:
            raise InvalidArgument("a quota is for a Namespace; the default namespace is shared by all: name one")
        digest = self._digest(namespace)

        def decide() -> None:
            self._engine.uses_quota = True
            self._roots.set_quota(digest, int(tier), blocks)

        self.moves.when_decided(decide)

    def purge(self, namespace: Namespace | None) -> int:
        """Forget a namespace.

        Nothing computed before ever matches again, not after a restart or a crash either.

        Blocks in use, pinned or on their way go when they are let go of. When this returns, the disk tier has it in
        writing. Returns blocks dropped now.

        Raises
        ------
        TierError
            The disk would not take it. In memory the namespace is forgotten; after a restart it may be found again.
        """
        digest = self._digest(namespace)
        self.moves.check_may_wait()
        with self.hooks.span("purge") as span:
            dropped = self._purge(digest)
            span.set(dropped_blocks=dropped)
        return dropped

    def _purge(self, digest: bytes) -> int:
        roots, dropped = self._roots.drop(digest)
        for root in roots:
            self.moves.drain_namespace(root)  # writes under way end before the disk is told
        self._roots.left(digest, roots)
        said = [self._purge_disk(digest), self._purge_remote(digest)]  # the second one whatever the first one says
        if any(said):
            text = " and ".join(f"it may be served {one}" for one in said if one)
            raise TierError(f"the namespace is forgotten in memory ({dropped} blocks), but {text}")
        return dropped

    def _purge_disk(self, digest: bytes) -> str:
        """Where the namespace may come from, and why; "" if from nowhere."""
        try:
            if self._store is not None:
                self._store.purge(digest)
            elif self._left_out:
                raise TierError("the disk tier was left out when the cache was opened")
        except TierError as problem:
            return f"from disk again after a restart: {problem}"
        return ""

    def _purge_remote(self, digest: bytes) -> str:
        """As `_purge_disk`."""
        try:
            if self._shared is not None:
                self._shared.purge(digest)
            elif self._remote_left_out:
                raise TierError("the remote store was left out when the cache was opened")
        except TierError as problem:
            return f"from the remote store again: {problem}"
        return ""

    def checkpoint(self) -> int:
        """Copy blocks that the disk lacks to it, as far as it has room; memory keeps its copies.

        The blocks used last come first, and of a prompt those nearest its beginning. Only the write budget and
        ``Disk(write="never")`` limit it. Requests go on meanwhile. A disk that fails stops it.

        Returns
        -------
        int
            Blocks that a restart finds; 0 without a disk tier, or if the disk does not confirm them.

        Raises
        ------
        InvalidArgument, ClosedError
        """
        self._engine.check_open()
        if self._store is None:
            return 0
        self.moves.check_may_wait()
        with self.hooks.span("checkpoint") as span:
            if self._checkpoint is not None:
                span.set(blocks=self._checkpoint.write().blocks)
        return self._on_disk()

    def flush(self) -> int:
        """Write everything cached to the disk, and drop unheld blocks from the faster tiers.

        As far as it fits.

        First a :meth:`checkpoint`; then, in the policy's order, blocks that the disk has leave the faster tiers, and
        blocks for which it has no room or write budget are dropped. If the disk fails meanwhile, the call stops, and
        the rest stays where it is.

        Returns
        -------
        int
            Blocks that a restart finds; 0 without a disk tier, or if the disk does not confirm them.

        Raises
        ------
        InvalidArgument, ClosedError
        """
        self._engine.check_open()
        store = self._store
        if store is None:
            return 0
        self.moves.check_may_wait()
        with self.hooks.span("flush"):
            if self._checkpoint is not None:
                self._checkpoint.write()
                self.moves.write_back(lambda: store.state == "ok")
        return self._on_disk()

    def _on_disk(self) -> int:
        """Blocks that the disk holds and confirms, each behind those before it."""
        assert self._store is not None
        return self.placement.resumable(Tier.DISK) if self._store.flush() else 0

    # ---- looking in

    @property
    def costs(self) -> CostModel:
        """Measured rates: what loading and computing take here."""
        return self._costs

    @property
    def max_sequences(self) -> int:
        """Live sequences at most."""
        return self._max_sequences

    def match(self, tokens: ArrayLike, namespace: Namespace | None = None) -> dict[str, int]:
        """How many of these tokens are cached, by the hottest tier that has them.

        One call of the core: nothing is promoted, owned or touched, so another thread may evict them at any time. It is
        for routers and for schedulers of one's own; :meth:`explain` says it block by block, and of a block in part.

        Returns
        -------
        dict
            Tokens in whole blocks for each tier of the cache, such as ``{"device": 96, "host": 32}``. Their sum is the
            length of the cached prefix; :meth:`sequence` leaves at least the last token to compute.

        Raises
        ------
        WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        prompt, root = self._asked(tokens, namespace)
        if root is None:
            return dict.fromkeys(self._tier_names(), 0)
        tiers = self.placement.match(prompt, root)[0].tobytes()  # uint8: counting bytes is quicker than np.bincount
        return {name: tiers.count(tier) * self.spec.block_size for tier, name in self._tiers_there}

    def explain(self, tokens: ArrayLike, namespace: Namespace | None = None) -> Explanation:
        """Which blocks of these tokens are in which tier. Touches nothing."""
        prompt, root = self._asked(tokens, namespace)
        if root is None:  # a namespace that was never used, or not lately: it has nothing, and gets nothing by this
            return Explanation(len(prompt), 0, (), 0)
        tiers, blocks, common = self.placement.match(prompt, root, partial=True)
        return explain_match(len(prompt), self.spec.block_size, tiers, blocks, common)

    def stats(self) -> CacheStats:
        """Counters so far, and the content of the tiers."""
        self._engine.check_process()
        moved = self._storage.carrier.stats()
        clock_failures = 0 if self._clock is None else self._clock.failures
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
                failed_moves=sum(s.failed + s.late + s.cancelled + s.left for s in moved.values()),
                disk=self._disk_stats(),
                remote=self._remote_stats(),
                hazard=None if self._learned is None else {**self._learned.stats(), "clock_failures": clock_failures},
                clock_failures=clock_failures,
                hook_failures=self.hooks.failures,
                steps_that_waited=self._engine.steps_that_waited,
                lagging_tokens=self.placement.stats()["lagging"] * self.spec.block_size,
                groups=groups_in_use(self.placement),
                orphans=0 if self._found is None else sum(self._found.orphans.values()),
                overflowing_writes=getattr(self._storage.kv, "overflowing_writes", 0),  # only a CPU's KV counts them
                latency=self._costs.latencies.read(),
            )

    def events(self) -> list[KVEvent]:
        """Changes of the cached blocks since the last call; needs ``event_words``."""
        return self.placement.drain_events()

    def check_integrity(self) -> None:
        """Recount every reference; AssertionError where the books do not agree.

        For tests and doubts, not for speed.
        """
        self.placement.check_integrity()
        self.table.check_integrity()

    @property
    def device_arena(self) -> Any:
        """The device's bytes, uint8 [num_blocks, block_bytes]."""
        return self._storage.device_arena

    def used_on(self, stream: Any = None) -> None:
        """Report launches of the caller's own kernels or graphs that use the device arena.

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
        self._storage.used_by(stream)

    def layer(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V that a layer of the model reads, as views into the device arena.

        Each [num_blocks, block_size, num_kv_heads, head_dim].

        Raises
        ------
        WrongType, InvalidArgument
        """
        return self._engine.kv.layer(self.spec.own_layer(layer))

    def layer_scales(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """Scales of K and V of a layer; None where the cache's dtype has none.

        value = stored * scale.

        Returns
        -------
        k_scale, v_scale : float32
            Views [num_blocks, block_size, num_kv_heads] into the device arena; fixed ones are [1] or [num_kv_heads].

        Raises
        ------
        WrongType, InvalidArgument
        """
        return self._engine.kv.layer_scales(self.spec.own_layer(layer))

    def pages(self, layer: int, *, read_only: bool = True, stream: Any = None) -> Pages:
        """K and V of a layer as compact paged caches, for other runtimes' paged attention.

        They cover the whole device arena.

        Nothing is copied, and nothing is held: blocks change as sequences come and go. Which pages are whose is said by
        ``pages.tables(step.block_tables)``.

        Parameters
        ----------
        layer : int
        read_only : what consumers are told; False for a runtime that writes K and V itself.
        stream : the CUDA stream that the cache is ready on. Default: CuPy's current one when it is handed over.

        Raises
        ------
        UnsupportedVariant
            Blocks hold scales, or V is not as wide as K.
        """
        shape, dtype = self.spec.block_shape, self.spec.exchange_dtype
        if self.table.num_groups > 1:
            raise UnsupportedVariant("a cache by groups has no blocks with the KV of all layers: take layer()")
        k, v = (export(array, dtype=dtype, read_only=read_only, stream=stream) for array in self.layer(layer))
        return pages_of(k, v, shape, self.spec.block_size)

    @property
    def decode(self) -> Any:
        """Turns stored values into floats where NumPy lacks the dtype (bfloat16 bits); else None."""
        return self._engine.kv.decode

    # ---- life

    def close(self, *, write_s: float | None = 5.0) -> None:
        """End the background work, the threads and the tiers. Sequences can then only be released.

        Twice is fine.

        Blocks that the disk lacks are written first, as by :meth:`checkpoint`; the log counts those lost all the same.
        Kernels that a step launched before are waited for. A thread that is still within a step's call is not: let it
        return first, at least where the device's memory is your own and you free it next.

        Parameters
        ----------
        write_s : float or None
            Seconds that writing may take, 0 to lose at once the blocks that are only in memory. None: until all is
            written. A call that is under way when they are over is waited for.

        Raises
        ------
        WrongType, InvalidArgument
        """
        within_s = math.inf if write_s is None else number_of_seconds(write_s, "write_s")
        if self._is_over or not self._engine.is_ours:
            return
        self._engine.closed = True
        if self._dispatcher.is_this_thread() or self._prefetcher.is_this_thread():  # a hook: others would wait for it
            self._close(0.0, wait=False)
            return
        if self._closing is None or self._closing.has_failed:
            self._closing = Errand(partial(self._close, within_s))
        try:
            self._closing.ends_within(math.inf)
        except BaseException:  # what interrupts it comes out when it is closed
            self._closing.ends_within(math.inf)
            raise

    def _close(self, within_s: float, *, wait: bool = True) -> None:
        self._prefetcher.close(wait=wait)
        if self._shared is not None:
            self._shared.close()
        began = time.monotonic()
        if self._shared is not None and wait:
            self._shared.drain(within_s)
            within_s = max(0.0, within_s - (time.monotonic() - began))
        try:
            if self._checkpoint is not None and wait:
                with contextlib.suppress(ClosedError):  # an earlier call was interrupted behind it
                    note_closed(self._checkpoint.write(within_s), self.spec.block_size)
            elif self._store is not None and wait:
                note_unwritten(int(self.placement.uncopied(Tier.DISK)[1].sum()), self.spec.block_size)
        finally:
            self._end()

    def _end(self) -> None:
        self._dispatcher.close()
        try:
            self._storage.carrier.close()
        finally:
            try:
                if self._learned is not None:
                    self._learned.save()
            finally:
                self._storage.close()
                release_storage(self._storage, self)
        self._is_over = True

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

    def _take_over(self, layout: GroupLayout | None) -> Describer | None:
        """Add the store's blocks to the tree; name the cache's blocks from now on."""
        self._store = store = self._storage.store
        records = None
        if store is not None:
            if layout is None:
                self._found = restore(self.placement, store, Tier.DISK, self._roots.of)
            else:
                lanes = cast(LaneStore, store)
                self._found = restore_points(self.placement, lanes, layout.groups, Tier.DISK, self._roots.of)
            records = RecordMaker(self.placement, store.secret, self.placement.tree.name)
        claims = None if self._shared is None else self._shared.claims
        return None if records is None and claims is None else Describer(records, claims)

    def _tier_names(self) -> list[str]:
        return [name for _, name in self._tiers_there]

    def _learning(self, what: str) -> Learned:
        if self._learned is None:
            raise InvalidArgument(f"{what} is for policy='hazard'; this cache has policy {self.placement.policy!r}")
        return self._learned

    def _disk_stats(self) -> dict[str, Any] | None:
        if self._store is None and not self._left_out:
            return None
        store = {"state": "left_out"} if self._store is None else dataclasses.asdict(self._store.stats())
        admission = self._admission
        declined = {"disk_hits_declined": self._matcher.declined_tokens, **admission.refused()}
        return {**store, **declined, "admission_failures": admission.failures}

    def _remote_stats(self) -> dict[str, Any] | None:
        if self._shared is None:
            return {"state": "left_out"} if self._remote_left_out else None
        return self._shared.stats()

    def _asked(self, tokens: ArrayLike, namespace: Namespace | None) -> tuple[NDArray[np.int32], Root | None]:
        """The tokens of a question, and its namespace's root, if there is one; it makes none."""
        return self._tokens(tokens), self._roots.find(self._digest(namespace))

    def check_request(self, namespace: Namespace | None = None, session: str | bytes | int | None = None) -> None:
        """Raise what :meth:`sequence` would raise for these two; nothing is matched.

        Raises
        ------
        WrongType, InvalidArgument, NamespaceRequired, ClosedError
        """
        self._digest(namespace)
        session_number(session)

    def _root(self, namespace: Namespace | None) -> Root:
        return self._roots.of(self._digest(namespace))

    def __reduce__(self) -> NoReturn:
        raise WrongType("a KVCache belongs to its process, and cannot be pickled or copied: open another like it")

    def _digest(self, namespace: Namespace | None) -> bytes:
        self._engine.check_open()
        if namespace is None and self._require_namespace:
            raise NamespaceRequired("this cache wants every call to name its Namespace: pass namespace=")
        if namespace is not None and not isinstance(namespace, Namespace):
            raise WrongType(f"namespace must be a pagedkv.Namespace, not {type(namespace).__name__}")
        return DEFAULT_NAMESPACE if namespace is None else namespace.digest()

    def _tokens(self, tokens: ArrayLike) -> NDArray[np.int32]:
        return self.placement.tree.tokens(tokens)
