"""A decode loop compiled by Numba: append, plan, compute, commit.

It calls the functions of ``pagedkv.h`` by their addresses. Needs Numba.
"""

from __future__ import annotations

import numba
import numpy as np

from pagedkv import c_api
from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree

BLOCK, ROWS, STEPS = 16, 8, 100

table_append = c_api.function("table_append")
table_step = c_api.function("table_step")
table_commit = c_api.function("table_commit")


@numba.njit  # type: ignore[untyped-decorator]
def decode(
    table: int,
    rows: np.ndarray,
    tokens: np.ndarray,
    step: np.ndarray,
    slots: np.ndarray,
    memory: np.ndarray,
    steps: int,
) -> int:
    """Decode so many tokens of each row; steps done.

    A negative code of the core ends the loop, and has changed nothing.
    """
    committed = np.zeros(1, np.int64)
    n = len(rows)
    for done in range(steps):
        if table_append(table, rows.ctypes.data, tokens.ctypes.data, n, 0) != 0:
            return done
        if table_step(table, rows.ctypes.data, n, 0, 0, step.ctypes.data, 0) != 0:
            return done
        for i in range(n):  # the model: it writes the new token's KV, and its next token follows from it
            memory[slots[i]] = tokens[i]
            tokens[i] = (tokens[i] * 7 + i) % 1000
        if table_commit(table, rows.ctypes.data, n, step[0].number, committed.ctypes.data, 0) != 0:
            return done
    return steps


def main() -> None:
    blocks = ROWS * (STEPS // BLOCK + 2)
    table = BlockTable(Placement(RadixTree(BLOCK), [BlockPool(blocks)]), ROWS)
    rows = np.array([table.open([i])[0] for i in range(ROWS)])
    table.commit(rows, table.step(rows).number)

    # the arrays of a step belong to the caller; the struct has their addresses
    tables, words = np.zeros((ROWS, blocks), np.int32), np.zeros((4, ROWS + 1), np.int32)
    slots, step = np.zeros(ROWS, np.int64), np.zeros(1, c_api.struct("pagedkv_step"))
    step["block_tables"], step["tables_room"] = tables.ctypes.data, tables.size
    for field, array in zip(("seq_lens", "q_indptr", "positions", "tokens"), words):
        step[field] = array.ctypes.data
    step["slot_mapping"], step["tokens_room"] = slots.ctypes.data, ROWS

    tokens, memory = np.arange(ROWS, dtype=np.int32), np.zeros(blocks * BLOCK, np.int32)
    handle = c_api.handle_of(table)  # keep `table` alive for as long as its handle is used
    done = decode(handle, rows, tokens, step, slots, memory, STEPS)
    for row in rows:
        ids = table.blocks(row)
        written = memory.reshape(-1, BLOCK)[ids].ravel()[1 : 1 + STEPS]
        assert written.tolist() == table.tokens(row)[1:].tolist()
    table.check_integrity()
    committed = table.placement.tree.num_blocks
    print(f"{done} steps of {ROWS} rows, {committed} blocks committed; all KV is where the tables say")


if __name__ == "__main__":
    main()
