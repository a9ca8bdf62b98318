"""What is written to a disk tier and what a crash leaves, counted on the real core.

One memory tier over one disk tier, runs of one block, LRU, as the exact simulator of write policies has it (its rules
are in docs/decisions/0020). A block's id is its token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.core import BlockPool, Placement, RadixTree

DISK = 1


def chats(systems: int, chats: int = 250, turns: int = 3000, system_blocks: int = 20, most_turns: int = 12):
    """Paths of chats over system prompts, int32 each; a turn has one block more than the last.

    Chat c has system prompt ``c % systems``; after `most_turns` turns it begins again.
    """
    choose, ids, turn, paths = np.random.default_rng(1), {}, [0] * chats, []
    for _ in range(turns):
        chat = int(choose.integers(chats))
        names = [("system", chat % systems, j) for j in range(system_blocks)]
        names += [("chat", chat, j) for j in range(turn[chat] + 1)]
        paths.append(np.array([ids.setdefault(name, len(ids)) for name in names], np.int32))
        turn[chat] = (turn[chat] + 1) % most_turns
    return paths


@dataclass
class Counts:
    """Blocks so far: served from memory and disk, computed, written, dropped from the disk."""

    memory: int = 0
    disk: int = 0
    computed: int = 0
    written: int = 0
    dropped: int = 0


class Driver:
    """Serves paths by the core's own protocol.

    Parameters
    ----------
    memory, disk : blocks.
    write : when the disk is written.
    second_hit : whether what no second request has used is refused.
    """

    def __init__(self, memory: int, disk: int, write: str, *, second_hit: bool = False) -> None:
        self.tree = RadixTree(1, num_tiers=2, max_run=1)
        self.pools = [BlockPool(memory), BlockPool(disk)]
        self.core = Placement(self.tree, self.pools, inclusive=(False, True), closed=(False, True), write=write)
        self.second_hit, self.most, self.counts = second_hit, memory, Counts()

    def carry_out(self) -> None:
        """What a mover does, and what admission refuses."""
        while len(moves := self.core.take_moves()):
            for group in np.unique(moves["group"]):
                part = moves[moves["group"] == group]
                wanted = part["dst_tier"][-1] == DISK
                good = not (wanted and self.second_hit and not self.core.prospects(int(part["node"][-1]))[2])
                self.counts.written += good and wanted and len(part)
                self.core.complete(part["transfer"], [good] * len(part), [good] * len(part))

    def request(self, path: NDArray[np.int32]) -> None:
        """One request for a path."""
        core, counts = self.core, self.counts
        path = path[: self.most]
        owner, found = core.acquire(path)
        cold = int(np.count_nonzero(core.tiers_of(owner)))
        counts.memory, counts.disk = counts.memory + found - cold, counts.disk + cold
        counts.computed += len(path) - found
        for room in range(1, len(path) - found + cold + 1):  # one by one: what is being written is passed over
            while core.reserve(room):
                self.carry_out()
            self.carry_out()
        core.promote(owner)
        self.carry_out()
        assert core.settle(owner) == found
        if found < len(path):
            assert core.insert(owner, path[found:], core.allocate(len(path) - found)) == len(path) - found
        core.release(owner)
        while core.copy_wanted(1 << 30):
            self.carry_out()
        counts.dropped = sum(core.stats()[how]["host"] for how in ("dropped", "trimmed"))  # tier 1 by its number

    def held(self) -> tuple[int, int]:
        """Blocks that any tier has, and that the disk has, all of them with their paths."""
        self.core.check_integrity()
        return self.tree.num_blocks, self.pools[DISK].counts()["cached"]
