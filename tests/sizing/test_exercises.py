"""The lesson's programming exercises: allocator, gather, online softmax.

The scripts in ``examples/`` do them.

Exercises 2 and 4 are functions (:func:`memory_savings`, :func:`paged_cost`); exercise 5 is a reading of vLLM's sources.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import OutOfBlocks
from pagedkv.lab.sizing import blocks_needed

pytestmark = pytest.mark.checkout


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_exercise_1_as_the_lesson_calls_it() -> None:
    allocator = example("allocator_simulator").Allocator(total_blocks=100, block_size=16)
    assert len(allocator.allocate(1, 50)) == 4
    assert allocator.allocated() == pytest.approx(0.04)
    assert len(allocator.append(1, 20)) == 1  # 70 tokens
    assert allocator.append(1, 10) == []  # 80 fill five blocks
    assert allocator.free(1) == 5
    assert allocator.allocated() == 0.0


def test_exercise_1_refuses_what_does_not_fit_and_changes_nothing() -> None:
    allocator = example("allocator_simulator").Allocator(total_blocks=4, block_size=16)
    table = list(allocator.allocate(1, 30))
    with pytest.raises(OutOfBlocks):
        allocator.append(1, 40)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(2, 33)
    assert allocator.tables == {1: table}
    assert allocator.lengths == {1: 30}
    with pytest.raises(ValueError, match="open already"):
        allocator.allocate(1, 1)
    with pytest.raises(KeyError):
        allocator.free(2)


@settings(deadline=None)
@given(calls=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 90)), max_size=60))
def test_exercise_1_never_gives_a_block_to_two(calls: list[tuple[int, int]]) -> None:
    """Each call opens a sequence, makes it longer, or (0 tokens) ends it."""
    allocator = example("allocator_simulator").Allocator(total_blocks=20, block_size=8)
    lengths: dict[int, int] = {}
    for seq_id, num_tokens in calls:
        if seq_id in lengths and not num_tokens:
            assert allocator.free(seq_id) == blocks_needed(lengths.pop(seq_id), 8)
            continue
        try:
            if seq_id in lengths:
                allocator.append(seq_id, num_tokens)
            else:
                allocator.allocate(seq_id, num_tokens)
            lengths[seq_id] = lengths.get(seq_id, 0) + num_tokens
        except OutOfBlocks:
            pass
        held = [block for table in allocator.tables.values() for block in table]
        assert len(held) == len(set(held)) == sum(blocks_needed(length, 8) for length in lengths.values())
        assert allocator.allocated() == pytest.approx(len(held) / 20)
        assert allocator.lengths == lengths
    allocator.pool.check_integrity()


def test_exercise_3_with_the_lesson_s_tables() -> None:
    draw = np.random.default_rng(3)
    blocks = draw.standard_normal((100, 16, 8, 64)).astype(np.float32)
    tables = [[0, 1, 2, -1], [3, 4, -1, -1], [5, 6, 7, 8]]
    gathered = example("block_gather").gather(blocks, tables, [40, 25, 60])
    assert gathered.shape == (3, 60, 8, 64)
    for row, table, length in zip(gathered, tables, [40, 25, 60], strict=True):
        whole = np.concatenate([blocks[block] for block in table if block >= 0])
        np.testing.assert_array_equal(row[:length], whole[:length])
        assert not row[length:].any()


def test_exercise_3_reads_nothing_behind_a_sequence_s_end() -> None:
    blocks = np.full((4, 4, 1, 2), np.nan, np.float32)
    blocks[3, :2] = 1
    gathered = example("block_gather").gather(blocks, [[3, -1], [-1, -1]], [2, 0])
    assert gathered.tolist() == [[[[1, 1]], [[1, 1]]], [[[0, 0]], [[0, 0]]]]


@settings(deadline=None)
@given(
    num_keys=st.integers(1, 90),
    block_size=st.integers(1, 33),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_exercise_6_in_one_pass_equals_the_textbook(num_keys: int, block_size: int, scale: float, seed: int) -> None:
    module = example("online_softmax")
    draw = np.random.default_rng(seed)
    query = scale * draw.standard_normal((8, 64))
    keys, values = draw.standard_normal((2, num_keys, 8, 64))
    starts = range(0, num_keys, block_size)
    output = module.online_attention(
        query, [keys[i : i + block_size] for i in starts], [values[i : i + block_size] for i in starts]
    )
    assert output.shape == (8, 64)
    np.testing.assert_allclose(output, module.standard_attention(query, keys, values), rtol=1e-9, atol=1e-12)


def test_exercise_6_keeps_its_head_where_exponentials_overflow() -> None:
    module = example("online_softmax")
    query = np.full((1, 1), 1000.0)
    keys = [np.array([[[-1.0]]]), np.array([[[1.0]]]), np.array([[[0.5]]])]  # the maximum rises by 2,000, then holds
    values = [np.array([[[1.0]]]), np.array([[[2.0]]]), np.array([[[3.0]]])]
    assert module.online_attention(query, keys, values) == pytest.approx(2.0)


def test_the_lesson_s_own_check_of_exercise_6_multiplies_shapes_that_do_not_fit() -> None:
    """The check computes ``[heads, 1, dim] @ [tokens, dim, heads]``.

    What it calls heads and tokens would have to be equal.
    """
    query, keys = np.zeros((8, 64)), np.zeros((5 * 16, 8, 64))
    with pytest.raises(ValueError, match="broadcast"):
        np.matmul(query[:, None], keys.swapaxes(-2, -1))
