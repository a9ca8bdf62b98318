"""The real block table beside the oracle's sequences.

They stand over a :class:`Pair` and share its tiers and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pagedkv.core import BlockTable
from pagedkv.errors import OutOfBlocks
from tests.model.pair import Pair
from tests.oracle.sequence_model import SequenceModel, compute
from tests.oracle.tiers_model import DEVICE


class Rows:
    """Sequences of both sides.

    The device's memory is kept by slot: a slot holds the prefix that was written there.
    """

    def __init__(self, **shape: Any) -> None:
        self.pair = Pair(**shape)
        self.size = self.pair.model.block_size
        self.table = BlockTable(self.pair.core, 64)
        self.rows: list[tuple[int, SequenceModel]] = []
        self.slots: dict[tuple[int, int], dict[int, Any]] = {}  # (tier, block) -> offset -> (namespace, prefix)
        self.copies = 0

    def open(self, tokens: Sequence[int], namespace: bytes = b"") -> None:
        """Do what a cache does with a prompt: own, make room, promote, settle, open.

        One token is left to compute.
        """
        limit = max(len(tokens) - 1, 0) // self.size
        who = self.pair.acquire(tokens, namespace, limit)
        handle, owner = self.pair.owners[who]
        self.make_room(sum(block.top != DEVICE for block in owner.path))
        self.pair.promote(who)
        self.finish()
        self.pair.settle(who)
        self.pair.owners.pop(who)
        row, num_cached = self.table.open(tokens, self.pair.tree.namespace(namespace), owner=handle)
        sequence = SequenceModel(self.pair.model, owner, tokens)
        assert num_cached == sequence.computed, "cached tokens"
        self.rows.append((row, sequence))

    def append(self, who: int, tokens: Sequence[int]) -> None:
        row, sequence = self.rows[who]
        self.table.extend(row, tokens)
        sequence.tokens += tokens

    def fork(self, who: int) -> None:
        row, sequence = self.rows[who]
        other = sequence.fork()
        self.rows.append((int(self.table.fork(row, 1)[0]), other))

    def truncate(self, who: int, num_tokens: int) -> None:
        row, sequence = self.rows[who]
        sequence.truncate(num_tokens)
        self.table.truncate(row, num_tokens)

    def release(self, who: int) -> None:
        row, sequence = self.rows.pop(who)
        sequence.release()
        self.table.release(row)

    def step(self, chosen: Sequence[int]) -> bool:
        """Run one step over these rows.

        Returns False when there is no room for it; nothing changes then.
        """
        rows = np.array([self.rows[who][0] for who in chosen], np.int64)
        sequences = [self.rows[who][1] for who in chosen]
        needed = sum(sequence.blocks_needed() for sequence in sequences)
        assert self.table.blocks_needed(rows) == needed, "blocks needed"
        self.make_room(needed)
        if needed > self.pair.model.free(DEVICE):
            with pytest.raises(OutOfBlocks):
                self.table.step(rows)
            self.pair.take()
            return False
        arrays = self.table.step(rows)
        assert arrays.seq_lens.tolist() == [len(sequence.tokens) for sequence in sequences]
        for source, target in arrays.copies.tolist():
            self.slots[DEVICE, target] = dict(self.slots[DEVICE, source])
        self.table.copies_done()
        for i, sequence in enumerate(sequences):
            for at in range(int(arrays.q_indptr[i]), int(arrays.q_indptr[i + 1])):
                position = int(arrays.positions[at])
                assert int(arrays.tokens[at]) == sequence.tokens[position], "token of a step"
                block, offset = divmod(int(arrays.slot_mapping[at]), self.size)
                assert block == int(arrays.block_tables[i, position // self.size]), "slot of a token"
                held = self.slots.setdefault((DEVICE, block), {})
                held[offset] = (sequence.namespace, tuple(sequence.tokens[: position + 1]))
        self.table.commit(rows)
        self.copies += compute(sequences)
        return True

    # ---- moves carry slots

    def finish(self, ok: bool = True) -> None:
        """Ends every transfer in flight, and moves the bytes of those that succeed."""
        known = len(self.pair.transfers)
        self.pair.take(check_content=False)
        for move, _ in self.pair.transfers[known:]:
            source = self.slots.get((int(move["src_tier"]), int(move["src_block"])), {})
            self.slots[int(move["dst_tier"]), int(move["dst_block"])] = dict(source)
        self.pair.finish(ok)

    def make_room(self, num_blocks: int) -> bool:
        for wanted in range(1, num_blocks + 1):
            while self.pair.reserve(wanted):
                if not self.pair.model.moves:
                    return False
                self.finish()
        return True

    # ---- what must be the same

    def check(self, *, deep: bool = False) -> None:
        for row, sequence in self.rows:
            num_tokens, computed, num_blocks, num_owned = self.table.info(row)
            assert self.table.tokens(row).tolist() == sequence.tokens, "tokens"
            assert (num_tokens, computed) == (len(sequence.tokens), sequence.computed), "computed"
            assert num_owned == len(sequence.owner.path), "committed blocks"
            assert num_blocks == num_owned + len(sequence.own), "blocks"
            blocks = self.table.blocks(row).tolist()
            for position, prefix in enumerate(sequence.contents()):
                self.pair.reads += 1
                held = self.slots[DEVICE, blocks[position // self.size]].get(position % self.size)
                assert held == (sequence.namespace, prefix), "wrong content"
        self.pair.counts()
        if deep:
            self.table.check_integrity()
            self.pair.core.check_integrity()
            self.pair.model.check([sequence.owner for _, sequence in self.rows])
            for block in self.pair.model.blocks():
                if not block.kids and not block.root.failed:
                    self._look(block.content)

    def _look(self, content: Any) -> None:
        namespace, prefix = content
        tiers, blocks, _ = self.pair.core.match(prefix, self.pair.tree.namespace(namespace))
        assert tiers.tolist() == self.pair.model.match(prefix, namespace), "tiers of a match"
        for i, (tier, block) in enumerate(zip(tiers.tolist(), blocks.tolist())):
            for offset in range(self.size):
                expected = (namespace, prefix[: i * self.size + offset + 1])
                assert self.slots[tier, block].get(offset) == expected, "wrong content"

    def close(self) -> None:
        self.finish()
        while self.rows:
            self.release(len(self.rows) - 1)
        self.pair.close()
