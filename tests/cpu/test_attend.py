"""The CPU kernels against the float64 reference.

The tests try every kind of number, block, layout, batch and variant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv import cpu
from pagedkv.reference import pack_mask
from tests.cpu.batches import DTYPES, Batch, batch, close

F32 = 3e-6
TOLERANCE = {"float32": F32, "float16": 1e-3, "bfloat16": 8e-3}  # of the output's last bit
LENGTHS = {
    "empty": ((), ()), "one key": ((1,), None), "no keys": ((0, 3), None), "around a block": ((15, 16, 17), None),
    "around a tile": ((127, 128, 129, 640), None), "parts": ((513, 2049, 700), None), "prefill": ((50, 7), (50, 7)),
    "append": ((300, 40), (20, 3)), "ragged": ((5, 260, 64), (1, 130, 0)), "more queries than keys": ((3,), (5,)),
    "a long prefill": ((400,), (333,)),
}  # fmt: skip


def slopes(heads: int) -> np.ndarray:
    return np.geomspace(0.5, 0.01, heads).astype(np.float32)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "not causal": {"causal": False}, "window": {"window": 37}, "soft cap": {"soft_cap": 3.0},
    "alibi": {"alibi_slopes": slopes(4)}, "sinks": {"sinks": np.array([0, 2, -np.inf, -3], np.float32)},
    "scale": {"softmax_scale": 0.9}, "window, not causal": {"window": 5, "causal": False},
    "all": {"window": 50, "soft_cap": 2.0, "alibi_slopes": slopes(4), "sinks": slopes(4), "softmax_scale": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_variant_of_every_batch_is_right(isa, lengths, variant):
    b = batch(*lengths)
    o, lse = b.attend(**variant)
    exact, exact_lse = b.exact(**variant)
    close(o, exact, F32)
    close(lse, exact_lse, F32)


@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_every_pair_of_dtypes_is_right(isa, dtype, q_dtype, q_len):
    b = batch((60, 150), (q_len, q_len), dtype=dtype, q_dtype=q_dtype)
    close(b.attend()[0], b.exact()[0], TOLERANCE[q_dtype])


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 64, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("q_len", [1, 30])
def test_every_block_size_and_layout_is_right(isa, block_size, layout, q_len):
    b = batch((90, 300, 31), (q_len,) * 3, block_size=block_size, layout=layout, dtype="float16")
    close(b.attend()[0], b.exact()[0], F32)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 80), (33, 33), (1, 1), (192, 128), (16, 48)], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize("q_len", [1, 18])
def test_every_head_dim_and_group_size_is_right(isa, dims, group, q_len):
    b = batch((40, 150), (q_len, q_len), dim=dims[0], dim_v=dims[1], group=group)
    close(b.attend()[0], b.exact()[0], F32)


@pytest.mark.parametrize("heads", [1, 3, 32, 70])
def test_every_number_of_heads_is_right(isa, heads):
    b = batch((40, 600), heads=heads, dim=16)
    close(b.attend()[0], b.exact()[0], F32)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3"])
@pytest.mark.parametrize("mode", ["tensor", "head", "token_head"])
@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_scales_of_quantised_caches_are_multiplied_in(isa, dtype, mode, q_len, soft_cap):
    b = batch((40, 300), (q_len, q_len), dtype=dtype, dim=64)
    rng = np.random.default_rng(1)
    shape = {"tensor": (1,), "head": (2,), "token_head": b.k.shape[:3]}[mode]
    k_scale, v_scale = (rng.uniform(0.002, 0.02, shape).astype(np.float32) for _ in range(2))
    options = {"k_scale": k_scale, "v_scale": v_scale, "soft_cap": soft_cap}
    o, lse = b.attend(**options)
    exact, exact_lse = b.exact(**options)
    close(o, exact, 1e-5)
    close(lse, exact_lse, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "float8_e5m2"])
def test_bits_without_a_dtype_of_their_own_are_read_by_their_name(isa, dtype):
    b = batch((40, 300), dtype=dtype)
    bits = np.uint16 if dtype == "bfloat16" else np.uint8
    o = cpu.attend(b.q, b.k.view(bits), b.v.view(bits), b.lens, block_tables=b.tables, kv_dtype=dtype)
    np.testing.assert_array_equal(o, b.attend(q_indptr=None)[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (3, 2, 1), (9, 40, 5)], ids=str)
def test_a_mask_takes_keys_away(isa, causal, q_lens):
    lens = (9, 150, 20)
    b = batch(lens, q_lens)
    rng = np.random.default_rng(2)
    mask, indptr = pack_mask([rng.random((n, length)) < 0.5 for n, length in zip(q_lens, lens)])
    options = {"mask": mask, "mask_indptr": indptr, "causal": causal}
    o, lse = b.attend(**options)
    exact, exact_lse = b.exact(**options)
    close(o, exact, F32)
    close(lse, exact_lse, F32)


def test_contiguous_keys_are_read_where_they_lie(isa):
    b = batch((40, 0, 300), (1, 1, 12), block_size=1)
    ids = [b.tables[seq, :length] for seq, length in enumerate(b.lens)]
    starts = np.array([7, 60, 61, 400], np.int32)
    k, v = (np.full((400, *x.shape[2:]), np.nan, np.float32) for x in (b.k, b.v))
    for start, blocks in zip(starts, ids):
        k[start : start + len(blocks)], v[start : start + len(blocks)] = b.k[blocks, 0], b.v[blocks, 0]
    o = cpu.attend(b.q, k, v, b.lens, kv_indptr=starts, q_indptr=b.indptr)
    np.testing.assert_array_equal(o, b.attend()[0])


def test_strided_queries_and_outputs_are_read_and_written_in_place(isa):
    b = batch((40, 300), (4, 5))
    wide = np.full((len(b.q), 9, 40), 7, np.float32)
    wide[:, 1:5, 3:35] = b.q
    out = np.full((len(b.q), 11, 50), 7, np.float32)
    got = b.attend(out=out[:, 2:6, 5:37])[0]
    assert got.base is out
    np.testing.assert_array_equal(cpu.attend(wide[:, 1:5, 3:35], b.k, b.v, b.lens, block_tables=b.tables,
                                             q_indptr=b.indptr), got)  # fmt: skip
    out[:, 2:6, 5:37] = 7
    assert (out == 7).all()


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lengths", [((40, 300), (1, 1)), ((40, 300), (12, 40))], ids=["decode", "prefill"])
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(isa, where, what, lengths):
    b = batch(*lengths)
    for token in (3, 270, 295):
        block = b.tables[1, token // 16]
        getattr(b, where)[block, token % 16, 0, :] = what
    for options in ({}, {"window": 12}, {"soft_cap": 2.0}):
        o, lse = b.attend(**options)
        exact, exact_lse = b.exact(**options)
        close(o, exact, F32)
        close(lse, exact_lse, F32)


def test_numbers_that_overflow_on_the_way_are_computed_all_the_same(isa):
    b = batch((40, 300))
    huge = Batch(b.q * np.float32(1e20), b.k * np.float32(1e19), b.v, b.tables, b.lens, b.indptr)
    o, lse = huge.attend()
    exact, exact_lse = huge.exact()
    close(o, exact, F32)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


@pytest.mark.parametrize("sinks", [None, np.zeros(4, np.float32)], ids=["", "sinks"])
@pytest.mark.parametrize("length", [4, 600])
def test_products_that_overflow_downwards_keep_their_weight(isa, sinks, length):
    b = batch((length,))
    b.q[...], b.k[...] = 1e20, -1e20
    o, lse = b.attend(sinks=sinks)
    exact, exact_lse = b.exact(sinks=sinks)
    close(o, exact, F32)
    np.testing.assert_array_equal(lse, exact_lse)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"window": 200}], ids=str)
def test_the_bits_depend_on_the_sequence_alone(isa, options):
    """On the number of threads, the rest of the batch, and where the blocks lie, they do not."""
    b = batch((700, 40, 3000, 129), (1, 40, 1, 3), heads=4, dim=64)
    whole = b.attend(threads=1, **options)[0]
    for threads in (2, 3, 7):
        np.testing.assert_array_equal(b.attend(threads=threads, **options)[0], whole)
    for seq in range(4):
        first, last = b.indptr[seq : seq + 2]
        alone = Batch(b.q[first:last], b.k, b.v, b.tables[seq : seq + 1], b.lens[seq : seq + 1],
                      np.array([0, last - first], np.int32))  # fmt: skip
        np.testing.assert_array_equal(alone.attend(threads=2, **options)[0], whole[first:last])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1.0, 1e-5, 3e4])
def test_outputs_are_rounded_to_nearest_even(isa, dtype, size):
    b = batch((1,) * 40, q_dtype=dtype)
    b.v[...] *= np.float32(size)
    wide = Batch(b.q.astype(np.float32), b.k, b.v, b.tables, b.lens, b.indptr)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(b.attend()[0], wide.attend()[0].astype(DTYPES[dtype]))


def test_all_dtypes_are_covered():
    assert set(DTYPES) == set(cpu._attend.DTYPES)  # type: ignore[attr-defined]
