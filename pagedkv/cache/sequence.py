"""A sequence: one request's tokens and the blocks that hold their KV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core.held import HeldRow, fork_row
from pagedkv.cache.engine import Engine
from pagedkv.errors import ClosedError, InvalidArgument, LayoutMismatch, UnsupportedVariant, WrongType
from pagedkv.interop import View, as_argument, block_views, export
from pagedkv.spec.budgets import check_choice
from pagedkv.spec.kv_spec import LAYOUTS
from pagedkv.spec.sizes import whole_number


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
    follow : int32 [m, 3] or None
        (follower, leader, num_blocks): sequences that go on from whole blocks which others of the batch compute in the
        same step, as :meth:`BlockTable.step` takes it.
    """

    __slots__ = ("follow", "rows", "sequences")

    def __init__(
        self, sequences: Seq[Sequence], rows: NDArray[np.int64], follow: NDArray[np.int32] | None = None
    ) -> None:
        if len(sequences) != len(rows):
            raise InvalidArgument(f"{len(sequences)} sequences but {len(rows)} rows")
        self.sequences, self.rows, self.follow = sequences, rows, follow

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
    trace : object
        The caller's name for its request, for hooks; None without one. Forks have it, too.
    """

    __slots__ = ("__weakref__", "_engine", "_found", "_held", "_session", "hit_tokens", "trace")

    def __init__(
        self,
        engine: Engine,
        held: HeldRow,
        hit_tokens: Mapping[str, int],
        found: int = 0,
        session: int | None = None,
        trace: object = None,
    ) -> None:
        if not isinstance(held, HeldRow):
            raise WrongType("sequences are made by KVCache.sequence and Sequence.fork")
        self._engine, self._held = engine, held
        self._found = found  # blocks of the prompt that were cached when it came
        self._session = session  # whose request it is, as a number; None: no session's
        self.hit_tokens, self.trace = dict(hit_tokens), trace

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
        """Forget all tokens beyond the first `num_tokens` (rejected drafts).

        By group the next step computes from the last boundary whose pages are all there, perhaps from the start.
        """
        if not self._engine.hooks.all:
            self._engine.table.truncate(self.row, num_tokens)
            return
        with self._engine.hooks.on_behalf_of(self.trace), self._engine.hooks.span("truncate", row=self.row) as span:
            self._engine.table.truncate(self.row, num_tokens)
            span.set(tokens=num_tokens)

    def fork(self, n: int = 1) -> list[Sequence]:
        """`n` sequences that go on from here; the partly filled block is copied when written."""
        with self._engine.hooks.on_behalf_of(self.trace), self._engine.hooks.span("fork", row=self.row) as span:
            rows = fork_row(self._engine.table, self._held, n)
            try:
                forks = [Sequence(self._engine, held, self.hit_tokens, trace=self.trace) for held in rows]
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
        priority : 0..100; blocks with a lower one are evicted first.
        ttl_s : float, optional
            Seconds after which the prefix is evicted before all others. Until it is evicted it can still be hit: to end
            hits, :meth:`KVCache.purge` its namespace.
        """
        self._engine.retain(self.row, priority, ttl_s)

    def expect_return(self, expected_return_s: float | None) -> None:
        """Hint: seconds after release until this prefix is expected to be requested again.

        ``math.inf`` for never. None leaves the hint unchanged.

        A hint, to be given before the release: ``policy="hazard"`` learns its reliability, other policies do not look
        at it. Who does not know whether it comes again should say nothing.

        Raises
        ------
        WrongType, InvalidArgument, ClosedError
        """
        self._engine.expect(self.row, expected_return_s)

    def gather(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        out: tuple[NDArray[Any], NDArray[Any]] | None = None,
        layout: str = "NHD",
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a range of the computed tokens, contiguous, for runtimes that do not page.

        On the CPU it is one call of a C kernel for all layers: no temporary arrays, on threads, without the GIL.

        Parameters
        ----------
        start, stop : int
            Tokens ``start`` to ``stop - 1``. Default: all computed tokens.
        out : pair of arrays, optional
            Where to put them: any framework's arrays that may be written, any strides. Default: new arrays.
        layout : ``"NHD"`` or ``"HND"``
            Order of the axes of the result; that of the cache (``KVSpec.layout``) does not matter.

        Returns
        -------
        k, v : ``spec.value_dtype``
            The stored numbers; float32, multiplied with their scales, where they have scales.
            [num_layers, stop - start, num_kv_heads, head_dim] with ``"NHD"``; [num_layers, num_kv_heads, stop - start,
            head_dim] with ``"HND"``, whose layers are the ``past_key_values`` of exported models. `out` if
            it was given.

        Raises
        ------
        WrongType, InvalidArgument
            The range is not within the computed tokens, or begins before those that a cache by groups keeps of every
            layer, or the layout is neither of the two.
        LayoutMismatch
            An array of `out` has another shape or dtype, or may not be written.
        """
        check_choice("layout", layout, LAYOUTS)
        computed = self.num_computed
        end = computed if stop is None else whole_number(stop, "stop", 0, 2**31 - 1)
        begin = whole_number(start, "start", 0, 2**31 - 1)
        if not begin <= end <= computed:
            raise InvalidArgument(f"start = {begin}, stop = {end} is no range of the {computed} computed tokens")
        if not isinstance(out, tuple):
            return self._engine.gather(self.row, begin, end, out, layout)
        arrays: Any = tuple(as_argument("out", array, writable=True) for array in out)
        self._engine.gather(self.row, begin, end, arrays, layout)
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
        UnsupportedVariant
            Blocks hold scales, V is not as wide as K, or the cache keeps each layer's reach alone (`by_group`).
        """
        shape = self._engine.spec.block_shape
        if self._engine.table.num_groups > 1:
            raise UnsupportedVariant("a cache by groups has no blocks with the KV of all layers: gather it")
        (holder,) = self.fork()
        committed = self._engine.table.info(holder.row).num_committed
        holder.truncate(committed * self._engine.spec.block_size)
        spec = self._engine.spec
        first = export(self._engine.kv.layer(0)[0], dtype=spec.exchange_dtype, stream=stream)
        return block_views(first, holder.blocks.tolist(), shape, holder)

    def scatter(
        self,
        k: NDArray[Any],
        v: NDArray[Any],
        start: int | None = None,
        stop: int | None = None,
        *,
        layout: str = "NHD",
    ) -> None:
        """Write the KV of tokens that are not computed yet, computed elsewhere, and commit it.

        Parameters
        ----------
        k, v : [num_layers, stop - start, num_kv_heads, head_dim], or with ``layout="HND"`` [num_layers, num_kv_heads,
            stop - start, head_dim]. Any framework's arrays, any strides; read without a copy.
        start, stop : int, optional
            The tokens that k and v hold, ``start`` to ``stop - 1``. Default: all that are not computed yet. Tokens
            before ``num_computed`` are in the cache already and stay as they are; ``start`` must not be beyond it.
        layout : ``"NHD"`` or ``"HND"``
            Order of the axes of k and v.

        Raises
        ------
        WrongType, InvalidArgument
            No range of the sequence's tokens, one that would leave a gap, or no such layout.
        LayoutMismatch, OutOfBlocks
            Nothing is committed then.
        """
        check_choice("layout", layout, LAYOUTS)
        num_tokens, computed = self.num_tokens, self.num_computed
        begin = computed if start is None else whole_number(start, "start", 0, 2**31 - 1)
        end = num_tokens if stop is None else whole_number(stop, "stop", 0, 2**31 - 1)
        if not begin <= end <= num_tokens:
            raise InvalidArgument(f"start = {begin}, stop = {end} is no range of the {num_tokens} tokens")
        if begin > computed:
            raise InvalidArgument(
                f"start = {begin} leaves a gap: {computed} tokens are computed, so k and v must begin at one of the "
                f"first {computed + 1}"
            )
        cached = min(end, computed) - begin
        values = (_layers(name, given, cached, end - begin, layout) for name, given in (("k", k), ("v", v)))
        with self._engine.hooks.on_behalf_of(self.trace):
            self._engine.write_next(self.row, end - begin - cached, *values)

    def release(self) -> None:
        """Let go of the blocks; full ones stay cached. Twice is fine.

        The last, partly filled block stays cached, too, where the cache has a disk tier and `partial_hits`.
        """
        row = self._held.handle
        if row < 0 or not self._engine.hooks.all or not self._engine.is_ours:
            self._let_go(is_whole=True)
        else:
            with self._engine.hooks.on_behalf_of(self.trace), self._engine.hooks.span("release", row=row):
                self._let_go(is_whole=True)

    def _let_go(self, *, is_whole: bool = False) -> None:
        """`is_whole`: no call was interrupted between counting tokens as computed and writing them."""
        if self._held.handle >= 0:
            if self._engine.is_ours:
                self._engine.release(self._held, is_whole)
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

    def __reduce__(self) -> NoReturn:
        raise WrongType("a Sequence belongs to its process and cache, and cannot be pickled or copied: send its tokens")

    def __repr__(self) -> str:
        if self._held.handle < 0:
            return "<Sequence, released>"
        num_tokens, computed, num_blocks, committed = self._engine.table.info(self._held.handle)
        return f"<Sequence, {computed} of {num_tokens} tokens computed, {committed} of {num_blocks} blocks committed>"


def _layers(name: str, values: Any, cached: int, num_tokens: int, layout: str) -> Any:
    """K or V of a scatter, by layer, without its `cached` first tokens.

    Views [num_tokens - cached, num_kv_heads, head_dim] of the arguments.

    Raises
    ------
    LayoutMismatch
        It cannot be read as arrays, or holds another number of tokens.
    """
    values = as_argument(name, values)
    if not cached and layout == "NHD":
        return values  # the usual case; what writes it checks it
    axis = 0 if layout == "NHD" else 1
    rows = []
    several = isinstance(values, list | tuple) or getattr(values, "ndim", None) == 4
    for given in values if several else ():
        layer = as_argument(name, given)
        layer = layer if hasattr(layer, "swapaxes") else np.asarray(layer)
        if layer.ndim != 3 or layer.shape[axis] != num_tokens:
            wanted = "num_tokens, num_kv_heads" if layout == "NHD" else "num_kv_heads, num_tokens"
            raise LayoutMismatch(
                f"a layer of {name} must be [{wanted}, head_dim] with {num_tokens} tokens, got {tuple(layer.shape)}"
            )
        rows.append((layer if layout == "NHD" else layer.swapaxes(0, 1))[cached:])
    return rows
