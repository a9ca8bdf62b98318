"""Chain keys differ where inputs differ, whatever the split.

The same inputs give the same key always.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv._core.chain_key import ROOT_PARENT, chain_key, chain_keys
from pagedkv.errors import InvalidArgument, WrongType

SECRET = bytes(range(32))
NAMESPACE = hashlib.blake2b(b"namespace", digest_size=32).digest()
EXTRA = hashlib.blake2b(b"image", digest_size=32).digest()

digests = st.sampled_from([ROOT_PARENT, NAMESPACE, EXTRA]) | st.binary(min_size=32, max_size=32)
inputs = st.tuples(
    st.sampled_from([SECRET, SECRET[:16], SECRET + b"\0"]),
    digests,
    digests,
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20),
    st.lists(digests, max_size=2).map(b"".join),
)


def test_a_key_is_blake2b_over_tagged_length_prefixed_fields() -> None:
    tokens = [1, -1, 2**31 - 1]
    fields = [NAMESPACE, ROOT_PARENT, struct.pack("<3i", *tokens), EXTRA]
    encoded = b"".join(struct.pack("<BQ", tag, len(data)) + data for tag, data in enumerate(fields, start=1))
    expected = hashlib.blake2b(encoded, digest_size=32, key=SECRET, person=b"pagedkv:chain:1").digest()
    assert chain_key(SECRET, NAMESPACE, ROOT_PARENT, tokens, EXTRA) == expected


@pytest.mark.parametrize(
    ("tokens", "extra", "key"),
    [
        ([0], b"", "486798ea3bc2c8e87ecf81373f5587cebd9cdf10d68783d93af4de49d8706be3"),
        (list(range(16)), b"", "4220ff03e6923de274055f323b3b4795726fe08dba5b1a6fbe0051faad20c67c"),
        (list(range(16)), EXTRA, "5eb17519283abe6a307e888ee7f04c92432a73db84bf15da7dbb0bfee8400316"),
    ],
)
def test_keys_are_what_they_were_in_the_first_release(tokens: list[int], extra: bytes, key: str) -> None:
    assert chain_key(SECRET, NAMESPACE, ROOT_PARENT, tokens, extra).hex() == key


@given(inputs, inputs)
@settings(max_examples=400)
def test_keys_are_equal_exactly_for_equal_inputs(a: Any, b: Any) -> None:
    assert (chain_key(*a) == chain_key(*b)) == (a == b)


@given(inputs)
def test_no_field_can_lend_bytes_to_its_neighbour(given_inputs: Any) -> None:
    secret, namespace, parent, tokens, _ = given_inputs
    digest_as_tokens = np.frombuffer(EXTRA, "<i4").tolist()
    as_extra = chain_key(secret, namespace, parent, tokens, EXTRA)
    as_tokens = chain_key(secret, namespace, parent, tokens + digest_as_tokens)
    swapped = chain_key(secret, parent, namespace, tokens, EXTRA)
    assert as_extra != as_tokens
    assert (as_extra == swapped) == (parent == namespace)


def test_the_secret_the_namespace_and_the_person_part_keys() -> None:
    key = chain_key(SECRET, NAMESPACE, ROOT_PARENT, [1])
    assert key != chain_key(SECRET[::-1], NAMESPACE, ROOT_PARENT, [1])
    assert key != chain_key(SECRET + bytes(1), NAMESPACE, ROOT_PARENT, [1])
    assert key != chain_key(SECRET, EXTRA, ROOT_PARENT, [1])
    assert key != chain_key(SECRET, NAMESPACE, EXTRA, [1])


@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_chain_keys_are_chain_key_block_by_block(
    block_size: int, num_blocks: int, with_extra: bool, rng: Any
) -> None:
    tokens = [rng.randrange(-5, 5) for _ in range(block_size * num_blocks)]
    extra = [EXTRA * rng.randrange(3) for _ in range(num_blocks)] if with_extra else None
    keys, parent = [], EXTRA
    for i in range(num_blocks):
        block = tokens[i * block_size : (i + 1) * block_size]
        parent = chain_key(SECRET, NAMESPACE, parent, block, extra[i] if extra else b"")
        keys.append(parent)
    assert chain_keys(SECRET, NAMESPACE, EXTRA, tokens, block_size, extra) == keys


def test_a_chain_that_differs_in_one_token_differs_from_there_on() -> None:
    tokens = np.arange(64, dtype=np.int32)
    other = tokens.copy()
    other[33] += 1
    a = chain_keys(SECRET, NAMESPACE, ROOT_PARENT, tokens, 16)
    b = chain_keys(SECRET, NAMESPACE, ROOT_PARENT, other, 16)
    assert [x == y for x, y in zip(a, b)] == [True, True, False, False]


def test_the_key_does_not_depend_on_how_the_integers_are_kept() -> None:
    wanted = chain_key(SECRET, NAMESPACE, ROOT_PARENT, [1, 2, 3])
    for array in (
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 2, 3], ">i4"),
        np.array([1, 9, 2, 9, 3], np.int32)[::2],
    ):
        assert chain_key(SECRET, NAMESPACE, ROOT_PARENT, array) == wanted


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"secret": b""}, InvalidArgument),
        ({"secret": bytes(15)}, InvalidArgument),
        ({"secret": bytes(65)}, InvalidArgument),
        ({"secret": "0" * 32}, WrongType),
        ({"secret": bytearray(32)}, WrongType),
        ({"namespace_digest": bytes(31)}, InvalidArgument),
        ({"namespace_digest": b""}, InvalidArgument),
        ({"parent": bytes(33)}, InvalidArgument),
        ({"parent": b""}, InvalidArgument),
        ({"parent": None}, WrongType),
        ({"extra": bytes(31)}, InvalidArgument),
        ({"extra": None}, WrongType),
        ({"tokens": []}, InvalidArgument),
        ({"tokens": [2**31]}, InvalidArgument),
        ({"tokens": [-(2**31) - 1]}, InvalidArgument),
        ({"tokens": np.array([2**63], np.uint64)}, InvalidArgument),
        ({"tokens": [2**70]}, WrongType),
        ({"tokens": [1.0]}, WrongType),
        ({"tokens": [True]}, WrongType),
        ({"tokens": ["a"]}, WrongType),
        ({"tokens": None}, InvalidArgument),
        ({"tokens": [[1, 2]]}, InvalidArgument),
        ({"tokens": [[1], [1, 2]]}, WrongType),
    ],
)
def test_lengths_and_types_that_cannot_be_are_refused(change: dict[str, Any], error: type[Exception]) -> None:
    fields: dict[str, Any] = {
        "secret": SECRET,
        "namespace_digest": NAMESPACE,
        "parent": ROOT_PARENT,
        "tokens": [1],
    }
    with pytest.raises(error):
        chain_key(**(fields | change))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"block_size": 0}, InvalidArgument),
        ({"block_size": -2}, InvalidArgument),
        ({"block_size": 3}, InvalidArgument),
        ({"block_size": 2.0}, WrongType),
        ({"block_size": True}, WrongType),
        ({"extra": [b""]}, InvalidArgument),
        ({"extra": [b"", b"x"]}, InvalidArgument),
        ({"extra": [b"", None]}, WrongType),
    ],
)
def test_chains_that_are_not_whole_blocks_are_refused(change: dict[str, Any], error: type[Exception]) -> None:
    fields: dict[str, Any] = {"tokens": [1, 2, 3, 4], "block_size": 2}
    with pytest.raises(error):
        chain_keys(SECRET, NAMESPACE, ROOT_PARENT, **(fields | change))
