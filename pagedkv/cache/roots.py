"""Roots: the numbers that the core gives to the namespaces in use.

Forgets those that nothing needs any more.

A namespace is made at its first use. It is forgotten, some time later, when the core does not need it any more (it
has no block, owner, transfer, quota or kind: `Placement.forget`) and no thread is about to use it. Reference counts
tell the second: a thread that asked for a namespace refers to its Root, and a Root stays while anything but the table
here refers to it. So a thread may use its Root at any later time, and the cost of a namespace ends with its use.

Making or purging a namespace looks at up to two known and two purged ones, in turn. So at any moment the table has at
most about twice as many as are needed.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import OrderedDict, deque
from contextlib import suppress

from pagedkv._core.placement import Placement
from pagedkv.cache.scrub import Scrub
from pagedkv.errors import StaleHandle
from pagedkv.spec.namespace import Namespace

LOOKED_AT = 2  # namespaces, for each that is made
DEFAULT = Namespace().digest()


class Root(int):
    """The number of a namespace in the core, as an object of its own.

    To refer to it is to keep it.
    """

    __slots__ = ()


def _references(root: Root) -> int:
    return sys.getrefcount(root)


def _alone() -> int:
    """What `_references` tells of a Root that only the caller's variable refers to."""
    root = Root(1 << 40)
    return _references(root)


class Roots:
    """The Roots of a cache, by digest.

    Parameters
    ----------
    placement : Placement
    scrub : Scrub
        Is told of each namespace before it is used.

    Attributes
    ----------
    quotas : dict, by digest and tier
        What each namespace may hold. A namespace that is purged begins anew with another number and the same quotas.
    kinds : dict, by digest
        Numbers of the kinds that were set, but for the default.
    """

    def __init__(self, placement: Placement, scrub: Scrub) -> None:
        self._placement, self._scrub = placement, scrub
        self._known: OrderedDict[bytes, Root] = OrderedDict()  # with quota and kind; next to look at first
        self._unsettled: dict[bytes, Root | None] = {}  # being made (None), or not known while it may be forgotten
        self._dropped: deque[Root] = deque()  # purged, and not forgotten yet
        self._leaving: dict[bytes, list[Root]] = {}  # of those, the ones that a purge has not waited for yet
        self._making = threading.RLock()
        self.quotas: dict[bytes, dict[int, int]] = {}
        self.kinds: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._known) + len(self._dropped)

    def find(self, digest: bytes) -> Root | None:
        """The Root of a namespace if there is one; makes nothing."""
        root = self._known.get(digest)
        if root is None and self._placement.tree.find(digest) is not None:
            root = self.of(digest)  # its making was interrupted
        return root

    def of(self, digest: bytes) -> Root:
        """The Root of a namespace, made at its first use."""
        root = self._known.get(digest)
        if root is not None:
            return root
        with self._making:
            root = self._known.get(digest)
            if root is None:
                self._forget_some()
                root = self._known.get(digest)  # now, where a call that was interrupted had begun to make it
            if root is None:
                self._unsettled[digest] = None
                root = self._make(digest)
                self._unsettled.pop(digest, None)  # a signal handler may have settled it
            return root

    def _make(self, digest: bytes) -> Root:
        """A Root that is known. To be done again where it was interrupted."""
        root = Root(self._placement.tree.namespace(digest))
        for tier, blocks in self.quotas.get(digest, {}).items():
            self._placement.set_quota(root, blocks, tier)
        if digest in self.kinds and self._placement.hazard is not None:
            self._placement.hazard.set_kind(root, self.kinds[digest])
        self._scrub.saw(int(root))
        return self._known.setdefault(digest, root)

    def set_quota(self, digest: bytes, tier: int, blocks: int | None) -> None:
        """The namespace may hold so many blocks in a tier; None lifts that."""
        with self._making:
            root = self.find(digest) if blocks is None else self.of(digest)
            if root is not None:
                self._placement.set_quota(root, blocks, tier)
            if blocks is not None:
                self.quotas.setdefault(digest, {})[tier] = blocks
            elif digest in self.quotas:
                self.quotas[digest].pop(tier, None)
                if not self.quotas[digest]:
                    del self.quotas[digest]

    def set_kind(self, digest: bytes, kind: int) -> None:
        """Assign the namespace to a kind, whose tables its requests train and query.

        With the policy ``hazard``.
        """
        with self._making:
            root = self.of(digest) if kind else self.find(digest)
            hazard = self._placement.hazard
            assert hazard is not None
            if root is not None:
                hazard.set_kind(root, kind)
            if kind:
                self.kinds[digest] = kind
            else:
                self.kinds.pop(digest, None)

    def drop(self, digest: bytes) -> tuple[list[Root], int]:
        """Forget the cached blocks of a namespace.

        The Roots whose moves have to be waited for, and the blocks dropped.

        They are those that the namespace had up to now, also in a purge by another thread, or one that was interrupted,
        until :meth:`left` is told of them.
        """
        with self._making:
            root = self.find(digest)
            if root is None:
                return list(self._leaving.get(digest, ())), 0
            self._forget_some()
            try:
                self._leaving.setdefault(digest, []).append(root)
                self._dropped.append(root)
                self._known.pop(digest, None)
                dropped = self._placement.drop_namespace(root)
            except BaseException:
                if self._placement.tree.find(digest) is not None:  # nothing was dropped
                    self._left(digest, root)
                    with suppress(ValueError):  # it was not there yet
                        self._dropped.remove(root)
                    self._known[digest] = root
                raise
            return list(self._leaving[digest]), dropped

    def left(self, digest: bytes, roots: list[Root]) -> None:
        """Nothing of these is under way any more."""
        with self._making:
            for root in roots:
                self._left(digest, root)

    def _left(self, digest: bytes, root: Root) -> None:
        rest = [other for other in self._leaving.get(digest, ()) if other != root]
        if rest:
            self._leaving[digest] = rest
        else:
            self._leaving.pop(digest, None)

    def _forget_some(self) -> None:
        for digest, roots in itertools.islice(list(self._leaving.items()), LOOKED_AT):  # purges that were interrupted
            for root in [root for root in roots if not self._placement.moving_in(root)]:
                self._left(digest, root)
        for _ in range(min(LOOKED_AT, len(self._dropped))):
            self._dropped.rotate(-1)
            root = self._dropped[-1]  # there, too, and no thread can get it any more
            try:
                if _references(root) == _ALONE + 1 and self._placement.forget(root):
                    self._dropped.pop()
            except StaleHandle:  # forgotten by a call that was interrupted then
                self._dropped.pop()
        self._settle()  # left by an interrupted call
        for digest in list(itertools.islice(self._known, LOOKED_AT)):
            root = self._unsettled[digest] = self._known[digest]
            del self._known[digest]  # no other thread can get the Root now: if no other has it, none will
            if _references(root) == _ALONE + 1:
                self._placement.forget(root)
            self._settle()

    def _settle(self) -> None:
        """Those that the core still has are known, as the last to be looked at."""
        while self._unsettled:
            digest, root = next(iter(self._unsettled.items()))
            in_core = self._placement.tree.find(digest)
            if in_core is not None and root is None:
                self._make(digest)
            elif in_core == root and root is not None:
                self._known[digest] = root
            self._unsettled.pop(digest, None)


_ALONE = _alone()
