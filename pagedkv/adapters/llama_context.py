"""One sequence of a ``llama_cpp.Llama``, read and written as a state."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.adapters.llama_numbers import numbers_of
from pagedkv.adapters.llama_state import SEQ, Layout
from pagedkv.adapters.probe import Probe
from pagedkv.errors import NotSupported

PROBED = 8  # tokens
_WHAT = "this llama.cpp's state"


class Context:
    """The KV of a ``llama_cpp.Llama``.

    It keeps a buffer of the size of the largest state that it has read or written.

    Parameters
    ----------
    llm : llama_cpp.Llama
    runtime : the module ``llama_cpp``.

    Attributes
    ----------
    layout : Layout
    probe : Probe
        KV of the fixed tokens.

    Raises
    ------
    NotSupported
        A state has another content than expected, or does not come back. The context is as it was before.
    """

    def __init__(self, llm: Any, runtime: Any) -> None:
        self._llm, self._runtime = llm, runtime
        self._buffer: NDArray[np.uint8] = np.empty(0, np.uint8)
        if llm.n_ctx() <= PROBED:
            raise NotSupported("this llama_cpp.Llama", f"its context of {llm.n_ctx()} tokens is too small")
        with self._as_it_was():
            self.layout, self.probe = self._probed()

    def read(self, num_tokens: int) -> NDArray[np.uint8] | None:
        """Return the state, valid until the next call.

        None if it is not that of tokens 0 to num_tokens - 1, because cells were removed or shifted, or a batch failed.
        """
        state = self._read()
        return state if self.layout.frames(state, num_tokens) else None

    def views(self, num_tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a state to be written by :meth:`write`."""
        state = self._room(self.layout.size(num_tokens))
        self.layout.frame(state, num_tokens)
        return self.layout.views(state, num_tokens)

    def write(self, num_tokens: int) -> None:
        """Put the state whose K and V were written into :meth:`views` in the place of the sequence.

        The caller sets ``n_tokens`` to 0 before, and the right number after: whatever interrupts this, the context
        counts as empty, and the next ``eval`` removes the cells that are there.

        Raises
        ------
        RuntimeError
            llama.cpp did not take it.
        """
        self._write(self._room(self.layout.size(num_tokens)))

    def clear(self) -> None:
        """Empty the sequence, and say so to the ``Llama``."""
        self._llm.n_tokens = 0
        try:
            self._llm._ctx.kv_cache_seq_rm(-1, 0, -1)
        finally:
            self._llm.reset()

    def _room(self, size: int) -> NDArray[np.uint8]:
        if len(self._buffer) < size:
            self._buffer = np.empty(size + size // 8, np.uint8)
        return self._buffer[:size]

    def _read(self) -> NDArray[np.uint8]:
        ctx, run = self._llm._ctx.ctx, self._runtime
        state = self._room(run.llama_state_seq_get_size(ctx, SEQ))
        return state[: run.llama_state_seq_get_data(ctx, _pointer(state), len(state), SEQ)]

    def _write(self, state: NDArray[np.uint8]) -> None:
        taken = self._runtime.llama_state_seq_set_data(self._llm._ctx.ctx, _pointer(state), len(state), SEQ)
        if taken != len(state):
            raise RuntimeError(f"llama.cpp took {taken} of a state's {len(state)} bytes")

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Restore the content of the context after the block."""
        llm = self._llm
        held, ids = llm.n_tokens, llm.input_ids[: max(llm.n_tokens, PROBED)].copy()
        state = self._read().copy() if held else None
        undo: Callable[[], None] = self.clear
        try:
            yield
        finally:
            undo()
            llm.input_ids[: len(ids)] = ids
            if state is not None:
                self._put_back(state)
                llm.n_tokens, llm._requires_eval = held, True

    def _put_back(self, state: NDArray[np.uint8]) -> None:
        try:
            self._write(state)
        except Exception as problem:
            raise NotSupported(
                _WHAT, f"a state that was read is not taken back ({problem})", "its context was emptied; it is whole"
            ) from problem

    def _probed(self) -> tuple[Layout, Probe]:
        """Compute the fixed tokens: a state's framing, and that it can be shortened and put back."""
        llm = self._llm
        self.clear()
        llm.eval([(1 + 7919 * i) % llm.n_vocab() for i in range(PROBED)])
        state = self._read().copy()
        layout = Layout.of(state)
        if not layout.frames(state, PROBED):
            raise NotSupported(_WHAT, f"it does not hold {PROBED} tokens after as many were computed")
        short = np.empty(layout.size(PROBED - 1), np.uint8)
        layout.frame(short, PROBED - 1)
        whole = layout.views(state, PROBED)
        for side, part in zip(whole, layout.views(short, PROBED - 1), strict=True):
            part[:] = side[:, :-1]
        self._write(short)
        if not np.array_equal(self._read(), short):
            raise NotSupported(_WHAT, "a state that was cut does not come back as it was")
        types = (layout.k_type, layout.v_type)
        k, v = (numbers_of(np.ascontiguousarray(side), kind) for side, kind in zip(whole, types, strict=True))
        return layout, Probe(k, v)


def _pointer(state: NDArray[np.uint8]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
