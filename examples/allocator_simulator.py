"""A block allocator over the core's pool.

Sequences take blocks as they grow, and give them back when they end.
"""

import pagedkv as pk
from pagedkv.core import BlockPool
from pagedkv.lab.sizing import blocks_needed


class Allocator:
    """Block tables of sequences, by number, over one pool."""

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.pool, self.block_size = BlockPool(total_blocks), block_size
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def allocate(self, seq_id: int, length: int) -> list[int]:
        """Open a sequence; its block table."""
        if seq_id in self.tables:
            raise ValueError(f"sequence {seq_id} is open already")
        self.tables[seq_id] = self.pool.alloc(blocks_needed(length, self.block_size)).tolist()
        self.lengths[seq_id] = length
        return self.tables[seq_id]

    def append(self, seq_id: int, num_tokens: int) -> list[int]:
        """Make a sequence longer; the blocks that are new, often none.

        Without enough of them nothing changes.
        """
        length, table = self.lengths[seq_id] + num_tokens, self.tables[seq_id]
        new: list[int] = self.pool.alloc(blocks_needed(length, self.block_size) - len(table)).tolist()
        table.extend(new)
        self.lengths[seq_id] = length
        return new

    def free(self, seq_id: int) -> int:
        """Close a sequence; how many blocks it gave back."""
        table = self.tables.pop(seq_id)
        del self.lengths[seq_id]
        self.pool.free(table)
        return len(table)

    def allocated(self) -> float:
        """Share of the pool's blocks that sequences own."""
        return 1 - self.pool.num_free / self.pool.capacity


def main() -> None:
    allocator = Allocator(total_blocks=100, block_size=16)
    print("sequence 1, 50 tokens:", allocator.allocate(1, 50))
    print("sequence 2, 10 tokens:", allocator.allocate(2, 10))
    print("sequence 1 grows by 14, into what it has:", allocator.append(1, 14))
    print("and by 6 more, into a block elsewhere:", allocator.append(1, 6), "in its table", allocator.tables[1])
    print(f"{allocator.allocated():.0%} allocated; freed {allocator.free(1)} blocks; {allocator.allocated():.0%} left")
    try:
        allocator.append(2, 10_000)
    except pk.OutOfBlocks as error:
        print("refused:", error)
    assert allocator.free(2) == 1
    allocator.pool.check_integrity()


if __name__ == "__main__":
    main()
