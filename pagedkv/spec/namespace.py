"""A namespace: requests outside it never share its KV.

Written as bytes that no two different namespaces can have.

The encoding is a list of typed, length-prefixed fields (tag, type, length, value), so moving a character
from one field to the next, or giving ``""`` for nothing, gives other bytes. The tree has one root for each
encoding; the disk and remote tiers carry its digest.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pagedkv.errors import InvalidArgument, WrongType

Value: TypeAlias = str | bytes | int

MAX_FIELD_BYTES = 1 << 16  # bounds the memory a namespace can cost
DIGEST_BYTES = 32

_HEADER = struct.Struct("<BBI")  # tag of the field, type of the value, length of the value in bytes
_TYPE_BYTES, _TYPE_STR, _TYPE_INT = 1, 2, 3


def encode_fields(fields: Iterable[tuple[int, Value | None]]) -> bytes:
    """Typed, length-prefixed bytes of ``(tag, value)`` fields; None fields are left out.

    Each field is ``tag (u8), type (u8), length (u32), value``, little-endian: type 1 is bytes, 2 is UTF-8
    text, 3 is a signed 64-bit integer. With tags that rise strictly the encoding is injective.

    Raises
    ------
    InvalidArgument
        A tag outside 0..255 or not above the one before, text that UTF-8 cannot encode, or an integer outside
        64 bits.
    """
    parts = []
    last = -1
    for tag, value in fields:
        if not last < tag <= 255:
            raise InvalidArgument(f"field tags must rise strictly within 0..255, got {tag} after {last}")
        last = tag
        if value is None:
            continue
        kind, data = _typed(value)
        parts += [_HEADER.pack(tag, kind, len(data)), data]
    return b"".join(parts)


def _typed(value: Value) -> tuple[int, bytes]:
    try:
        if isinstance(value, str):
            return _TYPE_STR, value.encode()
        if isinstance(value, bytes):
            return _TYPE_BYTES, value
        return _TYPE_INT, struct.pack("<q", value)
    except (UnicodeEncodeError, struct.error) as error:
        raise InvalidArgument(f"a field's value cannot be encoded: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Which model, adapter, tenant, salt and modality some KV belongs to.

    Two sequences share blocks only when all six fields are equal in value and in type. A field left at None
    is no statement: ``Namespace()`` is the default namespace, shared by all requests that name none.

    Set it in the host's code. A client that may choose the salt chooses whose cache it reads.

    Parameters
    ----------
    model : name and revision of the weights, or their digest.
    adapter : digest of the adapter's *contents*, 16..64 bytes; None without an adapter. A name is refused,
        because other weights under the same name would be served the old weights' KV.
    tenant : who may share with whom.
    salt : a secret that parts tenants' caches; 16 bytes or more make it unguessable.
    modality : the schema by which images, audio and other spans became tokens.
    extra : whatever else must be equal, in the caller's own encoding.

    Raises
    ------
    WrongType
        A field is neither text, bytes nor None; or ``adapter`` is text.
    InvalidArgument
        A field is longer than 65,536 bytes or not encodable; or ``adapter`` is not 16..64 bytes.
    """

    model: str | bytes | None = None
    adapter: bytes | None = None
    tenant: str | bytes | None = None
    salt: str | bytes | None = None
    modality: str | bytes | None = None
    extra: bytes | None = None
    _digest: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("model", "tenant", "salt", "modality"):
            _check(name, getattr(self, name), (str, bytes))
        _check("extra", self.extra, (bytes,))
        if isinstance(self.adapter, str):
            raise WrongType("adapter must be a digest of the adapter's weights (bytes), not its name")
        _check("adapter", self.adapter, (bytes,))
        if self.adapter is not None and not 16 <= len(self.adapter) <= 64:
            raise InvalidArgument(f"adapter must be a digest of 16..64 bytes, got {len(self.adapter)} bytes")

    def key(self) -> bytes:
        """Canonical bytes: equal for equal namespaces only; ``b""`` for the default namespace."""
        values = (self.model, self.adapter, self.tenant, self.salt, self.modality, self.extra)
        return encode_fields(enumerate(values, start=1))

    def digest(self) -> bytes:
        """BLAKE2b-256 of :meth:`key`: 32 bytes that name this namespace outside the process."""
        if self._digest is None:
            digest = hashlib.blake2b(self.key(), digest_size=DIGEST_BYTES, person=b"pagedkv:ns:1").digest()
            object.__setattr__(self, "_digest", digest)  # the fields never change
            return digest
        return self._digest


def _check(name: str, value: Any, types: tuple[type, ...]) -> None:
    if value is None:
        return
    if type(value) not in types:  # a subclass may change what encode() or equality means
        wanted = " or ".join(t.__name__ for t in types)
        raise WrongType(f"{name} must be {wanted} or None, not {type(value).__name__}")
    _, data = _typed(value)
    if len(data) > MAX_FIELD_BYTES:
        raise InvalidArgument(f"{name} is {len(data)} bytes; at most {MAX_FIELD_BYTES}")
