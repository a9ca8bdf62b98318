"""What sharing saves.

The formulas agree with the cache's own forks and prefix hits, and with counting references.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import Blocks, InvalidArgument, KVCache, KVSpec, WrongType
from pagedkv.core import BlockPool, BlockTable
from pagedkv.lab.sizing import Saving, blocks_needed, fork_sharing, prefix_sharing, tree_blocks_per_sequence

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_size=4)


def compute(cache: KVCache, seqs: list[Any]) -> None:
    """One step over what is not computed yet."""
    with cache.step(seqs) as step:
        kv = np.zeros((len(step.tokens), 1, 1), np.float32)
        step.write(0, kv, kv)


@settings(max_examples=60, deadline=None)
@given(
    num_forks=st.integers(1, 6),
    prompt=st.integers(1, 20),
    common=st.integers(0, 9),
    own=st.integers(0, 14),
    block_size=st.sampled_from([1, 3, 4, 8]),
    together=st.booleans(),
)
def test_forks_take_the_blocks_that_the_formula_says(
    num_forks: int, prompt: int, common: int, own: int, block_size: int, together: bool
) -> None:
    pool = BlockPool(1000)
    table = BlockTable(pool, block_size=block_size)
    row, _ = table.open(np.arange(prompt + common, dtype=np.int32))
    table.step([row])
    table.commit([row])
    rows = [row, *table.fork(row, num_forks - 1).tolist()] if num_forks > 1 else [row]
    copies = 0
    for _ in range(own):
        for batch in [rows] if together else [[row] for row in rows]:
            table.append(batch, np.zeros(len(batch), np.int32))
            copies += len(table.step(batch).copies)
            table.copies_done()
            table.commit(batch)
    saving = fork_sharing(num_forks, prompt, own, block_size, common_tokens=common)
    assert saving.shared == 1000 - pool.num_free
    assert saving.alone == num_forks * blocks_needed(prompt + common + own, block_size)
    assert copies == saving.copies + (together and saving.copies > 0)  # the last one's source, see Saving.copies


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 6), prefix=st.integers(0, 20), own=st.integers(1, 12))
def test_requests_over_a_cached_prefix_take_the_blocks_that_the_formula_says(count: int, prefix: int, own: int) -> None:
    with KVCache(SPEC, device_memory=Blocks(100)) as cache:
        seqs = []
        for i in range(count):
            seqs.append(cache.sequence([*range(prefix), *range(1000 * (i + 1), 1000 * (i + 1) + own)]))
            compute(cache, [seqs[-1]])
        used = set().union(*(set(seq.blocks.tolist()) for seq in seqs))
        saving = prefix_sharing(count, prefix, own, SPEC.block_size)
        assert saving.shared == len(used)
        assert saving.alone == sum(len(seq.blocks) for seq in seqs)
        for seq in seqs:
            seq.release()


@given(
    levels=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=5),
)
def test_shares_of_the_tree_add_up_to_the_tree(levels: list[tuple[int, int]]) -> None:
    """A tree of levels (blocks per node, children per node): every leaf is a sequence."""
    leaves = 1
    for _, children in levels:
        leaves *= children
    path, nodes, blocks = [], 1, 0
    for size, children in levels:
        path.append((size, leaves // nodes))
        blocks += nodes * size
        nodes *= children
    assert leaves * tree_blocks_per_sequence(path) == pytest.approx(blocks)


def test_one_sequence_shares_nothing() -> None:
    assert prefix_sharing(1, 100, 100).fraction == 0.0
    assert fork_sharing(1, 100, 100).fraction == 0.0
    assert fork_sharing(1, 100, 100).copies == 0


def test_forks_that_have_not_parted_share_even_what_is_not_full() -> None:
    assert fork_sharing(4, 10, 0, 16) == Saving(4, 1)


@pytest.mark.parametrize(("beams", "saved"), [(2, 0.375), (4, 0.5625), (6, 0.625), (8, 0.65625)])
def test_beams_of_a_prompt_of_96_and_own_32_tokens(beams: int, saved: float) -> None:
    """Six of eight blocks are the prompt's.

    The vLLM paper measured 37.6 to 55.2 % on its short prompts.
    """
    assert fork_sharing(beams, 96, 32).fraction == 0.75 * (1 - 1 / beams) == pytest.approx(saved, abs=1e-12)


def test_nothing_is_saved_of_nothing() -> None:
    assert prefix_sharing(3, 0).fraction == 0.0


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: prefix_sharing(0, 1), InvalidArgument),
        (lambda: prefix_sharing(1, -1), InvalidArgument),
        (lambda: prefix_sharing(1, 1, -1), InvalidArgument),
        (lambda: fork_sharing(1.5, 1, 1), WrongType),  # type: ignore[arg-type]
        (lambda: fork_sharing(1, 1, 1, common_tokens=-1), InvalidArgument),
        (lambda: fork_sharing(1, 1, -1), InvalidArgument),
        (lambda: tree_blocks_per_sequence([(1, 2), (1, 3)]), InvalidArgument),
        (lambda: tree_blocks_per_sequence([(1, 0)]), InvalidArgument),
    ],
)
def test_what_cannot_share_is_refused(call: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        call()
