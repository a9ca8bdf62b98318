"""Names for blocks that leave memory.

Records for moves to and from a store, and a reopened store's whole prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.chain_key import ROOT_PARENT, chain_key, chain_keys
from pagedkv._core.placement import Placement
from pagedkv.cache.storage import Store
from pagedkv.tiers import Record, StoredBlock


class RecordMaker:
    """Makes the Records of moves to or from a store.

    Each run's keys are computed once and anchored in the tree.

    Parameters
    ----------
    placement : Placement
    secret : bytes
        Key of the chain, the store's own.
    digest_of : callable
        Root -> 32-byte digest of its namespace.
    """

    def __init__(self, placement: Placement, secret: bytes, digest_of: Callable[[int], bytes]) -> None:
        self._placement, self._secret, self._digest_of = placement, secret, digest_of
        self._block_size = placement.tree.block_size

    def __call__(self, moves: NDArray[np.void]) -> list[Record]:
        """One Record per move, in order.

        All moves are of transfers in flight, so the path to a run's last block stays as it is; where the run was cut
        meanwhile, its other blocks lie above its node.
        """
        nodes, place = np.unique(moves["node"], return_inverse=True)
        first = np.full(len(nodes), np.iinfo(np.int32).max)
        np.minimum.at(first, place, moves["depth"])
        runs = [self._path(node, depth) for node, depth in zip(nodes.tolist(), first.tolist(), strict=True)]
        return [runs[i][depth - first[i]] for i, depth in zip(place.tolist(), moves["depth"].tolist(), strict=True)]

    def _path(self, node: int, first: int) -> list[Record]:
        """Records of the blocks of a node's path, from block `first` on."""
        placement, size = self._placement, self._block_size
        digest = self._digest_of(placement.root_of(node))
        tokens = placement.path_tokens(node)
        anchor, before = placement.anchor(node, first)
        keys = chain_keys(self._secret, digest, before or ROOT_PARENT, tokens[anchor * size :], size)
        placement.remember_keys(node, anchor, keys)
        parents = [before or ROOT_PARENT, *keys]
        return [
            Record(keys[i - anchor], parents[i - anchor], digest, tokens[i * size : (i + 1) * size].copy())
            for i in range(first, len(tokens) // size)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Stored blocks that continue each other and nothing else in between.

    Attributes
    ----------
    namespace : digest of 32 bytes.
    parent : index of the run it continues, an earlier one; -1 where it begins a prefix.
    found : its blocks, one at least.
    """

    namespace: bytes
    parent: int
    found: list[StoredBlock]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [n * block_size]."""
        return np.concatenate([block.record.tokens for block in self.found])

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Ids in the store, int32 [n]."""
        return np.array([block.block for block in self.found], np.int32)


@dataclass(frozen=True, slots=True)
class Found:
    """The contents of a reopened store.

    Attributes
    ----------
    blocks : that can be found again.
    prefixes : that they make up, each to its end.
    orphans : blocks that were freed, by the reason: ``no_parent`` (the block before it is not there), ``wrong_key``
        (its key is not that of its content), ``doubled``; over groups of layers ``no_tail`` (no request can go on there
        or behind it).
    """

    blocks: int
    prefixes: int
    orphans: dict[str, int]


def whole_prefixes(stored: Iterable[StoredBlock], secret: bytes) -> tuple[list[Run], dict[str, list[int]]]:
    """Sort a reopened store's blocks into whole prefixes; linear in their number.

    Returns
    -------
    runs : list of Run
        Each after the run it continues; of several ways to go on, the one written last comes first.
    orphans : dict of str to list of int
        Blocks that are never to be used, by the reasons of :class:`Found`.
    """
    records: dict[bytes, StoredBlock] = {}
    orphans: dict[str, list[int]] = {"no_parent": [], "wrong_key": [], "doubled": []}
    for found in stored:
        record = found.record
        if record.key in records:
            orphans["doubled"].append(found.block)
        elif record.key != chain_key(secret, record.namespace, record.parent, record.tokens):
            orphans["wrong_key"].append(found.block)
        else:
            records[record.key] = found
    below: dict[tuple[bytes, bytes], list[StoredBlock]] = {}
    for found in records.values():
        below.setdefault((found.record.namespace, found.record.parent), []).append(found)
    for siblings in below.values():
        siblings.sort(key=lambda found: found.generation)
    starts = [(first, -1) for (_, parent), firsts in below.items() if parent == ROOT_PARENT for first in firsts]
    todo = sorted(starts, key=lambda start: start[0].generation)
    runs: list[Run] = []
    while todo:
        found, parent = todo.pop()
        run = Run(found.record.namespace, parent, [found])
        while len(after := below.get((run.namespace, run.found[-1].record.key), [])) == 1:
            run.found.extend(after)
        todo += [(following, len(runs)) for following in after]
        runs.append(run)
    reached = {found.record.key for run in runs for found in run.found}
    orphans["no_parent"] = [found.block for key, found in records.items() if key not in reached]
    return runs, orphans


def restore(placement: Placement, store: Store, tier: int, root_of: Callable[[bytes], int]) -> Found:
    """Insert a reopened store's blocks into the empty tree, and free all others.

    Parameters
    ----------
    placement : Placement
    store : the tier of that number.
    root_of : digest of a namespace -> its root.
    """
    pool = placement.pools[tier]
    assert pool is not None
    runs, orphans = whole_prefixes(store.records(), store.secret)
    useless = [block for blocks in orphans.values() for block in blocks]
    counts = {reason: len(blocks) for reason, blocks in orphans.items()}
    if useless:
        store.invalidate(np.array(useless, np.int32))
    if not runs:
        return Found(0, 0, counts)
    pool.alloc(pool.capacity)  # a new pool hands out 0, 1, 2, ...: every id is ours for the moment
    blocks = [run.blocks for run in runs]
    lengths = np.array([len(ids) for ids in blocks], np.int64)
    first = np.concatenate(([0], np.cumsum(lengths)))
    roots = {digest: root_of(digest) for digest in {run.namespace for run in runs}}
    done = placement.restore_forest(
        np.concatenate([run.tokens for run in runs]),
        np.concatenate(blocks),
        first,
        np.array([run.parent for run in runs], np.int32),
        np.array([roots[run.namespace] for run in runs], np.int64),
        tier,
    )
    free = np.ones(pool.capacity, np.bool_)
    place = np.arange(first[-1]) - np.repeat(first[:-1], lengths)
    free[np.concatenate(blocks)[place < np.repeat(done, lengths)]] = False
    pool.free(np.flatnonzero(free).astype(np.int32)[::-1])
    prefixes = len(runs) - len({run.parent for run in runs if run.parent >= 0})
    return Found(int(np.sum(done)), prefixes, counts)
