"""What the CPU kernels do not take: a clear error of ours, and the output as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv import cpu
from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, WrongType
from tests.cpu.batches import batch


def changed(array: np.ndarray, at: Any, value: Any) -> np.ndarray:
    copy = array.copy()
    copy[at] = value
    return copy


B = batch((40, 300), (3, 5))
SLOPES = np.ones(4, np.float32)
WRONG: dict[str, tuple[dict[str, Any], type[PagedKVError], str]] = {
    "a block beyond the pool": ({"block_tables": changed(B.tables, (1, 3), 999)}, InvalidArgument, r"\[1, 3\] is 999"),
    "no block": ({"block_tables": changed(B.tables, (0, 2), -1)}, InvalidArgument, r"\[0, 2\] is -1"),
    "more keys than blocks": ({"seq_lens": np.array([40, 5000], np.int32)}, InvalidArgument, "5000"),
    "fewer keys than none": ({"seq_lens": np.array([-1, 300], np.int32)}, InvalidArgument, "-1"),
    "queries that end early": ({"q_indptr": np.array([0, 3, 7], np.int32)}, InvalidArgument, "q_indptr"),
    "queries that fall": ({"q_indptr": np.array([0, 9, 8], np.int32)}, InvalidArgument, "q_indptr"),
    "no q_indptr": ({"q_indptr": None}, InvalidArgument, "q_indptr"),
    "lengths of another dtype": ({"seq_lens": np.array([40, 300])}, WrongType, "seq_lens must be int32"),
    "tables of another dtype": ({"block_tables": B.tables.astype(np.int64)}, WrongType, "block_tables"),
    "tables of one axis": ({"block_tables": B.tables[0]}, LayoutMismatch, "block_tables"),
    "neither tables nor offsets": ({"block_tables": None}, LayoutMismatch, "k and v"),
    "both": ({"kv_indptr": np.zeros(3, np.int32)}, InvalidArgument, "one of the two"),
    "queries in float64": ({"q": B.q.astype(np.float64)}, WrongType, "one of float32, float16, bfloat16, got float64"),
    "queries in int8": ({"q": B.q.astype(np.int8)}, WrongType, "q must be"),
    "queries of two axes": ({"q": B.q[:, 0]}, LayoutMismatch, "num_tokens"),
    "a list": ({"q": B.q.tolist()}, WrongType, "NumPy"),
    "three query heads": ({"q": B.q[:, :3]}, LayoutMismatch, "no multiple"),
    "no query heads": ({"q": B.q[:, :0]}, LayoutMismatch, "no multiple"),
    "another head dim": ({"q": np.ascontiguousarray(B.q[:, :, :16])}, LayoutMismatch, "do not fit"),
    "a strided last axis": ({"q": np.repeat(B.q, 2, 2)[:, :, ::2]}, LayoutMismatch, "contiguous"),
    "V of another dtype": ({"v": B.v.astype(np.float16)}, LayoutMismatch, "do not fit"),
    "V of fewer blocks": ({"v": B.v[:-1]}, LayoutMismatch, "do not fit"),
    "an output of another dtype": ({"out": B.q.astype(np.float16)}, LayoutMismatch, "out must be float32"),
    "an output of another shape": ({"out": B.q[:4].copy()}, LayoutMismatch, "out must be"),
    "a read-only output": ({"out": np.broadcast_to(np.float32(0), B.q.shape)}, LayoutMismatch, "out"),
    "lse of another dtype": ({"lse": np.zeros((8, 4))}, WrongType, "lse must be float32"),
    "lse of another shape": ({"lse": np.zeros((8, 3), np.float32)}, LayoutMismatch, "lse"),
    "three slopes": ({"alibi_slopes": SLOPES[:3]}, LayoutMismatch, "alibi_slopes"),
    "positions of another dtype": ({"q_positions": np.zeros(8, np.int64)}, WrongType, "q_positions must be int32"),
    "too few positions": ({"q_positions": np.zeros(7, np.int32)}, LayoutMismatch, "q_positions"),
    "a position beyond all keys": ({"q_positions": np.full(8, -(2**31), np.int32)}, InvalidArgument, "q_positions"),
    "a slope that is not finite": ({"alibi_slopes": SLOPES * np.inf}, InvalidArgument, "finite"),
    "a sink that is not finite": ({"sinks": SLOPES * np.nan}, InvalidArgument, "sinks"),
    "another byte order": ({"q": B.q.astype(">f4")}, WrongType, "byte order"),
    "keys of another byte order": ({"k": B.k.astype(">f4"), "v": B.v.astype(">f4")}, WrongType, "byte order"),
    "lengths of another byte order": ({"seq_lens": B.lens.astype(">i4")}, WrongType, "seq_lens"),
    "no threads": ({"threads": 0}, InvalidArgument, "threads"),
    "a fraction of a thread": ({"threads": 1.5}, WrongType, "threads"),
    "too many threads": ({"threads": 2**40}, InvalidArgument, "threads"),
    "a window beyond all keys": ({"window": 2**40}, InvalidArgument, "window"),
    "queries that go round": (
        {"q_indptr": np.array([0, -(2**31), 8], np.int32)}, InvalidArgument, "q_indptr must rise",
    ),
    "no head dim": (
        {"q": B.q[:, :, :0], "k": B.k[..., :0], "v": B.v[..., :0], "out": None, "softmax_scale": 1.0},
        LayoutMismatch, "head_dim",
    ),
    "a head dim beyond reason": (
        {"k": B.k, "v": np.broadcast_to(B.v[..., :1], (*B.v.shape[:3], 5000)).copy(), "out": None}, LayoutMismatch,
        "head_dim of v",
    ),
    "blocks of nothing": (
        {"k": B.k[:, :0], "v": B.v[:, :0], "seq_lens": np.zeros(2, np.int32)}, LayoutMismatch, "block_size",
    ),
    "a mask without offsets": ({"mask": np.zeros(9, np.uint8)}, InvalidArgument, "together"),
    "a mask that is too short": (
        {"mask": np.zeros(150, np.uint8), "mask_indptr": np.array([0, 15, 150])}, InvalidArgument, "needs 1500 bits",
    ),
    "mask offsets beyond the mask": (
        {"mask": np.zeros(15, np.uint8), "mask_indptr": np.array([0, 15, 999])}, InvalidArgument, "mask",
    ),
    "mask offsets whose bits do not fit 64 bits": (
        {"mask": np.zeros(15, np.uint8), "mask_indptr": np.array([0, 15, -(2**61) + 999])}, InvalidArgument, "mask",
    ),
    "one scale": ({"k_scale": SLOPES[:1]}, InvalidArgument, "together"),
    "scales of another shape": ({"k_scale": SLOPES[:3], "v_scale": SLOPES[:3]}, LayoutMismatch, "k_scale"),
    "scales of another dtype": ({"k_scale": np.ones(1), "v_scale": np.ones(1)}, WrongType, "float32"),
    "half a key": ({"window": 1.5}, WrongType, "window"), "a window of truth": ({"window": True}, WrongType, "window"),
    "a window of 0": ({"window": 0}, InvalidArgument, "window"),
    "a soft cap of 0": ({"soft_cap": 0.0}, InvalidArgument, "soft_cap"),
    "a scale that is no number": ({"softmax_scale": "x"}, WrongType, "softmax_scale"),
    "a scale that is NaN": ({"softmax_scale": float("nan")}, InvalidArgument, "softmax_scale"),
    "an unknown dtype": ({"kv_dtype": "int4"}, WrongType, "k must be"),
    "a dtype it is not": ({"kv_dtype": "float16"}, WrongType, "k must be float16"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "says"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_written(wrong, kind, says):
    out, lse = np.full_like(B.q, 7), np.full(B.q.shape[:2], 7, np.float32)
    given: dict[str, Any] = {
        "q": B.q, "k": B.k, "v": B.v, "seq_lens": B.lens, "block_tables": B.tables, "q_indptr": B.indptr,
        "out": out, "lse": lse,
    } | wrong  # fmt: skip
    arrays = [given.pop(name) for name in ("q", "k", "v", "seq_lens")]
    with pytest.raises(kind, match=says):
        cpu.attend(*arrays, **given)
    assert (out == 7).all()
    assert (lse == 7).all()


def test_keys_of_contiguous_caches_must_be_there():
    k = np.zeros((100, 2, 32), np.float32)
    for starts in ([0, 61, 361], [-1, 50, 90]):
        with pytest.raises(InvalidArgument, match="keys from"):
            cpu.attend(B.q, k, k, B.lens, kv_indptr=np.array(starts, np.int32), q_indptr=B.indptr)


def test_blocks_outside_a_window_need_not_be_there():
    b = batch((300,))
    tables = b.tables.copy()
    tables[0, :17] = -1
    seen = cpu.attend(b.q, b.k, b.v, b.lens, block_tables=tables, window=20)
    np.testing.assert_array_equal(seen, cpu.attend(b.q, b.k, b.v, b.lens, block_tables=b.tables, window=20))


def test_more_keys_than_can_be_counted_are_refused_and_not_looked_for():
    q, k = np.zeros((1, 1, 8), np.float32), np.zeros((1, 256, 1, 8), np.float32)
    tables = np.zeros((1, 2**23), np.int32)
    for window in (None, 8):
        with pytest.raises(InvalidArgument, match="at most"):
            cpu.attend(q, k, k, np.array([2**31 - 1], np.int32), block_tables=tables, window=window)


def test_scales_between_their_elements_are_refused():
    b = batch((4,), dtype="int8")
    wide = np.zeros(2, [("a", "u2"), ("scale", "f4")])
    with pytest.raises(LayoutMismatch, match="k_scale"):
        cpu.attend(b.q, b.k, b.v, b.lens, block_tables=b.tables, k_scale=wide["scale"], v_scale=wide["scale"])
