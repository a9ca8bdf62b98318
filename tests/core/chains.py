"""The names of blocks in plain Python, and the blocks of a placement by them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pagedkv.core import Placement, Tier

WORD = (1 << 64) - 1
NO_TOKEN = -(1 << 31)

Known = dict[tuple[Tier, int], tuple[int, int, int | None, tuple[int, ...]]]
"""By tier and block id: its hash, its depth, its parent's hash, its tokens."""


def fold(a: int, b: int) -> int:
    """128 bits of a product, folded to 64."""
    product = a * b
    return (product & WORD) ^ (product >> 64)


def hash_of(block: Sequence[int], seed: int) -> int:
    """Of int32 tokens."""
    state, at = seed ^ 0x9E3779B97F4A7C15, 0
    while at + 4 <= len(block):
        a, b = struct.unpack("<QQ", struct.pack("<4i", *block[at : at + 4]))
        state = (fold(a ^ 0xA0761D6478BD642F ^ state, b ^ 0xE7037ED1A0B428DB) + state) & WORD
        at += 4
    for token in block[at:]:
        state = fold(state ^ (token & 0xFFFFFFFF), 0x8EBC6AF09C88C6E3)
    return fold(state ^ len(block), 0x589965CC75374CC3)


def root_hash(name: bytes, seed: int) -> int:
    """The hash of a namespace, with which those of its blocks begin."""
    state = seed
    for byte in name:
        state = (fold(state ^ byte, 0x2D358DCCAA6C78A5) + byte + 1) & WORD
    return fold(state ^ len(name), 0x589965CC75374CC3)


def chain(tokens: Sequence[int], size: int, before: int, seed: int) -> list[int]:
    """Hashes of whole blocks of `tokens`, which follow `before`."""
    out = []
    for at in range(0, len(tokens) - size + 1, size):
        before = hash_of(tokens[at : at + size], before ^ seed)
        out.append(before)
    return out


def findable(placement: Placement, seed: int, roots: dict[int, bytes]) -> Known:
    """The blocks that a match finds. `roots`: names of namespaces by node."""
    nodes, size, out = placement.dump(), placement.tree.block_size, Known()
    paths: dict[int, list[int]] = {}

    def path(n: int) -> list[int]:
        if n not in nodes:
            return []
        if n not in paths:
            paths[n] = [*path(nodes[n]["parent"]), *nodes[n]["tokens"]]
        return paths[n]

    for n, node in nodes.items():
        root = n
        while root in nodes:
            root = nodes[root]["parent"]
        if node["failed"] or root not in roots or node["tokens"][-1] == NO_TOKEN:
            continue
        hashes = chain(path(n), size, root_hash(roots[root], seed), seed)
        for tier, ids in node["ids"].items():
            for i, block in enumerate(ids):
                at = node["depth"] + i
                tokens = tuple(path(n)[at * size : (at + 1) * size])
                out[Tier(tier), block] = hashes[at], at, hashes[at - 1] if at else None, tokens
    return out


def followed(known: Known, events: list, size: int) -> Known:
    """Knowledge of a reader after these events, where it began with `known`."""
    for event in events:
        assert len(event.hashes) == len(event.block_ids)
        before = event.parent_hash
        for i, block in enumerate(event.block_ids):
            if event.kind == "stored":
                tokens = event.token_ids[size * i : size * (i + 1)]
                assert (event.tier, block) not in known
                known[event.tier, block] = event.hashes[i], event.depth + i, before, tokens
            else:
                assert known.pop((event.tier, block))[:3] == (event.hashes[i], event.depth + i, before)
            before = event.hashes[i]
        assert event.kind != "cleared" or not known
    return known
