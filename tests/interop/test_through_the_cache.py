"""Steps and sequences with foreign arrays, and the cache's own memory for others.

The memory is shared, held, and released.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import ExchangeRefused, InvalidArgument, LayoutMismatch, OutOfBlocks, WrongType
from pagedkv.interop import as_view, empty, export, fit
from pagedkv.interop.onnxruntime import paged_attention_inputs
from pagedkv.reference import paged_attention

from .conftest import Dlpack

BLOCK, LAYERS, HEADS, DIM = 4, 3, 2, 8


def spec(dtype: str = "float32", layout: str = "NHD") -> pk.KVSpec:
    return pk.KVSpec(LAYERS, HEADS, DIM, dtype, BLOCK, layout=layout)


def values(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def fill(cache: pk.KVCache, seq: pk.Sequence) -> None:
    """One step; every layer's K and V are random numbers of their own."""
    with cache.step([seq]) as step:
        for layer in range(LAYERS):
            step.write(layer, *values(2, len(step.tokens), HEADS, DIM, seed=layer))


# ---- theirs, for us


def test_a_step_takes_foreign_arrays_and_writes_its_result_into_one():
    with pk.KVCache(spec(), pk.Blocks(8)) as cache, cache.sequence(range(9)) as seq, cache.step([seq]) as step:
        for layer in range(LAYERS):
            q, k, v = values(9, 4, DIM), values(9, HEADS, DIM, seed=1), values(9, HEADS, DIM, seed=2)
            step.write(layer, Dlpack(k), Dlpack(v, old=True))
            wanted = step.attend(layer, q)
            assert np.array_equal(step.attend(layer, Dlpack(q)), wanted)
            out, view = np.zeros_like(q), export(values(9, 4, DIM))  # which keeps alive what its raw() points to
            mine = Dlpack(out)
            assert step.attend(layer, q, out=mine) is mine
            assert np.array_equal(out, wanted)
            o, lse = step.attend(layer, view.raw(), out=(mine := Dlpack(out)), return_lse=True)
            assert o is mine
            assert lse.shape == (9, 4)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_bfloat16_that_numpy_could_not_import_is_written_bit_for_bit_or_refused(stored: str):
    source = empty((5, HEADS, DIM), "bfloat16")
    source.numpy()[...] = values(5, HEADS, DIM)
    foreign = Dlpack(source)
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(foreign)
    with pk.KVCache(spec(stored), pk.Blocks(8)) as cache, cache.sequence(range(5)) as seq:
        if stored == "float16":
            with pytest.raises(LayoutMismatch, match="bfloat16"), cache.step([seq]) as step:
                step.write(0, foreign, foreign)
            assert seq.num_computed == 0
            return
        with cache.step([seq]) as step:
            for layer in range(LAYERS):
                step.write(layer, foreign, foreign)
        for found in seq.gather():
            assert all(layer.tobytes() == source.numpy().tobytes() for layer in found)


def test_gather_fills_foreign_arrays_and_scatter_reads_them():
    with pk.KVCache(spec(), pk.Blocks(8)) as cache:
        with cache.sequence(range(9)) as seq:
            fill(cache, seq)
            wanted = seq.gather()
            arrays = [np.zeros_like(wanted[0]) for _ in "kv"]
            out = (Dlpack(arrays[0]), Dlpack(arrays[1], old=True))
            assert seq.gather(out=out) is out
            assert all(np.array_equal(*pair) for pair in zip(arrays, wanted, strict=True))
        with cache.sequence(range(100, 109)) as seq:
            seq.scatter(*(Dlpack(array) for array in arrays))
            assert all(np.array_equal(*pair) for pair in zip(seq.gather(), wanted, strict=True))


def test_what_foreign_arrays_refuse_changes_nothing():
    sealed = export(values(9, 4, DIM))
    with pk.KVCache(spec(), pk.Blocks(8)) as cache, cache.sequence(range(9)) as seq:
        with cache.step([seq]) as step:
            step.write(0, *values(2, 9, HEADS, DIM))
            with pytest.raises(LayoutMismatch, match=r"out cannot be read as an array: .*read-only"):
                step.attend(0, values(9, 4, DIM), out=sealed)
            with pytest.raises(LayoutMismatch, match="k cannot be read as an array"):
                step.write(0, _Refusing(), values(9, HEADS, DIM))
            with pytest.raises(LayoutMismatch, match="q cannot be read as an array"):
                step.attend(0, _Refusing())
            for layer in range(1, LAYERS):
                step.write(layer, *values(2, 9, HEADS, DIM))
        with pytest.raises(LayoutMismatch, match="out cannot be read"):
            seq.gather(out=(sealed, sealed))
        assert np.array_equal(sealed.numpy(), values(9, 4, DIM))


class _Refusing(Dlpack):
    shape = (9, 4, DIM)

    def __init__(self) -> None:
        super().__init__(np.ones(1))

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not today")


# ---- ours, for others


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_committed_blocks_are_exported_where_they_lie_whole_and_read_only(dtype: str, layout: str):
    with pk.KVCache(spec(dtype, layout), pk.Blocks(8)) as cache, cache.sequence(range(2 * BLOCK + 1)) as seq:
        assert seq.export_blocks() == []
        fill(cache, seq)
        views = seq.export_blocks()
        assert len(views) == 2  # the third block is not full
        k, v = seq.gather()
        arena = cache.device_arena
        for i, (view, block) in enumerate(zip(views, seq.blocks, strict=False)):
            assert view.ptr == arena[block].ctypes.data
            assert (view.shape, view.dtype, view.read_only, view.is_compact) == (
                cache.spec.block_shape, dtype, True, True,
            )  # fmt: skip
            found = view.numpy()
            if layout == "HND":
                found = found.swapaxes(2, 3)
            assert np.array_equal(found[:, 0], k[:, i * BLOCK : (i + 1) * BLOCK])
            assert np.array_equal(found[:, 1], v[:, i * BLOCK : (i + 1) * BLOCK])
            with pytest.raises(ValueError, match="read-only"):
                view.numpy()[0] = 0


def test_exported_blocks_stay_until_the_last_array_of_one_of_them_is_gone():
    with pk.KVCache(spec(), pk.Blocks(4)) as cache:
        seq = cache.sequence(range(2 * BLOCK + 1))
        fill(cache, seq)
        taken = np.from_dlpack(seq.export_blocks()[0])
        before = taken.copy()
        seq.release()
        gc.collect()
        assert cache.stats().blocks["device"]["live"] == 2
        with cache.sequence(range(500, 500 + 2 * BLOCK + 1)) as other, pytest.raises(OutOfBlocks), cache.step([other]):
            pass  # three blocks are needed, two are held
        with cache.sequence(range(500, 500 + BLOCK + 1)) as other:
            fill(cache, other)
        assert np.array_equal(taken, before)
        cache.check_integrity()
        del taken
        gc.collect()
        assert cache.stats().blocks["device"]["live"] == 0
        with cache.sequence(range(500, 500 + 2 * BLOCK + 1)) as other:
            fill(cache, other)
        cache.check_integrity()


def test_the_sequence_goes_on_while_its_blocks_are_exported():
    with pk.KVCache(spec(), pk.Blocks(8)) as cache, cache.sequence(range(BLOCK + 1)) as seq:
        fill(cache, seq)
        views = seq.export_blocks()
        before = views[0].numpy().copy()
        blocks = seq.blocks.tolist()
        for token in range(BLOCK):
            seq.append(token)
            fill(cache, seq)
        assert seq.blocks.tolist()[:2] == blocks  # nothing was copied on write
        seq.truncate(1)
        seq.append([7, 8])
        fill(cache, seq)
        assert np.array_equal(views[0].numpy(), before)
        cache.check_integrity()


def test_exports_outlive_the_cache():
    cache = pk.KVCache(spec(), pk.Blocks(8))
    seq = cache.sequence(range(BLOCK + 1))
    fill(cache, seq)
    view = seq.export_blocks()[0]
    before = view.numpy().copy()
    seq.release()
    cache.close()
    del cache, seq
    gc.collect()
    assert np.array_equal(np.from_dlpack(view), before)


def test_blocks_are_not_exported_in_the_middle_of_a_step_or_without_a_row():
    with pk.KVCache(spec(), pk.Blocks(8), max_sequences=1) as cache, cache.sequence(range(BLOCK + 1)) as seq:
        with cache.step([seq]) as step:
            with pytest.raises(InvalidArgument):
                seq.export_blocks()
            for layer in range(LAYERS):
                step.mark_written(layer)
        with pytest.raises(InvalidArgument, match="rows are free"):
            seq.export_blocks()
        cache.check_integrity()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layers_pages_are_one_compact_array_with_one_table_for_all_layers(layer: int, layout: str):
    with pk.KVCache(spec(layout=layout), pk.Blocks(8)) as cache, cache.sequence(range(3 * BLOCK - 1)) as seq:
        fill(cache, seq)
        pages = cache.pages(layer)
        k, v = seq.gather()
        table = pages.tables(seq.blocks[None])[0]
        assert pages.k.shape == pages.v.shape
        assert pages.pages_per_block == 2 * LAYERS
        arena = cache.device_arena
        for view, wanted in ((pages.k, k[layer]), (pages.v, v[layer])):
            assert view.is_compact
            assert view.read_only
            assert arena.ctypes.data <= view.ptr
            assert view.ptr + view.nbytes <= arena.ctypes.data + arena.nbytes
            found = view.numpy()[table]
            if layout == "HND":
                found = found.swapaxes(1, 2)
            assert np.array_equal(found.reshape(-1, HEADS, DIM)[: len(seq)], wanted)
        assert cache.pages(layer).tables(np.array([[-1, 2]], np.int32)).tolist() == [[-1, 4 * LAYERS]]
        with pytest.raises(InvalidArgument, match="block 8"):
            pages.tables(np.array([8], np.int32))
    with pk.KVCache(spec(), pk.Blocks(8)) as cache, pytest.raises(InvalidArgument):
        cache.pages(LAYERS)


def test_pages_that_may_be_written_are_written_through():
    with pk.KVCache(spec(), pk.Blocks(8)) as cache, cache.sequence(range(BLOCK + 2)) as seq:
        with cache.step([seq]) as step:
            for layer in range(LAYERS):
                pages = cache.pages(layer, read_only=False)
                slots = pages.slots(step.slot_mapping)
                for view, array in ((pages.k, values(6, HEADS, DIM)), (pages.v, values(6, HEADS, DIM, seed=layer))):
                    view.numpy().reshape(-1, HEADS, DIM)[slots] = array
                step.mark_written(layer)
        assert np.array_equal(seq.gather()[0][1], values(6, HEADS, DIM))
        assert np.array_equal(seq.gather()[1][2], values(6, HEADS, DIM, seed=2))


# ---- ONNX Runtime's PagedAttention


def paged_attention_op(
    query: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, cumulative_sequence_length: Any,
    past_seqlens: Any, block_table: Any, slot_mapping: Any, attention_metadata: Any,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """The operator as its schema defines it.

    It writes new K and V into their slots, then attends causally.
    """
    block_size = key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        flat = cache.reshape(-1, *cache.shape[2:])
        for i, slot in enumerate(slot_mapping):
            if slot >= 0:
                flat[slot] = new[i]
    out = np.zeros_like(query)
    for seq, past in enumerate(past_seqlens):
        first, last = cumulative_sequence_length[seq : seq + 2]
        assert last - first <= attention_metadata[0]
        assert past + last - first <= attention_metadata[1]
        total = past + last - first
        table = block_table[seq, : -(-total // block_size)][None]
        out[first:last] = paged_attention(
            query[first:last], key_cache, value_cache, table, np.array([total]), np.array([0, last - first])
        )
    return out


def test_the_operators_inputs_name_the_same_kv_as_our_own_attention():
    with pk.KVCache(spec("float16"), pk.Blocks(16)) as cache:
        seqs = [cache.sequence(range(start, start + n)) for start, n in ((0, 9), (100, 2), (200, 5))]
        for turn in range(2):
            with cache.step(seqs) as step:
                assert len(step.tokens) == (16, 3)[turn]
                for layer in range(LAYERS):
                    n = len(step.tokens)
                    q, k, v = (values(n, heads, DIM, seed=turn + 5 * heads).astype(np.float16) for heads in (4, 2, 2))
                    inputs = paged_attention_inputs(step, cache.pages(layer, read_only=False))
                    assert all(
                        array.dtype == np.int32 and array.flags.c_contiguous
                        for name, array in inputs.items() if "cache" not in name
                    )  # fmt: skip
                    arrays = {name: x.numpy() if "cache" in name else x for name, x in inputs.items()}
                    found = paged_attention_op(q, k, v, **arrays)
                    step.mark_written(layer)
                    wanted = step.attend(layer, q)
                    assert np.allclose(found, wanted, atol=2e-3)
            for seq in seqs:
                seq.append(1)
        assert inputs["past_seqlens"].tolist() == [9, 2, 5]
        assert inputs["attention_metadata"].tolist() == [1, 10]
        assert (inputs["block_table"] >= 0).all()
        for seq in seqs:
            seq.release()


def test_the_operators_inputs_are_refused_where_it_could_not_use_them():
    with pk.KVCache(spec(), pk.Blocks(8)) as cache, cache.sequence(range(5)) as seq, cache.step([seq]) as step:
        with pytest.raises(ExchangeRefused, match="read_only=False"):
            paged_attention_inputs(step, cache.pages(0))
        for layer in range(LAYERS):
            step.mark_written(layer)
    with (
        pk.KVCache(spec(layout="HND"), pk.Blocks(8)) as cache,
        cache.sequence(range(5)) as seq,
        cache.step([seq]) as step,
    ):
        with pytest.raises(ExchangeRefused, match="NHD"):
            paged_attention_inputs(step, cache.pages(0, read_only=False))
        for layer in range(LAYERS):
            step.mark_written(layer)


def test_slots_beyond_the_operators_int32_are_refused():
    from dataclasses import replace
    from types import SimpleNamespace

    with pk.KVCache(spec(), pk.Blocks(8)) as cache:
        pages = replace(cache.pages(0, read_only=False), pages_per_block=2**20)
        arrays = SimpleNamespace(
            slot_mapping=np.array([2**31 // 2**20 * BLOCK + 1]), block_tables=np.array([[0]], np.int32),
            seq_lens=np.array([1], np.int32), q_indptr=np.array([0, 1], np.int32),
        )  # fmt: skip
        with pytest.raises(InvalidArgument, match="int32"):
            paged_attention_inputs(arrays, pages)


def test_an_exported_block_fits_every_framework_that_does_not_write():
    big = pk.KVSpec(2, 2, 64, "bfloat16", 16)
    with pk.KVCache(big, pk.Blocks(4)) as cache, cache.sequence(range(17)) as seq:
        with cache.step([seq]) as step:
            for layer in range(2):
                step.write(layer, *values(2, 17, 2, 64))
        (view,) = seq.export_blocks()
        for name in ("jax", "onnxruntime", "numpy"):
            assert fit(view, name).ptr == view.ptr
        with pytest.raises(ExchangeRefused, match="read-only"):
            fit(view, "torch")
        assert as_view(fit(view, "torch", copy=True)).ptr != view.ptr


def test_a_gpu_array_is_refused_by_a_cache_in_host_memory_before_anything_is_written(cuda: Any):
    from pagedkv.interop import RawArray

    place = values(9, HEADS, DIM)
    foreign = RawArray(place.ctypes.data, place.shape, None, "float32", "cuda:0")
    with pk.KVCache(spec(), pk.Blocks(8)) as cache, cache.sequence(range(9)) as seq:
        with pytest.raises((LayoutMismatch, WrongType)), cache.step([seq]) as step:
            step.write(0, foreign, foreign)
        assert seq.num_computed == 0


def test_exported_blocks_that_are_alive_when_python_ends_do_no_harm():
    script = (
        "import sys, numpy as np, pagedkv as pk\n"
        "cache = pk.KVCache(pk.KVSpec(1, 1, 8, 'float32', 4), pk.Blocks(4))\n"
        "seq = cache.sequence(range(5))\n"
        "with cache.step([seq]) as step:\n"
        "    step.write(0, *np.ones((2, 5, 1, 8), np.float32))\n"
        "sys.kept = [np.from_dlpack(view) for view in seq.export_blocks()]\n"
        "print(len(sys.kept))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1\n", "")
