"""Every error of ours is at the top of the package and travels between processes.

It is also what Python calls it.
"""

from __future__ import annotations

import inspect
import pickle

import pytest

import pagedkv as pk
from pagedkv import errors
from pagedkv.core import BlockPool, Placement, RadixTree
from pagedkv.observe.callbacks import has_no_memory

OURS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", OURS)
def test_an_error_is_at_the_top(kind):
    assert getattr(pk, kind.__name__) is kind
    assert issubclass(kind, pk.PagedKVError)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (pk.OutOfBlocks(3, 0, 2, 5, "host"), MemoryError),
        (pk.OutOfBlocks(3, 0, 2, 5, "pool"), MemoryError),
        (pk.WrongType("w"), TypeError),
        (pk.InvalidArgument("i"), ValueError),
        (pk.KernelsUnavailable("k"), ImportError),
        (pk.TraceFormatError("t.jsonl", "line 3", "is empty"), ValueError),
        (pk.CompileError("k", ("-O3",), "said"), Exception),
        (pk.RequestTooLarge(9, 3, "blocks", "ask for less"), Exception),
        (pk.QueueFull(3, 3, 1.5), Exception),
        (pk.StepFailed("ValueError", "no logits"), RuntimeError),
        (pk.SlowReader(9, 8), Exception),
        (pk.NotSupported("a model with windows", "its memory drops tokens"), ValueError),
        (pk.AddressInUse("tcp://127.0.0.1:5557"), OSError),
    ],
)
def test_an_error_travels_and_is_its_builtin(error, builtin):
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, builtin)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_full_tier_is_a_tier_and_the_message_has_its_name():
    assert [pk.OutOfBlocks(1, 0, 0, 4, str(tier)).tier for tier in pk.Tier] == list(pk.Tier)
    assert pk.OutOfBlocks(1, 0, 0, 4).tier is pk.OutOfBlocks(1, 0, 0, 4, "device").tier is pk.Tier.DEVICE
    assert "1 blocks on tier 'host': 0 free" in str(pk.OutOfBlocks(1, 0, 0, 4, pk.Tier.HOST))


def test_a_pool_of_no_cache_is_no_tier():
    with pytest.raises(pk.OutOfBlocks, match="2 blocks on tier 'pool': 1 free") as caught:
        BlockPool(1).alloc(2)
    assert caught.value.tier is None


def test_a_full_cache_names_the_tier():
    with pytest.raises(pk.OutOfBlocks) as caught:
        Placement(RadixTree(4), [BlockPool(1)]).allocate(2)
    assert caught.value.tier is pk.Tier.DEVICE


def test_a_full_tier_is_not_a_process_without_memory():
    assert has_no_memory(MemoryError())
    assert not has_no_memory(pk.OutOfBlocks(1, 0, 0, 4))
