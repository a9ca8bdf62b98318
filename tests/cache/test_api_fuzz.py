"""Every public call with arbitrary arguments.

A call raises documented errors only, the books are sound afterwards, and no bystander is affected.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkv as pk
from tests.cache.oddities import ANY, FEW, MORE, NAME, NUMBERS, ODDITIES, ForeignError, attempt, kv, world

from .conftest import SPEC, Toy, prompt

CACHE_CALLS = {
    "sequence": 2, "step": 1, "prefetch": 2, "pin": 2, "set_quota": 3, "purge": 1, "explain": 2, "layer": 1,
}  # fmt: skip
SEQUENCE_CALLS = {"append": 1, "truncate": 1, "fork": 1, "gather": 1, "scatter": 2}


PLAIN = {  # arguments that are fine, so that each place can be tried with all oddities alone
    "sequence": (prompt(1), NAME),
    "prefetch": (prompt(1), NAME),
    "pin": (prompt(1), NAME),
    "explain": (prompt(1), NAME),
    "set_quota": (NAME, pk.Blocks(4), pk.Tier.DEVICE),
    "purge": (NAME,),
    "step": ([],),
    "layer": (0,),
    "append": (1,),
    "truncate": (1,),
    "fork": (1,),
    "gather": (None,),
    "scatter": (kv(2, 1, 2, 4), kv(2, 1, 2, 4)),
}


@pytest.mark.parametrize(("name", "place"), [(name, i) for name, plain in PLAIN.items() for i in range(len(plain))])
def test_every_oddity_in_every_place(name, place):
    with world() as w:
        for odd in NUMBERS + ODDITIES:
            (target,) = w.seq.fork(1)
            owner = target if hasattr(pk.Sequence, name) else w.cache
            arguments = [odd if i == place else plain for i, plain in enumerate(PLAIN[name])]
            got = attempt(getattr(owner, name), *arguments)
            for made in got if name == "fork" and got else [got]:
                if isinstance(made, pk.Sequence):
                    made.release()
            if name == "pin" and got is not None:
                got.release()
            if name == "prefetch" and got is not None:
                got.wait(60)
            target.release()
            w.cache.check_integrity()
        w.check()


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
        with world() as w, pk.KVCache(SPEC, pk.Blocks(4)) as other:
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
    "device_memory", "host_memory", "device", "disk", "policy", "demotion", "inclusive", "pin_budget", "deadline_s",
    "require_namespace", "partial_hits",
)  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_a_cache_is_opened_or_refused(option):
    @FEW
    @given(ANY)
    def fuzz(value):
        try:
            cache = pk.KVCache(SPEC, **({"device_memory": pk.Blocks(8)} | {option: value}))
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
        pk.KVCache(SPEC, pk.Blocks(4), **{option: value}).close()


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
        attempt(pk.Disk, path, pk.Blocks(4)), attempt(pk.Disk, "kv", size),
        attempt(pk.Disk, "kv", pk.Blocks(4), segment_size=segment_size),
        attempt(pk.Disk, "kv", pk.Blocks(4), shards=shards),
    ):  # fmt: skip
        if disk is not None:
            assert disk.segment_bytes > 0
            assert disk.path
            assert disk.shards is None or 1 <= disk.shards <= 1024


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
