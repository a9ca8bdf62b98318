"""A sequence from its prompt to its release.

What is cached, what is left to compute, and what is given back.
"""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk

from .conftest import BLOCK, Toy, all_free, prompt

LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 2]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_second_request_finds_all_whole_blocks_but_leaves_a_token_to_compute(open_cache, length):
    toy = Toy(open_cache(partial_hits=False))
    assert toy.use(prompt(1, length)) == {}
    whole = max(length - 1, 0) // BLOCK * BLOCK
    assert sum(toy.use(prompt(1, length)).values()) == whole
    assert all_free(toy.cache)


def test_a_new_sequence_has_its_tokens_and_nothing_computed(open_cache):
    with open_cache().sequence([5, 6, 7, 8, 9]) as seq:
        assert (seq.num_tokens, seq.num_computed, len(seq), len(seq.blocks)) == (5, 0, 5, 0)
        assert seq.tokens.tolist() == [5, 6, 7, 8, 9]
        assert seq.tokens.dtype == np.int32
        assert "5 tokens" in repr(seq)


def test_tokens_and_blocks_are_copies(open_cache):
    toy = Toy(open_cache())
    with toy.cache.sequence([1, 2, 3, 4, 5]) as seq:
        toy.run(seq)
        before = seq.blocks
        seq.tokens[:] = 0
        seq.blocks[:] = 0
        assert seq.tokens.tolist() == [1, 2, 3, 4, 5]
        assert seq.blocks.tolist() == before.tolist()
        toy.check(seq)


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(9),
        np.arange(18)[::2],
        np.arange(9, dtype=">i4"),
        range(9),
        tuple(range(9)),
        np.arange(9, dtype=np.uint8),
    ],
    ids=["int64", "strided", "big-endian", "range", "tuple", "uint8"],
)
def test_a_prompt_may_be_any_sequence_of_whole_numbers(open_cache, tokens):
    toy = Toy(open_cache())
    toy.use([int(token) for token in tokens])
    assert toy.use(tokens) == {"device": 2 * BLOCK}


def test_the_prompt_is_copied(open_cache):
    toy = Toy(open_cache())
    tokens = np.arange(9, dtype=np.int32)
    with toy.cache.sequence(tokens) as seq:
        tokens[:] = 0
        assert seq.tokens.tolist() == list(range(9))


@pytest.mark.parametrize("token", [7, np.int64(7), np.int32(7), [7], np.array([7])], ids=lambda t: type(t).__name__)
def test_appending_one_token(open_cache, token):
    with open_cache().sequence([1]) as seq:
        seq.append(token)
        assert seq.tokens.tolist() == [1, 7]


def test_a_conversation_grows_turn_by_turn(open_cache):
    toy = Toy(open_cache(64))
    with toy.cache.sequence(prompt(1, 5)) as seq:
        for turn in range(2, 6):
            toy.run(seq)
            seq.append(prompt(turn, turn))
            seq.append(3)
            toy.check(seq)
        toy.run(seq)
        toy.check(seq)
        history = seq.tokens
    assert toy.use(history) == {"device": (len(history) - 1) // BLOCK * BLOCK}


@pytest.mark.parametrize("wrong", ["7", None, 1.5, [1.5], True, [[1]], {1}, np.float32(1)], ids=repr)
def test_appending_what_is_no_token_changes_nothing(open_cache, wrong):
    with open_cache().sequence([1]) as seq:
        with pytest.raises(pk.WrongType):
            seq.append(wrong)
        assert seq.tokens.tolist() == [1]


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, [0, 2**40], np.array([2**63], np.uint64)], ids=repr)
def test_appending_a_token_beyond_int32_changes_nothing(open_cache, wrong):
    with open_cache().sequence([1]) as seq:
        with pytest.raises(pk.InvalidArgument):
            seq.append(wrong)
        assert seq.tokens.tolist() == [1]


def test_the_largest_and_smallest_tokens_are_tokens(open_cache):
    toy = Toy(open_cache())
    tokens = [2**31 - 1, -(2**31), 0, -1, 5]
    toy.use(tokens)
    assert toy.use(tokens) == {"device": BLOCK}
    assert toy.use([0, *tokens[1:]]) == {}


@pytest.mark.parametrize("keep", range(11))
def test_truncated_and_grown_differently_it_holds_the_new_content(open_cache, keep):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 10)) as seq:
        toy.run(seq)
        seq.truncate(keep)
        assert seq.num_tokens == keep
        assert seq.num_computed <= keep
        toy.check(seq)
        seq.append(prompt(2, 7))
        toy.run(seq)
        toy.check(seq)
    assert toy.use(prompt(1, 10)).get("device") == 2 * BLOCK, "truncating must not touch what is cached"


def test_truncating_beyond_the_end_is_refused(open_cache):
    with open_cache().sequence([1, 2, 3]) as seq:
        with pytest.raises(pk.InvalidArgument, match="fewer than 4"):
            seq.truncate(4)
        with pytest.raises(pk.InvalidArgument):
            seq.truncate(-1)
        assert seq.num_tokens == 3


def test_truncating_gives_blocks_back(open_cache):
    toy = Toy(open_cache(4))
    with toy.cache.sequence(prompt(1, 4 * BLOCK)) as seq:
        toy.run(seq)
        seq.truncate(BLOCK)
        with toy.cache.sequence(prompt(2, 3 * BLOCK)) as other:
            toy.run(other)
            toy.check(seq, other)


def test_sequences_that_computed_the_same_prompt_share_its_blocks(open_cache):
    toy = Toy(open_cache())
    first, second = toy.cache.sequence(prompt(1)), toy.cache.sequence(prompt(1))
    toy.run(first, second)
    toy.check(first, second)
    assert first.blocks[:3].tolist() == second.blocks[:3].tolist()
    assert first.blocks[3] != second.blocks[3], "the partly filled block belongs to one of them"
    first.release()
    toy.check(second)
    second.release()


def test_releasing_twice_is_fine_and_all_else_says_that_it_is_released(open_cache):
    cache = open_cache()
    seq = cache.sequence([1, 2, 3])
    seq.release()
    seq.release()
    assert repr(seq) == "<Sequence, released>"
    for use in (
        lambda: seq.tokens, lambda: seq.num_tokens, lambda: seq.num_computed, lambda: seq.blocks, lambda: seq.row,
        lambda: len(seq), lambda: seq.append(1), lambda: seq.truncate(0), lambda: seq.fork(), lambda: seq.gather(),
        lambda: seq.retain(), lambda: cache.step([seq]), lambda: seq.scatter(np.zeros((2, 3, 2, 4)), np.zeros((2, 3,
        2, 4))),
    ):  # fmt: skip
        with pytest.raises(pk.ClosedError):
            use()


def test_leaving_the_with_block_releases_also_after_an_exception(open_cache):
    toy = Toy(open_cache())
    with pytest.raises(KeyError), toy.cache.sequence(prompt(1)) as seq:  # noqa: PT012
        toy.run(seq)
        raise KeyError
    assert toy.cache.stats().sequences == 0
    assert all_free(toy.cache)
    assert toy.use(prompt(1))["device"] == 3 * BLOCK, "what was committed before the exception stays cached"


def test_out_of_blocks_names_the_numbers_and_holds_nothing(open_cache):
    toy = Toy(open_cache(4))
    held = toy.cache.sequence(prompt(1, 3 * BLOCK))
    toy.run(held)
    with toy.cache.sequence(prompt(2, 2 * BLOCK)) as seq:
        with pytest.raises(pk.OutOfBlocks) as caught:
            toy.run(seq)
        assert (caught.value.asked, caught.value.free, caught.value.held) == (2, 1, 3)
        assert seq.num_computed == 0
        assert len(seq.blocks) == 0
        held.release()
        toy.run(seq)
        toy.check(seq)


def test_a_prefix_below_that_does_not_fit_on_the_device_is_out_of_blocks_and_stays_where_it_is(open_cache):
    toy = Toy(open_cache(4, host=16))
    toy.use(prompt(1))
    toy.use(prompt(2))  # pushes the first to the host
    held = toy.cache.sequence(prompt(3, 2 * BLOCK))
    toy.run(held)
    with pytest.raises(pk.OutOfBlocks):
        toy.cache.sequence(prompt(1))
    assert toy.cache.explain(prompt(1)).cached_tokens == 3 * BLOCK
    assert toy.cache.stats().sequences == 1
    held.release()
    assert sum(toy.use(prompt(1)).values()) == 3 * BLOCK


def test_no_more_sequences_than_max_sequences(open_cache):
    cache = open_cache(max_sequences=2)
    first, second = cache.sequence([1]), cache.sequence([2])
    with pytest.raises(pk.InvalidArgument, match="max_sequences"):
        cache.sequence([3])
    with pytest.raises(pk.InvalidArgument, match="1 forks"):
        first.fork()
    second.release()
    cache.sequence([3]).release()
    first.release()


def test_a_higher_priority_stays_longer(open_cache):
    toy = Toy(open_cache(8))
    with toy.cache.sequence(prompt(1)) as seq:
        toy.run(seq)
        seq.retain(priority=90)
    for start in range(2, 8):
        toy.use(prompt(start))
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}


def test_a_prefix_whose_time_to_live_is_over_goes_first(open_cache):
    toy = Toy(open_cache(8))
    toy.use(prompt(2))
    with toy.cache.sequence(prompt(1)) as seq:  # younger than the other, and expired
        toy.run(seq)
        seq.retain(ttl_s=0)
    toy.use(prompt(3, BLOCK * 4))
    assert toy.cache.explain(prompt(2)).cached_tokens == 3 * BLOCK
    assert toy.cache.explain(prompt(1)).cached_tokens < 3 * BLOCK


@pytest.mark.parametrize(
    "wrong", [{"priority": 101}, {"priority": -1}, {"priority": 1.5}, {"ttl_s": -1}, {"ttl_s": float("nan")},
    {"ttl_s": "1"}],
    ids=str,
)  # fmt: skip
def test_retaining_with_impossible_numbers_is_refused(open_cache, wrong):
    with open_cache().sequence([1]) as seq, pytest.raises((pk.InvalidArgument, pk.WrongType)):
        seq.retain(**wrong)


def test_a_pinned_prefix_stays_until_the_pin_is_released(open_cache):
    toy = Toy(open_cache(8, pin_budget=3))
    toy.use(prompt(1))
    pinned = toy.cache.pin(prompt(1))
    assert (pinned.num_tokens, pinned.num_blocks, pinned.is_released) == (3 * BLOCK, 3, False)
    for start in range(2, 6):
        toy.use(prompt(start))
    assert toy.use(prompt(1))["device"] == 3 * BLOCK
    pinned.release()
    assert pinned.is_released
    for start in range(2, 6):
        toy.use(prompt(start))
    assert toy.use(prompt(1)) == {}


def test_a_pin_is_released_by_with_by_the_collector_and_as_often_as_one_likes(open_cache):
    toy = Toy(open_cache(8, pin_budget=3))
    toy.use(prompt(1))
    with toy.cache.pin(prompt(1)) as pinned:
        assert toy.cache.stats().placement["pinned_blocks"] == 3
        assert repr(pinned) == "<Pin, 12 tokens>"
    pinned.release()
    assert repr(pinned) == "<Pin, released>"
    assert toy.cache.stats().placement["pinned_blocks"] == 0
    pinned = toy.cache.pin(prompt(1))
    del pinned
    assert toy.cache.stats().placement["pinned_blocks"] == 0
    assert all_free(toy.cache)
    nothing = toy.cache.pin(prompt(9))
    assert (nothing.num_tokens, nothing.num_blocks) == (0, 0)


def test_pinning_beyond_the_budget_is_refused_and_holds_nothing(open_cache):
    toy = Toy(open_cache(8, pin_budget=2))
    toy.use(prompt(1))
    with pytest.raises(pk.PinBudgetExceeded):
        toy.cache.pin(prompt(1))
    assert all_free(toy.cache)
    pinned = toy.cache.pin(prompt(1)[: 2 * BLOCK])
    with pytest.raises(pk.PinBudgetExceeded):
        toy.cache.pin(prompt(1)[:BLOCK])
    pinned.release()
    with toy.cache.pin(prompt(1)[:BLOCK]):
        pass
    assert all_free(toy.cache)


def test_a_pin_is_made_by_a_cache_alone():
    for wrong in (None, 3, "pin"):
        with pytest.raises(pk.WrongType, match=r"KVCache\.pin"):
            pk.Pin(wrong, 4)


def test_a_pin_outlives_its_cache_without_harm(open_cache):
    toy = Toy(open_cache(8, pin_budget=3))
    toy.use(prompt(1))
    pinned = toy.cache.pin(prompt(1))
    toy.cache.close()
    pinned.release()
