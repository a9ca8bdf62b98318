"""``KVCache.match``: cached tokens by tier, one call of the core, nothing changed by it."""

from __future__ import annotations

import pytest

import pagedkv as pk

from .conftest import BLOCK, Toy, prompt, where

A = pk.Namespace(tenant="a")


def test_it_is_what_explain_says_on_every_tier(open_cache):
    toy = Toy(open_cache(8, host=4, disk=40))
    for start in range(1, 9):
        toy.use(prompt(start))
    found = set()
    for start in range(1, 10):
        said = toy.cache.match(prompt(start))
        spans = dict.fromkeys(said, 0)
        for tier, count in where(toy.cache, prompt(start)):
            spans[tier] += BLOCK * count
        assert said == spans
        found |= {name for name, tokens in said.items() if tokens}
    assert found == {"device", "host", "disk"}
    assert sum(toy.cache.match(prompt(99)).values()) == 0


def test_it_asks_the_core_once_and_changes_nothing(open_cache):
    toy = Toy(open_cache(6, host=12))
    for start in (1, 2, 3):
        toy.use(prompt(start))
    core = toy.cache.placement
    stats = core.stats()
    before = core.num_locked
    for _ in range(5):
        assert sum(toy.cache.match(prompt(1)).values()) == 3 * BLOCK
    assert core.num_locked - before == 5
    assert core.stats() == stats
    order = [start for start in (1, 2, 3) if toy.cache.match(prompt(start))["device"]]
    toy.use(prompt(4))
    assert toy.cache.match(prompt(order[0]))["device"] < 3 * BLOCK, "to be asked for made it no younger"


def test_a_namespace_has_its_own_and_an_unknown_one_nothing_and_gets_nothing(open_cache):
    toy = Toy(open_cache(8))
    toy.use(prompt(1), A)
    assert toy.cache.match(prompt(1), A) == {"device": 3 * BLOCK}
    assert toy.cache.match(prompt(1)) == {"device": 0}
    known = len(toy.cache._roots._known)
    assert toy.cache.match(prompt(1), pk.Namespace(tenant="never")) == {"device": 0}
    assert len(toy.cache._roots._known) == known


@pytest.mark.parametrize("wrong", [None, "text", [1.5], [[1]], object()])
def test_what_is_no_prompt_is_refused(open_cache, wrong):
    with pytest.raises(pk.WrongType):
        open_cache(8).match(wrong)


def test_a_closed_cache_matches_nothing(open_cache):
    cache = open_cache(8)
    cache.close()
    with pytest.raises(pk.ClosedError):
        cache.match(prompt(1))
