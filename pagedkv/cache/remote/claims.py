"""The block ids of the remote tier, and the blocks that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.chain_key import KEY_BYTES, ROOT_PARENT, chain_keys
from pagedkv._core.placement import Placement
from pagedkv._core.tier import Tier
from pagedkv.tiers import Name, Record

REMOTE = int(Tier.REMOTE)
CHAIN = 1  # of the core's two chains of durable names, the one under the remote store's secret
PIECE_BYTES = 8 << 20  # of a run: it arrives as a whole or not at all


class Describer:
    """Names the blocks of moves to or from a store.

    With a Record for the disk, a Name for the remote tier.

    Parameters
    ----------
    records : makes Records; None without a disk tier.
    claims : knows Names; None without a remote tier.
    """

    def __init__(self, records: Callable[[NDArray[np.void]], list[Record]] | None, claims: Claims | None) -> None:
        self._records, self._claims = records, claims

    def __call__(self, moves: NDArray[np.void]) -> list[Record | Name]:
        """One for each move, in order."""
        if self._claims is None:
            assert self._records is not None
            return [*self._records(moves)]
        remote = moves["src_tier"] == REMOTE
        if remote.all():
            return [*self._claims.names(moves)]
        assert self._records is not None
        found = np.empty(len(moves), object)
        found[remote] = self._claims.names(moves[remote])
        found[~remote] = self._records(moves[~remote])
        return [*found]


class Claims:
    """Chain keys under the remote store's secret, and the key that each claim stands for.

    A claim's key is written before the tree has the claim. It stays while anything holds the claim, such as a transfer,
    which holds its source.

    Parameters
    ----------
    placement : Placement
    secret : that of those who share the store.
    block_bytes : of a block.
    """

    def __init__(self, placement: Placement, secret: bytes, block_bytes: int) -> None:
        pool = placement.pools[REMOTE]
        assert pool is not None
        self._placement, self._pool, self._secret = placement, pool, secret
        self._block_size = placement.tree.block_size
        self._piece = max(1, PIECE_BYTES // block_bytes)
        self._keys = np.zeros((pool.capacity, KEY_BYTES), np.uint8)

    def names(self, moves: NDArray[np.void]) -> list[Name]:
        """The names of moves from the remote tier, in order."""
        digest_of = self._digests(moves["node"].tolist())
        keys = self._keys[moves["src_block"]]
        return [Name(key.tobytes(), digest) for key, digest in zip(keys, digest_of, strict=True)]

    def keys_from(
        self, prompt: NDArray[np.int32], digest: bytes, owner: int, num_blocks: int
    ) -> Callable[[], list[bytes]]:
        """A function that computes the keys of a prompt's blocks behind an owned path.

        Up to block `num_blocks`, in any thread.

        Parameters
        ----------
        prompt : int32 [n], not changed meanwhile.
        digest : of its namespace.
        owner : of the path; asked now, and not when the keys are computed.
        """
        node, size = self._placement.node_of(owner), self._block_size
        found = len(self._placement.tiers_of(owner))
        anchor, before = (0, None) if node < 0 else self._placement.anchor(node, found, CHAIN)
        tokens = prompt[anchor * size : num_blocks * size]
        return lambda: chain_keys(self._secret, digest, before or ROOT_PARENT, tokens, size)[found - anchor :]

    def names_of_path(self, node: int, first: int) -> list[Name]:
        """The names of an owned path's blocks from `first` on; `node` ends it."""
        placement, size = self._placement, self._block_size
        digest = placement.tree.name(placement.root_of(node))
        tokens = placement.path_tokens(node)
        anchor, before = placement.anchor(node, first, CHAIN)
        keys = chain_keys(self._secret, digest, before or ROOT_PARENT, tokens[anchor * size :], size)
        placement.remember_keys(node, anchor, keys, CHAIN)
        return [Name(key, digest) for key in keys[first - anchor :]]

    def graft(self, prompt: NDArray[np.int32], root: int, found: int, keys: Sequence[bytes]) -> None:
        """Claim the blocks of these keys behind the first `found` blocks of a prompt.

        As many as there are claims for. The caller owns the first `found` blocks.
        """
        placement = self._placement
        placement.reserve(min(len(keys), self._pool.capacity), REMOTE)
        named = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        whole = prompt[: (found + len(keys)) * self._block_size]
        placement.graft(whole, named, self._keys, root, REMOTE, self._piece)

    def _digests(self, nodes: list[int]) -> list[bytes]:
        """Digest of the namespace of each node."""
        known: dict[int, bytes] = {}
        for node in nodes:
            if node not in known:
                known[node] = self._placement.tree.name(self._placement.root_of(node))
        return [known[node] for node in nodes]
