"""Numbers for blocks of prompts: equal where all tokens up to the block's end are equal.

A number is the beginning of a chain of hashes over the namespace and the blocks from the first one on. The chain starts
with a secret key, so a number says nothing of the tokens to a reader who does not have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64  # of BLAKE2b
CHAIN_BYTES = 32
ID_BITS = 63  # fits an int64
SESSION_BITS = 62  # pagedkv replay takes sessions up to 2**62


class BlockIds:
    """Chains of hashes with one key.

    Parameters
    ----------
    key : 16..64 bytes
    block_size : tokens of a block.
    """

    def __init__(self, key: bytes, block_size: int) -> None:
        self._key, self.block_size = key, block_size

    def chain(self, tokens: NDArray[Any], namespace: bytes) -> Iterator[bytes]:
        """32 bytes for each whole block of `tokens` (integers [n]), none for a partly filled one.

        Parameters
        ----------
        tokens : of one dtype for all calls, or equal tokens would give other bytes.
        namespace : blocks of two namespaces never share a number.
        """
        link = self._hash(b"namespace", namespace)
        data = tokens.tobytes()
        size = self.block_size * tokens.itemsize
        for at in range(0, len(data) - size + 1, size):
            link = hashlib.blake2b(link + data[at : at + size], digest_size=CHAIN_BYTES).digest()
            yield link

    def of(self, tokens: NDArray[Any], namespace: bytes) -> list[int]:
        """A number in 0..2**63-1 for each whole block."""
        return [_number(link, ID_BITS) for link in self.chain(tokens, namespace)]

    def session(self, name: bytes, namespace: bytes) -> int:
        """A number in 0..2**62-1 for a session of this name in this namespace."""
        return _number(self.session_link(name, namespace), SESSION_BITS)

    def session_link(self, name: bytes, namespace: bytes) -> bytes:
        """32 bytes for it, as of :meth:`chain`."""
        return self._hash(b"session", self._hash(b"namespace", namespace) + name)

    def _hash(self, use: bytes, value: bytes) -> bytes:
        return hashlib.blake2b(value, digest_size=CHAIN_BYTES, key=self._key, person=use).digest()


def _number(digest: bytes, bits: int) -> int:
    return int.from_bytes(digest[:8], "big") >> (64 - bits)
