"""Odd arguments for the fuzz tests, a small world, and the allowed outcomes of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from hypothesis import HealthCheck, settings

import pagedkv as pk

from .conftest import BLOCK, SPEC, Toy, prompt

MORE = settings(
    max_examples=200, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


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
class World:
    """A small cache with a victim to call and a bystander that must never be affected."""

    def __init__(self):
        self.toy = Toy(pk.KVCache(SPEC, pk.Blocks(24), host_memory=pk.Blocks(16), pin_budget=pk.Blocks(4), threads=1))
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


NAME = pk.Namespace(tenant="mine")
