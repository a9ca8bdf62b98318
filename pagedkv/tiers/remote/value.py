"""The names and the format of values in a remote store.

A key is ``PREFIX:GROUP:CHAIN``. GROUP is the hex of a keyed BLAKE2b-128 over the format's version, the mode, the
fingerprint of the KV, the digest of the namespace and the shard, each with its length; CHAIN is the hex of the block's
chain key, a keyed BLAKE2b-256. Both are under the secret of those who share the store, so others cannot guess a key,
and the blocks of one namespace can be deleted by their prefix.

A value is a head of 128 bytes and the block:

    0    4   magic, "PKVr"
    4    1   version
    5    1   mode: 0 sum, 1 seal
    6    2   bytes of the head
    8    8   bytes of the payload
    16   32  fingerprint
    48   32  chain key
    80   8   mode sum: XXH3-64 of the block, seeded with the first 8 bytes of the chain key; else 0
    88   12  mode seal: nonce; else 0
    100  28  zeros

All numbers are little-endian. In mode seal the payload is the block under AES-256-GCM and its tag of 16 bytes, with the
head as associated data and a key of its own for each block: keyed BLAKE2b-256 over chain key and fingerprint. That key
never seals two different blocks, so the nonce may be random.

A reader expects one mode and refuses the other: a writer without the secret cannot choose the weaker one.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv import extras
from pagedkv.tiers.disk.format import sum_of

HEAD = struct.Struct("<4sBBHQ32s32sQ12s28s")
HEAD_BYTES = HEAD.size
MAGIC, VERSION = b"PKVr", 1
SUM, SEAL = 0, 1
TAG_BYTES, NONCE_BYTES = 16, 12
NO_NONCE, REST = bytes(NONCE_BYTES), bytes(28)


class Values:
    """Names, makes and checks the values of one cache's blocks.

    Parameters
    ----------
    secret : 16 to 64 bytes that all who share the store have.
    fingerprint : 32 bytes, ``KVSpec.fingerprint()``.
    block_bytes : of a block.
    shard : (rank, size) of this process among those that split each block's KV heads.
    seal : encrypt and authenticate, instead of a sum that guards against accidents alone.
    prefix : of all keys.

    Raises
    ------
    ImportError
        `seal` without the package ``cryptography``.
    """

    def __init__(
        self,
        secret: bytes,
        fingerprint: bytes,
        block_bytes: int,
        *,
        shard: tuple[int, int] = (0, 1),
        seal: bool = False,
        prefix: str = "pagedkv",
    ) -> None:
        self._secret, self._fingerprint, self._prefix = secret, fingerprint, prefix
        self._mode = SEAL if seal else SUM
        self._cipher: Any = _cipher() if seal else None
        self._shard = struct.pack("<II", *shard)
        self.block_bytes = block_bytes
        self.payload_bytes = block_bytes + TAG_BYTES * seal
        self._groups: dict[bytes, str] = {}  # by namespace; a few strings, made again where they were forgotten

    @property
    def seals(self) -> bool:
        """Whether payloads are encrypted."""
        return self._cipher is not None

    def group(self, namespace: bytes) -> str:
        """The beginning of the keys of a namespace, by its digest."""
        known = self._groups.get(namespace)
        if known is not None:
            return known
        state = hashlib.blake2b(digest_size=16, key=self._secret, person=b"pagedkv:group:1")
        for field in (bytes((VERSION, self._mode)), self._fingerprint, namespace, self._shard):
            state.update(struct.pack("<Q", len(field)) + field)
        if len(self._groups) >= 4096:
            self._groups.clear()
        group = self._groups[namespace] = f"{self._prefix}:{state.hexdigest()}:"
        return group

    def key(self, namespace: bytes, chain_key: bytes) -> str:
        """The key of a block, by the digest of its namespace and its chain key."""
        return self.group(namespace) + chain_key.hex()

    def pack(self, chain_key: bytes, row: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> bytes:
        """The head of a block's value.

        In mode seal the payload is written to `scratch`, uint8 [payload_bytes]; else `row` is the payload.
        """
        if self._cipher is None:
            return self._head(chain_key, self._sum(row, chain_key), NO_NONCE)
        nonce = os.urandom(NONCE_BYTES)
        head = self._head(chain_key, 0, nonce)
        self._cipher(self._seal_key(chain_key)).encrypt_into(nonce, row, head, scratch)
        return head

    def problem(
        self, chain_key: bytes, head: NDArray[np.uint8], payload: NDArray[np.uint8], row: NDArray[np.uint8]
    ) -> str:
        """Why a value is not the block's; "" where it is, and then `row` holds the block.

        Parameters
        ----------
        head : uint8 [128]
        payload : uint8 [payload_bytes]; in mode sum `row` itself.
        row : uint8 [block_bytes]; anything may be in it where there is a problem.
        """
        magic, version, mode, head_bytes, payload_bytes, fingerprint, key, total, nonce, rest = HEAD.unpack(head.data)
        if (magic, version, head_bytes, payload_bytes) != (MAGIC, VERSION, HEAD_BYTES, self.payload_bytes):
            return "format"
        if mode != self._mode:
            return "integrity"
        if fingerprint != self._fingerprint:
            return "fingerprint"
        if key != chain_key:
            return "key"
        if rest != REST or (nonce != NO_NONCE if self._cipher is None else total):
            return "format"
        if self._cipher is None:
            return "" if total == self._sum(row, chain_key) else "sum"
        try:
            self._cipher(self._seal_key(chain_key)).decrypt_into(nonce, payload, head.tobytes(), row)
        except Exception as wrong:
            if type(wrong).__name__ != "InvalidTag":
                raise
            return "seal"
        return ""

    def _head(self, chain_key: bytes, total: int, nonce: bytes) -> bytes:
        return HEAD.pack(
            MAGIC, VERSION, self._mode, HEAD_BYTES, self.payload_bytes, self._fingerprint, chain_key, total, nonce, REST
        )

    def _sum(self, row: NDArray[np.uint8], chain_key: bytes) -> int:
        return sum_of(row, int.from_bytes(chain_key[:8], "little"))

    def _seal_key(self, chain_key: bytes) -> bytes:
        state = hashlib.blake2b(digest_size=32, key=self._secret, person=b"pagedkv:seal:1")
        state.update(chain_key + self._fingerprint)  # of 32 bytes each
        return state.digest()


def _cipher() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ImportError(f"seal=True needs the package cryptography: {extras.command('seal')}") from None
    if not hasattr(AESGCM, "decrypt_into"):
        raise ImportError(f"seal=True needs cryptography 46 or newer: {extras.command('seal')}")
    return AESGCM
