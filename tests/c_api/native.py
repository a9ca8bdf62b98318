"""The calls of ``pagedkv.h`` by address, with arrays in and out, for the tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv import c_api

OK, ARGUMENT, MEMORY, RANGE, UNDERFLOW, OVERFLOW, STALE, BLOCKS, DUPLICATE, STATE, ROOM, ROWS, UNSUPPORTED = (
    c_api.constants()[f"PAGEDKV_{name}"]
    for name in (
        *("OK", "E_ARGUMENT", "E_MEMORY", "E_RANGE", "E_UNDERFLOW", "E_OVERFLOW", "E_STALE", "E_BLOCKS", "E_DUPLICATE"),
        *("E_STATE", "E_ROOM", "E_ROWS", "E_UNSUPPORTED"),
    )
)
NIL = c_api.constants()["PAGEDKV_NIL"]
BAD = -99  # what `bad` holds where no call has set it


def at(array: NDArray[Any] | None) -> int:
    """Where an array lies; 0 for None."""
    return 0 if array is None else int(array.ctypes.data)


def call(name: str, *arguments: Any) -> int:
    """Call by name: arrays become pointers, objects of the core handles."""
    given = []
    for argument in arguments:
        if argument is None or isinstance(argument, np.ndarray):
            argument = at(argument)
        elif not isinstance(argument, (int, np.integer)):
            argument = c_api.handle_of(argument)
        given.append(int(argument))
    return int(c_api.function(name)(*given))


def out(kind: Any = np.int64, size: int = 1) -> NDArray[Any]:
    """Room for an answer."""
    return np.full(size, BAD, np.int64).astype(kind)


def tokens_of(values: Any) -> NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


def rows_of(values: Any) -> NDArray[np.int64]:
    return np.ascontiguousarray(values, np.int64)


class Arrays:
    """A step's arrays, BAD where nothing was written, and the struct that names them."""

    def __init__(self, rows: int, columns: int, tokens: int, copies: int = 0, stride: int = 0) -> None:
        self.tables = np.full((rows, columns), BAD, np.int32)
        self.seq_lens, self.q_indptr = np.full(rows, BAD, np.int32), np.full(rows + 1, BAD, np.int32)
        self.positions, self.tokens = np.full(tokens, BAD, np.int32), np.full(tokens, BAD, np.int32)
        self.slots, self.copies = np.full(tokens, BAD, np.int64), np.full((copies, 2), BAD, np.int32)
        self.struct = np.zeros(1, c_api.struct("pagedkv_step"))
        for name, array in (
            *(("block_tables", self.tables), ("seq_lens", self.seq_lens), ("q_indptr", self.q_indptr)),
            *(("positions", self.positions), ("tokens", self.tokens), ("slot_mapping", self.slots)),
            ("copies", self.copies),
        ):
            self.struct[name] = at(array)
        self.struct["tables_room"], self.struct["tokens_room"] = rows * columns, tokens
        self.struct["copies_room"], self.struct["stride"] = copies, stride

    def __getattr__(self, name: str) -> int:
        """An answer of the call: number, num_tokens, num_copies, num_new_blocks, width."""
        return int(self.struct[name][0])

    def equal(self, step: Any) -> bool:
        """Whether they are a step's of Python."""
        width, rows = self.width, len(step.seq_lens)
        mine = self.tables.ravel()[: rows * width].reshape(rows, width)
        n, c = self.num_tokens, self.num_copies
        return (
            np.array_equal(mine, step.block_tables)
            and np.array_equal(self.seq_lens[:rows], step.seq_lens)
            and np.array_equal(self.q_indptr[: rows + 1], step.q_indptr)
            and np.array_equal(self.positions[:n], step.positions)
            and np.array_equal(self.tokens[:n], step.tokens)
            and np.array_equal(self.slots[:n], step.slot_mapping)
            and np.array_equal(self.copies[:c], step.copies)
            and (self.number, self.num_new_blocks) == (step.number, step.num_new_blocks)
        )
