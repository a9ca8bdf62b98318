"""No byte of a namespace shows in another one's blocks.

That includes the part of a block that is not written yet.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tiers import DiskTier

from .conftest import BLOCK, SPEC, Toy, prompt, where

A, B = pk.Namespace(tenant="a"), pk.Namespace(tenant="b")
POISON = 0xFF


def fill(cache, namespace):
    """Take every block that has no holder for a sequence of `namespace`, and release it.

    The sequence fills the blocks with POISON bytes first.
    """
    counts = cache.stats().blocks["device"]
    seq = cache.sequence(prompt(90, (counts["max"] - counts["live"]) * BLOCK), namespace)
    with cache.step([seq]) as step:
        cache.device_arena[seq.blocks] = POISON
        for layer in range(cache.spec.num_layers):
            step.mark_written(layer)
    return seq


def unwritten(cache, seq):
    """The bytes of a sequence's blocks that belong to no computed token."""
    whole, part = divmod(seq.num_computed, BLOCK)
    rest = []
    for layer in range(cache.spec.num_layers):
        for view in cache.layer(layer):
            for i, block in enumerate(seq.blocks.tolist()):
                rest.append(view[block, (0 if i > whole else part if i == whole else BLOCK) :].ravel())
    return np.concatenate(rest)


def assert_zeroed_for(cache, namespace, blocks):
    """A sequence of `namespace` that takes all there is finds zeros in these blocks."""
    counts = cache.stats().blocks["device"]
    seq = cache.sequence(prompt(91, (counts["max"] - counts["live"]) * BLOCK), namespace)
    with cache.step([seq]) as step:
        assert set(blocks) <= set(seq.blocks.tolist())
        assert not cache.device_arena[list(blocks)].any()
        for layer in range(cache.spec.num_layers):
            step.mark_written(layer)
    seq.release()


def scribbled(cache, namespace):
    seq = fill(cache, namespace)
    seq.release()


@pytest.mark.parametrize("lookahead", [0, 1, 9])
@pytest.mark.parametrize("scrub", ["across_namespaces", "always", "never"])
def test_the_unwritten_tail_of_a_block_shows_nothing_of_another_namespace(open_cache, scrub, lookahead):
    cache = open_cache(6, scrub=scrub)
    toy = Toy(cache)
    scribbled(cache, A)
    with cache.sequence(prompt(1, BLOCK + 1), B) as seq:
        toy.run(seq, lookahead=lookahead)
        toy.check(seq)
        assert unwritten(cache, seq).size
        assert (not unwritten(cache, seq).any()) == (scrub != "never")


@pytest.mark.parametrize(("scrub", "clean"), [("across_namespaces", False), ("always", True), ("never", False)])
def test_within_a_namespace_only_always_zeroes(open_cache, scrub, clean):
    cache = open_cache(6, scrub=scrub)
    toy = Toy(cache)
    toy.use(prompt(7, 3), A)  # two namespaces are known
    scribbled(cache, B)
    with cache.sequence(prompt(1, BLOCK + 1), B) as seq:
        toy.run(seq)
        assert (not unwritten(cache, seq).any()) == clean


def test_what_a_sequence_wrote_is_never_zeroed(open_cache):
    cache = open_cache(12, scrub="always")
    toys = [Toy(cache, salt) for salt in range(2)]
    scribbled(cache, A)
    seqs = [cache.sequence(prompt(1, 2), name) for name in (A, B)]
    for toy, seq in zip(toys, seqs, strict=True):
        for token, lookahead in zip(range(14), itertools.cycle([0, 3, 1, 6])):
            toy.run(seq, lookahead=lookahead)
            toy.check(seq)
            seq.append(token)
            if token % 5 == 4:
                seq.truncate(seq.num_tokens - 2)
    for toy, seq in zip(toys, seqs, strict=True):
        toy.run(seq)
        toy.check(seq)
        seq.release()


def test_a_step_of_several_namespaces_zeroes_each_ones_own(open_cache):
    cache = open_cache(8)
    toy = Toy(cache)
    first = fill(cache, A)
    kept = first.blocks.tolist()
    first.release()
    mine, theirs = cache.sequence(prompt(2, 1), A), cache.sequence(prompt(2, 1), B)
    toy.run(mine, theirs)
    assert unwritten(cache, mine).any(), "its own namespace's leavings: no work for nothing"
    assert not unwritten(cache, theirs).any()
    assert set(mine.blocks.tolist()) | set(theirs.blocks.tolist()) <= set(kept)


def test_a_copy_on_write_shows_what_was_copied_and_is_its_namespaces_afterwards(open_cache):
    cache = open_cache(8)
    toy = Toy(cache)
    seq = cache.sequence(prompt(1, BLOCK + 3), B)
    toy.run(seq)
    scribbled(cache, A)
    (fork,) = seq.fork()
    fork.append(5)
    toy.run(fork)
    toy.check(seq, fork)
    assert fork.blocks[-1] != seq.blocks[-1]
    assert not unwritten(cache, fork).any()
    block = int(fork.blocks[-1])
    fork.release()
    assert_zeroed_for(cache, A, [block])  # whose the block was before the copy
    seq.release()


def test_a_partial_hit_shows_nothing_but_its_own_namespace(open_cache):
    cache = open_cache(8)
    toy = Toy(cache)
    toy.use(prompt(1, 2 * BLOCK), B)
    held = cache.sequence(prompt(1, BLOCK + 1), B)
    scribbled(cache, A)
    toy.run(held)
    toy.use(prompt(1, 2 * BLOCK), B)
    cache.moves.make_room(3)
    with cache.sequence([*prompt(1, BLOCK + 2), 7, 7], B) as seq:
        assert seq.hit_tokens["partial"] == 2
        wanted = cache.explain(prompt(1, 2 * BLOCK), B).runs[0].block_ids[1]
        got = seq.blocks[-1]
        assert np.array_equal(cache.device_arena[got], cache.device_arena[wanted])
        toy.run(seq)
        toy.check(seq)
    assert_zeroed_for(cache, A, [int(got)])
    held.release()


@pytest.mark.parametrize("below", ["host", "disk"])
def test_a_promoted_block_is_known_to_be_its_namespaces(open_cache, below):
    cache = open_cache(4, **{below: 20})
    mine, theirs = Toy(cache, 1), Toy(cache, 2)
    mine.use(prompt(1), A)
    theirs.use(prompt(2, 4 * BLOCK), B)
    assert where(cache, prompt(1), A) == [(below, 3)]
    mine.use(prompt(1), A)  # came up into blocks that were B's
    (run,) = cache.explain(prompt(1), A).runs
    assert run.tier == pk.Tier.DEVICE
    assert_zeroed_for(cache, B, run.block_ids)


class Lying(DiskTier):
    """Delivers bytes and says that they are wrong."""

    lie = False

    def read(self, blocks, expected, arena, dst_blocks):
        ok = super().read(blocks, expected, arena, dst_blocks)
        if self.lie:
            arena[dst_blocks] = POISON
            ok[:] = False
        return ok


@pytest.mark.parametrize("namespaces", [(A, B), (A, A)], ids=["another", "the same"])
def test_what_a_failed_promotion_read_shows_in_nobodys_block(open_cache, monkeypatch, namespaces):
    monkeypatch.setattr(pk.cache.tiered, "DiskTier", Lying)
    cache = open_cache(4, disk=20)
    toy = Toy(cache)
    toy.use(prompt(1), namespaces[0])
    toy.use(prompt(2, 4 * BLOCK), namespaces[0])
    assert where(cache, prompt(1), namespaces[0]) == [("disk", 3)]
    cache._storage.store.lie = True
    with cache.sequence(prompt(1), namespaces[0]) as seq:
        assert sum(seq.hit_tokens.values()) == 0
    with cache.sequence(prompt(3, 2 * BLOCK + 1), namespaces[1]) as seq:
        toy.run(seq)
        assert (cache.device_arena == POISON).all(axis=1).sum() < 4
        assert not unwritten(cache, seq).any()


def test_a_namespace_used_anew_after_a_purge_is_another(open_cache):
    cache = open_cache(4)
    toy = Toy(cache)
    scribbled(cache, A)
    cache.purge(A)
    with cache.sequence(prompt(1, 2), A) as seq:
        toy.run(seq)
        assert not unwritten(cache, seq).any()


def test_while_there_is_one_namespace_nothing_is_remembered(open_cache):
    cache = open_cache(6)
    Toy(cache).use(prompt(1), A)
    assert not cache._scrub.active
    Toy(cache, 1).use(prompt(1), B)
    assert cache._scrub.active


def test_random_traffic_of_three_tenants_never_shows_anothers_bytes(open_cache):
    """Every byte of an unwritten tail is zero or one that its own tenant once had there."""
    cache = open_cache(10, host=6, disk=30)
    tenants = [pk.Namespace(tenant=name) for name in "abc"]
    choose = random.Random(11)
    for turn in range(150):
        tenant = choose.randrange(3)
        tokens = choose.choices([0, 1], k=choose.randint(1, 24))
        with cache.sequence(tokens, tenants[tenant]) as seq:
            with cache.step([seq], lookahead=choose.choice([0, 0, 5])) as step:
                value = np.float32(tenant + 1)
                for layer in range(SPEC.num_layers):
                    shape = (len(step.tokens), SPEC.num_kv_heads, SPEC.head_dim)
                    step.write(layer, np.full(shape, value), np.full(shape, value))
            held = cache.device_arena[seq.blocks].view(np.float32)
            assert np.isin(held, [0, tenant + 1]).all(), f"turn {turn} of tenant {tenant}"


@pytest.mark.parametrize("wrong", ["sometimes", "", None, 1, True, ["always"]])
def test_an_unknown_way_to_scrub_is_refused(open_cache, wrong):
    with pytest.raises((pk.InvalidArgument, pk.WrongType), match="scrub"):
        open_cache(4, scrub=wrong)


@pytest.mark.parametrize(
    "begin",
    [lambda cache, fork: cache.sequence([7, 7, 9, 9, 9, 9], B), lambda cache, fork: cache.step([fork]).__enter__()],
    ids=["reused in part", "copied on write"],
)
def test_a_copy_that_is_interrupted_leaves_nothing_of_another_namespace(open_cache, monkeypatch, begin):
    """The block was to hold a copy; what stood there before is another namespace's."""
    cache = open_cache(4)
    toy = Toy(cache)
    seq = cache.sequence([7, 7, 7, 7, 8], B)
    toy.run(seq)
    (fork,) = seq.fork(1)  # shares the block that is not full: the first that writes copies it
    fork.append(9)
    scribbled(cache, A)
    cache.purge(A)
    copy = type(cache._engine.kv).copy_blocks

    def interrupted(kv, pairs):
        monkeypatch.setattr(type(kv), "copy_blocks", copy)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(cache._engine.kv), "copy_blocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(cache, fork)
    fork.release()
    seq.release()
    cache.check_integrity()
    seqs = [cache.sequence([40 + i], B) for i in range(3)]
    toy.run(*seqs)
    assert not any(unwritten(cache, one).any() for one in seqs)

