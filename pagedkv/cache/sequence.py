"""A sequence: one request's tokens and the blocks that hold their KV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core.held import HeldRow, fork_row
from pagedkv.cache.engine import Engine
from pagedkv.errors import ClosedError, InvalidArgument, WrongType
from pagedkv.interop import View, as_argument, block_views, export


def session_number(session: object) -> int | None:
    """A session's name as a number for the core.

    The same for the same name, as long as this process lives.

    Raises
    ------
    WrongType
        No str, bytes, integer or None.
    InvalidArgument
        Empty string or negative number. Callers use these to mean "no session"; accepting them would merge all such
        requests into one session.
    """
    if session is None:
        return None
    if isinstance(session, bool) or not isinstance(session, str | bytes | Integral):
        raise WrongType(f"a session is named by a str, bytes or int, not {type(session).__name__}")
    if session < 0 if isinstance(session, Integral) else not session:
        raise InvalidArgument(f"session = {session!r} names no session: leave it out, or give None")
    return hash(session) & 0x7FFFFFFFFFFFFFFF


class Batch:
    """Sequences and their rows, looked up once, for schedulers.

    A step over many of them need not ask each.

    Attributes
    ----------
    sequences : sequence of Sequence
    rows : int64 [num_seqs]
        Their rows in the core's block table, in the same order. A sequence that was released since is found by the
        core: StaleHandle.
    """

    __slots__ = ("rows", "sequences")

    def __init__(self, sequences: Seq[Sequence], rows: NDArray[np.int64]) -> None:
        if len(sequences) != len(rows):
            raise InvalidArgument(f"{len(sequences)} sequences but {len(rows)} rows")
        self.sequences, self.rows = sequences, rows

    def __len__(self) -> int:
        return len(self.rows)


class Sequence:
    """Tokens and their blocks.

    Made by :meth:`KVCache.sequence`; a context manager that releases itself.

    Attributes
    ----------
    hit_tokens : mapping of tier name to int
        Prompt tokens that came from the cache, by the tier they were found in (``"partial"``: copied out of a
        block that agreed only in its first tokens).
    """

    __slots__ = ("__weakref__", "_engine", "_found", "_held", "_session", "hit_tokens")

    def __init__(
        self, engine: Engine, held: HeldRow, hit_tokens: Mapping[str, int], found: int = 0, session: int | None = None
    ) -> None:
        if not isinstance(held, HeldRow):
            raise WrongType("sequences are made by KVCache.sequence and Sequence.fork")
        self._engine, self._held = engine, held
        self._found = found  # blocks of the prompt that were cached when it came
        self._session = session  # whose request it is, as a number; None: no session's
        self.hit_tokens = dict(hit_tokens)

    @property
    def row(self) -> int:
        """The row's handle in the core's block table."""
        row = self._held.handle
        if row < 0:
            raise ClosedError("this sequence was released: open another one")
        self._engine.check_process()
        return row

    @property
    def is_released(self) -> bool:
        """Whether it holds nothing any more: it was released."""
        return self._held.handle < 0

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens so far, int32 [num_tokens] (a copy)."""
        return self._engine.table.tokens(self.row)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._engine.table.info(self.row).num_tokens

    @property
    def num_computed(self) -> int:
        """Leading tokens whose KV is written."""
        return self._engine.table.info(self.row).num_computed

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Device block ids, int32 [num_blocks] (a copy)."""
        return self._engine.table.blocks(self.row)

    def append(self, tokens: int | ArrayLike) -> None:
        """Add a sampled token, or several (a further turn, a draft).

        Their KV is computed in the next step.

        Raises
        ------
        WrongType, InvalidArgument
            Not integers that fit in int32.
        """
        single = isinstance(tokens, int | np.integer) and not isinstance(tokens, bool)
        self._engine.table.extend(self.row, np.array([tokens]) if single else tokens)

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens beyond the first `num_tokens` (rejected drafts)."""
        if not self._engine.hooks.all:
            self._engine.table.truncate(self.row, num_tokens)
            return
        with self._engine.hooks.span("truncate", row=self.row) as span:
            self._engine.table.truncate(self.row, num_tokens)
            span.set(tokens=num_tokens)

    def fork(self, n: int = 1) -> list[Sequence]:
        """`n` sequences that go on from here.

        Full blocks are shared, the partly filled one is copied when written.
        """
        with self._engine.hooks.span("fork", row=self.row) as span:
            rows = fork_row(self._engine.table, self._held, n)
            try:
                forks = [Sequence(self._engine, held, self.hit_tokens) for held in rows]
                span.set(forks=len(forks))
                span.about(np.array([fork.row for fork in forks], np.int64))
            except BaseException:  # they would let go by themselves, but only once the traceback is gone
                for held in rows:
                    held.release()
                raise
        return forks

    def retain(self, *, priority: int = 50, ttl_s: float | None = None) -> None:
        """How long the cache should keep this prefix after release.

        Parameters
        ----------
        priority : 0..100; what has a lower one is evicted first.
        ttl_s : float, optional
            Seconds after which the prefix is evicted before all others. Until it is evicted it can still be hit: to end
            hits, :meth:`KVCache.purge` its namespace.
        """
        self._engine.retain(self.row, priority, ttl_s)

    def expect_return(self, expected_return_s: float | None) -> None:
        """Hint: seconds after release until this prefix is expected to be requested again.

        ``math.inf`` for never. None leaves the hint unchanged.

        A hint, to be given before the release: ``policy="hazard"`` learns what it is worth, other policies do not look
        at it. Who does not know whether it comes again should say nothing.

        Raises
        ------
        WrongType, InvalidArgument, ClosedError
        """
        self._engine.expect(self.row, expected_return_s)

    def gather(self, out: tuple[NDArray[Any], NDArray[Any]] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of the computed tokens, contiguous, for runtimes that do not page.

        Returns
        -------
        k, v : ``spec.np_dtype`` [num_layers, num_computed, num_kv_heads, head_dim]
            `out` where it was given; any framework's arrays that may be written.

        Raises
        ------
        LayoutMismatch
            An array of `out` has another shape or dtype.
        """
        if not isinstance(out, tuple):
            return self._engine.kv.gather(self.blocks, self.num_computed, out)
        arrays: Any = tuple(as_argument("out", array, writable=True) for array in out)
        self._engine.kv.gather(self.blocks, self.num_computed, arrays)
        return out

    def export_blocks(self, *, stream: Any = None) -> list[View]:
        """The committed blocks as read-only arrays for other frameworks. Nothing is copied.

        While one of the views, or an array made of it, lives, all these blocks stay where they are, also after this
        sequence's release: they count as a live sequence's.

        Parameters
        ----------
        stream : the CUDA stream that their KV was written on. Default: CuPy's current one when one is handed over.

        Returns
        -------
        list of View
            ``spec.block_shape`` each, in the order of the tokens. The unfinished block at the end is not among them.

        Raises
        ------
        InvalidArgument
            A step of this sequence is under way; or the cache has `max_sequences` already, and this would be one more.
        """
        (holder,) = self.fork()
        committed = self._engine.table.info(holder.row).num_committed
        holder.truncate(committed * self._engine.spec.block_size)
        spec = self._engine.spec
        first = export(self._engine.kv.layer(0)[0], dtype=spec.dtype, stream=stream)
        return block_views(first, holder.blocks.tolist(), spec.block_shape, holder)

    def scatter(self, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Write the KV of all tokens not computed yet, computed elsewhere, and commit it.

        Parameters
        ----------
        k, v : [num_layers, num_tokens - num_computed, num_kv_heads, head_dim]
            Any framework's arrays; read without a copy.

        Raises
        ------
        LayoutMismatch, OutOfBlocks
            Nothing is committed then.
        """
        self._engine.write_all(self.row, as_argument("k", k), as_argument("v", v))

    def release(self) -> None:
        """Let go of the blocks; full ones stay cached. Twice is fine."""
        row = self._held.handle
        if row < 0 or not self._engine.hooks.all or not self._engine.is_ours:
            self._let_go()
        else:
            with self._engine.hooks.span("release", row=row):
                self._let_go()

    def _let_go(self) -> None:
        if self._held.handle >= 0:
            if self._engine.is_ours:
                self._engine.release(self._held)
            else:  # a forked child: the row is the parent's
                self._held.release()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_held") and not is_finalizing():  # at the end modules are gone, and soon the memory
            self._let_go()

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        if self._held.handle < 0:
            return "<Sequence, released>"
        num_tokens, computed, num_blocks, committed = self._engine.table.info(self._held.handle)
        return f"<Sequence, {computed} of {num_tokens} tokens computed, {committed} of {num_blocks} blocks committed>"
