"""Namespaces, both ways: never a hit across them, always one within."""

from __future__ import annotations

import itertools

import pytest

import pagedkv as pk

from .conftest import BLOCK, Toy, all_free, prompt, where

DIGEST = bytes(range(32))
NAMES = [
    None, pk.Namespace(model="m"), pk.Namespace(tenant="m"), pk.Namespace(salt="m"), pk.Namespace(modality="m"),
    pk.Namespace(model=b"m"), pk.Namespace(extra=b"m"), pk.Namespace(adapter=DIGEST),
    pk.Namespace(adapter=DIGEST[::-1]),
    pk.Namespace(model="m", tenant="m"), pk.Namespace(model="mm"), pk.Namespace(model=""), pk.Namespace(tenant="a",
    salt="b"),
    pk.Namespace(tenant="ab"),
]  # fmt: skip
A, B = pk.Namespace(tenant="a"), pk.Namespace(tenant="b")


def test_no_two_namespaces_share_and_each_shares_with_itself(open_cache):
    cache = open_cache(80)
    toys = [Toy(cache, salt) for salt in range(len(NAMES))]
    for toy, name in zip(toys, NAMES, strict=True):
        assert toy.use(prompt(1), name) == {}
    for toy, name in zip(toys, NAMES, strict=True):
        assert toy.use(prompt(1), name) == {"device": 3 * BLOCK}, name


def test_an_equal_namespace_is_the_same_namespace(open_cache):
    toy = Toy(open_cache())
    toy.use(prompt(1), pk.Namespace(model="m", adapter=DIGEST, tenant="t", salt="s"))
    assert toy.use(prompt(1), pk.Namespace(salt="s", tenant="t", adapter=bytes(DIGEST), model="m"))


def test_the_default_namespace_is_the_empty_one(open_cache):
    toy = Toy(open_cache())
    toy.use(prompt(1))
    assert toy.use(prompt(1), pk.Namespace()) == {"device": 3 * BLOCK}


@pytest.mark.parametrize("budgets", [{"host": 40}, {"disk": 40}, {"host": 4, "disk": 40}], ids=str)
def test_namespaces_hold_on_every_tier(open_cache, budgets):
    cache = open_cache(4, **budgets)
    mine, theirs = Toy(cache, 1), Toy(cache, 2)
    for start in range(4):
        mine.use(prompt(start), A)
        theirs.use(prompt(start), B)
    for start in range(4):
        assert sum(mine.use(prompt(start), A).values()) == 3 * BLOCK
        assert sum(theirs.use(prompt(start), B).values()) == 3 * BLOCK
    assert cache.explain(prompt(0)).cached_tokens == 0


def test_namespaces_hold_across_a_reopened_disk(open_cache):
    cache = open_cache(4, disk=60)
    for salt, name in enumerate([A, B]):
        for start in range(3):
            Toy(cache, salt).use(prompt(start), name)
    Toy(cache).use(prompt(7, 4 * BLOCK))
    cache.close()
    cache = open_cache(4, disk=60)
    assert cache.explain(prompt(0)).cached_tokens == 0
    found = 0
    for salt, name in enumerate([A, B]):
        for start in range(3):
            found += sum(Toy(cache, salt).use(prompt(start), name).values())
    assert found >= 4 * 3 * BLOCK


def test_a_step_may_mix_namespaces(open_cache):
    cache = open_cache(32)
    first, second = cache.sequence(prompt(1), A), cache.sequence(prompt(1), B)
    mine, theirs = Toy(cache, 1), Toy(cache, 2)
    with cache.step([first, second]) as step:
        for layer in range(cache.spec.num_layers):
            pairs = [toy.kv(prompt(1), layer) for toy in (mine, theirs)]
            step.write(layer, *(list(itertools.chain(*parts)) for parts in zip(*pairs, strict=True)))
    mine.check(first)
    theirs.check(second)
    assert set(first.blocks.tolist()).isdisjoint(second.blocks.tolist())


def test_purged_it_never_matches_again_and_its_blocks_are_free(open_cache):
    toy = Toy(open_cache(8, host=8))
    for start in range(1, 4):
        toy.use(prompt(start), A)
    toy.use(prompt(1), B)
    assert toy.cache.purge(A) > 0
    for start in range(1, 4):
        assert toy.cache.explain(prompt(start), A).cached_tokens == 0
    counts = toy.cache.stats().blocks
    assert counts["device"]["cached"] + counts["host"]["cached"] == 3, "the other namespace's"
    assert sum(toy.use(prompt(1), B).values()) == 3 * BLOCK
    assert toy.use(prompt(1), A) == {}
    assert sum(toy.use(prompt(1), A).values()) == 3 * BLOCK, "a purged namespace may be used anew"


def test_purged_it_does_not_come_back_from_a_reopened_disk(open_cache):
    cache = open_cache(4, disk=60)
    old = Toy(cache, salt=1)
    for start in range(4):
        old.use(prompt(start), A)
        old.use(prompt(start), B)
    assert cache.purge(A) > 0
    cache.close()
    cache = open_cache(4, disk=60)
    assert [cache.explain(prompt(start), A).cached_tokens for start in range(4)] == [0] * 4
    assert cache.explain(prompt(0), B).cached_tokens == 3 * BLOCK
    new = Toy(cache, salt=2)
    for start in range(4):
        new.use(prompt(start), A)


@pytest.mark.parametrize("hold", [pk.KVCache.pin, pk.KVCache.sequence], ids=["pin", "sequence"])
def test_purged_while_held_it_does_not_come_back_but_what_was_computed_anew_does(open_cache, hold):
    cache = open_cache(8, disk=60, pin_budget=3, partial_hits=False)
    others = [Toy(cache, salt=salt) for salt in range(3)]
    others[1].use(prompt(1), A)
    others[0].use(prompt(7, 8 * BLOCK))
    assert where(cache, prompt(1), A) == [("disk", 3)]
    held = hold(cache, prompt(1), A)
    assert cache.purge(A) == 0
    others[2].use(prompt(2), A)
    for start in (8, 9):
        others[0].use(prompt(start, 4 * BLOCK))
    assert where(cache, prompt(2), A) == [("disk", 3)]
    cache.close()
    cache = open_cache(8, disk=60)
    assert where(cache, prompt(1), A) == []
    assert Toy(cache, salt=2).use(prompt(2), A) == {"disk": 3 * BLOCK}
    del held


def test_a_sequence_of_a_purged_namespace_goes_on_alone(open_cache):
    old, new = Toy(open_cache(32), salt=1), None
    seq = old.cache.sequence(prompt(1), A)
    old.run(seq)
    old.cache.purge(A)
    new = Toy(old.cache, salt=2)
    assert new.use(prompt(1), A) == {}
    seq.append(prompt(2, 6))
    old.run(seq)
    old.check(seq)
    (fork,) = seq.fork()
    seq.release()
    old.check(fork)
    fork.release()
    assert all_free(old.cache)
    assert new.use(prompt(1), A) == {"device": 3 * BLOCK}
    assert new.use([*prompt(1), *prompt(2, 6)], A).get("device") == 3 * BLOCK


def test_purging_while_its_blocks_move(open_cache):
    cache = open_cache(4, host=4, disk=12)
    for turn in range(12):
        toy = Toy(cache, turn)
        for start in range(3):
            toy.use(prompt(start), A)
        tickets = [cache.prefetch(prompt(start), A) for start in range(3)]
        cache.purge(A)
        for ticket in tickets:
            ticket.wait(60)
        cache.check_integrity()
    assert all_free(cache)


def test_purging_what_was_never_used_is_fine(open_cache):
    cache = open_cache()
    assert cache.purge(A) == 0
    assert cache.purge(A) == 0


def test_a_quota_bounds_what_a_namespace_keeps_and_leaves_others_alone(open_cache):
    toy = Toy(open_cache(32))
    toy.cache.set_quota(A, pk.Blocks(4))
    toy.use(prompt(1), B)
    for start in range(1, 10):
        toy.use(prompt(start), A)
    kept = sum(toy.cache.explain(prompt(start), A).cached_tokens for start in range(1, 10))
    assert 0 < kept <= 4 * BLOCK
    assert toy.use(prompt(1), B) == {"device": 3 * BLOCK}
    toy.cache.set_quota(A, None)
    for start in range(1, 5):
        toy.use(prompt(start), A)
    assert sum(toy.cache.explain(prompt(start), A).cached_tokens for start in range(1, 5)) == 12 * BLOCK


def test_a_prompt_longer_than_its_quota_is_computed_all_the_same(open_cache):
    toy = Toy(open_cache(32))
    toy.cache.set_quota(A, pk.Blocks(2))
    toy.use(prompt(1, 6 * BLOCK), A)
    assert toy.use(prompt(1, 6 * BLOCK), A).get("device", 0) <= 2 * BLOCK


def test_a_quota_set_later_evicts_at_once(open_cache):
    toy = Toy(open_cache(32, host=32))
    for start in range(4):
        toy.use(prompt(start), A)
    toy.cache.set_quota(A, pk.Blocks(3))
    toy.use(prompt(9), B)
    device = sum(n for start in range(4) for tier, n in where(toy.cache, prompt(start), A) if tier == "device")
    assert device <= 3
    for start in range(4):
        toy.use(prompt(start), A)


@pytest.mark.parametrize(
    "wrong",
    [
        *[("stranger", 4), (A, 0), (A, -1), (A, 1.5), (A, "x"), (A, 4, "host"), (A, 4, 0), (A, 4, None)],
        *[(A, 4, pk.Tier.DISK), (A, 4, pk.Tier.REMOTE)],
    ],
    ids=str,
)
def test_an_impossible_quota_is_refused(open_cache, wrong):
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        open_cache(8, host=4).set_quota(*wrong)


@pytest.mark.parametrize("call", ["sequence", "explain", "prefetch", "pin"])
def test_a_cache_that_requires_a_namespace_refuses_calls_without_one(open_cache, call):
    toy = Toy(open_cache(require_namespace=True, pin_budget=4))
    with pytest.raises(pk.NamespaceRequired, match="namespace="):
        getattr(toy.cache, call)(prompt(1))
    toy.use(prompt(1), A)
    assert toy.use(prompt(1), A) == {"device": 3 * BLOCK}
    with pytest.raises(pk.NamespaceRequired):
        toy.cache.purge(None)


@pytest.mark.parametrize("wrong", ["tenant", b"x", 5, ("a",), {"tenant": "a"}, pk.Namespace], ids=repr)
def test_what_is_no_namespace_is_refused(open_cache, wrong):
    cache = open_cache()
    for call in (cache.sequence, cache.explain, cache.prefetch, cache.pin):
        with pytest.raises(pk.WrongType):
            call([1], wrong)
    with pytest.raises(pk.WrongType):
        cache.purge(wrong)


def test_many_namespaces_come_and_go(open_cache):
    toy = Toy(open_cache(8))
    for i in range(200):
        name = pk.Namespace(tenant=str(i))
        assert toy.use(prompt(1), name) == {}
        assert toy.use(prompt(1), name) == {"device": 3 * BLOCK}
        if i % 2:
            toy.cache.purge(name)
    assert all_free(toy.cache)


def test_a_purged_namespace_keeps_its_quota(open_cache):
    toy = Toy(open_cache(20))
    toy.cache.set_quota(A, pk.Blocks(2))
    toy.use(prompt(1, 6 * BLOCK), A)
    toy.cache.purge(A)
    toy.use(prompt(1, 6 * BLOCK), A)
    assert len(where(toy.cache, prompt(1, 6 * BLOCK), A)) <= 2
