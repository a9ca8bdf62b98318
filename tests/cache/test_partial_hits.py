"""A block that agrees only in its first tokens is reused by copying it.

No other sequence is affected.
"""

from __future__ import annotations

import pytest

import pagedkv as pk

from .conftest import BLOCK, Toy, all_free, prompt


@pytest.fixture
def toy(open_cache):
    toy = Toy(open_cache(32))
    toy.use(prompt(1))
    return toy


@pytest.mark.parametrize("agree", range(2 * BLOCK + 1))
def test_the_agreeing_front_of_the_next_block_is_a_hit(toy, agree):
    tokens = [*prompt(1)[:agree], *prompt(2, 9)]
    hits = toy.use(tokens)
    whole = agree // BLOCK * BLOCK
    wanted = {"device": whole, "partial": agree - whole}
    assert hits == {tier: count for tier, count in wanted.items() if count}
    toy.use(prompt(1))


def test_a_prompt_that_ends_inside_a_cached_block_leaves_one_token_to_compute(toy):
    assert toy.use(prompt(1)[: BLOCK + 3]) == {"device": BLOCK, "partial": 2}
    assert toy.use(prompt(1)[: 2 * BLOCK]) == {"device": BLOCK, "partial": BLOCK - 1}
    assert toy.use(prompt(1)[:BLOCK]) == {"partial": BLOCK - 1}
    assert toy.use(prompt(1)[:1]) == {}


def test_the_longest_agreement_wins(toy):
    base = prompt(1)[:BLOCK]
    toy.use([*base, 1, 2, 3, 4, 5])
    toy.use([*base, 1, 2, 9, 9, 5])
    assert toy.use([*base, 1, 2, 9, 8, 7]) == {"device": BLOCK, "partial": 3}


def test_the_copy_is_private(toy):
    with toy.cache.sequence([*prompt(1)[:6], *prompt(2, 5)]) as seq:
        assert seq.hit_tokens["partial"] == 2
        with toy.cache.sequence(prompt(1)) as source:
            assert seq.blocks[1] != source.blocks[1]
            toy.run(seq, source)
            toy.check(seq, source)


def test_a_fork_of_a_sequence_that_reused_a_part(toy):
    with toy.cache.sequence([*prompt(1)[:6], *prompt(2, 5)]) as seq:
        (fork,) = seq.fork()
        fork.truncate(7)
        fork.append(prompt(3, 4))
        toy.run(seq)
        toy.run(fork)
        toy.check(seq, fork)
        fork.release()


def is_whole(cache: pk.KVCache) -> bool:
    """Whether the first prompt's blocks are one run; the promotion of one would cut it."""
    return tuple(prompt(1)[: len(prompt(1)) // BLOCK * BLOCK]) in [n[2] for n in cache.placement.tree.dump().values()]


@pytest.mark.parametrize("first", [0, BLOCK])
def test_a_part_of_a_block_below_the_device_is_promoted_and_copied(open_cache, first):
    """Behind a whole block, which comes up with it, and at the start of the prompt."""
    toy = Toy(open_cache(4, host=16))
    toy.use(prompt(1))
    toy.use(prompt(2, 4 * BLOCK))
    shared = prompt(1)[: first + 2]
    assert toy.cache.explain([*shared, *prompt(3, 4)]).partial_tokens == 2
    hits = toy.use([*shared, *prompt(3, 4)])
    assert hits == ({"host": first, "partial": 2} if first else {"partial": 2})
    assert all_free(toy.cache)


def test_a_part_below_the_device_that_is_computed_faster_stays_there(open_cache):
    toy = Toy(open_cache(4, host=16))
    toy.use(prompt(1))
    toy.use(prompt(2, 4 * BLOCK))
    toy.cache.observe_prefill(1000, 1e-3)
    toy.cache.costs.observe_load(1, toy.cache.spec.block_bytes, 1.0)
    assert toy.use([*prompt(1)[:2], *prompt(3, 1)]) == {}
    assert is_whole(toy.cache)


def test_a_part_below_the_device_is_left_there_where_parts_are_switched_off(open_cache):
    toy = Toy(open_cache(4, host=16, partial_hits=False))
    toy.use(prompt(1))
    toy.use(prompt(2, 4 * BLOCK))
    assert toy.use([*prompt(1)[:2], *prompt(3, 4)]) == {}
    assert is_whole(toy.cache)


def test_a_part_on_disk_is_promoted_after_a_restart(open_cache, tmp_path):
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(16), write="all", admission="all")
    with open_cache(8, disk=disk) as cache:
        Toy(cache).use(prompt(1, 2 * BLOCK))
        cache.checkpoint()
    with open_cache(8, disk=disk) as cache:
        assert Toy(cache).use([*prompt(1)[: BLOCK + 3], *prompt(3, 4)]) == {"disk": BLOCK, "partial": 3}
        assert all_free(cache)


@pytest.mark.parametrize("host", [None, 8])
def test_a_part_is_copied_into_the_room_of_a_colder_block(open_cache, host):
    toy = Toy(open_cache(4, host=host))
    toy.use(prompt(2, BLOCK))
    toy.use(prompt(1, 3 * BLOCK))
    assert toy.use([*prompt(1)[:2], 5, 5]) == {"partial": 2}
    assert toy.use(prompt(1, 3 * BLOCK + 1)) == {"device": 3 * BLOCK}
    assert all_free(toy.cache)


def test_no_part_is_reused_where_there_is_no_room_but_its_own(open_cache):
    toy = Toy(open_cache(4))
    toy.use(prompt(1, BLOCK))
    held = toy.cache.sequence(prompt(2, 3 * BLOCK))
    toy.run(held)
    with toy.cache.sequence([*prompt(1)[:2], 5, 5]) as seq:
        assert seq.num_computed == 0
        assert seq.hit_tokens["partial"] == 0
        toy.run(seq)  # evicts what it could not copy
        toy.check(seq, held)
    held.release()
    assert all_free(toy.cache)


def test_switched_off_only_whole_blocks_are_hits(open_cache):
    toy = Toy(open_cache(partial_hits=False))
    toy.use(prompt(1))
    assert toy.use(prompt(1)[:6]) == {"device": BLOCK}
    assert toy.cache.stats().hit_tokens["partial"] == 0


def test_no_part_crosses_namespaces(toy):
    other = pk.Namespace(tenant="other")
    assert toy.use(prompt(1)[:3], other) == {}
    theirs = Toy(toy.cache, salt=1)
    theirs.use(prompt(2), other)
    assert theirs.use(prompt(2)[:3], other) == {"partial": 2}
    assert theirs.use(prompt(1)[:3], other) == {}


def test_explain_counts_the_tokens_that_agree(toy):
    found = toy.cache.explain([*prompt(1)[:6], 1, 2, 3])
    assert (found.cached_tokens, found.partial_tokens) == (BLOCK, 2)


def test_many_continuations_of_one_block(toy):
    base = prompt(1)[:BLOCK]
    for i in range(6):
        toy.use([*base, 50 + i, 1, 2, 3, 4])
    for i in range(6):
        hits = toy.use([*base, 50 + i, 1, 9, 9, 9])
        assert hits == {"device": BLOCK, "partial": 2}
