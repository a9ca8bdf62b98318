"""A BlockTable driven as a runtime does, over a memory that knows what each slot must hold.

The KV of a token depends on every token before it, so a slot holds the whole prefix that ends there. Whatever two
sequences wrongly share, or a copy on write that was forgotten, is read back as another sequence's prefix.
"""

from __future__ import annotations

from typing import Any

from pagedkv.core import BlockPool, BlockTable, Placement, StepArrays
from tests.core.helpers import cached_prefixes


class Runtime:
    """Rows of a table with their tokens, and the memory under them."""

    def __init__(self, source: BlockPool | Placement, block_size: int, max_rows: int = 16) -> None:
        self.table = BlockTable(source, max_rows, block_size=block_size)
        self.placement = source if isinstance(source, Placement) else None
        self.block_size = block_size
        self.memory: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, list[int]] = {}

    def open(self, tokens: list[int], **options: Any) -> int:
        row, _ = self.table.open(tokens, **options)
        self.rows[row] = list(tokens)
        return row

    def extend(self, row: int, tokens: list[int]) -> None:
        self.table.extend(row, tokens)
        self.rows[row] += tokens

    def append(self, rows: list[int], tokens: list[int]) -> None:
        self.table.append(rows, tokens)
        for row, token in zip(rows, tokens):
            self.rows[row].append(token)

    def fork(self, row: int, n: int = 1) -> list[int]:
        forks = self.table.fork(row, n).tolist()
        self.rows.update({fork: list(self.rows[row]) for fork in forks})
        return forks

    def truncate(self, row: int, num_tokens: int) -> None:
        self.table.truncate(row, num_tokens)
        del self.rows[row][num_tokens:]

    def release(self, row: int) -> None:
        self.table.release(row)
        del self.rows[row]

    def step(
        self,
        rows: list[int],
        q_lens: list[int] | None = None,
        lookahead: int = 0,
        follow: list[tuple[int, int, int]] | None = None,
    ) -> StepArrays:
        """Build a step, make its copies, write its tokens, and read all that rows attend."""
        before = [self.table.info(row).num_computed for row in rows]
        for follower, _, blocks in follow or ():
            before[follower] = blocks * self.block_size
        step = self.table.step(rows, q_lens, lookahead, follow)
        self.check_step(step, rows, before, q_lens)
        self.write(step, rows)
        for i, row in enumerate(rows):
            self.check_content(step.block_tables[i].tolist(), self.rows[row][: step.seq_lens[i]])
        self.table.check_integrity()
        return step

    def cancel(self, step: StepArrays, rows: list[int]) -> None:
        """Take a step back; its slots hold nothing that may be read."""
        self.table.cancel(rows, step.number)
        for slot in step.slot_mapping.tolist():
            self.memory.pop(slot, None)

    def advance(self, rows: list[int], tokens: list[int]) -> StepArrays:
        """Commit the step under way, append a token to each row and begin the next step."""
        self.table.commit(rows)
        self.append(rows, tokens)
        step = self.table.step(rows)
        self.write(step, rows)
        return step

    def write(self, step: StepArrays, rows: list[int]) -> None:
        size = self.block_size
        for source, target in step.copies.tolist():
            for offset in range(size):
                if source * size + offset in self.memory:
                    self.memory[target * size + offset] = self.memory[source * size + offset]
        self.table.copies_done()
        for i, row in enumerate(rows):
            for at in range(step.q_indptr[i], step.q_indptr[i + 1]):
                self.memory[int(step.slot_mapping[at])] = tuple(self.rows[row][: step.positions[at] + 1])

    def check_step(self, step: StepArrays, rows: list[int], before: list[int], q_lens: list[int] | None) -> None:
        size, at = self.block_size, 0
        assert step.q_indptr[0] == 0
        for i, row in enumerate(rows):
            left = len(self.rows[row]) - before[i]
            length = left if q_lens is None else q_lens[i]
            positions = list(range(before[i], before[i] + length))
            span = slice(at, at + length)
            at += length
            assert step.q_indptr[i + 1] == at
            assert step.seq_lens[i] == before[i] + length
            assert step.positions[span].tolist() == positions
            assert step.tokens[span].tolist() == [self.rows[row][p] for p in positions]
            blocks = self.table.blocks(row).tolist()
            used = step.block_tables[i].tolist()
            assert used == blocks + [-1] * (len(used) - len(blocks))
            assert step.slot_mapping[span].tolist() == [blocks[p // size] * size + p % size for p in positions]
        indptr, indices, last = step.to_csr()
        for i, length in enumerate(step.seq_lens.tolist()):
            num = -(-length // size)
            assert indices[indptr[i] : indptr[i + 1]].tolist() == step.block_tables[i, :num].tolist()
            assert last[i] == (length - (num - 1) * size if length else 0)
        assert len(step.slot_mapping) == len(set(step.slot_mapping.tolist())) == at

    def commit(self, rows: list[int]) -> int:
        return self.table.commit(rows)

    def check(self) -> None:
        """Every computed token of every row reads its own prefix; nothing leaks."""
        self.table.check_integrity()
        (self.placement or self.table.block_pool).check_integrity()
        for row, tokens in self.rows.items():
            assert self.table.tokens(row).tolist() == tokens
            blocks = self.table.blocks(row).tolist()
            _, computed, num_blocks, committed = self.table.info(row)
            assert num_blocks == len(blocks)
            assert committed * self.block_size <= computed <= len(tokens)
            self.check_content(blocks, tokens[:computed])
        if self.placement is not None:
            for prefix in cached_prefixes(self.placement.tree):
                self.check_content(self.placement.match(prefix)[1].tolist(), list(prefix))

    def check_content(self, blocks: list[int], tokens: list[int]) -> None:
        size = self.block_size
        for i in range(len(tokens)):
            slot = blocks[i // size] * size + i % size
            assert self.memory.get(slot) == tuple(tokens[: i + 1]), f"position {i} reads {self.memory.get(slot)}"

    def close(self) -> None:
        for row in list(self.rows):
            self.release(row)
        self.check()
        assert self.table.num_rows == 0
        assert self.table.block_pool.counts()["live"] == 0
