"""ONNX Runtime: buffers for its IOBinding and inputs of its PagedAttention operator.

Does not import it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ExchangeRefused, InvalidArgument
from pagedkv.interop.devices import device_code
from pagedkv.interop.dtypes import bits_dtype, in_numpy
from pagedkv.interop.imports import as_view
from pagedkv.interop.needs import fit
from pagedkv.interop.pages import Pages
from pagedkv.interop.view import View

# onnx.TensorProto.DataType of what NumPy lacks
_ONNX = {
    "bfloat16": 16, "float8_e4m3fn": 17, "float8_e4m3fnuz": 18, "float8_e5m2": 19, "float8_e5m2fnuz": 20,
}  # fmt: skip


class Tables(Protocol):
    """The arrays of a step: ``step.arrays``, or a step that is under way."""

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """int32 [num_seqs, max_blocks], padded with -1."""

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """int32 [num_seqs]."""

    @property
    def q_indptr(self) -> NDArray[np.int32]:
        """int32 [num_seqs + 1]."""

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """int64 [num_tokens]."""


def bind_input(binding: Any, name: str, x: Any) -> View:
    """Let an input of a session read an array where it lies.

    Parameters
    ----------
    binding : ``session.io_binding()``.
    name : of the input.
    x : any array, compact; read-only is fine.

    Returns
    -------
    View
        Keep it until the session has run: the binding knows only the address.

    Raises
    ------
    ExchangeRefused
        Strides, or a dtype ONNX has not. Nothing was bound.
    """
    view = fit(x, "onnxruntime")
    binding.bind_input(name, *_where(view))
    return view


def bind_output(binding: Any, name: str, x: Any) -> View:
    """Let an output of a session be written into an array; otherwise as :func:`bind_input`.

    Raises
    ------
    ExchangeRefused
        It is read-only as well. Nothing was bound.
    """
    view = fit(as_view(x, writable=True), "onnxruntime")
    binding.bind_output(name, *_where(view))
    return view


def _where(view: View) -> tuple[Any, ...]:
    kind, number = device_code(view.device)
    element = bits_dtype(view.dtype).type if in_numpy(view.dtype) else _ONNX[view.dtype]
    return ("cuda" if kind == 2 else "cpu"), number, element, list(view.shape), view.ptr


def paged_attention_inputs(arrays: Tables, pages: Pages) -> dict[str, Any]:
    """Cache and table inputs of ``com.microsoft.PagedAttention``, by name, for one layer.

    ``key_cache`` and ``value_cache`` are the device arena itself; the operator writes the new tokens' K and V into them
    (say :meth:`Step.mark_written` then), or skips it where ``slot_mapping`` is -1. ONNX Runtime 1.31 runs the operator
    with its CUDA provider only.

    Parameters
    ----------
    arrays : of the step.
    pages : ``cache.pages(layer, read_only=False)``, layout NHD.

    Returns
    -------
    dict
        Views ``key_cache``, ``value_cache``; int32 arrays ``cumulative_sequence_length`` [num_seqs + 1],
        ``past_seqlens`` [num_seqs], ``block_table`` [num_seqs, max_blocks] (padded with 0, a page that is there),
        ``slot_mapping`` [num_tokens], and ``attention_metadata`` [2]: this step's longest query and longest sequence.

    Raises
    ------
    ExchangeRefused
        The pages are read-only, or are not [num_pages, block_size, num_kv_heads, head_dim].
    InvalidArgument
        A slot passes int32: the operator cannot address so large an arena.
    """
    if pages.k.read_only or pages.v.read_only:
        raise ExchangeRefused("the operator writes K and V into its caches: take cache.pages(layer, read_only=False)")
    if pages.k.shape[1] != pages.block_size:
        raise ExchangeRefused(f"the operator takes pages [block_size, heads, dim] (NHD), these are {pages.k.shape[1:]}")
    slots = pages.slots(arrays.slot_mapping)
    if slots.size and int(slots.max()) > np.iinfo(np.int32).max:
        raise InvalidArgument(f"slot {int(slots.max())} does not fit in the operator's int32: take a smaller arena")
    q_lens = np.diff(arrays.q_indptr)
    bounds = [int(q_lens.max(initial=0)), int(arrays.seq_lens.max(initial=0))]
    return {
        "key_cache": pages.k,
        "value_cache": pages.v,
        "cumulative_sequence_length": np.ascontiguousarray(arrays.q_indptr, np.int32),
        "past_seqlens": (arrays.seq_lens - q_lens).astype(np.int32),
        "block_table": pages.tables(arrays.block_tables, padding=0),
        "slot_mapping": slots.astype(np.int32),
        "attention_metadata": np.array(bounds, np.int32),
    }
