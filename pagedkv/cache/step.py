"""A step: the batch's new tokens, written and attended layer by layer.

It commits as a whole or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core.block_table import StepArrays
from pagedkv.cache.engine import Engine
from pagedkv.cache.reach import LayeredStep, bind_step, written_layer
from pagedkv.cache.sequence import Batch, Sequence
from pagedkv.cache.storage import BoundStep, StepTables
from pagedkv.errors import ClosedError, InvalidArgument, LayoutMismatch, StaleHandle, UnsupportedVariant, WrongType
from pagedkv.interop import as_argument
from pagedkv.observe.callbacks import is_refusal
from pagedkv.spec.layers import check_scale_of_latents
from pagedkv.spec.sizes import whole_number

_NOT_UNDER_WAY = "this step is not under way: use it inside `with cache.step(...) as step:`"
_VARIANT = ("softmax_scale", "window", "soft_cap", "alibi_slopes", "sinks", "mask", "mask_indptr", "causal", "kernel")
_MAX_WINDOW = 2**31 - 1
MEASURED_TOKENS = 128  # a step of fewer tokens says little about the rate of long prompts


class Step:
    """One forward pass over a batch of sequences.

    Made by :meth:`KVCache.step`; use it with ``with``.

    At a clean end all layers must have been written; then the tokens count as computed and full blocks join the prefix
    tree. If the body raises, nothing is committed.

    Attributes
    ----------
    tokens, positions : int32 [num_tokens]
    q_indptr : int32 [num_seqs + 1]
    seq_lens : int32 [num_seqs]
    block_tables : int32 [num_seqs, max_blocks], padded with -1
    slot_mapping : int64 [num_tokens]
    """

    def __init__(self, engine: Engine, seqs: Seq[Sequence] | Batch, q_lens: ArrayLike | None, lookahead: int) -> None:
        self._engine = engine
        self._seqs = seqs.sequences if isinstance(seqs, Batch) else list(seqs)  # held, so that they stay open
        self._rows = seqs.rows if isinstance(seqs, Batch) else np.array([seq.row for seq in seqs], np.int64)
        self._follow = seqs.follow if isinstance(seqs, Batch) else None
        self._q_lens, self._lookahead = q_lens, lookahead
        self._arrays: StepArrays | None = None
        self._bound: BoundStep | None = None
        self._written: set[int] = set()
        self._attended: set[int] = set()
        self._began = 0.0

    def __enter__(self) -> Step:
        if self._arrays is not None:
            raise InvalidArgument("this step is under way already")
        self._written, self._attended = set(), set()
        self._began = time.perf_counter()
        begun = False
        try:
            arrays = self._engine.begin(self._rows, self._q_lens, self._lookahead, self._follow)
            begun = True
            self._bound = bind_step(self._engine.kv, arrays, self._engine.spec)
            self._arrays = arrays
            self._engine.moves.make_room_ahead(arrays.num_new_blocks)
        except BaseException as problem:
            if begun or not is_refusal(problem):  # else nothing was scheduled
                self._cancel()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        arrays = self._arrays
        if arrays is None:
            return
        try:
            if kind is None:
                self._check_complete(arrays)
                self._engine.commit(self._rows, arrays)
        except BaseException:  # where it came after the commit, there is nothing left to cancel
            self._cancel()
            raise
        if kind is not None:
            self._cancel()
            return
        self._arrays = self._bound = None
        self._measure(arrays)

    def __del__(self) -> None:
        """An interrupt may come between `__enter__` and the body, or before `__exit__` has begun."""
        if getattr(self, "_arrays", None) is not None and self._engine.is_ours:
            self._cancel()  # of its rows those that have not gone on without it

    def _cancel(self) -> None:
        self._engine.table.cancel(self._rows, None if self._arrays is None else self._arrays.number)
        self._arrays = self._bound = None

    def _check_complete(self, arrays: StepArrays) -> None:
        spec = self._engine.spec
        if len(self._written) < spec.num_layers and len(arrays.tokens):
            missing = [spec.model_layer(own) for own in range(spec.num_layers) if own not in self._written]
            raise InvalidArgument(
                f"the step ended with layers {missing[:8]} unwritten, so nothing was committed: write every layer, "
                f"or call mark_written(layer) if your own kernel wrote them"
            )

    @property
    def arrays(self) -> StepArrays:
        """All arrays of the step.

        Raises
        ------
        ClosedError
            The step has not begun or is over.
        """
        if self._arrays is None:
            raise ClosedError(_NOT_UNDER_WAY)
        return self._arrays

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens to compute, of all sequences one after the other."""
        return self.arrays.tokens

    @property
    def positions(self) -> NDArray[np.int32]:
        """Their positions."""
        return self.arrays.positions

    @property
    def q_indptr(self) -> NDArray[np.int32]:
        """Where each sequence's tokens begin."""
        return self.arrays.q_indptr

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """KV tokens of each sequence, this step's included."""
        return self.arrays.seq_lens

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """Block ids, a row per sequence."""
        return self.arrays.block_tables

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """Where each new token's K and V go: block * block_size + offset."""
        return self.arrays.slot_mapping

    def to_csr(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """``kv_indptr``, ``kv_indices``, ``kv_last_block_len`` of the tables."""
        return self.arrays.to_csr()

    def write(self, layer: int, k: Any, v: Any = None, *, stream: Any = None) -> None:
        """Put the new tokens' K and V of one layer into their slots.

        Parameters
        ----------
        layer : int, of the model's; not one that shares another's KV.
        k, v : [num_tokens, num_kv_heads, head_dim]
            In the cache's dtype, or float32/float64/float16, which are converted (to nearest even); for int8 and fp8
            also bfloat16, and they are divided by the scales. V: [.., head_dim_v], or None where it is a part of K.
            Arrays of any framework, where the cache's device is; read without a copy.
        stream : CUDA stream
            Where the kernel runs; only on a GPU, and there by default the current stream. The host does not wait.

        Raises
        ------
        LayoutMismatch
            Another shape or a dtype that cannot be converted. Nothing was written.
        InvalidArgument
            The layer shares the KV of another.
        WrongType
            An array of another device, or a stream where there is no GPU.
        """
        bound, arrays = self._under_way
        if not arrays.is_untouched:
            self._check_rows(arrays)
        v = None if v is None else as_argument("v", v, stream=stream)
        bound.write(layer, as_argument("k", k, stream=stream), v, stream)
        self._written.add(int(layer) if self._engine.spec.reads is None else self._engine.spec.own_layer(layer))

    def mark_written(self, layer: int) -> None:
        """Say that a kernel of the caller's own has written this layer's slots."""
        self._written.add(written_layer(self._engine.spec, layer))

    def _measure(self, arrays: StepArrays) -> None:
        """A long step that attended every layer was a forward pass.

        Its time says how fast the caller computes.
        """
        costs = self._engine.measured
        if costs is None or len(arrays.tokens) < MEASURED_TOKENS:
            return
        if len(self._attended) == self._engine.spec.num_model_layers:
            q_lens = np.diff(arrays.q_indptr)
            costs.observe_prefill(q_lens, time.perf_counter() - self._began, arrays.seq_lens - q_lens)

    def _is_written(self, layer: Any) -> bool:
        """Whether this layer's slots were written in this step."""
        try:
            return layer in self._written
        except TypeError:  # it cannot be hashed
            return False

    def _check_written(self, layer: int) -> None:
        """Raise if attention would read slots of this layer that were not written in this step."""
        spec, num_new = self._engine.spec, len(self.arrays.tokens)
        own = spec.own_layer(layer)
        if num_new and own not in self._written:
            first = spec.model_layer(own)
            raise InvalidArgument(
                f"attend({layer}) came before write({first}): the slots of this step's {num_new} new tokens still hold "
                f"what was there before. Call step.write({first}, k, v) first, or step.mark_written({first}) once your "
                f"own kernel has written them"
            )

    def _check_rows(self, arrays: StepArrays) -> None:
        """The slots are this step's only while its rows are as they were when it began."""
        if not arrays.is_untouched and not self._engine.table.are_in(self._rows, arrays.number):
            raise StaleHandle("a sequence of this step was cut back or stepped again: its slots may be others' now")

    def attend(
        self,
        layer: int,
        q: Any,
        *,
        softmax_scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        mask: Any = None,
        mask_indptr: Any = None,
        return_lse: bool = False,
        kernel: str = "auto",
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Attention of the new tokens over their sequences' KV, this layer's writes included.

        Write the layer first.

        Parameters
        ----------
        layer : int, of the model's.
        q : [num_tokens, num_qo_heads, head_dim]
            num_qo_heads is a multiple of num_kv_heads. Any framework's array; on a GPU in the cache's dtype, or in any
            float dtype where the cache's numbers have scales.
        window : tokens that a query sees, its own included; None: as the spec says of this layer, by default all.
        softmax_scale : None: ``head_dim ** -0.5``. Over latents it must be given: the model's own, as
            ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``.
        causal, soft_cap, alibi_slopes, sinks, mask, mask_indptr, return_lse, out
            As :func:`pagedkv.reference.paged_attention`. On the CPU :mod:`pagedkv.cpu` computes (float32 inside), and
            that reference where q is float64 or `out` has another dtype than q; on a GPU the kernels of
            :class:`pagedkv.attention.PagedAttention` do, and arrays are CuPy arrays.
            There slopes belong to an attention that the cache keeps, with its workspace: give the same memory each
            time, and not a copy made for the call. A captured graph reads sinks where they were.
        kernel : on a GPU the name of the kernel, as :class:`pagedkv.attention.PagedAttention` takes it; "auto" for the
            best on this device.
        stream : CUDA stream
            Where the kernels run; only on a GPU. The host does not wait.

        Returns
        -------
        o : [num_tokens, num_qo_heads, head_dim_v], and ``lse`` float32 [num_tokens, num_qo_heads] if asked for

        Raises
        ------
        InvalidArgument
            The step has new tokens, and this layer's K and V are not written yet: their slots hold old values. Or the
            spec has windows or chunks, and the window is not this layer's; or of latents, no scale.
        UnsupportedVariant
            The cache holds rows of bytes; or the layer has a chunk, and its queries a mask or are not causal; or there
            is no such kernel.
        LayoutMismatch, WrongType
        """
        (bound, arrays), spec = self._under_way, self._engine.spec
        spec.check_can_attend()
        if spec.v_in_k:
            check_scale_of_latents(softmax_scale, spec.head_dim)
        q = as_argument("q", q, stream=stream)
        target = None if out is None else as_argument("out", out, writable=True, stream=stream)
        shape = getattr(q, "shape", None)
        if not isinstance(shape, tuple) or len(shape) != 3 or shape != (len(arrays.tokens), shape[1], spec.head_dim):
            shown = shape if isinstance(shape, tuple) else type(q).__name__
            raise LayoutMismatch(f"q must be [{len(arrays.tokens)}, num_qo_heads, {spec.head_dim}], got {shown}")
        if shape[1] % spec.num_kv_heads:
            raise LayoutMismatch(f"{shape[1]} query heads are no multiple of {spec.num_kv_heads} KV heads")
        if causal is not True or return_lse is not False:
            _check_flags(causal=causal, return_lse=return_lse)
        if window is not None and not (type(window) is int and 1 <= window <= _MAX_WINDOW):
            window = whole_number(window, "window", 1, _MAX_WINDOW)
        own = layer if spec.reads is None else spec.own_layer(layer)
        if not self._is_written(own):
            self._check_written(layer)
        if not arrays.is_untouched:
            self._check_rows(arrays)
        variant: dict[str, Any] = {}
        own_kernel = None if kernel == "auto" else self._checked_kernel(kernel)
        if not (
            (softmax_scale is window is soft_cap is alibi_slopes is sinks is mask is mask_indptr is own_kernel is None)
            and causal
        ):
            given = (
                softmax_scale, window, soft_cap, alibi_slopes, sinks, mask, mask_indptr, None if causal else False,
                own_kernel,
            )  # fmt: skip
            for name, value in zip(_VARIANT, given, strict=True):
                if value is not None:
                    variant[name] = value  # noqa: PERF403 - a comprehension would be one more call a layer
        result = bound.attend(layer, q, return_lse=return_lse, out=target, stream=stream, **variant)
        if self._arrays is not arrays or not arrays.is_untouched:
            self._check_rows(self.arrays)  # after a release meanwhile, others may have written the blocks read
        self._attended.add(int(layer))
        if target is out:
            return result
        return (out, result[1]) if return_lse else out  # the caller's own array, which was written

    def _checked_kernel(self, kernel: Any) -> str:
        """A kernel's name, where kernels can be chosen."""
        if not isinstance(kernel, str):
            raise WrongType(f"kernel must be a name, not {type(kernel).__name__}")
        if self._engine.kv.is_synchronous:
            raise UnsupportedVariant(f"kernel = {kernel!r}: this cache is in CPU memory, where no kernel can be chosen")
        return kernel

    def __reduce__(self) -> NoReturn:
        raise WrongType("a Step belongs to its process, and cannot be pickled or copied: send its tokens")

    def tables_of(self, layer: int) -> StepTables:
        """The step's arrays for a layer of the model, for kernels of the caller's own.

        With ``KVCache(by_group=True)`` each group of layers has its own: ``block_tables`` name pages of
        :meth:`KVCache.layer`, from the first that is still needed on, and ``seq_lens`` count from there. Else they are
        the step's own.

        Raises
        ------
        WrongType, InvalidArgument
        """
        own, arrays = self._engine.spec.own_layer(layer), self.arrays
        return self._bound.tables_of(own) if isinstance(self._bound, LayeredStep) else arrays

    @property
    def _under_way(self) -> tuple[BoundStep, StepArrays]:
        self._engine.check_open()
        arrays, bound = self._arrays, self._bound
        if arrays is None or bound is None:
            raise ClosedError(_NOT_UNDER_WAY)
        return bound, arrays


def _check_flags(**flags: Any) -> None:
    """Raise WrongType unless all are bools."""
    for name, flag in flags.items():
        if flag is not True and flag is not False and not isinstance(flag, np.bool_):
            raise WrongType(f"{name} must be a bool, not {type(flag).__name__}")
