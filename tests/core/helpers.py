"""Helpers of the core tests: small caches, a synchronous mover, "nothing has changed"."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree, Tier

DAMAGED_IDS = [
    None,
    "0",
    b"\0\0\0\0",
    0,
    0.0,
    float("nan"),
    object(),
    {0: 1},
    {0},
    [0.0],
    [True],
    [None],
    ["0"],
    [[0]],
    [[0], [0, 1]],
    (0, 1.5),
    np.zeros(2, np.float32),
    np.full(1, np.nan),
    np.zeros(2, np.bool_),
    np.zeros((1, 1), np.int32),
    np.array(0, np.int32),
    np.array([0], dtype="datetime64[s]"),
    np.array([None], dtype=object),
]
"""Arguments that are no row of integers."""

TOO_LARGE = [[2**31], [-(2**31) - 1], [2**70], (2**31,), np.array([2**31]), np.array([2**63], np.uint64)]
"""Rows of integers that do not fit in int32."""


def kind(argument: Any) -> str:
    """A name for a test's argument that is the same in every process."""
    return type(argument).__name__


class PoolStruct(ctypes.Structure):
    """The C struct at ``BlockPool.address``, as block_pool.pxd lays it out."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("capacity", "max_capacity", "chunk", "fresh")),
        *((name, ctypes.c_int32) for name in ("num_stack", "num_cached", "num_reserved", "watermark")),
        ("refs", ctypes.POINTER(ctypes.c_uint32)),
        ("generations", ctypes.POINTER(ctypes.c_uint32)),
        ("stack", ctypes.POINTER(ctypes.c_int32)),
    ]


def struct_of(pool: BlockPool) -> PoolStruct:
    return PoolStruct.from_address(pool.address)


def single(block_size: int = 1, num_blocks: int = 16, **options: Any) -> tuple[RadixTree, BlockPool, Placement]:
    """A cache of one tier; ``tree_*`` options go to the tree."""
    tree, (pool,), placement = tiered(block_size, (num_blocks,), **options)
    return tree, pool, placement


def tiered(
    block_size: int = 1, capacities: Sequence[int] = (4, 8), **options: Any
) -> tuple[RadixTree, list[BlockPool], Placement]:
    tree_options = {key.removeprefix("tree_"): options.pop(key) for key in list(options) if key.startswith("tree_")}
    tree_options.setdefault("keep_chain", options.get("policy") in ("arc", "s3fifo", "hazard"))
    tree = RadixTree(block_size, len(capacities), seed=1, **tree_options)
    tree.namespace(b"")
    pools = [BlockPool(n) for n in capacities]
    return tree, pools, Placement(tree, pools, **options)


def insert(placement: Placement, owner: int, tokens: Sequence[int]) -> np.ndarray:
    """Fill fresh device blocks with `tokens` and give them to the tree; return the ids in use."""
    need = len(tokens) // placement.tree.block_size
    assert placement.reserve(need) == 0
    blocks = placement.pools[0].alloc(need)
    assert placement.insert(owner, np.asarray(tokens, np.int32), blocks) == need
    return blocks


def remember(placement: Placement, tokens: Sequence[int], namespace: int = 0) -> int:
    """Cache `tokens` and keep hold of them: the owner."""
    owner, matched = placement.acquire(tokens, namespace)
    insert(placement, owner, tokens[matched * placement.tree.block_size :])
    return owner


def cache(placement: Placement, tokens: Sequence[int], namespace: int = 0) -> None:
    placement.release(remember(placement, tokens, namespace))


def finish(placement: Placement, ok: bool = True) -> np.ndarray:
    """Take all moves and complete their transfers in the order of their decision; the moves."""
    moves = placement.take_moves()
    transfers = list(dict.fromkeys(moves["transfer"].tolist()))
    placement.complete(transfers, [ok] * len(transfers))
    return moves


def make_room(placement: Placement, n: int, tier: int = 0) -> None:
    """Reserve as a conductor does: until there is room, finishing what is in flight."""
    for _ in range(100):
        if placement.reserve(n, tier) == 0:
            return
        assert placement.num_in_flight, "nothing in flight and no room"
        finish(placement)
    raise AssertionError("reserve never met the request")


def cached_prefixes(tree: RadixTree, namespace: int = 0) -> set[tuple[int, ...]]:
    """Every cached prefix in whole blocks, the empty one left out."""
    size = tree.block_size
    leaves = [tuple(leaf.tolist()) for leaf in tree.prefixes(namespace)]
    return {leaf[:end] for leaf in leaves for end in range(size, len(leaf) + 1, size)}


def state(thing: Any) -> Any:
    """Everything that can be seen of a structure; a table comes as ``(table, rows)``."""
    if isinstance(thing, BlockPool):
        fresh = struct_of(thing).fresh
        return thing.dump(), thing.handles(range(fresh)).tolist() if fresh else []
    if isinstance(thing, RadixTree):
        return thing.dump(), thing.num_blocks, thing.num_nodes
    if isinstance(thing, Placement):
        pools = [state(pool) for pool in thing.pools if pool is not None]
        return thing.dump(), thing.stats(), thing.num_in_flight, pools
    table, rows = thing
    assert isinstance(table, BlockTable)
    seen = [(table.info(row), table.tokens(row).tolist(), table.blocks(row).tolist()) for row in rows]
    return table.num_rows, seen, state(table.placement or table.block_pool)


def sound(*things: Any) -> None:
    for thing in things:
        table = thing[0] if isinstance(thing, tuple) else thing
        table.check_integrity()


@contextmanager
def nothing_changes(*things: Any) -> Iterator[None]:
    before = [state(thing) for thing in things]
    yield
    for thing, was in zip(things, before, strict=True):
        assert state(thing) == was
    sound(*things)


def where(placement: Placement, tokens: list[int]) -> list[int]:
    """Hottest tier of every cached block of the prefix."""
    return placement.match(tokens)[0].tolist()


def below(capacities: tuple[int, ...] = (4, 8), **options: Any) -> Placement:
    """A cache in which [1, 2, 3, 4] lies on the host and the device is free."""
    _, _, placement = tiered(1, capacities, **options)
    cache(placement, [1, 2, 3, 4])
    make_room(placement, capacities[0])
    assert where(placement, [1, 2, 3, 4]) == [Tier.HOST] * 4
    return placement


def states(placement: Placement) -> list[tuple[int, int, int]]:
    return [(c["free"], c["live"], c["cached"]) for c in (pool.counts() for pool in placement.pools if pool)]


def bare(num_blocks: int = 32, block_size: int = 4, max_rows: int = 8) -> BlockTable:
    return BlockTable(BlockPool(num_blocks), max_rows, block_size=block_size)


def filled(table: BlockTable, tokens: list[int]) -> int:
    """A row with all its tokens computed."""
    row, _ = table.open(tokens)
    table.step([row])
    table.commit([row])
    return row


def kept(placement: Placement, *paths: list[int]) -> list[int]:
    return [len(placement.match(path)[1]) for path in paths]


def owner_calls(placement: Placement, blocks: np.ndarray) -> list[Any]:
    """Every call that takes an owner, but its release."""
    return [
        placement.share,
        placement.tiers_of,
        placement.blocks_of,
        placement.blocked_by,
        placement.promote,
        placement.settle,
        placement.is_moving,
        placement.pin,
        placement.set_retention,
        lambda owner: placement.partial(owner, [1]),
        lambda owner: placement.insert(owner, [3], blocks),
    ]
