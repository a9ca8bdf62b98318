"""Whole blocks copied, staged and filled: every byte of both sides is compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, WrongType
from pagedkv.kernels import block_ops as module
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.block_ops import POISON, copy_blocks, fill_blocks, gather_blocks, scatter_blocks
from tests.kernels.pools import DTYPES, Shape, assert_same_bytes, huge

BLOCK_BYTES = (1, 7, 24, 64, 4096, 16 * 1024 + 16, 20_002)


def arena(num_blocks: int, block_bytes: int, gap: int = 0, seed: int = 0) -> NDArray[np.uint8]:
    """Random bytes; between blocks there may be a gap, whose bytes belong to no block."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_blocks, block_bytes + gap), np.uint8)


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_blocks_are_copied_and_nothing_else_changes(backend: Backend, block_bytes: int) -> None:
    for gap, dtype in ((0, np.int32), (3, np.int64), (16, np.int32)):
        host = arena(7, block_bytes, gap)
        device = backend.asarray(host.copy())
        pairs = np.array([[0, 6], [3, 1], [-1, 2], [2, -1], [0, 5]], dtype)
        copy_blocks(backend, device[:, :block_bytes], backend.asarray(pairs))
        for source, target in ((0, 6), (3, 1), (0, 5)):
            host[target, :block_bytes] = host[source, :block_bytes]
        assert_same_bytes(backend.to_host(device), host)


def test_blocks_move_from_one_arena_to_another(backend: Backend) -> None:
    source, target = arena(4, 4096, seed=1), arena(6, 4096, gap=64, seed=2)
    device = backend.asarray(target.copy())
    pairs = np.array([[1, 1], [3, 5], [0, 3], [1, 0]])
    copy_blocks(backend, backend.asarray(source), backend.asarray(pairs), to_arena=device[:, :4096])
    for a, b in pairs.tolist():
        target[b, :4096] = source[a]
    assert_same_bytes(backend.to_host(device), target)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_layer_alone_can_be_copied(backend: Backend, layout: str) -> None:
    shape = Shape(dim=24, layout=layout, skew=2)
    rng = np.random.default_rng(3)
    host = rng.integers(0, 256, shape.blank().shape, np.uint8)
    device = backend.asarray(host.copy())
    copy_blocks(backend, shape.views(device).v, backend.asarray(np.array([[4, 0], [1, 2]], np.int32)))
    view = shape.views(host).v
    view[0], view[2] = view[4], view[1]
    assert_same_bytes(backend.to_host(device), host)


@pytest.mark.parametrize("max_ctas", [1, 3, None])
@pytest.mark.parametrize("block_bytes", [12, 48_000])
def test_staging_takes_blocks_from_anywhere_and_puts_them_anywhere(
    backend: Backend, block_bytes: int, max_ctas: int | None
) -> None:
    host, staging = arena(9, block_bytes, seed=4), arena(6, block_bytes, seed=5)
    ids = np.array([8, 0, -1, 3, 8], np.int32)
    buffer = backend.asarray(staging.copy())
    gather_blocks(backend, backend.asarray(host), backend.asarray(ids), buffer, max_ctas=max_ctas)
    staging[[0, 1, 3, 4]] = host[[8, 0, 3, 8]]
    assert_same_bytes(backend.to_host(buffer), staging)

    device = backend.asarray(host.copy())
    ids = np.array([5, 7, -1, 2, 0], np.int64)
    scatter_blocks(backend, buffer, device, backend.asarray(ids), max_ctas=max_ctas)
    host[[5, 7, 2, 0]] = staging[[0, 1, 3, 4]]
    assert_same_bytes(backend.to_host(device), host)


@pytest.mark.parametrize("max_ctas", [2, None])
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_listed_blocks_are_filled_and_nothing_else(backend: Backend, block_bytes: int, max_ctas: int | None) -> None:
    for gap, value in ((0, 0), (5, POISON), (0, 0x5A)):
        host = arena(6, block_bytes, gap)
        device = backend.asarray(host.copy())
        ids = backend.asarray(np.array([5, -1, 0, 2], np.int32))
        fill_blocks(backend, device[:, :block_bytes], ids, value, max_ctas=max_ctas)
        host[[5, 0, 2], :block_bytes] = value
        assert_same_bytes(backend.to_host(device), host)


def test_poison_is_nan_in_every_floating_point_type() -> None:
    for name, dtype in DTYPES.items():
        value = np.full(dtype.itemsize, POISON, np.uint8).view(dtype).astype(np.float32)
        assert np.isnan(value).all() or name == "int8"


def test_no_blocks_are_no_work(backend: Backend) -> None:
    host = arena(3, 32)
    device = backend.asarray(host.copy())
    none = backend.asarray(np.zeros(0, np.int32))
    copy_blocks(backend, device, backend.asarray(np.zeros((0, 2), np.int32)))
    gather_blocks(backend, device, none, device[:0])
    scatter_blocks(backend, device[:0], device, none)
    fill_blocks(backend, device, none)
    assert_same_bytes(backend.to_host(device), host)


def test_blocks_past_4_gib_are_reached(backend: Backend) -> None:
    block_bytes = 2**24
    device = huge(backend, (2**32 // block_bytes + 3, block_bytes), np.uint8)
    last = len(device) - 1
    used = device[:, :4096]
    for block_idx in (0, 1, 2, last - 1, last):
        used[block_idx] = block_idx % 256
    copy_blocks(backend, used, backend.asarray(np.array([[last, 1], [0, last - 1]])))
    fill_blocks(backend, used, backend.asarray(np.array([last])), 0x77)
    staging = backend.asarray(np.zeros((2, 4096), np.uint8))
    gather_blocks(backend, used, backend.asarray(np.array([last, 2])), staging)
    assert (backend.to_host(staging) == [[0x77], [2]]).all()
    found = [backend.to_host(used[i])[[0, -1]].tolist() for i in (0, 1, 2, last - 1, last)]
    assert found == [[0, 0], [last % 256] * 2, [2, 2], [0, 0], [0x77, 0x77]]


A = np.zeros((4, 32), np.uint8)
I32 = np.int32
WRONG: list[tuple[str, Any, type[PagedKVError], str]] = [
    (
        "a far source",
        lambda b: copy_blocks(b, A, np.array([[4, 0]])),
        InvalidArgument,
        r"pairs\[:, 0\] has 4: .* 0\.\.3",
    ),
    ("a far target", lambda b: copy_blocks(b, A, np.array([[0, 4]])), InvalidArgument, r"pairs\[:, 1\] has 4"),
    ("one target twice", lambda b: copy_blocks(b, A, np.array([[0, 2], [1, 2]])), InvalidArgument, "block 2 more than"),
    ("a chain", lambda b: copy_blocks(b, A, np.array([[0, 1], [1, 2]])), InvalidArgument, "block 1 as a source and"),
    ("pairs of three", lambda b: copy_blocks(b, A, np.zeros((1, 3), I32)), LayoutMismatch, "pairs has shape"),
    (
        "short pairs",
        lambda b: copy_blocks(b, A, np.zeros((1, 2), np.int16)),
        WrongType,
        "pairs has dtype int16, not int32",
    ),
    ("gaps in a block", lambda b: copy_blocks(b, A[:, ::2], np.zeros((0, 2), I32)), LayoutMismatch, "must be dense"),
    (
        "other blocks",
        lambda b: gather_blocks(b, A, np.zeros(1, I32), A[:, :16]),
        LayoutMismatch,
        "32 bytes, one of staging 16",
    ),
    (
        "a small buffer",
        lambda b: gather_blocks(b, A, np.zeros(2, I32), A[:1]),
        LayoutMismatch,
        "staging holds 1 blocks: 2",
    ),
    (
        "scattered twice",
        lambda b: scatter_blocks(b, A, A, np.array([1, 1])),
        InvalidArgument,
        "block_ids has block 1 more",
    ),
    ("a far fill", lambda b: fill_blocks(b, A, np.array([9])), InvalidArgument, "block_ids has 9"),
    ("no byte", lambda b: fill_blocks(b, A, np.array([0]), 256), InvalidArgument, "value is 256"),
    ("no CTAs", lambda b: fill_blocks(b, A, np.array([0]), max_ctas=0), InvalidArgument, "max_ctas is 0"),
    ("no blocks at all", lambda b: fill_blocks(b, A[0], np.array([0])), LayoutMismatch, "arena has shape"),
    ("a list", lambda b: fill_blocks(b, A, [0]), WrongType, "block_ids must be an array"),
]


@pytest.mark.parametrize(("call", "error", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_does_not_fit_is_refused_and_nothing_is_moved(
    backend: Backend, call: Any, error: type[PagedKVError], message: str
) -> None:
    if backend.name != "ptxsim":
        pytest.skip("ids are checked on the host only")
    with pytest.raises(error, match=message):
        call(backend)
    assert not A.any()


def test_overlapping_blocks_and_read_only_arenas_are_refused(backend: Backend) -> None:
    if backend.name != "ptxsim":
        pytest.skip("made of NumPy's stride tricks")
    pairs = np.array([[0, 1]])
    with pytest.raises(LayoutMismatch, match="16 bytes apart, of 32 bytes each"):
        copy_blocks(backend, np.lib.stride_tricks.as_strided(A, (4, 32), (16, 1)), pairs)
    frozen = A.view()
    frozen.flags.writeable = False
    with pytest.raises(LayoutMismatch, match="arena is read-only"):
        copy_blocks(backend, frozen, pairs)


def test_with_debug_the_device_stops_at_an_id_outside_the_arena(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.name != "ptxsim":
        pytest.skip("a trap ends the CUDA context")
    copy_blocks(backend, A, np.array([[0, 1]]), debug=True)
    monkeypatch.setattr(module, "check_range", lambda *_, **__: None)
    with pytest.raises(Exception, match="trap"):
        copy_blocks(backend, A, np.array([[0, 4]]), debug=True)
    with pytest.raises(Exception, match="trap"):
        fill_blocks(backend, A, np.array([7]), debug=True)
