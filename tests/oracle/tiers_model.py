"""Blocks and the tiers they lie in.

Who may be evicted, what goes first, and what a transfer changes.

The lower half of the cache's model, in plain Python. It counts blocks and gives them no ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

DEVICE = 0

Content: TypeAlias = tuple[Hashable, tuple[int, ...]]


class NoRoom(Exception):
    """A tier has fewer free blocks than were asked for."""


class Block:
    """One block of one prefix, in all tiers where a copy of it lies."""

    __slots__ = ("content", "copies", "failed", "kids", "moving", "owners", "parent", "root", "tokens")

    def __init__(self, parent: Block | None, tokens: tuple[int, ...], content: Content) -> None:
        self.parent = parent
        self.root: Block = parent.root if parent else self
        self.tokens = tokens
        self.content = content  # (namespace, all tokens of the prefix): KV depends on nothing else
        self.kids: dict[tuple[int, ...], Block] = {}
        self.copies: set[int] = set()
        self.owners = 0
        self.moving: Transfer | None = None
        self.failed = False  # never matched again; of a root: its namespace was dropped

    @property
    def top(self) -> int:
        """Hottest tier with a copy."""
        return min(self.copies)

    @property
    def stands(self) -> int:
        """Where its parent sees it: what is being demoted has left already."""
        return self.moving.dst if self.moving and self.moving.demotes else self.top

    def subtree(self) -> list[Block]:
        """The blocks that hang on this one, parents before children."""
        found = list(self.kids.values())
        for block in found:
            found.extend(block.kids.values())
        return found


class Transfer:
    """One block on its way from one tier to another."""

    __slots__ = ("block", "dst", "src")

    def __init__(self, block: Block, src: int, dst: int) -> None:
        self.block, self.src, self.dst = block, src, dst

    @property
    def demotes(self) -> bool:
        return self.dst > self.src


class TiersModel:
    """Copies of blocks in tiers of limited size, least recently used, leaves first.

    Parameters
    ----------
    capacities : blocks in each tier, hottest first; 0 where there is no such tier.
    inclusive : by tier, whether a copy stays there when its block is promoted.
    """

    def __init__(self, capacities: Sequence[int], inclusive: Sequence[bool]) -> None:
        self.capacities = list(capacities)
        self.inclusive = [*inclusive, *[False] * len(capacities)][: len(capacities)]
        self.order: list[list[Block]] = [[] for _ in capacities]  # what the tree alone owns, coldest first
        self.used = [0 for _ in capacities]
        self.in_flight: list[Transfer] = []
        self.moves: list[Transfer] = []  # decided and not yet taken
        self.dropped = [0 for _ in capacities]

    def free(self, tier: int) -> int:
        return self.capacities[tier] - self.used[tier]

    def pending(self, tier: int) -> int:
        """Blocks of a tier that demotions in flight will free."""
        return sum(transfer.demotes and transfer.src == tier for transfer in self.in_flight)

    def reserve(self, num_blocks: int, tier: int = DEVICE) -> int:
        """Make room, and return how many blocks are still missing.

        The caller then finishes the moves and asks again.
        """
        missing = num_blocks - self.free(tier) - self.pending(tier)
        if missing > 0:
            self._make_room(tier, missing)
        return max(0, num_blocks - self.free(tier))

    def take_moves(self) -> list[Transfer]:
        taken, self.moves = self.moves, []
        return taken

    def complete(self, transfer: Transfer, ok: bool) -> None:
        """What becomes of a block whose bytes have arrived, or have not."""
        self.in_flight.remove(transfer)
        block, src, dst = transfer.block, transfer.src, transfer.dst
        block.moving = None
        returned = transfer.demotes and block.owners > 0  # an owner came back for it: it stays where it was
        if ok and not (returned and not self.inclusive[dst]):
            block.copies.add(dst)  # its room there was taken when the transfer began
            if not returned and (transfer.demotes or not self.inclusive[src]):
                self._lose(block, src)
        else:
            self.used[dst] -= 1
        if not ok and not transfer.demotes:
            block.failed = True
        for tier in sorted(block.copies):
            if not self._held(block, tier) and block not in self.order[tier]:
                self._link(block, tier, below_parent=ok and transfer.demotes and not returned)
        if not ok and transfer.demotes and not returned:
            self._drop_subtree(block)
        if block.root.failed:
            for kid in list(block.root.kids.values()):
                self._drop_subtree(kid)

    # ---- inside

    def _held(self, block: Block, tier: int) -> bool:
        """Whether others than the tree hold the copy.

        Owners hold the hottest copy, a transfer its source.
        """
        if block.moving and block.moving.src == tier:
            return True
        return block.owners > 0 and tier == block.top

    def _link(self, block: Block, tier: int, below_parent: bool = False) -> None:
        """Make a copy the hottest of its tier.

        A copy that was just demoted is not hotter than its parent there.
        """
        order, parent = self.order[tier], block.parent
        if below_parent and parent in order and parent.top == tier and parent.failed == block.failed:
            order.insert(order.index(parent), block)
        else:
            order.append(block)

    def _unlink(self, block: Block, tier: int) -> None:
        if block in self.order[tier]:
            self.order[tier].remove(block)

    def _gain(self, block: Block, tier: int) -> None:
        block.copies.add(tier)
        self.used[tier] += 1

    def _lose(self, block: Block, tier: int) -> None:
        self._unlink(block, tier)
        block.copies.remove(tier)
        self.used[tier] -= 1

    def _start(self, block: Block, dst: int) -> None:
        for tier in block.copies:
            self._unlink(block, tier)
        block.moving = Transfer(block, block.top, dst)
        self.used[dst] += 1
        self.in_flight.append(block.moving)
        self.moves.append(block.moving)

    def _may_go(self, block: Block, tier: int, leaf: bool) -> bool:
        if block.moving:
            return False
        if block.top < tier:
            return True  # a hotter copy exists: this one is redundant
        if block.owners:
            return False
        if block.failed or (leaf and len(block.copies) == 1):  # it would be lost
            return not block.kids
        return all(kid.stands > tier for kid in block.kids.values())

    def _victim(self, tier: int, leaf: bool) -> Block | None:
        """The coldest copy that may go; what failed goes before everything else."""
        for failed in (True, False):
            for block in self.order[tier]:
                if block.failed == failed and self._may_go(block, tier, leaf):
                    return block
        return None

    def _useless(self, tier: int) -> Block | None:
        """Return a block that could not be read and has no owner.

        What continues it is as lost as the block itself.
        """
        for block in self.order[tier]:
            if block.failed and not block.moving and not block.owners:
                return block
        return None

    def _make_room(self, tier: int, num_blocks: int) -> None:
        colder = [t for t in range(tier + 1, len(self.capacities)) if self.capacities[t]]
        drop = not colder  # out of the last tier: only leaves, and they are lost
        while num_blocks > 0:
            block = self._victim(tier, drop)
            if block is None and not drop:
                drop = True  # nothing can be demoted; perhaps something can be dropped
                continue
            if block is None:  # whatever could go still has colder blocks hanging on it: those first
                block = self._victim(tier, False) or self._useless(tier)
                if block is None:
                    return
                for kid in list(block.kids.values()):
                    self._drop_subtree(kid)
                if block.kids:
                    return
                continue
            if len(block.copies) > 1:
                self._give_up_copy(block, tier)
            elif drop or block.failed:
                self._drop(block)
            else:
                if not self.free(colder[0]) and not self.pending(colder[0]):
                    self._make_room(colder[0], 1)
                    if not block.copies:  # it hung on what had to go
                        continue
                if not self.free(colder[0]):
                    if self.pending(colder[0]):
                        return  # the caller finishes what is in flight and asks again
                    drop = True
                    continue
                self._start(block, colder[0])
            num_blocks -= 1

    def _give_up_copy(self, block: Block, tier: int) -> None:
        was_top = block.top == tier
        self._lose(block, tier)
        if was_top:
            self._unlink(block, block.top)
            self._link(block, block.top, below_parent=True)

    def _drop(self, block: Block) -> None:
        """Loses a leaf for good."""
        assert block.parent
        assert not block.kids
        self.dropped[block.top] += 1
        for tier in list(block.copies):
            self._lose(block, tier)
        del block.parent.kids[block.tokens]

    def _drop_subtree(self, block: Block) -> None:
        """Drops a block and what hangs on it, as far as no owner holds and no transfer moves it."""
        for kid in list(block.kids.values()):
            self._drop_subtree(kid)
        if not block.kids and not block.owners and not block.moving:
            self._drop(block)
