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

    __slots__ = (
        "content", "copies", "copying", "failed", "kids", "moving", "owners", "parent", "root", "spoilt", "tokens",
        "wanted",
    )  # fmt: skip

    def __init__(self, parent: Block | None, tokens: tuple[int, ...], content: Content) -> None:
        self.parent = parent
        self.root: Block = parent.root if parent else self
        self.tokens = tokens
        self.content = content  # (namespace, all tokens of the prefix): KV depends on nothing else
        self.kids: dict[tuple[int, ...], Block] = {}
        self.copies: set[int] = set()
        self.owners = 0
        self.moving: Transfer | None = None
        self.copying: Transfer | None = None
        self.wanted: set[int] = set()
        self.spoilt: set[int] = set()  # its copy there could not be read, and stays because others hang on it
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

    __slots__ = ("block", "copies", "dst", "src", "void")

    def __init__(self, block: Block, src: int, dst: int, *, copies: bool = False) -> None:
        self.block, self.src, self.dst, self.copies = block, src, dst, copies
        self.void = False  # its source was found bad

    @property
    def demotes(self) -> bool:
        return self.dst > self.src and not self.copies


class TiersModel:
    """Copies of blocks in tiers of limited size, least recently used, leaves first.

    Parameters
    ----------
    capacities : blocks in each tier, hottest first; 0 where there is no such tier.
    inclusive : by tier, whether a copy stays there when its block is promoted.
    closed : by tier, whether a block has a copy there only where its parent has one.
    beside : whether the coldest tier holds claims: nothing is demoted there.
    write : when blocks are written to closed tiers: "never", "evicted", "reused" or "all".
    """

    def __init__(
        self,
        capacities: Sequence[int],
        inclusive: Sequence[bool],
        closed: Sequence[bool] = (),
        write: str = "evicted",
        *,
        beside: bool = False,
    ) -> None:
        self.capacities = list(capacities)
        self.claims = len(capacities) - 1 if beside else None  # the tier of claims
        self.coldest = len(capacities) - 1 - beside
        self.closed = [*closed, *[False] * len(capacities)][: len(capacities)]
        self.write = write
        self.wanted: list[tuple[Block, int, int]] = []  # and the blocks lacking when some were started
        self.inclusive = [*inclusive, *[False] * len(capacities)][: len(capacities)]
        self.order: list[list[Block]] = [[] for _ in capacities]  # what the tree alone owns, coldest first
        self.used = [0 for _ in capacities]
        self.in_flight: list[Transfer] = []
        self.moves: list[Transfer] = []  # decided and not yet taken
        self.dropped = [0 for _ in capacities]
        self._batch: set[Block] | None = None
        self._kept: Block | None = None  # of a closed tier, while room is made there for what hangs on it

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
        if transfer.copies:
            self._copied(transfer, ok)
            return
        block.moving = None
        returned = transfer.demotes and block.owners > 0  # an owner came back for it: it stays where it was
        if ok and not (returned and not self.inclusive[dst]):
            block.copies.add(dst)  # its room there was taken when the transfer began
            if not returned and (transfer.demotes or not (self.inclusive[src] or self._must_stay(block, src))):
                self._lose(block, src)
        else:
            self.used[dst] -= 1
        if not ok and not transfer.demotes:
            block.failed = True
            if block.copying and block.copying.src == src:
                block.copying.void = True
        for tier in sorted(block.copies):
            if not self._held(block, tier) and block not in self.order[tier]:
                self._link(block, tier, below_parent=ok and transfer.demotes and not returned)
        if not ok and transfer.demotes and not returned:
            if block.copies == {src}:
                self._drop_subtree(block)
            elif not self._must_stay(block, src):
                self._give_up_copy(block, src)
        if block.root.failed:
            for kid in list(block.root.kids.values()):
                self._drop_subtree(kid)

    def may_arrive(self, transfer: Transfer) -> bool:
        """Whether a block's parent is where the block is going, if it has to be."""
        parent = transfer.block.parent
        return not self.closed[transfer.dst] or parent is None or parent.parent is None or transfer.dst in parent.copies

    def copy_wanted(self, most: int) -> int:
        """Start copies of what is wanted; how many."""
        started = 0
        if any(transfer.copies for transfer in self.in_flight):
            return 0
        if any(self.closed[transfer.src] and transfer.dst < transfer.src for transfer in self.in_flight):
            return 0
        self._batch = set()  # what is decided together ends in its order
        for _ in range(len(self.wanted)):
            if started >= most:
                break
            block, tier, left = self.wanted.pop(0)
            if not block.copies or tier not in block.wanted:
                continue
            block.wanted.discard(tier)
            before = self._num_lacking(block, tier)
            if 0 < left <= before:  # nothing has arrived
                continue
            now = self._copy(block, tier, most - started)
            if now is None:
                self._want(block, tier, left)
            elif now > 0 and tier not in block.copies and not block.copying:
                self._want(block, tier, before)
            started += now or 0
        self._batch = None
        return started

    # ---- inside

    def _want(self, block: Block, tier: int, left: int = 0) -> None:
        if tier not in block.wanted:
            block.wanted.add(tier)
            self.wanted.append((block, tier, left))

    def _num_lacking(self, block: Block, tier: int) -> int:
        """How many blocks a tier lacks of a path; -1 where that cannot be told now."""
        try:
            lacking = self._lacking(block, tier)
        except NoRoom:
            return -1
        return -1 if lacking is None else len(lacking)

    def _want_where(self, block: Block, *writes: str) -> None:
        for tier in range(1, len(self.capacities)):
            takes = self.closed[tier] and self.capacities[tier] and self.write in writes
            if takes and block.top < tier and tier not in block.copies:
                self._want(block, tier)

    def _lacking(self, block: Block, tier: int) -> list[Block] | None:
        """What a tier lacks of the path to a block, root first.

        None where some of it is on its way there. Raises NoRoom where some of it lies in a colder tier only, or could
        not be read.
        """
        path: list[Block] = []
        while block.parent and tier not in block.copies:
            if self._batch is not None and block in self._batch:
                break
            if block.copying or (block.moving and block.moving.demotes):
                return None
            if block.failed or block.top > tier:
                raise NoRoom
            path.insert(0, block)
            block = block.parent
        return path

    def _copy(self, block: Block, tier: int, most: int) -> int | None:
        """Copies what a tier lacks of a path, `most` blocks at most; None to be asked again."""
        again = tier in block.spoilt and not block.failed
        if block.failed or block.root.failed or (again and block.top == tier):
            return 0
        if again and (block.copying or block.moving):
            return None
        try:
            path = [block] if again else self._lacking(block, tier)
        except NoRoom:
            return 0
        if not path:
            return None if path is None else 0
        path = path[:most]
        self._make_room_behind(block, tier, len(path))
        if not block.copies:
            return 0
        if block.copying:
            return None
        path = path[: self.free(tier)]
        for each in path:
            self._start(each, tier, copies=True)
        return len(path)

    def _copied(self, transfer: Transfer, ok: bool) -> None:
        block, dst = transfer.block, transfer.dst
        block.copying = None
        if not ok or transfer.void or block.failed or not self.may_arrive(transfer):
            self.used[dst] -= 1
        elif dst in block.copies:  # in the place of a copy that could not be read
            self.used[dst] -= 1
            block.spoilt.discard(dst)
        else:
            block.copies.add(dst)
            if not block.moving:
                self._link(block, dst, below_parent=True)
            for tier in sorted(block.copies):
                if block.top < tier < dst and not self.inclusive[tier] and not self.closed[tier] and not block.moving:
                    self._lose(block, tier)
        if block.root.failed:
            for kid in list(block.root.kids.values()):
                self._drop_subtree(kid)

    def _below(self, block: Block, tier: int) -> bool:
        """Whether a child is in a tier, or on its way down to it."""
        for kid in block.kids.values():
            moves = (kid.copying, kid.moving if kid.moving and kid.moving.demotes else None)
            if tier in kid.copies or any(move and move.dst == tier for move in moves):
                return True
        return block is self._kept

    def _must_stay(self, block: Block, tier: int) -> bool:
        return block.copying is not None or (self.closed[tier] and self._below(block, tier))

    def _make_room_behind(self, block: Block, tier: int, num_blocks: int) -> None:
        """Makes room in a tier; the deepest of the block's path that is there stays."""
        at = block.parent
        while at and at.parent and tier not in at.copies:
            at = at.parent
        kept, self._kept = self._kept, at
        missing = num_blocks - self.free(tier) - self.pending(tier)
        if missing > 0:
            self._make_room(tier, missing)
        self._kept = kept

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
        hot = parent in order and (parent.top == tier or self.closed[tier]) and not parent.moving
        if below_parent and hot and parent and parent.failed == block.failed:
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
        block.spoilt.discard(tier)
        self.used[tier] -= 1

    def _start(self, block: Block, dst: int, *, copies: bool = False) -> None:
        transfer = Transfer(block, block.top, dst, copies=copies)
        if copies:
            block.copying = transfer
            if self._batch is not None:
                self._batch.add(block)
        else:
            for tier in block.copies:
                self._unlink(block, tier)
            block.moving = transfer
        self.used[dst] += 1
        self.in_flight.append(transfer)
        self.moves.append(transfer)

    def _may_go(self, block: Block, tier: int, leaf: bool) -> bool:
        if block.moving or block.copying or (self.closed[tier] and self._below(block, tier)):
            return False
        if block.top < tier:
            return True  # a hotter copy exists: this one is redundant
        if block.owners:
            return False
        if block.failed or (leaf and len(block.copies) == 1):  # it would be lost
            return self._ends(block, tier)
        return all(kid.stands > tier for kid in block.kids.values())

    def _ends(self, block: Block, tier: int) -> bool:
        """Whether nothing continues a block but claims that can be dropped with it."""
        if self.claims is None or tier == self.claims or not block.kids:
            return not block.kids
        reads = any(transfer.src == self.claims for transfer in self.in_flight)
        return not reads and all(kid.stands == self.claims for kid in block.kids.values())

    def _victim(self, tier: int, leaf: bool) -> Block | None:
        """The coldest copy that may go; what failed goes before everything else."""
        for failed in (True, False):
            for block in self.order[tier]:
                if block.failed == failed and self._may_go(block, tier, leaf):
                    return block
        return None

    def _useless(self, tier: int) -> Block | None:
        """Return a block that could not be read, has no owner and is continued.

        What continues it is as lost as the block itself.
        """
        for block in self.order[tier]:
            if block.failed and not block.moving and not block.copying and not block.owners and block.kids:
                return block
        return None

    def _make_room(self, tier: int, num_blocks: int) -> None:
        later = range(tier + 1, self.coldest + 1)
        colder = [t for t in later if self.capacities[t] and not (self.closed[t] and self.write == "never")]
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
            mirrored = self.closed[self.coldest] and self.write in ("reused", "all")
            lower = colder[0] if mirrored and not drop else None
            if len(block.copies) > 1 and (lower is None or block.failed or block.top < tier or lower in block.copies):
                self._give_up_copy(block, tier)
            elif drop or block.failed:
                for kid in list(block.kids.values()):  # claims
                    self._drop_subtree(kid)
                if block.kids:  # one has a hotter block behind it, which is on its way down
                    return
                self._drop(block)
            else:
                before: list[Block] | None = []
                if self.closed[colder[0]] and block.parent:
                    try:
                        before = self._lacking(block.parent, colder[0])
                    except NoRoom:
                        drop = True
                        continue
                    if before is None:
                        return  # the caller finishes what is in flight and asks again
                self._make_room_behind(block, colder[0], len(before) + 1)
                if not block.copies or block.copying:  # it hung on what had to go, or goes along as a copy
                    continue
                if self.free(colder[0]) <= len(before):
                    if self.pending(colder[0]) or any(transfer.copies for transfer in self.in_flight):
                        return
                    if len(block.copies) > 1:
                        self._give_up_copy(block, tier)
                        num_blocks -= 1
                    else:
                        drop = True
                    continue
                for each in before:
                    self._start(each, colder[0], copies=True)
                self._start(block, colder[0])
            num_blocks -= 1

    def _give_up_copy(self, block: Block, tier: int) -> None:
        was_top = block.top == tier
        self._lose(block, tier)
        if was_top:
            if block.top in block.spoilt:  # what is left could not be read
                block.spoilt.discard(block.top)
                block.failed = True
                for other in sorted(block.copies - {block.top}):
                    if block in self.order[other]:
                        self._unlink(block, other)
                        self._link(block, other)
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
        if not block.kids and not block.owners and not block.moving and not block.copying:
            self._drop(block)
