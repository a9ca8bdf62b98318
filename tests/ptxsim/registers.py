"""The register file: one NumPy row per register, and typed views of rows as operands.

A view narrower than its register reads the low bytes, so nothing is converted when an instruction runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.declarations import size_of
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.syntax import Imm, Operand, Reg, Special, Sym
from tests.ptxsim.types import UNSIGNED, dtype_of, immediate

Row = NDArray[Any]
_CHUNK, _MOST_CHUNKS = 1 << 20, 64
_free_chunks: list[NDArray[np.uint8]] = []
_CONTAINERS: dict[str, np.dtype[Any]] = {}  # of each kind of register


class Registers:
    """Rows for the registers of one program, made when an instruction first names them.

    Parameters
    ----------
    kinds : declared type of each register.
    lanes : threads of the grid, padded to whole warps.
    specials : rows or 0-d arrays of special registers.
    symbols : addresses of variables.
    constants : literals of registers that never hold anything else.
    """

    def __init__(
        self,
        kinds: dict[str, str],
        lanes: int,
        specials: dict[str, Row],
        symbols: dict[str, int],
        constants: dict[str, str],
    ) -> None:
        self.kinds, self.lanes, self.specials, self.symbols = kinds, lanes, specials, symbols
        self.constants = constants
        self._rows: dict[str, Row] = {}
        self._chunks: list[NDArray[np.uint8]] = []
        self._left = 0  # bytes of the last chunk
        self.carry = np.zeros(lanes, bool)

    def row(self, name: str) -> Row:
        """A register's bits."""
        row = self._rows.get(name)
        if row is None:
            kind = self.kinds[name]
            dtype = _CONTAINERS.get(kind)
            if dtype is None:
                dtype = _CONTAINERS[kind] = np.dtype(np.bool_ if kind == "pred" else UNSIGNED[size_of(kind)])
            row = self._rows[name] = self._allocate(dtype)
        return row

    def _allocate(self, dtype: np.dtype[Any]) -> Row:
        """Return a row of zeros from a chunk.

        Chunks pass from launch to launch: fresh memory costs a page fault per 4 KiB.
        """
        size = -(-self.lanes * dtype.itemsize // 64) * 64
        if self._left < size:
            chunk = _free_chunks.pop() if _free_chunks else None
            if chunk is None or len(chunk) < size:
                chunk = np.empty(max(_CHUNK, size), np.uint8)
            self._chunks.append(chunk)
            self._left = len(chunk)
        chunk = self._chunks[-1]
        start = len(chunk) - self._left
        self._left -= size
        row = chunk[start : start + self.lanes * dtype.itemsize].view(dtype)
        row[...] = 0
        return row

    def release(self) -> None:
        """No row is used any more."""
        _free_chunks.extend(self._chunks[: max(0, _MOST_CHUNKS - len(_free_chunks))])
        self._chunks.clear()
        self._left = 0

    def source(self, operand: Operand, kind: str) -> Row:
        """A view of an operand as a type: a row, or a 0-d array if it is a constant."""
        dtype = dtype_of(kind)
        if isinstance(operand, Imm):
            return immediate(operand.text, kind)
        if isinstance(operand, Reg):
            if operand.negated:
                raise UnsupportedPtx(f"negated operand !{operand.name}")
            if operand.name in self.constants:
                return immediate(self.constants[operand.name], kind)
            return _view(self.row(operand.name), dtype, operand.name)
        if isinstance(operand, Special):
            if operand.name not in self.specials:
                raise UnsupportedPtx(f"special register {operand.name}")
            return _view(self.specials[operand.name], dtype, operand.name)
        if isinstance(operand, Sym):
            if operand.name not in self.symbols:
                raise UnsupportedPtx(f"symbol {operand.name}")
            return np.array(self.symbols[operand.name] + operand.offset, dtype)
        raise UnsupportedPtx(f"operand {operand}")

    def target(self, operand: Operand, kind: str) -> Row:
        """A register's row to write as a type of the same width; scratch for the sink ``_``."""
        dtype = dtype_of(kind)
        if not isinstance(operand, Reg):
            raise UnsupportedPtx(f"destination {operand}")
        if operand.name == "_":
            return np.empty(self.lanes, dtype)
        row = self.row(operand.name)
        if row.dtype.itemsize != dtype.itemsize or (row.dtype == np.bool_) != (dtype == np.bool_):
            raise UnsupportedPtx(f"destination {operand.name} ({row.dtype}) of an instruction on .{kind}")
        return row.view(dtype)

    def widened_target(self, operand: Operand, kind: str) -> Row:
        """Return a row that takes values of a type narrower than the register, or as wide.

        It extends them by sign or by zero.

        The view has the register's width and the type's signedness, so NumPy's conversion does the extension.
        """
        dtype = dtype_of(kind)
        if isinstance(operand, Reg) and operand.name != "_":
            row = self.row(operand.name)
            if row.dtype.itemsize > dtype.itemsize and row.dtype != np.bool_:
                if dtype.kind == "f":
                    raise UnsupportedPtx(f"a .{kind} into the wider register {operand.name}")
                return row.view(f"{dtype.kind}{row.dtype.itemsize}")
        return self.target(operand, kind)


def _view(row: Row, dtype: np.dtype[Any], name: str) -> Row:
    if row.dtype == dtype:
        return row
    if dtype == np.bool_ or row.dtype == np.bool_ or row.dtype.itemsize < dtype.itemsize:
        raise UnsupportedPtx(f"{name} ({row.dtype}) read as {dtype}")
    if row.dtype.itemsize == dtype.itemsize:
        return row.view(dtype)
    step = row.dtype.itemsize // dtype.itemsize
    return row.reshape(-1).view(dtype)[::step] if row.ndim else row.reshape(1).view(dtype)[0:1].reshape(())
