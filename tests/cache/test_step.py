"""A step: its arrays, and that it commits all or nothing whatever happens inside."""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk

from .conftest import BLOCK, SPEC, Toy, all_free, prompt


@pytest.fixture
def toy(open_cache):
    return Toy(open_cache(64))


def ones(count, dtype=np.float32):
    return np.ones((count, SPEC.num_kv_heads, SPEC.head_dim), dtype)


def test_the_arrays_say_where_every_token_goes(toy):
    long, short, cached = prompt(1, 10), prompt(2, 3), prompt(3, 6)
    toy.use(cached)
    seqs = [toy.cache.sequence(tokens) for tokens in (long, short, cached)]
    with toy.cache.step(seqs) as step:
        assert step.q_indptr.tolist() == [0, 10, 13, 15], "a block of the third is cached"
        assert step.seq_lens.tolist() == [10, 3, 6]
        assert step.tokens.tolist() == [*long, *short, *cached[4:]]
        assert step.positions.tolist() == [*range(10), *range(3), 4, 5]
        assert step.block_tables.shape == (3, 3)
        assert (step.block_tables[1, 1:] == -1).all()
        for i, seq in enumerate(seqs):
            blocks = seq.blocks
            assert step.block_tables[i, : len(blocks)].tolist() == blocks.tolist()
            places = step.positions[step.q_indptr[i] : step.q_indptr[i + 1]]
            slots = step.slot_mapping[step.q_indptr[i] : step.q_indptr[i + 1]]
            assert slots.tolist() == [int(blocks[p // BLOCK]) * BLOCK + p % BLOCK for p in places.tolist()]
        indptr, indices, last = step.to_csr()
        assert indptr.tolist() == [0, 3, 4, 6]
        assert indices.tolist() == np.concatenate([seq.blocks for seq in seqs]).tolist()
        assert last.tolist() == [2, 3, 2]
        assert [a.dtype for a in (step.tokens, step.positions, step.q_indptr, step.seq_lens, step.block_tables)] == [
            np.int32
        ] * 5
        assert step.slot_mapping.dtype == np.int64
        toy.write(step, *seqs)
    toy.check(*seqs)
    for seq in seqs:
        seq.release()


def test_outside_the_with_block_there_are_no_arrays(toy):
    seq = toy.cache.sequence([1, 2])
    step = toy.cache.step([seq])
    with pytest.raises(pk.ClosedError):
        step.tokens  # noqa: B018
    with step:
        toy.write(step, seq)
    for use in (
        lambda: step.tokens,
        lambda: step.write(0, ones(2), ones(2)),
        lambda: step.attend(0, ones(2)),
        step.to_csr,
    ):
        with pytest.raises(pk.ClosedError):
            use()


def test_an_exception_inside_commits_nothing(toy):
    seq = toy.cache.sequence(prompt(1))
    with pytest.raises(KeyError), toy.cache.step([seq]) as step:  # noqa: PT012
        toy.write(step, seq)
        raise KeyError
    assert seq.num_computed == 0
    assert toy.cache.explain(prompt(1)).cached_tokens == 0
    toy.run(seq)
    toy.check(seq)


@pytest.mark.parametrize("written", [[], [0], [1]])
def test_a_layer_that_was_not_written_commits_nothing(toy, written):
    seq = toy.cache.sequence(prompt(1))
    with pytest.raises(pk.InvalidArgument, match="unwritten"), toy.cache.step([seq]) as step:  # noqa: PT012
        for layer in written:
            step.write(layer, *toy.new_kv(step, [seq], layer))
    assert seq.num_computed == 0
    toy.run(seq)
    toy.check(seq)


def test_a_kernel_of_ones_own_may_mark_layers_as_written(toy):
    seq = toy.cache.sequence(prompt(1, 6))
    with toy.cache.step([seq]) as step:
        for layer in range(SPEC.num_layers):
            k, v = toy.new_kv(step, [seq], layer)
            k_view, v_view = toy.cache.layer(layer)
            k_view[step.slot_mapping // BLOCK, step.slot_mapping % BLOCK] = k
            v_view[step.slot_mapping // BLOCK, step.slot_mapping % BLOCK] = v
            step.mark_written(layer)
    assert seq.num_computed == 6
    toy.check(seq)


@pytest.mark.parametrize("layer", [-1, 2, 10**30, 0.5, "0", None, True, float("nan")], ids=repr)
def test_marking_what_is_no_layer_is_refused(toy, layer):
    seq = toy.cache.sequence([1])
    with toy.cache.step([seq]) as step:
        with pytest.raises((pk.InvalidArgument, pk.WrongType)):
            step.mark_written(layer)
        toy.write(step, seq)


def test_a_step_object_used_again_does_not_count_old_writes(toy):
    seq = toy.cache.sequence(prompt(1, BLOCK))
    step = toy.cache.step([seq])
    with step:
        toy.write(step, seq)
    seq.append(prompt(2, BLOCK))
    with pytest.raises(pk.PagedKVError), step:
        pass
    assert seq.num_computed == BLOCK
    toy.check(seq)


def test_a_step_cannot_be_entered_twice(toy):
    seq = toy.cache.sequence([1])
    with toy.cache.step([seq]) as step:
        with pytest.raises(pk.InvalidArgument, match="under way"):
            step.__enter__()
        toy.write(step, seq)
    toy.check(seq)


@pytest.mark.parametrize("chunk", [1, 3, BLOCK, BLOCK + 1, 100])
def test_a_prompt_may_be_computed_in_chunks(toy, chunk):
    seq = toy.cache.sequence(prompt(1, 14))
    while seq.num_computed < 14:
        before = seq.num_computed
        toy.run(seq, q_lens=[min(chunk, 14 - before)])
        assert seq.num_computed == min(before + chunk, 14)
        assert toy.cache.explain(prompt(1, 14)).cached_tokens == seq.num_computed // BLOCK * BLOCK
        toy.check(seq)


def test_chunks_decodes_and_idle_sequences_in_one_step(toy):
    seqs = [toy.cache.sequence(prompt(i, 9)) for i in range(3)]
    toy.run(seqs[0])
    seqs[0].append(7)
    toy.run(*seqs, q_lens=[1, 4, 0])
    assert [seq.num_computed for seq in seqs] == [10, 4, 0]
    toy.check(*seqs)


@pytest.mark.parametrize("q_lens", [[4], [-1], [1, 1], [], [2**40], [1.5], 1, "1", [[1]]], ids=repr)
def test_q_lens_that_do_not_fit_are_refused(toy, q_lens):
    seq = toy.cache.sequence([1, 2, 3])
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        toy.run(seq, q_lens=q_lens)
    assert len(seq.blocks) == 0
    toy.run(seq)
    toy.check(seq)


def test_a_step_over_nothing_is_a_step(toy):
    with toy.cache.step([]) as step:
        assert len(step.tokens) == len(step.seq_lens) == 0
        assert step.q_indptr.tolist() == [0]
    seq = toy.cache.sequence([])
    with toy.cache.step([seq]) as step:
        assert step.q_indptr.tolist() == [0, 0]


def test_lookahead_allocates_and_commits_no_more_than_was_asked_to_compute(toy):
    seq = toy.cache.sequence(prompt(1, 3))
    toy.run(seq, lookahead=6)
    assert (seq.num_computed, len(seq.blocks)) == (3, 3)
    seq.append([5, 6, 7])  # a draft
    toy.run(seq)
    seq.truncate(4)  # most of it rejected
    seq.append([8, 9])
    toy.run(seq)
    toy.check(seq)


@pytest.mark.parametrize("lookahead", [-1, 1 << 21, 1.5, None, "1"], ids=repr)
def test_an_impossible_lookahead_is_refused(toy, lookahead):
    seq = toy.cache.sequence([1])
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        toy.run(seq, lookahead=lookahead)


def test_a_sequence_stands_once_in_a_step(toy):
    seq = toy.cache.sequence([1])
    with pytest.raises(pk.InvalidArgument, match="twice"):
        toy.run(seq, seq)
    assert len(seq.blocks) == 0


def test_a_step_takes_live_sequences_of_its_own_cache_only(toy, open_cache):
    with pytest.raises(pk.WrongType):
        toy.cache.step([[1, 2, 3]])
    with pytest.raises(pk.InvalidArgument, match="another cache"):
        toy.cache.step([open_cache().sequence([1])])
    seq = toy.cache.sequence([1])
    step = toy.cache.step([seq])
    seq.release()
    with pytest.raises(pk.StaleHandle), step:
        pass


def test_a_step_that_finds_no_room_changes_nothing(open_cache):
    toy = Toy(open_cache(4))
    first, second = toy.cache.sequence(prompt(1, 8)), toy.cache.sequence(prompt(2, 12))
    with pytest.raises(pk.OutOfBlocks):
        toy.run(first, second)
    assert [len(seq.blocks) for seq in (first, second)] == [0, 0]
    toy.run(first)
    toy.check(first)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", ">f8"])
def test_kv_of_another_float_dtype_is_converted(toy, dtype):
    seq = toy.cache.sequence(prompt(1, 3))
    with toy.cache.step([seq]) as step:
        for layer in range(SPEC.num_layers):
            step.write(layer, 2.5 * ones(3, dtype), np.asfortranarray(-ones(3, dtype)))
    k, v = seq.gather()
    assert (k == 2.5).all()
    assert (v == -1).all()


def test_strided_and_read_only_kv_is_read(toy):
    seq = toy.cache.sequence(prompt(1, 5))
    with toy.cache.step([seq]) as step:
        for layer in range(SPEC.num_layers):
            k, v = toy.new_kv(step, [seq], layer)
            wide = np.zeros((10, SPEC.num_kv_heads, SPEC.head_dim), np.float32)
            wide[::2] = k
            v.flags.writeable = False
            step.write(layer, wide[::2], v)
    toy.check(seq)


WRONG_KV = {
    "too few tokens": ones(4), "too many": ones(6), "flat": np.ones(40, np.float32), "integers": ones(5, np.int32),
    "objects": ones(5, object), "complex": ones(5, complex), "bool": ones(5, bool), "a list": [[1]], "none": None,
    "text": "kv", "a number": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_KV.values(), ids=WRONG_KV)
def test_kv_that_does_not_fit_is_refused_and_not_written(toy, wrong):
    seq = toy.cache.sequence(prompt(1, 5))
    with toy.cache.step([seq]) as step:
        toy.write(step, seq)
        before = toy.cache.device_arena.copy()
        for pair in ((wrong, ones(5)), (ones(5), wrong)):
            with pytest.raises(pk.LayoutMismatch):
                step.write(0, *pair)
        assert np.array_equal(toy.cache.device_arena, before)
    toy.check(seq)


@pytest.mark.parametrize("layer", [-1, 2, "0", None, 1.0, True, 10**30], ids=repr)
def test_writing_or_attending_what_is_no_layer_is_refused(toy, layer):
    seq = toy.cache.sequence([1])
    with toy.cache.step([seq]) as step:
        with pytest.raises((pk.InvalidArgument, pk.WrongType)):
            step.write(layer, ones(1), ones(1))
        with pytest.raises((pk.InvalidArgument, pk.WrongType)):
            step.attend(layer, ones(1))
        toy.write(step, seq)
    toy.check(seq)


def test_tokens_appended_inside_a_step_wait_for_the_next(toy):
    seq = toy.cache.sequence(prompt(1, 3))
    with toy.cache.step([seq]) as step:
        seq.append([7, 8])
        toy.write(step, seq)
    assert (seq.num_computed, seq.num_tokens) == (3, 5)
    toy.run(seq)
    toy.check(seq)


def test_a_fork_inside_a_step_is_refused(toy):
    seq = toy.cache.sequence(prompt(1, 3))
    with toy.cache.step([seq]) as step:
        with pytest.raises(pk.InvalidArgument, match="in a step"):
            seq.fork()
        toy.write(step, seq)
    toy.check(seq)


# What follows is misuse. It may be refused anywhere, but never changes what another sequence holds.


def test_writes_after_a_release_inside_the_step_reach_nobody_else(toy):
    seq = toy.cache.sequence(prompt(1, 5))
    other = None
    try:
        with toy.cache.step([seq]) as step:
            stale = [toy.new_kv(step, [seq], layer) for layer in range(SPEC.num_layers)]
            seq.release()
            other = toy.cache.sequence(prompt(2, 5))
            toy.run(other)
            for layer in range(SPEC.num_layers):
                step.write(layer, *stale[layer])
    except pk.PagedKVError:
        pass
    if other is not None:
        toy.check(other)


def test_writes_after_a_truncate_inside_the_step_reach_nobody_else(toy):
    seq = toy.cache.sequence(prompt(1, 5))
    other = None
    try:
        with toy.cache.step([seq]) as step:
            stale = [toy.new_kv(step, [seq], layer) for layer in range(SPEC.num_layers)]
            seq.truncate(0)
            other = toy.cache.sequence(prompt(2, 5))
            toy.run(other)
            for layer in range(SPEC.num_layers):
                step.write(layer, *stale[layer])
    except pk.PagedKVError:
        pass
    if other is not None:
        toy.check(other)


def test_a_step_inside_a_step_of_the_same_sequence_reaches_nobody_else(toy):
    twin, seq = toy.cache.sequence(prompt(1, 5)), toy.cache.sequence(prompt(1, 5))
    toy.run(twin)  # the tree has the block now: a sequence that commits it again gives its own back
    other = None
    try:
        with toy.cache.step([seq]) as step:
            stale = [toy.new_kv(step, [seq], layer) for layer in range(SPEC.num_layers)]
            toy.run(seq)
            other = toy.cache.sequence(prompt(2, 5))
            toy.run(other)
            for layer in range(SPEC.num_layers):
                step.write(layer, *stale[layer])
    except pk.PagedKVError:
        pass
    toy.check(twin, seq)
    if other is not None:
        toy.check(other)


def test_a_sequence_released_inside_a_step_leaves_the_others_usable(toy):
    first, second = toy.cache.sequence(prompt(1, 5)), toy.cache.sequence(prompt(2, 5))
    try:
        with toy.cache.step([first, second]) as step:
            toy.write(step, first, second)
            first.release()
    except pk.PagedKVError:
        pass
    second.fork(1)[0].release()
    if second.num_computed < second.num_tokens:
        toy.run(second)
    toy.check(second)
    second.release()
    first.release()
    assert all_free(toy.cache)


def test_a_step_whose_sequence_was_cut_back_reads_nothing(open_cache):
    """Its blocks may be another sequence's by then, in another namespace."""
    cache = open_cache(6)
    seq = cache.sequence(list(range(9)))
    step = cache.step([seq]).__enter__()
    fill_every_layer(cache, step)
    q = np.ones((len(step.tokens), cache.spec.num_kv_heads, cache.spec.head_dim), np.float32)
    seq.truncate(0)
    with pytest.raises(pk.StaleHandle):
        step.attend(0, q)
    with pytest.raises(pk.StaleHandle):
        step.__exit__(None, None, None)
    cache.check_integrity()


def test_the_arrays_of_a_step_cannot_be_changed(open_cache):
    cache = open_cache(6)
    seq = cache.sequence(list(range(9)))
    with cache.step([seq]) as step:
        fill_every_layer(cache, step)
        for array in (step.slot_mapping, step.block_tables, step.seq_lens, step.q_indptr, step.positions):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def fill_every_layer(cache, step) -> None:
    kv = np.ones((len(step.tokens), cache.spec.num_kv_heads, cache.spec.head_dim), np.float32)
    for layer in range(cache.spec.num_layers):
        step.write(layer, kv, kv)


def test_a_step_whose_sequence_was_stepped_again_takes_nothing_from_the_other_step(open_cache):
    toy = Toy(open_cache(8))
    with toy.cache.sequence(prompt(1)) as seq:
        first, second = toy.cache.step([seq]), toy.cache.step([seq])
        first.__enter__()
        with second:
            toy.write(second, seq)
            with pytest.raises(pk.StaleHandle):
                toy.write(first, seq)
            with pytest.raises(KeyError):
                raise_in(first)
        assert seq.num_computed == len(prompt(1))
        toy.check(seq)


def raise_in(step):
    """End a step that is under way by an exception of its body."""
    try:
        raise KeyError
    except KeyError as problem:
        step.__exit__(KeyError, problem, None)
        raise


def test_a_step_that_is_dropped_lets_go_of_the_rows_that_did_not_go_on(toy):
    """One of its sequences was cut back meanwhile; the other can be forked at once."""
    first, second = toy.cache.sequence([1, 2, 3, 4, 5, 6]), toy.cache.sequence([7, 8, 9])
    step = toy.cache.step([first, second])
    step.__enter__()
    first.truncate(3)
    del step
    (fork,) = second.fork(1)
    for seq in (first, second, fork):
        seq.release()
    toy.cache.check_integrity()

