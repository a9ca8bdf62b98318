"""Three ranks in threads of the test's process, and their cache."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from tests import toy

SPEC = pk.KVSpec(2, 3, 4, "float32", 4, model="toy")
BLOCK = SPEC.block_size
SIZE = 3
SECRET = b"a secret of the tests' ranks"
WATCHDOG_S = 60  # of each wait of a test; twice that stops the process, with all stacks
DEVICE, HOST = pk.Blocks(8), pk.Blocks(16)


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(2 * WATCHDOG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short path: that of a unix socket has 107 bytes."""
    return str(tmp_path_factory.mktemp("r") / "s")


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """What `work` returns or raises, in a thread."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as problem:
            found.set_exception(problem)

    threading.Thread(target=run, daemon=True).start()
    return found


def ranks_at(address: str, **changes: Any) -> pk.Ranks:
    return pk.Ranks(address, **{"size": SIZE, "secret": SECRET, **changes})


class World:
    """A cache that decides, and its ranks.

    Every token's K and V are the toy model's, of which each rank writes and checks its head.
    """

    def __init__(self, address: str, disk: Path | None = None, spec: pk.KVSpec = SPEC, **options: Any) -> None:
        self.ranks = ranks_at(address)
        given = {"device_memory": DEVICE, "host_memory": HOST, **options.pop("budgets", {})}
        given["disk"] = None if disk is None else pk.Disk(disk, pk.Blocks(64), write="all", admission="all")
        self.given = given
        coming = [in_thread(lambda rank=rank: pk.Rank(spec, **given, ranks=self.ranks, rank=rank)) for rank in range(3)]
        self.parts: list[pk.Rank] = []
        self.cache: pk.KVCache | None = None
        try:
            self.cache = pk.KVCache(spec, **given, ranks=self.ranks, **options)
        finally:
            self.failed = [one.exception() for one in coming]
            self.parts = [one.result() for one in coming if one.exception() is None]

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()
        for part in self.parts:
            assert part.wait(WATCHDOG_S)
            part.close()

    def compute(self, seq: pk.Sequence) -> None:
        """Check the tokens that were found, at every rank, and write the others."""
        assert self.cache is not None
        k, v = toy.kv(SPEC, seq.tokens)
        done = seq.num_computed
        with self.cache.step([seq]) as step:
            self.check(step.block_tables[0], seq.tokens[:done])
            for rank, part in enumerate(self.parts):
                mine = part.step(step.slot_mapping, step.block_tables, step.seq_lens, step.q_indptr)
                for layer in range(SPEC.num_layers):
                    mine.write(layer, k[layer, done:, rank : rank + 1], v[layer, done:, rank : rank + 1])
            for layer in range(SPEC.num_layers):
                step.mark_written(layer)
            self.check(step.block_tables[0], seq.tokens)

    def check(self, blocks: Any, tokens: Any) -> None:
        """The blocks hold the tokens' K and V, of each rank's head and no other."""
        k, v = toy.kv(SPEC, tokens)
        for rank, part in enumerate(self.parts):
            for layer in range(SPEC.num_layers):
                for stored, wanted in zip(part.layer(layer), (k[layer], v[layer]), strict=True):
                    assert stored.shape[2] == 1
                    found = stored[blocks].reshape(-1, SPEC.head_dim)[: len(tokens)]
                    np.testing.assert_array_equal(found, wanted[:, rank])

    def ask(self, tokens: Any, namespace: pk.Namespace | None = None) -> dict[str, int]:
        """One request; the tokens that it found, by tier."""
        assert self.cache is not None
        with self.cache.sequence(tokens, namespace) as seq:
            self.compute(seq)
            return {name: count for name, count in seq.hit_tokens.items() if count}


@pytest.fixture
def world(address: str) -> Iterator[Callable[..., World]]:
    """Opens worlds, and closes them; at the end their books agree."""
    with contextlib.ExitStack() as closing:

        def open_it(**options: Any) -> World:
            found = World(address, **options)
            closing.callback(found.close)
            assert found.cache is not None
            closing.callback(found.cache.check_integrity)
            return found

        yield open_it


def prompt(number: int, blocks: int = 2) -> list[int]:
    """Tokens of so many whole blocks, and one more; no two prompts share any."""
    return list(range(100 * number, 100 * number + blocks * BLOCK + 1))
