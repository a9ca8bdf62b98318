"""The bytes of a llama.cpp sequence's state, cut into tokens.

``llama_state_seq_get_data`` gives, in llama.cpp of 2026, little-endian and without padding:

    u32 magic 0xaf143cd8, i32 seq_id                           (absent in older builds)
    u32 n_stream = 1, u32 cells
    cells x {i32 pos, u32 n_seq_id = 1, i32 seq_id}            (M-RoPE models have more)
    u32 v_trans, u32 n_layer
    n_layer x {i32 type, u64 row_bytes, cells x row}                              K
    n_layer x {i32 type, u64 row_bytes, cells x row}                              V, v_trans = 0 (flash attention)
    n_layer x {i32 type, u32 item_bytes, u32 n_embd, n_embd x cells items}        V, v_trans = 1

Nothing in it depends on other cells, so a state of any number of cells can be written, and K and V are strided views
into it. The framing is not promised by llama.cpp: a state is understood only if the framing that is made from the
parsed numbers is its own, byte for byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import NotSupported
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.layers import Rows

MAGIC = 0xAF143CD8
SEQ = 0  # llama_cpp.Llama has one sequence
UNITS: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}  # items of a transposed V
_WHAT = "this llama.cpp's state"
_MOST = 1 << 20  # layers, and bytes of a row: beyond what any model has


@dataclass(frozen=True, slots=True)
class Layout:
    """The framing of a state, for any number of cells; nothing of llama_cpp.

    Parameters
    ----------
    magic : whether a state begins with one.
    v_trans : whether V lies as [n_embd][cells].
    k_type, v_type : ggml's numbers of the types.
    num_layers : int
    k_bytes, v_bytes : of a token's row in one layer.
    unit : bytes of an item of a transposed V; 2 where it is not transposed.
    """

    magic: bool
    v_trans: bool
    k_type: int
    v_type: int
    num_layers: int
    k_bytes: int
    v_bytes: int
    unit: int = 2

    @classmethod
    def of(cls, state: NDArray[np.uint8]) -> Layout:
        """Parse a state with at least one cell, uint8 [n].

        Raises
        ------
        NotSupported
            It has another format, or holds something that cannot be cut into tokens.
        """
        try:
            layout, cells = cls._parsed(state)
        except struct.error:
            raise NotSupported(_WHAT, f"{len(state)} bytes are too short for its numbers") from None
        if layout.size(cells) != len(state):
            raise NotSupported(
                _WHAT,
                f"{len(state)} bytes where K and V of {cells} tokens in {layout.num_layers} equal layers take "
                f"{layout.size(cells)} (a sliding window, a recurrent state, or another format)",
            )
        if not layout.frames(state, cells):
            raise NotSupported(_WHAT, "it holds more than K and V of tokens in a row (M-RoPE, or another format)")
        return layout

    @classmethod
    def _parsed(cls, state: NDArray[np.uint8]) -> tuple[Layout, int]:
        def read(form: str, at: int) -> tuple[int, ...]:
            return struct.unpack("<" + form, state[at : at + struct.calcsize("<" + form)].tobytes())

        has_magic = read("I", 0)[0] == MAGIC
        at = 8 if has_magic else 0
        n_stream, cells = read("II", at)
        at += 8 + 12 * cells
        v_trans, n_layer, k_type, k_bytes = read("IIiQ", at)
        if n_stream != 1 or not cells or v_trans > 1 or not 0 < n_layer <= _MOST or not 0 < k_bytes <= _MOST:
            raise NotSupported(
                _WHAT, f"it says {n_stream} streams, {cells} cells, {n_layer} layers, {k_bytes} bytes in a row of K"
            )
        at += 8 + n_layer * (12 + cells * k_bytes)
        if v_trans:
            v_type, unit, n_embd = read("iII", at)
            v_bytes = unit * n_embd
        else:
            v_type, v_bytes = read("iQ", at)
            unit = 2
        if unit not in UNITS or not 0 < v_bytes <= _MOST or k_bytes % unit or v_bytes % unit:
            raise NotSupported(_WHAT, f"rows of {k_bytes} and {v_bytes} bytes, with items of {unit}, cannot be copied")
        return cls(has_magic, bool(v_trans), k_type, v_type, n_layer, k_bytes, v_bytes, unit), cells

    def size(self, cells: int) -> int:
        """Bytes of a state of so many cells."""
        return self._v_at(cells) + self.num_layers * (12 + cells * self.v_bytes)

    def frame(self, out: NDArray[np.uint8], cells: int) -> None:
        """Write all of a state but K and V: positions 0 to cells - 1, types, sizes."""
        for at, piece in self._pieces(cells):
            out[at : at + len(piece)] = piece

    def frames(self, state: NDArray[np.uint8], cells: int) -> bool:
        """Whether a state has this framing: its tokens lie in a row, and all but K and V is known."""
        return len(state) == self.size(cells) and all(
            np.array_equal(state[at : at + len(piece)], piece) for at, piece in self._pieces(cells)
        )

    def views(self, state: NDArray[np.uint8], cells: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V in a state as views, whichever way V lies.

        Each [num_layers, cells, 1, bytes / unit] of the unit's dtype.
        """
        k_at, v_at, unit = self._k_at(cells) + 12, self._v_at(cells) + 12, self.unit
        k_row, v_row, dtype = self.k_bytes, self.v_bytes, UNITS[unit]
        k_strides = (12 + cells * k_row, k_row, k_row, unit)
        v_strides = (12 + cells * v_row, *((unit, unit, cells * unit) if self.v_trans else (v_row, v_row, unit)))
        k: NDArray[Any] = np.ndarray(
            (self.num_layers, cells, 1, k_row // unit), dtype, state.data, offset=k_at, strides=k_strides
        )
        v: NDArray[Any] = np.ndarray(
            (self.num_layers, cells, 1, v_row // unit), dtype, state.data, offset=v_at, strides=v_strides
        )
        return k, v

    def spec(self, block_size: int, model: str) -> KVSpec:
        """The spec of a cache of these rows: the same whichever way V lies."""
        return KVSpec.of([Rows(self.k_bytes, self.v_bytes)] * self.num_layers, block_size=block_size, model=model)

    def _k_at(self, cells: int) -> int:
        return (8 if self.magic else 0) + 8 + 12 * cells + 8

    def _v_at(self, cells: int) -> int:
        return self._k_at(cells) + self.num_layers * (12 + cells * self.k_bytes)

    def _pieces(self, cells: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The pieces of the framing, and where they lie."""
        head = struct.pack("<Ii", MAGIC, SEQ) if self.magic else b""
        head += struct.pack("<II", 1, cells)
        yield 0, np.frombuffer(head, np.uint8)
        rows = np.empty((cells, 3), "<i4")
        rows[:, 0], rows[:, 1], rows[:, 2] = np.arange(cells), 1, SEQ
        yield len(head), rows.view(np.uint8).reshape(-1)
        k_at, v_at = self._k_at(cells), self._v_at(cells)
        yield k_at - 8, np.frombuffer(struct.pack("<II", self.v_trans, self.num_layers), np.uint8)
        of_k = np.frombuffer(struct.pack("<iQ", self.k_type, self.k_bytes), np.uint8)
        of_v = struct.pack("<iQ", self.v_type, self.v_bytes)
        if self.v_trans:
            of_v = struct.pack("<iII", self.v_type, self.unit, self.v_bytes // self.unit)
        for layer in range(self.num_layers):
            yield k_at + layer * (12 + cells * self.k_bytes), of_k
            yield v_at + layer * (12 + cells * self.v_bytes), np.frombuffer(of_v, np.uint8)
