"""Names for blocks that leave memory: Records for moves to and from a store, and a reopened store's whole prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.chain_key import ROOT_PARENT, chain_key, chain_keys
from pagedkv._core.placement import Placement
from pagedkv.tiers import Record, StoredBlock


class Describer:
    """Makes the Records of moves to or from a store; each run's keys are computed once and anchored in the tree.

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
        """One Record per move, in order. All moves are of transfers in flight, so their runs stay whole."""
        runs: dict[int, list[Record]] = {}
        for node in np.unique(moves["node"]).tolist():
            runs[node] = self._run(node)
        return [runs[int(move["node"])][int(move["index"])] for move in moves]

    def _run(self, node: int) -> list[Record]:
        placement, size = self._placement, self._block_size
        digest = self._digest_of(placement.root_of(node))
        tokens = placement.path_tokens(node)
        first = placement.depth_of(node)
        anchor, before = placement.anchor(node)
        keys = chain_keys(self._secret, digest, before or ROOT_PARENT, tokens[anchor * size :], size)
        placement.remember_keys(node, anchor, keys)
        parents = [before or ROOT_PARENT, *keys]
        return [
            Record(keys[i - anchor], parents[i - anchor], digest, tokens[i * size : (i + 1) * size].copy())
            for i in range(first, len(tokens) // size)
        ]


def whole_chains(
    stored: Iterable[StoredBlock], secret: bytes
) -> tuple[list[tuple[bytes, NDArray[np.int32], NDArray[np.int32]]], list[int]]:
    """Sort a reopened store's blocks into whole prefixes.

    Returns
    -------
    chains : list of (namespace digest, tokens int32 [n * block_size], blocks int32 [n])
        One per leaf, each from the start of its prefix. Chains may share their beginnings.
    orphans : list of int
        Blocks whose key is not that of their content, which are doubled, or whose parent is not there: never
        to be used.
    """
    records: dict[bytes, StoredBlock] = {}
    orphans: list[int] = []
    for found in stored:
        record = found.record
        if record.key in records or record.key != chain_key(secret, record.namespace, record.parent, record.tokens):
            orphans.append(found.block)
        else:
            records[record.key] = found
    children: dict[bytes, list[bytes]] = {}
    for key, found in records.items():
        children.setdefault(found.record.parent, []).append(key)
    chains = []
    reached: set[bytes] = set()
    for start in children.get(ROOT_PARENT, []):
        path: list[bytes] = []
        todo = [(start, 0)]
        while todo:
            key, depth = todo.pop()
            del path[depth:]
            path.append(key)
            reached.add(key)
            below = children.get(key, [])
            todo += [(child, depth + 1) for child in below]
            if not below:
                blocks = [records[k] for k in path]
                tokens = np.concatenate([b.record.tokens for b in blocks])
                ids = np.array([b.block for b in blocks], np.int32)
                chains.append((blocks[0].record.namespace, tokens, ids))
    orphans += [found.block for key, found in records.items() if key not in reached]
    return chains, orphans
