"""Namespaces: equal keys exactly for equal namespaces."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.namespace import MAX_FIELD_BYTES, Namespace, encode_fields

FIELDS = ["model", "adapter", "tenant", "salt", "modality", "extra"]
DIGEST = bytes(range(32))

values = st.none() | st.text(max_size=4) | st.binary(max_size=4)
namespaces = st.builds(
    Namespace,
    model=values,
    adapter=st.none() | st.binary(min_size=16, max_size=18),
    tenant=values,
    salt=values,
    modality=values,
    extra=st.none() | st.binary(max_size=4),
)


def decode(key: bytes) -> Namespace:
    """The namespace that a key was made from, by the written-down format alone."""
    fields: dict[str, Any] = {}
    at = 0
    while at < len(key):
        tag, kind, length = struct.unpack_from("<BBI", key, at)
        data = key[at + 6 : at + 6 + length]
        at += 6 + length
        fields[FIELDS[tag - 1]] = {1: bytes, 2: bytes.decode}[kind](data)
    return Namespace(**fields)


@given(namespaces)
def test_a_key_tells_its_whole_namespace_so_no_two_share_one(namespace: Namespace) -> None:
    assert decode(namespace.key()) == namespace


@given(namespaces, namespaces)
@settings(max_examples=300)
def test_keys_and_digests_are_equal_exactly_for_equal_namespaces(a: Namespace, b: Namespace) -> None:
    assert (a.key() == b.key()) == (a == b) == (a.digest() == b.digest())


def test_the_default_namespace_has_the_empty_key() -> None:
    assert Namespace().key() == b""
    assert len(Namespace().digest()) == 32


def test_nothing_empty_text_and_empty_bytes_are_three_namespaces() -> None:
    keys = {Namespace(salt=salt).key() for salt in (None, "", b"")}
    assert len(keys) == 3


def test_the_same_value_in_another_field_is_another_namespace() -> None:
    keys = {Namespace(**{field: DIGEST}).key() for field in FIELDS}
    assert len(keys) == len(FIELDS)


def test_moving_a_character_between_fields_gives_another_namespace() -> None:
    assert Namespace(model="ab", tenant="c").key() != Namespace(model="a", tenant="bc").key()


def test_the_digest_is_what_it_was_in_the_first_release() -> None:
    assert (
        Namespace(model="m", adapter=DIGEST, tenant="t", salt=b"s").digest().hex()
        == "11e525669d3579b8d28c4036843430b20a7fa2f498ff6046d49eaef78e7ead6f"
    )


def test_an_adapter_is_known_by_its_digest_and_not_by_its_name() -> None:
    with pytest.raises(WrongType, match="not its name"):
        Namespace(adapter="my-lora")  # type: ignore[arg-type]
    for length in (0, 15, 65):
        with pytest.raises(InvalidArgument):
            Namespace(adapter=bytes(length))
    assert Namespace(adapter=bytes(16)) != Namespace(adapter=bytes(17))


class Text(str):
    """Equal to other text, but free to encode as it likes."""


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "value", [1, True, 1.5, bytearray(20), memoryview(DIGEST), Text("x" * 20), ["a"], object()]
)
def test_fields_of_other_types_are_refused(field: str, value: Any) -> None:
    with pytest.raises(WrongType):
        Namespace(**{field: value})


def test_long_fields_are_refused_and_the_longest_is_not() -> None:
    Namespace(salt=bytes(MAX_FIELD_BYTES))
    with pytest.raises(InvalidArgument):
        Namespace(salt=bytes(MAX_FIELD_BYTES + 1))
    with pytest.raises(InvalidArgument):
        Namespace(tenant="ü" * (MAX_FIELD_BYTES // 2 + 1))


def test_text_that_utf8_cannot_write_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Namespace(tenant="\ud800")


def test_namespaces_are_frozen_hashable_and_keyword_only() -> None:
    assert {Namespace(tenant="a"): 1}[Namespace(tenant="a")] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Namespace().tenant = "b"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Namespace("model")  # type: ignore[misc]


@pytest.mark.parametrize(
    "fields", [[(1, "a"), (1, "b")], [(2, "a"), (1, "b")], [(256, "a")], [(-1, "a")], [(1, 2**63)]]
)
def test_encode_fields_refuses_tags_out_of_order_and_numbers_out_of_range(fields: Any) -> None:
    with pytest.raises(InvalidArgument):
        encode_fields(fields)


def test_encode_fields_keeps_integers_apart_from_their_bytes() -> None:
    assert encode_fields([(1, 5)]) != encode_fields([(1, struct.pack("<q", 5))])
