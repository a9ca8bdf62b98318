"""Chain keys: a block's durable name, for the tiers that outlive the process.

A key is a keyed BLAKE2b-256 over the namespace, the key of the block before, the block's tokens and any
extra digests (images, audio). Every field goes in with its tag and length, so no other split of the same
bytes gives the same key. In memory the tree compares tokens and needs no keys; a key is computed when a block
leaves memory.

BLAKE2: RFC 7693. ``person`` parts our keys from every other use of the same secret.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.errors import InvalidArgument, WrongType

KEY_BYTES = 32
ROOT_PARENT = bytes(KEY_BYTES)  # the parent of a sequence's first block
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 64

INT32 = np.iinfo(np.int32)

_PERSON = b"pagedkv:chain:1"
_FIELD = struct.Struct("<BQ")  # tag, length in bytes
_NAMESPACE, _PARENT, _TOKENS, _EXTRA = 1, 2, 3, 4


def chain_key(secret: bytes, namespace_digest: bytes, parent: bytes, tokens: ArrayLike, extra: bytes = b"") -> bytes:
    """Durable name of one block.

    Parameters
    ----------
    secret : 16..64 bytes, kept with the cache directory. Who does not know it cannot compute or predict keys.
    namespace_digest : 32 bytes, ``Namespace.digest()``.
    parent : 32 bytes, the key of the block before; ``ROOT_PARENT`` for the first.
    tokens : int32 [block_size], at least one.
    extra : digests that the tokens do not tell (of images, say): a multiple of 32 bytes, in a fixed order.

    Returns
    -------
    bytes
        32 bytes.

    Raises
    ------
    WrongType
        A field is not bytes, or the tokens are not integers.
    InvalidArgument
        A field has another length than it must, or a token does not fit in int32.
    """
    base = _base(secret, namespace_digest)
    _check_digest("parent", parent)
    _check_extra(extra)
    data = _token_bytes(tokens)
    if not data:
        raise InvalidArgument("a block has at least one token")
    return _link(base, parent, data, extra)


def chain_keys(
    secret: bytes,
    namespace_digest: bytes,
    parent: bytes,
    tokens: ArrayLike,
    block_size: int,
    extra: list[bytes] | None = None,
) -> list[bytes]:
    """Keys of consecutive blocks: each is the parent of the next.

    Parameters
    ----------
    tokens : int32 [num_blocks * block_size]; may be empty.
    block_size : tokens in a block.
    extra : one ``extra`` for each block; None when no block has any.

    Returns
    -------
    list of bytes
        ``num_blocks`` keys; the same that :func:`chain_key` gives block by block.

    Raises
    ------
    WrongType, InvalidArgument
        As :func:`chain_key`; or the tokens are not whole blocks, or ``extra`` has another length.
    """
    base = _base(secret, namespace_digest)
    _check_digest("parent", parent)
    if isinstance(block_size, bool) or not isinstance(block_size, int | np.integer):
        raise WrongType(f"block_size must be an integer, not {type(block_size).__name__}")
    data = _token_bytes(tokens)
    step = 4 * int(block_size)
    if step <= 0 or len(data) % step:
        raise InvalidArgument(f"{len(data) // 4} tokens are not whole blocks of {block_size}")
    num_blocks = len(data) // step
    extras = [b""] * num_blocks if extra is None else list(extra)
    if len(extras) != num_blocks:
        raise InvalidArgument(f"extra has {len(extras)} entries for {num_blocks} blocks")
    for digests in extras:
        _check_extra(digests)
    keys = []
    for index in range(num_blocks):
        parent = _link(base, parent, data[index * step : (index + 1) * step], extras[index])
        keys.append(parent)
    return keys


def _base(secret: bytes, namespace_digest: bytes) -> hashlib.blake2b:
    """The hash state that all blocks of one namespace start from."""
    _check_bytes("secret", secret)
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise InvalidArgument(f"secret must have 16..64 bytes, not {len(secret)}")
    _check_digest("namespace_digest", namespace_digest)
    base = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=_PERSON)
    base.update(_FIELD.pack(_NAMESPACE, KEY_BYTES) + namespace_digest)
    return base


def _link(base: hashlib.blake2b, parent: bytes, token_bytes: bytes, extra: bytes) -> bytes:
    state = base.copy()
    state.update(_FIELD.pack(_PARENT, KEY_BYTES) + parent)
    state.update(_FIELD.pack(_TOKENS, len(token_bytes)) + token_bytes)
    state.update(_FIELD.pack(_EXTRA, len(extra)) + extra)
    return state.digest()


def _token_bytes(tokens: ArrayLike) -> bytes:
    """Tokens as little-endian int32, whatever integers they came as."""
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise WrongType("tokens must be one row of integers") from None
    if array.ndim != 1:
        raise InvalidArgument(f"tokens must be one row of integers, got {array.ndim} dimensions")
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise WrongType(f"tokens must be integers, not {array.dtype}")
    if array.dtype != np.int32 and (array.min() < INT32.min or array.max() > INT32.max):
        raise InvalidArgument("a token does not fit in int32")
    little: NDArray[np.int32] = array.astype("<i4", copy=False)
    return little.tobytes()


def _check_bytes(name: str, value: bytes) -> None:
    if type(value) is not bytes:
        raise WrongType(f"{name} must be bytes, not {type(value).__name__}")


def _check_digest(name: str, value: bytes) -> None:
    _check_bytes(name, value)
    if len(value) != KEY_BYTES:
        raise InvalidArgument(f"{name} must be {KEY_BYTES} bytes, got {len(value)}")


def _check_extra(value: bytes) -> None:
    _check_bytes("extra", value)
    if len(value) % KEY_BYTES:
        raise InvalidArgument(f"extra must be whole digests of {KEY_BYTES} bytes, got {len(value)} bytes")
