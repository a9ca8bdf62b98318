"""Forks share what is full and copy what is partly filled before either writes to it."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

import pagedkv as pk

from .conftest import BLOCK, Toy, all_free, prompt


@pytest.fixture
def toy(open_cache):
    return Toy(open_cache(64))


def diverge(toy, *seqs, turns=6):
    """Each goes its own way, token by token; no fork may ever see another's writes."""
    for turn in range(turns):
        for i, seq in enumerate(seqs):
            seq.append(10_000 * (i + 1) + turn)
            toy.run(seq)
            toy.check(*seqs)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3])
def test_siblings_never_see_each_others_writes(toy, length):
    seq = toy.cache.sequence(prompt(1, length))
    toy.run(seq)
    diverge(toy, seq, *seq.fork(3))


def test_siblings_in_one_step_diverge_as_well(toy):
    seq = toy.cache.sequence(prompt(1, 6))
    toy.run(seq)
    seqs = [seq, *seq.fork(3)]
    for turn in range(5):
        for i, one in enumerate(seqs):
            one.append(100 * i + turn)
        toy.run(*seqs)
        toy.check(*seqs)


def test_a_fork_has_the_tokens_and_shares_every_block_until_it_writes(toy):
    seq = toy.cache.sequence(prompt(1, 6))
    toy.run(seq)
    (fork,) = seq.fork()
    assert fork.tokens.tolist() == seq.tokens.tolist()
    assert fork.num_computed == 6
    assert fork.blocks.tolist() == seq.blocks.tolist()
    assert fork.hit_tokens == seq.hit_tokens
    fork.append(1)
    toy.run(fork)
    assert fork.blocks[0] == seq.blocks[0]
    assert fork.blocks[1] != seq.blocks[1]


def test_the_last_one_left_writes_in_place(toy):
    seq = toy.cache.sequence(prompt(1, 6))
    toy.run(seq)
    (fork,) = seq.fork()
    before = fork.blocks.tolist()
    seq.release()
    fork.append(1)
    toy.run(fork)
    assert fork.blocks.tolist() == before
    toy.check(fork)


def test_fork_of_nothing_is_an_empty_list(toy):
    seq = toy.cache.sequence(prompt(1, 6))
    assert seq.fork(0) == []
    toy.run(seq)
    assert seq.fork(0) == []
    diverge(toy, seq)


def test_a_fork_before_anything_is_computed(toy):
    seq = toy.cache.sequence(prompt(1, 6))
    (fork,) = seq.fork()
    fork.truncate(3)
    fork.append([7, 8, 9])
    toy.run(seq)
    toy.run(fork)
    toy.check(seq, fork)


def test_forks_of_forks(toy):
    seqs = [toy.cache.sequence(prompt(1, 5))]
    toy.run(*seqs)
    for generation in range(4):
        seqs += seqs[-1].fork(2)
        seqs[generation].append(generation)
        toy.run(seqs[generation])
        toy.check(*seqs)
    for i, seq in enumerate(seqs):
        seq.append(500 + i)
    toy.run(*(seq for seq in seqs))
    toy.check(*seqs)


@pytest.mark.parametrize("seed", range(6))
def test_released_in_any_order_the_others_keep_their_content(toy, seed):
    order = random.Random(seed)
    seq = toy.cache.sequence(prompt(1, 6))
    toy.run(seq)
    seqs = [seq, *seq.fork(4)]
    for i in order.sample(range(5), 3):
        seqs[i].append(100 + i)
        toy.run(seqs[i])
    order.shuffle(seqs)
    while seqs:
        seqs.pop().release()
        toy.check(*seqs)
        toy.cache.check_integrity()
    assert all_free(toy.cache)


def test_a_fork_truncated_into_a_shared_block_copies_it(toy):
    seq = toy.cache.sequence(prompt(1, 11))
    toy.run(seq)
    for keep in range(11):
        (fork,) = seq.fork()
        fork.truncate(keep)
        fork.append(prompt(keep + 2, 9))
        toy.run(fork)
        toy.check(seq, fork)
        fork.release()


def test_lookahead_blocks_are_not_shared_between_writers(toy):
    seq = toy.cache.sequence(prompt(1, 3))
    toy.run(seq, lookahead=9)
    diverge(toy, seq, *seq.fork(2), turns=10)
    seq.append([1, 2, 3, 4, 5, 6, 7])
    toy.run(seq)
    toy.check(seq)


def test_lookahead_then_forks_that_each_write_several_blocks(toy):
    seq = toy.cache.sequence(prompt(1, 3))
    toy.run(seq, lookahead=9)
    seqs = [seq, *seq.fork(2)]
    for i, one in enumerate(seqs):
        one.append(prompt(50 + i, 8))
    toy.run(*seqs)
    toy.check(*seqs)


def test_blocks_left_by_a_cancelled_step_are_not_shared_between_writers(toy):
    seq = toy.cache.sequence(prompt(1, 12))
    with pytest.raises(KeyError), toy.cache.step([seq]):
        raise KeyError
    (fork,) = seq.fork()
    seq.truncate(5)
    seq.append(prompt(2, 7))
    toy.run(seq)
    toy.run(fork)
    toy.check(seq, fork)


@pytest.mark.parametrize("how", ["quota", "purge"])
def test_full_blocks_that_the_tree_did_not_take_are_copied_when_written(toy, how):
    namespace = pk.Namespace(tenant="small")
    seq = toy.cache.sequence(prompt(1, 13), namespace)
    if how == "quota":
        toy.cache.set_quota(namespace, pk.Blocks(1))
    else:
        toy.cache.purge(namespace)
    toy.run(seq)
    (fork,) = seq.fork()
    seq.append(1)
    toy.run(seq)
    seq.truncate(6)
    seq.append([2, 3, 4])
    toy.run(seq)
    toy.check(seq, fork)
    fork.truncate(2)
    fork.append(prompt(3, 12))
    toy.run(fork)
    toy.check(seq, fork)


def test_out_of_blocks_for_a_copy_changes_nothing(open_cache):
    toy = Toy(open_cache(2))
    seq = toy.cache.sequence(prompt(1, 6))
    toy.run(seq)
    (fork,) = seq.fork()
    fork.append(1)
    with pytest.raises(pk.OutOfBlocks):
        toy.run(fork)
    toy.check(seq, fork)
    seq.release()
    toy.run(fork)
    toy.check(fork)


def test_the_source_of_a_copy_stays_until_it_is_copied_whatever_other_threads_do(open_cache, monkeypatch):
    toy = Toy(open_cache(4))
    seq = toy.cache.sequence(prompt(1, 3))
    toy.run(seq)
    (fork,) = seq.fork()
    seq.append(10)
    fork.append(20)
    kv_type = type(toy.cache._engine.kv)
    copy, others = kv_type.copy_blocks, []

    def disturbed(self, pairs):
        """Another thread makes its own copy, releases, and a third sequence takes what became free."""
        monkeypatch.setattr(kv_type, "copy_blocks", copy)

        def other_thread():
            toy.run(fork)
            fork.release()
            others.append(toy.cache.sequence(prompt(2, 4)))
            toy.run(*others)

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        copy(self, pairs)

    monkeypatch.setattr(kv_type, "copy_blocks", disturbed)
    toy.run(seq)
    toy.check(seq, *others)


@pytest.mark.parametrize("n", [-1, 1.5, "2", None, 10**30, True], ids=repr)
def test_an_impossible_number_of_forks_is_refused(toy, n):
    seq = toy.cache.sequence([1])
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        seq.fork(n)
    assert toy.cache.stats().sequences == 1


def test_a_beam_search_ends_with_the_content_of_its_beams(toy):
    choose = np.random.default_rng(3)
    beams = [toy.cache.sequence(prompt(1, 7))]
    toy.run(*beams)
    for _ in range(12):
        grown = [fork for beam in beams for fork in beam.fork(2)]
        for beam in beams:
            beam.release()
        for i, beam in enumerate(grown):
            beam.append(i)
        toy.run(*grown)
        toy.check(*grown)
        keep = set(choose.permutation(len(grown))[:3].tolist())
        for i, beam in enumerate(grown):
            if i not in keep:
                beam.release()
        beams = [beam for i, beam in enumerate(grown) if i in keep]
    toy.check(*beams)
