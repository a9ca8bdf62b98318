"""What sequences and steps work on.

The block table, the device's KV and the moves, opened and closed together.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core.block_table import BlockTable, StepArrays
from pagedkv._core.held import HeldRow
from pagedkv._core.placement import Placement
from pagedkv._core.policies.requests import check_return, requests_of
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.learned import Learned
from pagedkv.cache.moves import Moves
from pagedkv.cache.scrub import Scrub
from pagedkv.cache.storage import KV
from pagedkv.errors import ClosedError, InvalidArgument, LayoutMismatch, OutOfBlocks, PagedKVError
from pagedkv.observe.callbacks import is_refusal
from pagedkv.observe.hooks import Hooks
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import number_of_seconds


class Engine:
    """One cache's working parts. Knows sequences only by their row handles.

    Parameters
    ----------
    spec : KVSpec
    table : BlockTable over `placement`
    moves : Moves
        Makes room when a step finds none.
    kv : KV
    scrub : Scrub
        Which of the blocks that a step is given have to be zeroed.
    hooks : Hooks
        Told of steps and of what sequences do.
    costs : CostModel
        Told how long steps take, where `kv` is synchronous.
    learned : Learned, optional
        With the policy hazard: told when requests come and go.
    keeps_remainders : bool
        Whether the last, partly filled block of a released sequence stays cached.
    """

    def __init__(
        self,
        spec: KVSpec,
        placement: Placement,
        table: BlockTable,
        moves: Moves,
        kv: KV,
        scrub: Scrub,
        hooks: Hooks,
        costs: CostModel,
        learned: Learned | None = None,
        keeps_remainders: bool = False,
    ) -> None:
        self.spec, self.placement, self.table, self.moves = spec, placement, table, moves
        self._kv, self._scrub, self.hooks, self._learned = kv, scrub, hooks, learned
        self.measured = costs if kv.is_synchronous else None
        self._requests = requests_of(table)  # None where nothing is decided by which requests come
        self._learns = self._requests is not None and self._requests.learns
        self._counting = threading.Lock()
        self.computed_tokens = self.steps_that_waited = 0
        self.keeps_remainders = keeps_remainders
        self.uses_quota = False  # whether a commit may decide moves
        self.closed = False
        self.is_ours = True  # not in a forked child: it has none of the cache's threads, and perhaps a held mutex
        self._pid = os.getpid()
        _engines.add(self)

    @property
    def kv(self) -> KV:
        """The device's K and V.

        Raises
        ------
        ClosedError
            The cache is closed.
        """
        self.check_open()
        return self._kv

    def check_open(self) -> None:
        """Raise ClosedError once the cache is closed, and in a process that was forked off."""
        self.check_process()
        if self.closed:
            raise ClosedError("this cache is closed")

    def check_process(self) -> None:
        """Raise ClosedError in a process that was forked off."""
        if not self.is_ours:
            raise ClosedError(f"this cache belongs to process {self._pid}; a forked child must open one of its own")

    def begin(
        self,
        rows: NDArray[np.int64],
        q_lens: ArrayLike | None,
        lookahead: int,
        follow: NDArray[np.int32] | None = None,
    ) -> StepArrays:
        """Allocate and build a step's arrays, making room where needed.

        Copies on write are made before it returns. `follow`: as :meth:`BlockTable.step` takes it.

        Raises
        ------
        OutOfBlocks
            Everything else is held. Nothing was changed.
        """
        if not self.hooks.all:
            return self._begin(rows, q_lens, lookahead, follow)
        with self.hooks.span("allocate", sequences=len(rows), lookahead=lookahead) as span:
            arrays = self._begin(rows, q_lens, lookahead, follow)
            span.set(tokens=len(arrays.tokens), copied_blocks=len(arrays.copies))
            span.about(arrays)
        return arrays

    def _begin(
        self, rows: NDArray[np.int64], q_lens: ArrayLike | None, lookahead: int, follow: NDArray[np.int32] | None
    ) -> StepArrays:
        kv = self.kv  # before anything is scheduled: a cache that is closed raises here
        self.moves.expire()
        if self._requests is not None and self._learns:
            self._requests.begin(rows)
        refused, has_waited = True, False
        try:
            while not isinstance(arrays := self.table.try_step(rows, q_lens, lookahead, follow), StepArrays):
                has_waited = True
                self.moves.make_room(arrays)  # another thread may take it: then once more
            refused = False
            if has_waited:
                with self._counting:
                    self.steps_that_waited += 1
            if self._scrub.active:
                zero: Any = kv.zero_pages if arrays.groups else kv.zero_blocks  # type: ignore[attr-defined]
                self._scrub.clear(arrays, lookahead, lambda: self.table.roots(rows), zero)
            if len(arrays.copies):
                kv.copy_blocks(arrays.copies)
                self._scrub.copied(arrays.copies)
                self.table.copies_done(arrays.copies)
            for group, part in enumerate(arrays.groups, start=1):
                if len(part.copies):
                    kv.copy_pages(group, part.copies)  # type: ignore[attr-defined]
                    self.table.copies_done(part.copies, group)
            return arrays
        except PagedKVError:  # after any other exception the caller cancels: it may come as this returns, too
            if not refused:
                self.table.cancel(rows)
            raise

    def commit(self, rows: NDArray[np.int64], arrays: StepArrays) -> None:
        """Commit a step: its tokens are written in every layer.

        Raises
        ------
        StaleHandle
            One of its sequences was released, cut back or stepped again. Nothing was committed.
        """
        number, num_tokens = arrays.number, len(arrays.tokens)
        self.moves.expire()
        if self.uses_quota:  # a commit may decide moves
            self.moves.when_decided(lambda: self.table.commit(rows, number))
        else:
            self.table.commit(rows, number)
        with self._counting:
            self.computed_tokens += num_tokens

    def write_next(self, row: int, num_tokens: int, k: Any, v: Any) -> None:
        """Write and commit the next `num_tokens` uncomputed tokens of a row.

        K, v [num_layers, num_tokens, num_kv_heads, head_dim].
        """
        for name, values in (("k", k), ("v", v)):
            try:
                layers = [values[layer] for layer in range(len(values))]
            except (TypeError, KeyError, IndexError):
                layers = []
            if len(layers) != self.spec.num_layers:
                wanted = f"[{self.spec.num_layers}, num_tokens, num_kv_heads, head_dim]"
                raise LayoutMismatch(f"{name} must be {wanted}, got {getattr(values, 'shape', type(values).__name__)}")
        rows = np.array([row], np.int64)
        with self.hooks.span("step", sequences=1) as span:
            begun = False
            try:
                arrays = self.begin(rows, np.array([num_tokens], np.int32), 0)
                begun = True
                bound = self.kv.bind(arrays)
                for layer in range(self.spec.num_layers):
                    bound.write(layer, k[layer], v[layer])
                self.commit(rows, arrays)
            except BaseException as problem:
                if begun or not is_refusal(problem):
                    self.table.cancel(rows)
                raise
            span.set(tokens=len(arrays.tokens))

    def gather(self, row: int, start: int, stop: int, out: tuple[Any, Any] | None, layout: str) -> tuple[Any, Any]:
        """K and V of tokens `start` to `stop` - 1 of a row, as :meth:`KV.gather`.

        Raises
        ------
        InvalidArgument
            The cache keeps of some layers the last tokens alone, from a later one on.
        LayoutMismatch
        """
        blocks = self.table.blocks(row)
        if self.table.num_groups == 1:
            return self.kv.gather(blocks, start, stop, out, layout)
        tables = [(0, blocks), *(self.table.pages(row, group) for group in range(1, self.table.num_groups))]
        result: tuple[Any, Any] = self.kv.gather_pages(tables, start, stop, out, layout)  # type: ignore[attr-defined]
        return result

    def reuse_part(self, row: int, block: int, common: int, *, awaits_reads: bool) -> int:
        """Copy a block whose first `common` tokens are this row's next ones.

        Tokens reused (0: there is no room for another block). `awaits_reads`: as :meth:`Moves.make_room`.
        """
        target = self.table.seed(row, common)
        if target < 0 and self.moves.may_wait:  # the block that it needs for its next step in any case
            with contextlib.suppress(OutOfBlocks):
                self.moves.make_room(1, awaits_reads=awaits_reads)
                target = self.table.seed(row, common)
        if target < 0:
            return 0
        root, pair = int(self.table.roots([row])[0]), np.array([[block, target]], np.int32)
        self.kv.copy_blocks(pair)
        self._scrub.holds(target, root)
        return common

    def arrive(self, row: int, found: int, session: int | None) -> None:
        """Report a served request, its session and its cached blocks.

        Only where the core decides by requests. Once for each row.
        """
        if self._requests is not None and (found or self._learns):
            now = self.moves.now_ns() if self.moves.uses_time else -1
            self._requests.arrive(row, found, session=session, now_ns=now)

    def expect(self, row: int, expected_return_s: float | None) -> None:
        """A row's caller expects the next use of its prefix so long after its release."""
        self.check_open()
        if self._requests is None or not self._learns:
            check_return(expected_return_s)
        else:
            self._requests.hint(row, expected_return_s=expected_return_s)

    def release(self, held: HeldRow, is_whole: bool) -> None:
        """A row's sequence is over; its last, partly filled block is kept only if it `is_whole`.

        Train the policy on its request now: no caller waits for a token of it.
        """
        keeps = is_whole and self.keeps_remainders
        if self._learned is None:
            held.release(keeps)
            return
        try:
            self._learned.tick()
        finally:  # whatever the caller's clock does
            held.release(keeps)
        self._learned.study()

    def retain(self, row: int, priority: int, ttl_s: float | None) -> None:
        """Priority and time to live of a row's prefix."""
        self.check_open()
        expires = 0
        if ttl_s is not None:
            seconds = number_of_seconds(ttl_s, "ttl_s")
            if seconds >= 1e9:
                raise InvalidArgument(f"ttl_s = {ttl_s!r}: a number of seconds below 1e9 is needed")
            expires = self.moves.now_ns() + int(seconds * 1e9)
            self.moves.uses_time = True
        self.table.retain(row, priority, expires)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _disown() -> None:
    for engine in _engines:
        engine.is_ours = False


os.register_at_fork(after_in_child=_disown)
