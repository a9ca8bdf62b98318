"""Callers' objects that call back while the cache reads them, and calls in any order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkv as pk
from tests.cache.oddities import MORE, NAME, ODDITIES, ForeignError, Raising, attempt, kv, world
from tests.in_blocks import in_blocks

from .conftest import SPEC, Toy, prompt


class Calling:
    """A token that does something to the cache while it is read."""

    def __init__(self, action):
        self.action, self.calls = action, 0

    def __index__(self):
        self.calls += 1
        if self.calls == 1:
            self.action()
        return 5


class CallingArray:
    """An array that does something to the cache while it is read."""

    def __init__(self, action, array):
        self.action, self.array = action, array

    def __array__(self, dtype=None, copy=None):
        self.action()
        return np.asarray(self.array, dtype)


ACTIONS = {
    "use": lambda w: w.toy.use(prompt(3, 9)), "append": lambda w: w.seq.append(3),
    "truncate": lambda w: w.seq.truncate(5),
    "fork": lambda w: w.seq.fork(2), "release": lambda w: w.seq.release(), "close": lambda w: w.cache.close(),
    "purge": lambda w: w.cache.purge(NAME), "check": lambda w: w.cache.check_integrity(),
    "prefetch": lambda w: w.cache.prefetch(prompt(3)).wait(60), "raise": lambda w: Raising().fail(),
    "run": lambda w: w.toy.run(w.seq),
}  # fmt: skip
READERS = {
    "sequence": lambda w, token, array: w.cache.sequence([1, 2, token, *range(9)], NAME).release(),
    "sequence of an array": lambda w, token, array: w.cache.sequence(array(np.arange(9)), NAME).release(),
    "explain": lambda w, token, array: w.cache.explain([token]),
    "prefetch": lambda w, token, array: w.cache.prefetch([token], NAME).wait(60),
    "pin": lambda w, token, array: w.cache.pin([token] * 4),
    "append": lambda w, token, array: w.seq.append([1, token, 2]),
    "truncate": lambda w, token, array: w.seq.truncate(token),
    "fork": lambda w, token, array: w.seq.fork(token),
    "retain": lambda w, token, array: w.seq.retain(priority=token),
    "q_lens": lambda w, token, array: w.toy.run(w.seq, q_lens=[token]),
    "lookahead": lambda w, token, array: w.toy.run(w.seq, lookahead=token),
    "scatter": lambda w, token, array: w.seq.scatter([array(kv(1, 2, 4))] * 2, [kv(1, 2, 4)] * 2),
    "set_quota": lambda w, token, array: w.cache.set_quota(NAME, token),
}


@pytest.mark.parametrize(("reader", "action"), list(itertools.product(READERS, ACTIONS)), ids=lambda name: name)
def test_calling_back_while_arguments_are_read_is_safe(reader, action):
    with world() as w:

        def act():
            ACTIONS[action](w)

        attempt(READERS[reader], w, Calling(act), lambda array: CallingArray(act, array))
        if action == "close":
            w.cache.check_integrity()
            return
        w.check()
        new = Toy(w.cache, salt=3)
        new.use(prompt(1), NAME)
        w.seq.release()
        w.check()


@pytest.mark.parametrize(
    "action", [name for name in ACTIONS if name not in ("close", "release", "truncate", "fork", "run")]
)
def test_calling_back_while_a_step_reads_its_kv_is_safe(action):
    with world() as w:
        try:
            with w.cache.step([w.seq]) as step:
                for layer in range(2):
                    k, v = w.toy.new_kv(step, [w.seq], layer)
                    step.write(layer, CallingArray(lambda: ACTIONS[action](w), k), v)
        except (ForeignError, pk.PagedKVError):
            assert w.seq.num_computed == 9
        w.toy.check(w.seq)
        w.check()


CALLS = st.sampled_from(
    [
        "open",
        "append",
        "truncate",
        "fork",
        "run",
        "chunk",
        "fail",
        "release",
        "junk",
        "purge",
        "quota",
        "pin",
        "prefetch",
    ]
)


@pytest.mark.slow
@MORE
@given(st.lists(st.tuples(CALLS, st.integers(0, 30), st.integers(0, 3)), max_size=25))
def test_any_order_of_calls_keeps_every_sequence_right(calls):
    toy = Toy(pk.KVCache(SPEC, pk.Blocks(20), host_memory=pk.Blocks(6), pin_budget=pk.Blocks(3)))
    cache, live = toy.cache, []
    with cache:
        for call, number, which in calls:
            seq = live[which % len(live)] if live else None
            try:
                if call == "open":
                    live.append(cache.sequence([token % 2 for token in range(number)]))
                elif call == "quota":
                    cache.set_quota(pk.Namespace(), in_blocks(number or None))
                elif call == "purge" and number > 25:
                    cache.purge(None)
                elif call == "pin":
                    cache.pin([token % 2 for token in range(number)]).release()
                elif call == "prefetch":
                    cache.prefetch([token % 2 for token in range(number)]).wait(60)
                elif seq is None:
                    continue
                elif call == "append":
                    seq.append([number % 2] * (which + 1))
                elif call == "truncate":
                    seq.truncate(number)
                elif call == "fork" and len(live) < 8:
                    live += seq.fork(1)
                elif call == "run":
                    toy.run(*live, lookahead=which)
                elif call == "chunk":
                    toy.run(seq, q_lens=[min(number, seq.num_tokens - seq.num_computed)])
                elif call == "fail":
                    with pytest.raises(ForeignError), cache.step([seq], lookahead=number):
                        raise ForeignError
                elif call == "release":
                    live.remove(seq)
                    seq.release()
                elif call == "junk":
                    seq.append(ODDITIES[number])
            except (pk.PagedKVError, ForeignError):
                pass
            cache.check_integrity()
            toy.check(*live)
        for seq in live:
            seq.release()
        cache.check_integrity()
