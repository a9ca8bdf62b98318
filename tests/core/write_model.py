"""The exact simulator of write policies, by its own rules and by the core's.

One memory tier over one disk tier; a block has one parent, and is found only where all its ancestors are. A request's
path is a list of blocks, root first. The rules:

1. Hits are the leading blocks of the path that memory or disk has; all others are computed.
2. All blocks of the path count as used by this request, the root last.
3. As many blocks leave memory as the rest of the path needs, the least recently used first, of those the deepest. What
   `write` says is written then: the block behind its ancestors.
4. The path's blocks are in memory; their copies on the disk stay.
5. With ``"reused"``, blocks of the path that have been used a second time are copied, the root first.

`Simulator` drops from a full disk in the order of rule 3, and remembers each use for ever. `CoreOrder` drops in the
order of the core's list, and forgets as the core does.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .write_policies import Counts


@dataclass(slots=True, eq=False)
class Block:
    """A block and where it is.

    `children` are those on the disk, `colder` and `hotter` its neighbours in a list.
    """

    number: int
    parent: Block | None
    depth: int
    last: int = -1
    seen: int = 0
    in_memory: bool = False
    on_disk: bool = False
    children: int = 0
    colder: Block | None = None
    hotter: Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Smaller is colder."""
        return self.last, -self.depth, self.number


class Simulator:
    """Serves paths by the rules above, with the interface of `write_policies.Driver`.

    Parameters
    ----------
    memory, disk : blocks.
    write : ``"evicted"``, ``"reused"``, or ``"leaf first"``: as blocks leave memory, without their ancestors.
    second_hit : only blocks that were used twice are written.
    """

    def __init__(self, memory: int, disk: int, write: str, *, second_hit: bool = False) -> None:
        self.memory, self.disk, self.write, self.second_hit = memory, disk, write, second_hit
        self.blocks: dict[int, Block] = {}
        self.counts, self.time = Counts(), 0
        self.in_memory = self.on_disk = 0
        self.coldest_in_memory: list[tuple[tuple[int, int, int], Block]] = []
        self.coldest_on_disk: list[tuple[tuple[int, int, int], Block]] = []

    def request(self, path: NDArray[np.int32]) -> None:
        """One request for a path."""
        blocks, parent = [], None
        for number in path[: self.memory].tolist():
            b = self.blocks.get(number)
            if b is None:
                b = self.blocks[number] = Block(number, parent, len(blocks))
            blocks.append(b)
            parent = b
        found = next((i for i, b in enumerate(blocks) if not (b.in_memory or b.on_disk)), len(blocks))
        cold = [b for b in blocks[:found] if not b.in_memory]
        self.counts.memory += found - len(cold)
        self.counts.disk += len(cold)
        self.counts.computed += len(blocks) - found
        self.time += 1
        for b in blocks:
            b.last, b.seen = self.time, b.seen + 1
        self.owned(cold)
        missing = [b for b in blocks if not b.in_memory]
        for _ in range(self.in_memory + len(missing) - self.memory):
            b = self.pop(self.coldest_in_memory, "in_memory")
            b.in_memory = False
            self.in_memory -= 1
            self.leave(b)
        for b in missing:
            b.in_memory = True
            heapq.heappush(self.coldest_in_memory, (b.key, b))
        self.in_memory += len(missing)
        self.released(blocks)
        if self.write == "reused":
            self.reuse(blocks, found)

    def pop(self, heap: list[tuple[tuple[int, int, int], Block]], where: str) -> Block:
        """The coldest; keys only grow, so an old entry is pushed anew."""
        while True:
            key, b = heap[0]
            if getattr(b, where) and key != b.key:
                heapq.heapreplace(heap, (b.key, b))
                continue
            heapq.heappop(heap)
            if getattr(b, where):
                return b

    def leave(self, b: Block) -> None:
        """Rule 3."""
        if self.second_hit:
            return
        for one in [b] if self.write == "leaf first" else lacking(b):
            self.put(one)

    def reuse(self, blocks: list[Block], found: int) -> None:
        """Rule 5."""
        for b in blocks:
            if b.seen > 1:
                self.put(b)

    def put(self, b: Block) -> None:
        """Write a block, unless all of a full disk was used later."""
        if b.on_disk:
            return
        if self.on_disk == self.disk:
            victim = self.pop(self.coldest_on_disk, "on_disk")
            if victim.key > b.key:
                heapq.heappush(self.coldest_on_disk, (victim.key, victim))
                return
            self.drop(victim)
        heapq.heappush(self.coldest_on_disk, (b.key, b))
        self.written(b)

    def written(self, b: Block) -> None:
        """Count it."""
        b.on_disk = True
        self.on_disk += 1
        self.counts.written += 1

    def drop(self, b: Block) -> None:
        """Count it."""
        b.on_disk = False
        self.on_disk -= 1
        self.counts.dropped += 1

    def owned(self, cold: list[Block]) -> None:
        """These blocks are about to come up from the disk."""

    def released(self, blocks: list[Block]) -> None:
        """The request is over."""

    def held(self) -> tuple[int, int]:
        """Blocks that memory or disk has, and that the disk has."""
        return sum(b.in_memory or b.on_disk for b in self.blocks.values()), self.on_disk


def lacking(b: Block) -> list[Block]:
    """A block and its ancestors that the disk lacks, root first; empty if it has the block."""
    path, at = [], b
    while at is not None and not at.on_disk:
        path.append(at)
        at = at.parent
    return path[::-1]


class CoreOrder(Simulator):
    """The same where the disk's victims are those of the core's list, from cold to hot.

    - A block that is written, or leaves memory while the disk has it, goes into the list right before its parent; to
      the hot end if its parent is not in the list.
    - Copies of a request's blocks move to the hot end when it ends, not when it begins. Those found on the disk alone
      are in no list until then.
    - The coldest block without children on the disk goes, but none of the path that is written. Room for all of a path
      is made before it is written, and no block is refused because others were used later.
    - With ``"reused"`` the blocks that a request has found are copied: the core remembers no use of a block that is in
      neither tier.
    """

    def __init__(self, memory: int, disk: int, write: str, *, second_hit: bool = False) -> None:
        super().__init__(memory, disk, write, second_hit=second_hit)
        self.ends = Block(-1, None, -1)
        self.ends.colder = self.ends.hotter = self.ends

    def owned(self, cold: list[Block]) -> None:
        for b in cold:
            unlink(b)

    def released(self, blocks: list[Block]) -> None:
        for b in reversed(blocks):
            if b.on_disk:
                unlink(b)
                link_before(b, self.ends)

    def leave(self, b: Block) -> None:
        if b.on_disk:
            unlink(b)
            self.link(b)
        elif not self.second_hit:
            self.copy(b)

    def reuse(self, blocks: list[Block], found: int) -> None:
        if found:
            self.copy(blocks[found - 1])

    def copy(self, b: Block) -> None:
        """Write a block behind its ancestors."""
        path = lacking(b)
        above = path[0].parent if path else None
        if above is not None:
            above.children += 1
        while self.disk - self.on_disk < len(path):
            victim = self.ends.hotter
            while victim.children:
                victim = victim.hotter
            assert victim is not self.ends, "these loads never lack room for a path"
            unlink(victim)
            self.drop(victim)
            if victim.parent is not None:
                victim.parent.children -= 1
        if above is not None:
            above.children -= 1
        for one in path:
            self.written(one)
            if one.parent is not None:
                one.parent.children += 1
            self.link(one)

    def link(self, b: Block) -> None:
        """Into the list, by the first rule."""
        link_before(b, b.parent if b.parent is not None and b.parent.hotter is not None else self.ends)

def link_before(b: Block, hotter: Block) -> None:
    """Put a block right before another one, on its colder side."""
    b.colder, b.hotter = hotter.colder, hotter
    hotter.colder.hotter = hotter.colder = b


def unlink(b: Block) -> None:
    """Take a block out of its list, if it is in one."""
    if b.hotter is not None:
        b.colder.hotter, b.hotter.colder = b.hotter, b.colder
        b.colder = b.hotter = None
