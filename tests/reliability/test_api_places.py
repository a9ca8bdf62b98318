"""Every odd argument in every place of every public call, one at a time.

The proof *api* draws several at once, at random, from the same calls.
"""

from __future__ import annotations

import itertools
import random

import pytest

import pagedkv as pk
from tests.cache.conftest import SPEC
from tests.cache.oddities import NUMBERS, ODDITIES, world
from tests.reliability import small_store as small
from tests.reliability.api_world import ApiWorld
from tests.reliability.proof import Tally
from tests.reliability.proofs import api
from tests.slices import one_in

with small.quiet(), small.scratch() as _folder:
    _world = ApiWorld(_folder)
    CALLS = [call.name for call in _world.calls()]
    NAMES = [call.name for call in _world.calls() if call.arguments or call.options]
    _world.close()


@pytest.mark.parametrize("name", one_in(3, NAMES))
def test_every_oddity_in_every_place(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some oddities are good names of directories
    with small.small_files():
        tally, made = Tally(), ApiWorld(tmp_path)
        oddities = NUMBERS + ODDITIES + api.SCALARS + made.near_misses()
        for number, odd in enumerate(oddities):
            (call,) = (call for call in made.calls() if call.name == name)
            for place in [*range(len(call.arguments)), *(call.options or {})]:
                if name == "DiskTier":
                    call.arguments = (tmp_path / f"{number} {place}", *call.arguments[1:])
                api.attempt(call, made, random.Random(number), tally, {place: odd})
        assert made.check() == []
        made.close()
    assert tally.wrong == 0, tally.first_wrong
    assert "accepted" in tally.found or any(what.startswith("refused") for what in tally.found)


@pytest.mark.parametrize("kind", [pk.KVCache, pk.Sequence, pk.Step, pk.Scheduler], ids=lambda kind: kind.__name__)
def test_the_proof_makes_every_public_call(kind):
    called = {word for name in CALLS for word in name.replace(".", " ").split()}
    public = {name for name, what in vars(kind).items() if not name.startswith("_") and callable(what)}
    assert public - called == set()


def test_a_step_over_odd_collections_is_refused():
    with world() as w, pk.KVCache(SPEC, pk.Blocks(4)) as other:
        released = w.cache.sequence([1])
        released.release()
        members = {"seq": w.seq, "bystander": w.bystander, "released": released, "foreign": other.sequence([1])}
        for names in itertools.chain.from_iterable(itertools.product([*members, None, 3], repeat=n) for n in range(4)):
            computed = w.seq.num_computed
            try:
                with w.cache.step([members.get(name, name) for name in names]) as step:
                    w.toy.write(step, *[members[name] for name in names]) if names else None
            except pk.PagedKVError:
                assert w.seq.num_computed == computed
        w.check()


@pytest.mark.parametrize("option", ["max_sequences", "event_words", "threads"])
@pytest.mark.parametrize("value", [-1, 0.5, None, "2", True, float("nan"), [2]], ids=repr)
def test_a_number_that_sizes_something_must_be_possible(option, value):
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        pk.KVCache(SPEC, pk.Blocks(4), **{option: value}).close()
