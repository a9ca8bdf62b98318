"""The whole cache in plain Python: prefixes, owners, tiers, transfers.

The tests compare the real core with it.

One :class:`Block` object per block and tier lists that are searched from one end: slow, and short enough to
be believed. It knows counts, not ids: what can be observed is which prefixes are cached, in which tiers,
for whom, how many blocks are free, and what every block must contain (:attr:`Block.content`).

The rules, in the words of the design:

* A block is owned by the tree, by owners (sequences), or by a transfer in flight. An owner owns a whole
  prefix.
* Evictable is what the tree alone owns and on which nothing as hot hangs. Among those the coldest goes first.
* Releasing makes a path hot, deepest first, so a parent is hotter than its children.
* What is evicted goes to the next colder tier; out of the last one it is dropped, and only leaves are
  dropped.
* A copy that exists elsewhere too is given up without a move.
* A transfer owns both sides; its destination becomes a copy only when it has succeeded. A block whose promotion failed
  is never matched again. A block whose demotion failed is dropped, unless it has an owner again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tests.oracle.tiers_model import DEVICE, Block, NoRoom, TiersModel


class Owner:
    """A holder of a prefix."""

    __slots__ = ("live", "path", "pinned", "root")

    def __init__(self, root: Block) -> None:
        self.root = root
        self.path: list[Block] = []
        self.pinned = 0  # blocks counted against the pin budget
        self.live = True

    @property
    def last(self) -> Block:
        return self.path[-1] if self.path else self.root


class CacheModel(TiersModel):
    """A prefix cache over tiers.

    Parameters
    ----------
    block_size : tokens in a block.
    capacities, inclusive : of :class:`TiersModel`.
    pin_budget : blocks that :meth:`pin` may hold.
    """

    def __init__(
        self,
        block_size: int,
        capacities: Sequence[int],
        *,
        inclusive: Sequence[bool] = (),
        closed: Sequence[bool] = (),
        write: str = "evicted",
        pin_budget: int = 0,
        beside: bool = False,
    ) -> None:
        super().__init__(capacities, inclusive, closed, write, beside=beside)
        self.block_size = block_size
        self.pin_budget = pin_budget
        self.roots: dict[Hashable, Block] = {}
        self.retired: list[Block] = []  # roots of dropped namespaces
        self.private = 0  # device blocks in the hands of callers
        self.pinned = 0
        self.hits = [0 for _ in capacities]

    # ---- looking

    def cached(self, tier: int) -> int:
        """Blocks of a tier that the tree alone owns."""
        return sum(not self._held(block, tier) for block in self.blocks() if tier in block.copies)

    def blocks(self) -> list[Block]:
        """Every cached block, parents before children."""
        return [block for root in [*self.roots.values(), *self.retired] for block in root.subtree()]

    def root(self, namespace: Hashable) -> Block:
        return self.roots.setdefault(namespace, Block(None, (), (namespace, ())))

    def match(self, tokens: Sequence[int], namespace: Hashable = None) -> list[int]:
        """Tiers of the longest cached prefix; changes nothing."""
        tiers = []
        block = self.root(namespace)
        for piece in self._pieces(tokens):
            found = block.kids.get(piece)
            if found is None or found.failed:
                break
            tiers.append(found.top)
            block = found
        return tiers

    # ---- owning

    def acquire(self, tokens: Sequence[int], namespace: Hashable = None, max_blocks: int | None = None) -> Owner:
        """Owns the longest cached prefix, wherever it lies; what is just being promoted ends it."""
        owner = Owner(self.root(namespace))
        for piece in self._pieces(tokens)[:max_blocks]:
            block = owner.last.kids.get(piece)
            if block is None or block.failed or (block.moving and not block.moving.demotes):
                break
            self.hits[block.top] += 1
            self._own(block)
            owner.path.append(block)
        if owner.path:
            self._want_where(owner.last, "reused", "all")
        return owner

    def share(self, owner: Owner) -> Owner:
        """A second owner of the same prefix."""
        other = Owner(owner.root)
        for block in owner.path:
            self._own(block)
            other.path.append(block)
        return other

    def release(self, owner: Owner) -> None:
        """Lets go of the whole path, deepest first."""
        assert owner.live, "released twice"
        owner.live = False
        self.pinned -= owner.pinned
        self.shorten(owner, 0)

    def shorten(self, owner: Owner, num_blocks: int) -> None:
        """Lets go of the path behind its first ``num_blocks`` blocks, deepest first."""
        while len(owner.path) > num_blocks:
            self._disown(owner.path.pop())

    def pin(self, owner: Owner) -> bool:
        """Count the path, as it is now, against the pin budget until release.

        Returns False when the budget has no room.
        """
        more = len(owner.path) - owner.pinned
        if self.pinned + more > self.pin_budget:
            return False
        owner.pinned += more
        self.pinned += more
        return True

    # ---- blocks of callers

    def alloc(self, num_blocks: int) -> None:
        """Takes free device blocks out of the pool, for the caller to write."""
        if num_blocks > self.free(DEVICE):
            raise NoRoom
        self.used[DEVICE] += num_blocks
        self.private += num_blocks

    def give_back(self, num_blocks: int) -> None:
        """Returns private blocks unused."""
        self.used[DEVICE] -= num_blocks
        self.private -= num_blocks
        assert self.private >= 0, "gave back more than was taken"

    def insert(self, owner: Owner, tokens: Sequence[int], mine: Sequence[bool]) -> int:
        """Give the tree private blocks with the KV of ``tokens``.

        The tokens follow the owned prefix.

        Where the tree has a block already, the owner adopts it; the private one is freed, or, where the
        tree's copy is colder or failed, takes its place. ``mine`` says of each block whether the caller
        alone holds it; one that others hold too cannot become the tree's, but may give way to the tree's.
        Returns the leading blocks that were inserted or adopted.
        """
        for done, (piece, alone) in enumerate(zip(self._pieces(tokens), mine)):
            block = owner.last.kids.get(piece)
            adopts = block is not None and block.top == DEVICE
            if owner.root.failed or (block and block.moving) or not (alone or adopts):
                return done
            if block is None:
                namespace, prefix = owner.last.content
                block = Block(owner.last, piece, (namespace, prefix + piece))
                owner.last.kids[piece] = block
                self._gain(block, DEVICE)
            else:
                self._want_where(block, "reused", "all")
                if block.top != DEVICE:
                    self._refresh(block)
            if alone:
                self.give_back(1)
            self._own(block)
            owner.path.append(block)
        if mine:
            self._want_where(owner.last, "all")
        return len(mine)

    def graft(self, tokens: Sequence[int], namespace: Hashable = None) -> int:
        """Claim the blocks of a prefix that are not cached; the leading blocks cached then."""
        assert self.claims is not None
        pieces, done, block, added = self._pieces(tokens), 0, self.root(namespace), []
        while done < len(pieces) and (kid := block.kids.get(pieces[done])):
            if kid.failed:
                self._drop_subtree(kid)
                if pieces[done] in block.kids:
                    return done
                break
            block, done = kid, done + 1
        for piece in pieces[done:]:
            prefix = block.content[1]
            block.kids[piece] = block = Block(block, piece, (namespace, prefix + piece))
            self._gain(block, self.claims)
            added.append(block)
        for block in reversed(added):
            self._link(block, self.claims)
        return len(pieces)

    def promote(self, owner: Owner) -> int:
        """Start to bring the path to the device, deepest first.

        It promotes all of the path or, without the room, nothing.
        """
        cold = [b for b in reversed(owner.path) if b.top != DEVICE and not b.moving and not b.failed]
        if len(cold) > self.free(DEVICE):
            raise NoRoom
        for block in cold:
            self._start(block, DEVICE)
        return len(cold)

    def settle(self, owner: Owner) -> int:
        """Keeps of the path what is on the device from the front."""
        keep = [block.top == DEVICE and not block.failed for block in owner.path]
        self.shorten(owner, keep.index(False) if False in keep else len(keep))
        return len(owner.path)

    def clear(self) -> None:
        """Drops everything that has no owner."""
        for root in [*self.roots.values(), *self.retired]:
            for block in list(root.kids.values()):
                self._drop_subtree(block)

    def drop_namespace(self, namespace: Hashable) -> None:
        """Forget a namespace, which never matches again.

        Blocks without an owner go now, the rest when their owners let go.
        """
        root = self.roots.pop(namespace)
        root.failed = True
        self.retired.append(root)
        for block in list(root.kids.values()):
            self._drop_subtree(block)

    # ---- inside

    def _pieces(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Whole blocks of tokens."""
        size = self.block_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

    def _own(self, block: Block) -> None:
        block.owners += 1
        self._unlink(block, block.top)

    def _disown(self, block: Block) -> None:
        block.owners -= 1
        if block.owners or block.moving:
            return
        self._link(block, block.top)
        for tier in sorted(block.copies):
            if tier > block.top and self.closed[tier] and block in self.order[tier]:
                self._unlink(block, tier)
                self._link(block, tier)
        if block.failed or block.root.failed:
            self._drop_subtree(block)

    def _refresh(self, block: Block) -> None:
        """A freshly written device block takes the place of a colder or failed copy."""
        top, failed = block.top, block.failed
        block.failed = False
        self._gain(block, DEVICE)
        if self._must_stay(block, top):
            if failed:
                block.spoilt.add(top)
            if self.closed[top] and self.write != "never":
                self._want(block, top)
        elif failed or not self.inclusive[top]:
            self._lose(block, top)
        if top in block.copies and block not in self.order[top]:
            self._link(block, top)
        for tier in block.copies if failed else ():
            if block in self.order[tier]:
                self._unlink(block, tier)
                self._link(block, tier)

    # ---- the equations

    def check(self, owners: Sequence[Owner]) -> None:
        """Recomputes everything that is counted, and asserts the rules that hold at every moment."""
        blocks = self.blocks()
        for tier in range(len(self.capacities)):
            copies = sum(tier in block.copies for block in blocks)
            arriving = sum(transfer.dst == tier for transfer in self.in_flight)
            assert self.used[tier] == copies + arriving + (self.private if tier == DEVICE else 0), "a leak"
            assert 0 <= self.used[tier] <= self.capacities[tier], "more blocks than there are"
            evictable = [block for block in blocks if tier in block.copies and not self._held(block, tier)]
            assert sorted(map(id, self.order[tier])) == sorted(id(b) for b in evictable if not b.moving)
        for block in blocks:
            assert block.owners == sum(block in owner.path for owner in owners), "owners miscounted"
            assert block.copies, "a block without a copy"
            parent = block.parent
            if parent and parent.parent:
                assert parent.owners >= block.owners, "a prefix owned less than what hangs on it"
            assert block.content[1][len(block.content[1]) - self.block_size :] == block.tokens
