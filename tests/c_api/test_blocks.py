"""Blocks through ``pagedkv.h``: each call works, and a refused one changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv import c_api
from pagedkv.core import BlockPool
from pagedkv.errors import InvalidArgument, WrongType
from tests.c_api.native import (
    ARGUMENT,
    BAD,
    BLOCKS,
    OK,
    OVERFLOW,
    RANGE,
    UNDERFLOW,
    UNSUPPORTED,
    call,
    out,
)
from tests.core.helpers import nothing_changes, remember, single, sound, struct_of


def test_blocks_are_taken_shared_and_given_back() -> None:
    pool, ids = BlockPool(8), out(np.int32, 8)
    assert call("pool_alloc", pool, 3, ids) == OK
    assert call("pool_share", pool, ids, 2, None) == OK
    assert pool.refs(ids[:3]).tolist() == [2, 2, 1]
    counts = np.zeros(1, c_api.struct("pagedkv_counts"))
    assert call("pool_counts", pool, counts) == OK
    assert counts[0].tolist() == (8, 8, 5, 3, 0, 5)
    assert call("pool_free", pool, np.concatenate([ids[:3], ids[:2]]), 5, None) == OK
    assert pool.num_free == 8
    assert call("pool_alloc", pool, 0, None) == OK
    sound(pool)


def test_a_growing_pool_grows_and_counts_its_growth_as_available() -> None:
    pool, ids = BlockPool(2, max_blocks=10, chunk=4), out(np.int32, 8)
    counts = np.zeros(1, c_api.struct("pagedkv_counts"))
    assert call("pool_alloc", pool, 5, ids) == OK
    call("pool_counts", pool, counts)
    assert counts[0].tolist() == (6, 10, 1, 5, 0, 5)


def test_a_refused_call_on_blocks_changes_nothing_and_names_the_entry() -> None:
    _, pool, placement = single(num_blocks=8)
    owner = remember(placement, [1, 2])
    ids, bad = out(np.int32, 8), out(np.int32)
    assert call("pool_alloc", pool, 2, ids) == OK
    tree = placement.blocks_of(owner)
    struct_of(pool).refs[int(ids[1])] = 2**31 - 1
    with nothing_changes(placement):
        assert call("pool_alloc", pool, 5, ids[2:]) == BLOCKS
        for name, given, code, entry in (
            ("pool_free", [ids[0], ids[0]], UNDERFLOW, 1),
            ("pool_free", [ids[0], tree[0]], UNDERFLOW, 1),
            ("pool_free", [ids[0], 8], RANGE, 1),
            ("pool_free", [ids[0], -1], RANGE, 1),
            ("pool_share", [ids[0], 7], RANGE, 1),
            ("pool_share", [tree[0]], UNDERFLOW, 0),
            ("pool_share", [ids[0], ids[1]], OVERFLOW, 1),
        ):
            array = np.array(given, np.int32)
            assert call(name, pool, array, len(array), bad) == code, name
            assert bad[0] == entry
            assert call(name, pool, array, len(array), None) == code
    struct_of(pool).refs[int(ids[1])] = 1
    pool.free(ids[:2])


def test_arguments_that_are_never_allowed_change_nothing() -> None:
    pool, ids, bad = BlockPool(4), out(np.int32, 4), out(np.int32)
    with nothing_changes(pool):
        assert call("pool_alloc", pool, -1, ids) == ARGUMENT
        assert call("pool_alloc", pool, 1, None) == ARGUMENT
        assert call("pool_alloc", 0, 1, ids) == ARGUMENT
        for name in ("pool_share", "pool_free"):
            assert call(name, pool, ids, -1, bad) == ARGUMENT
            assert call(name, pool, None, 1, bad) == ARGUMENT
            assert call(name, 0, ids, 1, bad) == ARGUMENT
        assert call("pool_counts", pool, None) == ARGUMENT
        assert call("pool_counts", 0, ids) == ARGUMENT
    assert bad[0] == BAD


def test_objects_are_made_and_deleted_without_python() -> None:
    handle = out()
    assert call("pool_new", 4, 8, 2, handle) == OK
    pool, ids = int(handle[0]), out(np.int32, 8)
    assert call("pool_alloc", pool, 8, ids) == OK
    assert ids.tolist() == list(range(8))
    call_nothing("pool_delete", pool)
    call_nothing("pool_delete", 0)
    for given in ((-1, 8, 2), (4, 3, 2), (4, 8, 0)):
        assert call("pool_new", *given, handle) == ARGUMENT
    assert call("pool_new", 4, 8, 2, None) == ARGUMENT


def call_nothing(name: str, handle: int) -> None:
    assert c_api.function(name)(handle) is None


def test_an_object_of_python_lives_as_long_as_its_handle() -> None:
    handle, other = out(), out()
    pool = BlockPool(4)
    assert call("pool_of", id(pool), handle) == OK
    assert handle[0] == c_api.handle_of(pool)
    del pool
    ids = out(np.int32, 4)
    assert call("pool_alloc", int(handle[0]), 4, ids) == OK
    call_nothing("pool_delete", int(handle[0]))
    assert call("pool_of", id(3), other) == ARGUMENT
    assert call("pool_of", 0, other) == ARGUMENT
    assert other[0] == BAD


def test_what_the_header_does_not_cover_is_refused() -> None:
    from pagedkv.core import ExtentPool

    pools = ExtentPool(4, (2, 1)).pools
    handle = out()
    assert call("pool_of", id(pools[0]), handle) == UNSUPPORTED
    with pytest.raises(InvalidArgument, match="groups of layers"):
        c_api.handle_of(pools[0])
    with pytest.raises(WrongType, match="int has no handle"):
        c_api.handle_of(3)  # type: ignore[arg-type]


def test_every_code_has_a_text() -> None:
    codes = {name: code for name, code in c_api.constants().items() if name.startswith(("PAGEDKV_E_", "PAGEDKV_OK"))}
    texts = {c_api.function("describe")(code) for code in codes.values()}
    assert len(texts) == len(codes) == 13
    assert c_api.function("describe")(-77) == b"not a code of pagedkv"
