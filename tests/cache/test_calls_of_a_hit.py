"""How many calls of the core a prompt costs.

Each call takes the mutex that all threads of a cache share.
"""

from __future__ import annotations

import pytest

from .conftest import BLOCK, Toy, prompt


@pytest.mark.parametrize("options", [{}, {"host": 8}, {"host": 8, "disk": 20}], ids=["one tier", "two", "three"])
@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_a_device_hit_takes_the_core_four_times_at_most(open_cache, options, policy):
    toy = Toy(open_cache(16, policy=policy, **options))
    toy.use(prompt(1))
    core = toy.cache.placement
    for tokens in (prompt(1), prompt(1)[: 2 * BLOCK + 1], prompt(5)):
        before = core.num_locked
        seq = toy.cache.sequence(tokens)
        assert core.num_locked - before <= 4, tokens
        before = core.num_locked
        seq.release()
        assert core.num_locked - before == 1
    before = core.num_locked
    with toy.cache.sequence([*prompt(1)[: 2 * BLOCK], *prompt(1)[2 * BLOCK : -2], 7, 8, 9]) as seq:
        assert seq.hit_tokens["partial"], "a block is copied: its own block, and the row's"
        assert core.num_locked - before <= 7
