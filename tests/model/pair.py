"""The real core beside the oracle: both do every operation and must look the same.

The memory of every tier is simulated: what a block holds is what was written into its id, and moves copy it. So a
wrong id anywhere shows as wrong content at the next read.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from pagedkv.core import BlockPool, Placement, RadixTree
from pagedkv.errors import OutOfBlocks, PinBudgetExceeded
from tests.oracle.cache_model import CacheModel, NoRoom, Owner
from tests.oracle.tiers_model import DEVICE, Content, Transfer

TIERS = ("device", "host", "disk", "remote")


class Pair:
    """A :class:`Placement` and a :class:`CacheModel` under the same operations.

    Parameters
    ----------
    block_size, capacities, inclusive, closed, write, pin_budget : of both; at most four tiers.
    beside : whether the coldest tier is one of claims.
    max_run : of the real tree; 1 makes every block a node of its own.
    """

    def __init__(
        self,
        block_size: int = 1,
        capacities: Sequence[int] = (4, 4),
        *,
        inclusive: Sequence[bool] = (),
        closed: Sequence[bool] = (),
        write: str = "evicted",
        max_run: int = 256,
        pin_budget: int = 0,
        beside: bool = False,
    ) -> None:
        flags = [*inclusive, *[False] * len(capacities)][: len(capacities)]
        shut = [*closed, *[False] * len(capacities)][: len(capacities)]
        self.model = CacheModel(
            block_size, capacities, inclusive=flags, closed=shut, write=write, pin_budget=pin_budget, beside=beside
        )
        self.pools = [BlockPool(n) if n else None for n in capacities]
        self.tree = RadixTree(block_size, len(capacities), max_run=max_run)
        self.core = Placement(
            self.tree, self.pools, inclusive=flags, closed=shut, write=write, pin_budget=pin_budget,
            beside=[*[False] * (len(capacities) - 1), beside],
        )  # fmt: skip
        self.max_run = max_run
        self.memory: list[dict[int, Content]] = [{} for _ in capacities]
        self.owners: list[tuple[int, Owner]] = []
        self.private: list[int] = []
        self.transfers: list[tuple[Any, Transfer]] = []  # taken, not completed: the core's moves, the model's
        self.reads = 0

    # ---- operations; `who` is an index into owners

    def acquire(self, tokens: Sequence[int], namespace: bytes = b"", max_blocks: int | None = None) -> int:
        handle, num_blocks = self.core.acquire(tokens, self.tree.namespace(namespace), max_blocks)
        owner = self.model.acquire(tokens, namespace, max_blocks)
        assert num_blocks == len(owner.path), "matched blocks"
        self.owners.append((handle, owner))
        return len(self.owners) - 1

    def share(self, who: int) -> None:
        handle, owner = self.owners[who]
        self.owners.append((self.core.share(handle), self.model.share(owner)))

    def release(self, who: int) -> None:
        handle, owner = self.owners.pop(who)
        self.core.release(handle)
        self.model.release(owner)

    def pin(self, who: int) -> bool:
        handle, owner = self.owners[who]
        if self.model.pin(owner):
            self.core.pin(handle)
            return True
        with pytest.raises(PinBudgetExceeded):
            self.core.pin(handle)
        return False

    def reserve(self, num_blocks: int, tier: int = DEVICE) -> int:
        missing = self.model.reserve(num_blocks, tier)
        assert self.core.reserve(num_blocks, tier) == missing, "shortfall"
        return missing

    def promote(self, who: int) -> bool:
        handle, owner = self.owners[who]
        try:
            self.model.promote(owner)
        except NoRoom:
            with pytest.raises(OutOfBlocks):
                self.core.promote(handle)
            return False
        self.core.promote(handle)
        return True

    def settle(self, who: int) -> int:
        handle, owner = self.owners[who]
        num_blocks = self.model.settle(owner)
        assert self.core.settle(handle) == num_blocks, "settled blocks"
        return num_blocks

    def insert(self, who: int, tokens: Sequence[int]) -> int:
        """Writes new blocks for ``tokens`` behind the owner's prefix and gives them to the tree."""
        handle, owner = self.owners[who]
        size = self.model.block_size
        num_blocks = len(tokens) // size
        try:
            self.model.alloc(num_blocks)
        except NoRoom:
            with pytest.raises(OutOfBlocks):
                self.pools[DEVICE].alloc(num_blocks)
            return 0
        blocks = self.pools[DEVICE].alloc(num_blocks)
        namespace, prefix = owner.last.content
        for i, block in enumerate(blocks.tolist()):
            assert block not in self.private, "handed out twice"
            self.memory[DEVICE][block] = (namespace, prefix + tuple(tokens[: (i + 1) * size]))
        taken = self.model.insert(owner, tokens, [True] * num_blocks)
        assert self.core.insert(handle, tokens, blocks) == taken, "inserted blocks"
        self.pools[DEVICE].free(blocks[taken:])
        self.model.give_back(num_blocks - taken)
        return taken

    def num_colder(self, who: int, tokens: Sequence[int]) -> int:
        """Blocks behind the owner's prefix that the tree has in colder tiers alone."""
        block, found = self.owners[who][1].last, 0
        for begin in range(0, len(tokens), self.model.block_size):
            kid = block.kids.get(tuple(tokens[begin : begin + self.model.block_size]))
            if kid is None:
                break
            block, found = kid, found + (kid.top != DEVICE)
        return found

    def graft(self, tokens: Sequence[int], namespace: bytes, piece: int) -> int:
        """Add claims behind the cached part of a prompt, as many as there is room for; how many."""
        tier, root = len(self.pools) - 1, self.tree.namespace(namespace)
        pool, size = self.pools[tier], self.model.block_size
        assert pool is not None
        if self.max_run > 1:  # what moves cannot be cut, and the model knows no runs
            self.finish()
        who = self.acquire(tokens, namespace)
        found = len(self.owners[who][1].path)
        more = len(tokens) // size - found
        if self.max_run == 1:
            self.reserve(more, tier)
        total = found + min(more, self.model.free(tier))
        keys = np.arange(found, found + more, dtype=np.uint32).view(np.uint8).reshape(more, 4)
        table = np.full((pool.max_blocks, 4), 255, np.uint8)
        done = self.core.graft(tokens[: (found + more) * size], keys, table, root, tier, piece)
        assert self.model.graft(tokens[: total * size], namespace) == done, "grafted blocks"
        for claim in np.flatnonzero((table != 255).any(axis=1)).tolist():
            depth = int(table[claim].view(np.uint32)[0])
            self.memory[tier][claim] = (namespace, tuple(tokens[: (depth + 1) * size]))
        self.release(who)
        return done - found

    def hold(self, num_blocks: int) -> bool:
        """Keeps device blocks from all owners, as a sequence's unfinished tail does."""
        try:
            self.model.alloc(num_blocks)
        except NoRoom:
            return False
        for block in self.pools[DEVICE].alloc(num_blocks).tolist():
            self.memory[DEVICE][block] = ("private", ())
            self.private.append(block)
        return True

    def let_go(self) -> None:
        """Gives all held blocks back."""
        self.pools[DEVICE].free(self.private)
        self.model.give_back(len(self.private))
        self.private.clear()

    def take(self, *, check_content: bool = True) -> None:
        """Take the moves that both decided, and compare them.

        They are the same blocks in the same order, but for the order within a run.
        """
        moves, expected = self.core.take_moves(), self.model.take_moves()
        assert len(moves) == len(expected), "number of moves"
        begin = 0
        for _, run in groupby(moves["transfer"].tolist()):
            end = begin + len(list(run))
            theirs = sorted(expected[begin:end], key=lambda t: len(t.block.content[1]))
            for move, transfer in zip(moves[begin:end], theirs):
                self._take_one(move, transfer, check_content)
            begin = end

    def _take_one(self, move: Any, transfer: Transfer, check_content: bool) -> None:
        assert (move["src_tier"], move["dst_tier"]) == (transfer.src, transfer.dst), "tiers of a move"
        num_blocks = int(move["depth"]) + 1
        prefix = tuple(self.core.path_tokens(move["node"]).tolist())[: num_blocks * self.model.block_size]
        assert prefix == transfer.block.content[1], "prefix of a move"
        if check_content:
            held = self.memory[transfer.src].get(int(move["src_block"]))
            assert held == transfer.block.content, "a move reads wrong content"
        self.transfers.append((move, transfer))

    def complete(self, ok: bool = True, which: int = 0) -> None:
        """Ends one transfer in flight, with all moves of it: bytes arrive, or half of them do."""
        self.take()
        chosen = int(self.transfers[which][0]["transfer"])
        mine = [pair for pair in self.transfers if pair[0]["transfer"] == chosen]
        self.transfers = [pair for pair in self.transfers if pair[0]["transfer"] != chosen]
        for move, transfer in mine:
            content = transfer.block.content if ok else ("torn", ())
            self.memory[transfer.dst][int(move["dst_block"])] = content
        self.core.complete([chosen], [ok])
        ok = ok and (mine[0][1].dst < mine[0][1].src or self.model.may_arrive(mine[0][1]))
        # a run moves as one: its deepest block ends coldest
        for _, transfer in mine if mine[0][1].copies else reversed(mine):
            self.model.complete(transfer, ok)

    def finish(self, ok: bool = True) -> None:
        """Ends every transfer in flight, in the order in which they were decided."""
        self.take()
        while self.transfers:
            self.complete(ok)

    def make_room(self, num_blocks: int, tier: int = DEVICE) -> bool:
        """Do what a cache does to get blocks: ask, move, and ask again.

        It stops when it has them or when nothing helps.

        One block more at a time, unless every run is one block: asked for many at once, the core looks for room
        below for a run's blocks together, the model for one after the other.
        """
        first = num_blocks if self.max_run == 1 else 1
        for wanted in range(first, num_blocks + 1):
            while self.reserve(wanted, tier):
                self.take()
                if not self.transfers:
                    return False
                self.finish()
        return True

    def copy_wanted(self, most: int) -> None:
        """Only with runs of one block: the ring holds runs."""
        assert self.core.copy_wanted(most) == self.model.copy_wanted(most), "blocks to be copied"

    def clear(self) -> None:
        self.core.clear()
        self.model.clear()

    def drop_namespace(self, namespace: bytes) -> None:
        self.core.drop_namespace(self.tree.namespace(namespace))
        self.model.root(namespace)
        self.model.drop_namespace(namespace)

    # ---- what must be the same

    def read(self, who: int) -> None:
        """Reads every block of an owner where the core says it lies."""
        handle, owner = self.owners[who]
        tiers, blocks = self.core.tiers_of(handle).tolist(), self.core.blocks_of(handle).tolist()
        assert tiers == [block.top for block in owner.path], "tiers of an owned path"
        for tier, block_id, block in zip(tiers, blocks, owner.path):
            self.reads += 1
            if not block.failed:
                assert self.memory[tier].get(block_id) == block.content, "wrong content"

    def look(self, tokens: Sequence[int], namespace: bytes = b"") -> None:
        """Matches a prompt and reads what is found."""
        tiers, blocks, _ = self.core.match(tokens, self.tree.namespace(namespace))
        assert tiers.tolist() == self.model.match(tokens, namespace), "tiers of a match"
        size = self.model.block_size
        for i, (tier, block) in enumerate(zip(tiers.tolist(), blocks.tolist())):
            self.reads += 1
            content: tuple[Hashable, tuple[int, ...]] = (namespace, tuple(tokens[: (i + 1) * size]))
            assert self.memory[tier].get(block) == content, "wrong content"

    def counts(self) -> None:
        """Free and cached blocks of every tier, hits, drops and pins."""
        stats = self.core.stats()
        for tier, pool in enumerate(self.pools):
            if pool is None:
                continue
            counts = pool.counts()
            assert counts["free"] == self.model.free(tier), f"free blocks of tier {tier}"
            assert counts["cached"] == self.model.cached(tier), f"cached blocks of tier {tier}"
            assert stats["hit_blocks"][TIERS[tier]] == self.model.hits[tier], f"hits in tier {tier}"
            assert stats["dropped"][TIERS[tier]] == self.model.dropped[tier], f"drops from tier {tier}"
        assert stats["pinned_blocks"] == self.model.pinned, "pinned blocks"
        assert stats["in_flight"] == len({move["transfer"] for move, _ in self.transfers}) or self.model.moves

    def check(self, *, deep: bool = False) -> None:
        """Compare all of the above.

        ``deep`` also recomputes both sides' books and matches every cached prefix.
        """
        self.counts()
        for who in range(len(self.owners)):
            self.read(who)
        if deep:
            self.core.check_integrity()
            self.model.check([owner for _, owner in self.owners])
            for namespace, root in list(self.model.roots.items()):
                for block in root.subtree():
                    if not block.kids:
                        assert isinstance(namespace, bytes)
                        self.look(block.content[1], namespace)

    def close(self) -> None:
        """Ends everything; nothing may be left in any tier."""
        self.finish()
        while self.owners:
            self.release(len(self.owners) - 1)
        self.let_go()
        self.clear()
        self.check(deep=True)
        for pool in self.pools:
            if pool is not None:
                counts = pool.counts()
                assert counts["free"] == counts["capacity"], "a leak"
