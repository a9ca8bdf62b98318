"""Slow, short models of eviction policies on single blocks, without the core's code.

They follow their papers, except that they evict leaf-first.

A block is the tuple of tokens that leads to it (a block is one token). A request hits its leading cached blocks, then
takes in all the others of its first `capacity` blocks; only a block that no cached block continues, and that the
request itself does not use, may go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Block = tuple[int, ...]


class LeafFirst:
    """LRU; the other policies change what they must.

    Parameters
    ----------
    capacity : blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cached: set[Block] = set()
        self.last_use: dict[Block, int] = {}
        self.clock = 0  # requests done
        self.pinned: set[Block] = set()

    def request(self, path: Sequence[int]) -> int:
        """Serve one request; the blocks it hits."""
        blocks = [tuple(path[: i + 1]) for i in range(min(len(path), self.capacity))]
        hits = 0
        while hits < len(blocks) and blocks[hits] in self.cached:
            hits += 1
        self.pinned = set(blocks)
        self.on_hits(blocks[:hits])
        self.on_misses(blocks[hits:])
        while len(self.cached) + len(blocks) - hits > self.capacity:
            victim = self.victim()
            self.cached.remove(victim)
            self.on_eviction(victim)
        self.cached.update(blocks[hits:])
        self.on_insertion(blocks[hits:])
        self.clock += 1
        self.last_use.update(dict.fromkeys(blocks, self.clock))
        return hits

    def may_go(self, block: Block) -> bool:
        continued = any(other[:-1] == block for other in self.cached)
        return block in self.cached and block not in self.pinned and not continued

    def coldest_first(self, blocks: Iterable[Block]) -> list[Block]:
        """Longest ago first; of one request the deepest first."""
        return sorted((b for b in blocks if self.may_go(b)), key=lambda b: (self.last_use[b], -len(b)))

    def victim(self) -> Block:
        return self.coldest_first(self.cached)[0]

    def on_hits(self, blocks: list[Block]) -> None: ...
    def on_misses(self, blocks: list[Block]) -> None: ...
    def on_eviction(self, block: Block) -> None: ...
    def on_insertion(self, blocks: list[Block]) -> None: ...


class Arc(LeafFirst):
    """ARC (Megiddo and Modha, FAST 2003), with ghosts that adapt the share of T1.

    T1 has blocks seen once, T2 blocks seen again; evictions from both leave ghosts.

    A ghost counts until `capacity` more evictions from its own list.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.again: set[Block] = set()  # T2
        self.ghosts: list[dict[Block, int]] = [{}, {}]
        self.evictions = [0, 0]
        self.target = 0.0

    def fresh(self, block: Block, which: int) -> bool:
        stamp = self.ghosts[which].get(block)
        return stamp is not None and self.evictions[which] - stamp < self.capacity

    def on_hits(self, blocks: list[Block]) -> None:
        self.again.update(blocks)

    def on_misses(self, blocks: list[Block]) -> None:
        for block in blocks:
            if self.fresh(block, 0):
                self.target = min(float(self.capacity), self.target + 1)
            elif self.fresh(block, 1):
                self.target = max(0.0, self.target - 1)

    def victim(self) -> Block:
        once = self.cached - self.again
        lists = [self.coldest_first(once), self.coldest_first(self.cached & self.again)]
        if not (len(once) > self.target and once):
            lists.reverse()
        return (lists[0] or lists[1])[0]

    def on_eviction(self, block: Block) -> None:
        which = int(block in self.again)
        self.again.discard(block)
        self.evictions[which] += 1
        self.ghosts[1 - which].pop(block, None)
        self.ghosts[which][block] = self.evictions[which]

    def on_insertion(self, blocks: list[Block]) -> None:
        for block in blocks:
            if self.fresh(block, 0) or self.fresh(block, 1):
                self.again.add(block)
            for ghosts in self.ghosts:
                ghosts.pop(block, None)


class S3Fifo(LeafFirst):
    """S3-FIFO (Yang et al., SOSP 2023): a small and a main queue and a ghost queue.

    What cannot go at the end of the small queue (used since, continued, in use) enters the main one.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: list[Block] = []  # the next to look at first
        self.main: list[Block] = []
        self.uses: dict[Block, int] = {}
        self.ghosts: dict[Block, int] = {}
        self.evictions = 0
        self.share = max(1, capacity // 10)

    def on_hits(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.uses[block] = min(3, self.uses[block] + 1)

    def victim(self) -> Block:
        for _ in range(6 * self.capacity + 100):
            if self.small and (len(self.small) >= self.share or not self.main):
                block = self.small.pop(0)
                if self.may_go(block) and self.uses[block] == 0:
                    self.evictions += 1
                    self.ghosts[block] = self.evictions
                    return block
                self.uses[block] = 0
            else:
                block = self.main.pop(0)
                if self.may_go(block) and self.uses[block] == 0:
                    return block
                if block not in self.pinned:
                    self.uses[block] = max(0, self.uses[block] - 1)
            self.main.append(block)
        raise AssertionError("nothing in the queues may go")

    def on_insertion(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            self.uses[block] = 0
            stamp = self.ghosts.pop(block, None)
            known = stamp is not None and self.evictions - stamp < self.capacity
            (self.main if known else self.small).append(block)


class Lfu(LeafFirst):
    """``examples/policy_lfu``: of the 64 coldest that may go, the one with the fewest hits."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.hits: dict[Block, int] = {}

    def on_hits(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.hits[block] = min(255, self.hits[block] + 1)

    def on_insertion(self, blocks: list[Block]) -> None:
        self.hits.update(dict.fromkeys(blocks, 0))

    def victim(self) -> Block:
        best: Block | None = None
        for block in self.coldest_first(self.cached)[:64]:
            if best is None or self.hits[block] < self.hits[best]:
                if best is not None:
                    self.hits[best] >>= 1
                best = block
            elif self.hits[block] > self.hits[best]:
                self.hits[block] >>= 1
        assert best is not None
        return best
