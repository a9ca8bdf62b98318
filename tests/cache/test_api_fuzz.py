"""Every public call with whatever comes: documented errors only, sound books afterwards, and nobody else notices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pagedkv as pk

from .conftest import BLOCK, SPEC, Toy, prompt

FEW = settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
MORE = settings(FEW, max_examples=200)


class ForeignError(Exception):
    """Raised by objects of the caller's own; passes through."""


class Raising:
    """Raises from every method that a library could call."""

    def fail(self, *_, **__):
        raise ForeignError

    __index__ = __len__ = __iter__ = __getitem__ = __array__ = __bool__ = __eq__ = __fspath__ = __dlpack__ = fail
    __hash__ = object.__hash__


class Odd:
    """Answers every attribute with a number."""

    shape = dtype = ndim = size = 3

    def __index__(self):
        return 10**40


def kv(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def read_only(array):
    array.flags.writeable = False
    return array


NUMBERS = [-(10**30), -(2**63), -1, 0, 1, 2, 3, BLOCK, 255, 2**31 - 1, 2**31, 2**63, 10**30]
ODDITIES = [
    None, True, False, 0.0, 1.0, -1.5, float("nan"), float("inf"), 1j, "", "lru", "8GiB", "device", "\0", b"",
    b"x" * 32, (), (1, 2),
    {}, {1: 2}, set(), frozenset({1}), object(), int, print, range(3), Ellipsis, NotImplemented, SPEC,
    pk.Namespace(tenant="a"),
    Raising(), Odd(), [Raising()], [Odd()], [None], [[]], [[1], [1, 2]], [1, 2.5], ["a"], [10**40], np.int8(3),
    np.float32(1), np.bool_(True),
    np.array(3), np.array([]), np.array([1.0]), np.array([[1]]), np.array([None]), np.array(["a"]), np.array([True]),
    np.zeros((0, 3)),
    np.array([2**63], np.uint64), np.array([np.nan]), np.arange(10)[::-3], np.array([1, 2], ">i8"),
    read_only(np.arange(3)),
    np.array([(1, 2)], "i4,f4"), np.array([1], "M8[s]"), memoryview(b"abcd"), bytearray(b"abc"), np.arange(5,
    dtype=np.uint8),
    kv(1, 2, 4), kv(2, 1, 2, 4), kv(1, 2, 4)[:, ::-1], read_only(kv(2, 1, 2, 4)), kv(1, 2, 4, dtype=np.float64), kv(1,
    4, 4),
    np.full((1, 2, 4), np.nan), np.broadcast_to(np.float32(0), (2, 1, 2, 4)), (kv(2, 1, 2, 4), read_only(kv(2, 1, 2,
    4))),
]  # fmt: skip
ANY = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(ODDITIES), st.lists(st.sampled_from(NUMBERS), max_size=4),
    st.text(max_size=5),
    st.floats(), st.lists(st.sampled_from(ODDITIES), max_size=3),
)  # fmt: skip


class World:
    """A small cache with a bystander that must never notice anything, and a victim to try things on."""

    def __init__(self):
        self.toy = Toy(pk.KVCache(SPEC, 24, host=16, pin_budget=4, threads=1))
        self.cache = self.toy.cache
        for start in (1, 2, 3, 4):
            self.toy.use(prompt(start, 6 * BLOCK))
        self.bystander = self.cache.sequence(prompt(5, 11))
        self.toy.run(self.bystander)
        self.seq = self.cache.sequence(prompt(1, 9))
        self.toy.run(self.seq)
        self.seq.append(7)

    def check(self):
        """All is as it must be, whatever happened."""
        self.cache.check_integrity()
        self.toy.check(self.bystander)
        if not self.cache._engine.closed:
            self.toy.use(prompt(5, 11))
            self.toy.use(prompt(2, 6 * BLOCK))
            self.cache.check_integrity()


@contextmanager
def world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.cache.close()


def attempt(call, *arguments, **options):
    """Call it; only documented errors may come out. What it returned, if it did."""
    try:
        return call(*arguments, **options)
    except (pk.PagedKVError, ForeignError):
        return None


CACHE_CALLS = {
    "sequence": 2, "step": 1, "prefetch": 2, "pin": 2, "unpin": 1, "set_quota": 3, "purge": 1, "explain": 2, "layer": 1,
}  # fmt: skip
SEQUENCE_CALLS = {"append": 1, "truncate": 1, "fork": 1, "gather": 1, "scatter": 2}


@pytest.mark.parametrize("name", CACHE_CALLS)
def test_a_cache_refuses_what_it_cannot_use(name):
    @FEW
    @given(st.tuples(*[ANY] * CACHE_CALLS[name]))
    def fuzz(arguments):
        with world() as w:
            got = attempt(getattr(w.cache, name), *arguments)
            if isinstance(got, pk.Sequence):
                attempt(w.toy.run, got)
                got.release()
            elif hasattr(got, "wait"):
                got.wait(60)
            w.check()

    fuzz()


@pytest.mark.parametrize("name", SEQUENCE_CALLS)
def test_a_sequence_refuses_what_it_cannot_use(name):
    @FEW
    @given(st.tuples(*[ANY] * SEQUENCE_CALLS[name]))
    def fuzz(arguments):
        with world() as w:
            before = w.seq.tokens.tolist(), w.seq.num_computed
            try:
                got = getattr(w.seq, name)(*arguments)
            except (pk.PagedKVError, ForeignError):
                assert (w.seq.tokens.tolist(), w.seq.num_computed) == before
                if name != "scatter":
                    w.toy.run(w.seq)
                    w.toy.check(w.seq)
            else:
                for fork in got if name == "fork" else []:
                    fork.release()
            w.seq.release()
            w.check()

    fuzz()


def test_retain_refuses_what_it_cannot_use():
    @FEW
    @given(ANY, ANY)
    def fuzz(priority, ttl_s):
        with world() as w:
            attempt(w.seq.retain, priority=priority, ttl_s=ttl_s)
            w.seq.release()
            w.check()

    fuzz()


def test_opening_a_step_refuses_what_it_cannot_use():
    @FEW
    @given(ANY, ANY)
    def fuzz(q_lens, lookahead):
        with world() as w:
            try:
                with w.cache.step([w.seq], q_lens=q_lens, lookahead=lookahead) as step:
                    w.toy.write(step, w.seq)
            except (pk.PagedKVError, ForeignError):
                assert w.seq.num_computed == 9
                w.toy.run(w.seq)
            w.toy.check(w.seq)
            w.check()

    fuzz()


def test_a_step_over_odd_collections_is_refused():
    @FEW
    @given(st.lists(st.sampled_from(["seq", "bystander", "released", "foreign", None, 3]), max_size=4))
    def fuzz(names):
        with world() as w, pk.KVCache(SPEC, 4) as other:
            released = w.cache.sequence([1])
            released.release()
            members = {"seq": w.seq, "bystander": w.bystander, "released": released, "foreign": other.sequence([1])}
            try:
                with w.cache.step([members.get(name, name) for name in names]) as step:
                    w.toy.write(step, *[members[name] for name in names]) if names else None
            except pk.PagedKVError:
                assert w.seq.num_computed == 9
            w.check()

    fuzz()


STEP_CALLS = {"write": 3, "attend": 2, "mark_written": 1}


@pytest.mark.parametrize("name", STEP_CALLS)
def test_a_step_under_way_refuses_what_it_cannot_use_and_ends_well(name):
    @FEW
    @given(st.one_of(st.tuples(*[ANY] * STEP_CALLS[name]), st.tuples(st.just(0), *[ANY] * (STEP_CALLS[name] - 1))))
    def fuzz(arguments):
        with world() as w:
            with w.cache.step([w.seq]) as step:
                attempt(getattr(step, name), *arguments)
                w.toy.write(step, w.seq)
            w.toy.check(w.seq)
            w.check()

    fuzz()


def test_attend_refuses_options_it_cannot_use():
    options = st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("softmax_scale", "causal", "window", "soft_cap", "return_lse", "out"), ANY)
    )

    @MORE
    @given(options)
    def fuzz(chosen):
        with world() as w:
            with w.cache.step([w.seq]) as step:
                w.toy.write(step, w.seq)
                attempt(step.attend, 0, kv(1, 2, 4), **chosen)
            w.toy.check(w.seq)
            w.check()

    fuzz()


OPTIONS = (
    "device", "host", "disk", "policy", "demotion", "inclusive", "pin_budget", "deadline_s", "require_namespace",
    "partial_hits",
)  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_a_cache_is_opened_or_refused(option):
    @FEW
    @given(ANY)
    def fuzz(value):
        try:
            cache = pk.KVCache(SPEC, **({"device": 8} | {option: value}))
        except (pk.PagedKVError, ForeignError):
            return
        with cache:
            if cache.stats().blocks["device"]["max"] >= 4:
                toy = Toy(cache)
                if not cache._require_namespace:
                    toy.use(prompt(1))
                toy.use(prompt(1), pk.Namespace(tenant="a"))
            cache.check_integrity()

    fuzz()


@pytest.mark.parametrize("option", ["max_sequences", "event_words", "threads"])
@pytest.mark.parametrize("value", [-1, 0.5, None, "2", True, float("nan"), [2], np.array([1, 2])], ids=repr)
def test_a_number_that_sizes_something_must_be_possible(option, value):
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        pk.KVCache(SPEC, 4, **{option: value}).close()


@MORE
@given(ANY, ANY, ANY, ANY, ANY)
def test_a_spec_is_valid_or_refused(num_layers, num_kv_heads, head_dim, dtype, block_size):
    for changes in (
        {"num_layers": num_layers}, {"num_kv_heads": num_kv_heads}, {"head_dim": head_dim}, {"dtype": dtype},
        {"block_size": block_size},
        {"layout": dtype}, {"model": dtype},
    ):  # fmt: skip
        spec = attempt(pk.KVSpec, **({"num_layers": 2, "num_kv_heads": 2, "head_dim": 4} | changes))
        if spec is not None:
            assert spec.block_bytes == int(np.prod(spec.block_shape)) * spec.itemsize > 0
            assert len(spec.fingerprint()) == 32


@MORE
@given(ANY, ANY, ANY, ANY)
def test_a_disk_is_valid_or_refused(path, size, segment_size, shards):
    for disk in (
        attempt(pk.Disk, path, 4), attempt(pk.Disk, "kv", size), attempt(pk.Disk, "kv", 4, segment_size=segment_size),
        attempt(pk.Disk, "kv", 4, shards=shards),
    ):  # fmt: skip
        if disk is not None:
            assert disk.segment_bytes > 0
            assert disk.path
            assert 1 <= disk.shards <= 64


@MORE
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("model", "adapter", "tenant", "salt", "modality", "extra"), ANY))
)
def test_a_namespace_is_valid_or_refused(fields):
    name = attempt(pk.Namespace, **fields)
    if name is not None:
        assert len(name.digest()) == 32
        assert (name.key() == b"") == (name == pk.Namespace())
        hash(name)


# ---- re-entrancy: the caller's objects call back into the cache while it reads them


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


NAME = pk.Namespace(tenant="mine")
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


# ---- sequences of calls, valid and not, in any order


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


@MORE
@given(st.lists(st.tuples(CALLS, st.integers(0, 30), st.integers(0, 3)), max_size=25))
def test_any_order_of_calls_keeps_every_sequence_right(calls):
    toy = Toy(pk.KVCache(SPEC, 20, host=6, pin_budget=3))
    cache, live = toy.cache, []
    with cache:
        for call, number, which in calls:
            seq = live[which % len(live)] if live else None
            try:
                if call == "open":
                    live.append(cache.sequence([token % 2 for token in range(number)]))
                elif call == "quota":
                    cache.set_quota(pk.Namespace(), number or None)
                elif call == "purge" and number > 25:
                    cache.purge(None)
                elif call == "pin":
                    cache.unpin(cache.pin([token % 2 for token in range(number)]))
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
