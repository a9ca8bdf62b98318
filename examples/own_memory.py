"""The core's bookkeeping over memory of one's own.

Two NumPy arrays stand for a GPU's memory and the host's. `docs/core.md` walks through the calls. The toy model's next
token is the sum of all values that the sequence has in memory, so a block that holds anything else changes the answer.
"""

import numpy as np

from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree

BLOCK = 4  # tokens
VOCABULARY = 1009


class Engine:
    """One value a token, in a device of `device` blocks over a host of `host`."""

    def __init__(self, device: int, host: int) -> None:
        self.memory = [np.zeros((blocks, BLOCK), np.int64) for blocks in (device, host)]
        self.placement = Placement(RadixTree(BLOCK, num_tiers=2), [BlockPool(device), BlockPool(host)])
        self.table = BlockTable(self.placement, max_sequences=8)

    def move(self) -> None:
        """Carry out the moves that the core has decided.

        `take_moves` has a row for each block, `complete` takes each transfer once.
        """
        moves = self.placement.take_moves()
        for src, dst, src_block, dst_block in moves[["src_tier", "dst_tier", "src_block", "dst_block"]].tolist():
            self.memory[dst][dst_block] = self.memory[src][src_block]
        transfers = np.unique(moves["transfer"])
        self.placement.complete(transfers, np.ones(len(transfers), bool))

    def make_room(self, blocks: int) -> None:
        """Room for so many blocks on the device."""
        while missing := self.placement.reserve(blocks):
            if not self.placement.num_in_flight:
                raise SystemExit(f"{missing} blocks are missing, and sequences hold all others")
            self.move()

    def open(self, prompt: list[int]) -> tuple[int, int]:
        """A row, and how many of its tokens are cached, wherever they lay."""
        owner, _ = self.placement.acquire(prompt, max_blocks=(len(prompt) - 1) // BLOCK)  # a token is left to compute
        self.make_room(int((self.placement.tiers_of(owner) > 0).sum()))
        self.placement.promote(owner)
        self.move()
        self.placement.settle(owner)
        return self.table.open(prompt, owner=owner)  # the row owns the prefix from here on

    def step(self, row: int) -> int:
        """Compute the tokens of a row that are not computed yet; the next token."""
        tokens = self.table.tokens(row)
        self.make_room(-(-len(tokens) // BLOCK) - len(self.table.blocks(row)))
        step = self.table.step([row])
        self.memory[0].ravel()[step.slot_mapping] = step.tokens  # the layer's write
        seen = self.memory[0][step.block_tables[0]].ravel()[: step.seq_lens[0]]  # its attention
        self.table.commit([row], step.number)
        return int((seen * np.arange(1, len(seen) + 1)).sum() % VOCABULARY)

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], int]:
        """So many tokens after `prompt`, and how many of its own were cached."""
        row, cached = self.open(prompt)
        answer = [self.step(row)]
        while len(answer) < count:
            self.table.append([row], answer[-1:])
            answer.append(self.step(row))
        self.table.release(row)
        return answer, cached


def main() -> None:
    engine = Engine(device=8, host=32)
    prompts = [[*range(12), *range(100 * i, 100 * i + 6)] for i in range(1, 5)]
    for round_number in (1, 2):
        for prompt in prompts:
            answer, cached = engine.generate(prompt, 5)
            alone, _ = Engine(device=8, host=32).generate(prompt, 5)
            assert answer == alone
            print(f"round {round_number}: {cached} of {len(prompt)} tokens were cached, then {answer}")
            assert cached == (16 if round_number == 2 else 12 if prompt != prompts[0] else 0)
    engine.placement.check_integrity()
    demoted = engine.placement.stats()["demoted"]["device"]
    print(f"{demoted} blocks went to the host on the way; every answer is that of an empty engine")


if __name__ == "__main__":
    main()
