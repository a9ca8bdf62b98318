"""Pairs of namespaces that differ as little as possible, and a decoder of their keys."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from pagedkv.spec.namespace import Namespace

Fields: TypeAlias = dict[str, Any]
NAMES = ("model", "adapter", "tenant", "salt", "modality", "extra")
TEXTS = ("model", "tenant", "salt", "modality")  # may be text or bytes
FREE = (*TEXTS, "extra")  # may have any length
HEADER = struct.Struct("<BBI")
ALPHABET = ["", "a", "b", "ab", "tenant", "\0", "é", "e\u0301", "A", "1", "01", "None", "-SEP-", "/", "..", "x" * 40]


def random_fields(choose: random.Random) -> Fields:
    """Fields of a namespace, about half of them given."""
    fields: Fields = {}
    for name in NAMES:
        if choose.random() < 0.5:
            continue
        if name == "adapter":
            fields[name] = choose.randbytes(choose.choice((16, 32, 64)))
        else:
            text = "".join(choose.choices(ALPHABET, k=choose.randint(0, 3)))
            fields[name] = text.encode() if name == "extra" or choose.random() < 0.5 else text
    return fields


def _moved(choose: random.Random, fields: Fields) -> Fields | None:
    """The end of one field moved to the start of another, both of one type."""
    giver, taker = choose.sample(FREE, 2)
    given, taken = fields.get(giver), fields.get(taker)
    if not given or (taker == "extra" and isinstance(given, str)):
        return None
    taken = type(given)() if taken is None else taken
    if type(given) is not type(taken):
        return None
    at = choose.randrange(len(given))
    return {**fields, giver: given[:at], taker: given[at:] + taken}


def _swapped(choose: random.Random, fields: Fields) -> Fields | None:
    first, second = choose.sample(TEXTS, 2)
    return {**fields, first: fields.get(second), second: fields.get(first)}


def _retyped(choose: random.Random, fields: Fields) -> Fields | None:
    """Text as the bytes that encode it, or the other way round."""
    name = choose.choice(TEXTS)
    value = fields.get(name)
    if value is None:
        return None
    return {**fields, name: value.encode() if isinstance(value, str) else value.decode()}


def _absent(choose: random.Random, fields: Fields) -> Fields | None:
    """Nothing as an empty value, or an empty value as nothing."""
    name = choose.choice(FREE)
    value = fields.get(name)
    if value:
        return {**fields, name: None}
    return {**fields, name: None if value is not None else b"" if name == "extra" or choose.random() < 0.5 else ""}


def _nested(choose: random.Random, fields: Fields) -> Fields | None:
    """Make a field look like itself and the encoding of the next field after it."""
    first, second = (TEXTS[i] for i in sorted(choose.sample(range(len(TEXTS)), 2)))
    inner = fields.get(second)
    if inner is None:
        return None
    data = inner.encode() if isinstance(inner, str) else inner
    header = HEADER.pack(NAMES.index(second) + 1, 2 if isinstance(inner, str) else 1, len(data))
    outer = fields.get(first) or b""
    return {**fields, first: (outer.encode() if isinstance(outer, str) else outer) + header + data, second: None}


def _adapter(choose: random.Random, fields: Fields) -> Fields | None:
    """Another adapter by one bit or one byte, or none."""
    digest = fields.get("adapter")
    if digest is None:
        return {**fields, "adapter": choose.randbytes(16)}
    at = choose.randrange(len(digest))
    flipped = digest[:at] + bytes([digest[at] ^ 1 << choose.randrange(8)]) + digest[at + 1 :]
    return {**fields, "adapter": choose.choice((flipped, (digest + b"\0")[-64:], None))}


def _edited(choose: random.Random, fields: Fields) -> Fields | None:
    """One field longer, shorter or other by one character."""
    name = choose.choice(FREE)
    value = fields.get(name)
    if value is None:
        return None
    end = b"\0" if isinstance(value, bytes) else "\0"
    return {**fields, name: choose.choice((value + end, end + value, value[:-1], value.swapcase()))}


KINDS: dict[str, Callable[[random.Random, Fields], Fields | None]] = {
    "moved": _moved, "swapped": _swapped, "retyped": _retyped, "absent": _absent, "nested": _nested,
    "adapter": _adapter, "edited": _edited,
}  # fmt: skip


def pair(choose: random.Random) -> tuple[str, Fields, Fields]:
    """Two sets of fields that are not the same, and how they differ."""
    while True:
        fields, kind = random_fields(choose), choose.choice(list(KINDS))
        other = KINDS[kind](choose, fields)
        if other is not None and given(other) != given(fields):
            return kind, fields, other


def given(fields: Fields) -> Fields:
    """Return the fields that say something.

    They are equal for namespaces that are the same, and only for those.
    """
    return {name: value for name, value in fields.items() if value is not None}


def copied(fields: Fields) -> Namespace:
    """The same namespace from other objects, its fields in another order."""
    fresh = {name: value[:1] + value[1:] if value else value for name, value in reversed(fields.items())}
    return Namespace(**fresh)


def decode(key: bytes) -> Fields:
    """Return the fields that `Namespace.key` wrote.

    Because a key can be decoded, no two namespaces share one.
    """
    fields, at = {}, 0
    while at < len(key):
        tag, kind, length = HEADER.unpack_from(key, at)
        value = key[at + HEADER.size : at + HEADER.size + length]
        assert len(value) == length
        fields[NAMES[tag - 1]] = value.decode() if kind == 2 else value
        at += HEADER.size + length
    return fields
