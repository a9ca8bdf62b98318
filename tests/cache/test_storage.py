"""A cache over a storage of the caller's own.

One is written from the protocol alone; what is no storage is refused.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache.storage import Storage
from pagedkv.cache.tiered import TieredStorage
from pagedkv.reference import paged_attention
from pagedkv.tiers import DirectionStats

from .conftest import Toy, all_free

SPEC = pk.KVSpec(2, 2, 4, "float32", 4, model="toy")


class Done:
    """The handle of moves that are over."""

    is_settled, seconds = True, 1e-6

    def __init__(self, transfers: Any) -> None:
        self._ids, self._count = np.unique(transfers), len(transfers)

    def results(self) -> Any:
        return self._ids, np.ones(len(self._ids), bool)

    def tried(self) -> Any:
        return np.ones(len(self._ids), bool)

    def left(self) -> Any:
        return np.zeros(self._count, bool)

    def when_back(self, tell: Any) -> None:
        pass


class Own:
    """A storage whose blocks are rows of ordinary arrays, as an engine's own memory would be."""

    store = None
    decode = None
    is_synchronous = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.moved: dict[tuple[int, int], DirectionStats] = {}
        self.kv = self.carrier = self

    # what a Storage has

    def open(self, spec: pk.KVSpec, blocks: Any, disk: Any) -> list[int]:
        self.calls.append("open")
        self.spec, self.block_bytes = spec, spec.block_bytes
        shape = (spec.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.arenas = [np.full((n, *shape), np.nan, np.float32) for n in blocks]
        return list(blocks)

    def start(self, describe: Any) -> None:
        self.calls.append("start" if describe is None else "start with names")

    @property
    def device_arena(self) -> Any:
        return self.arenas[0].view(np.uint8).reshape(len(self.arenas[0]), -1)

    def used_by(self, stream: Any) -> None:
        self.calls.append("used")

    def close(self) -> None:
        self.calls.append("close")

    # what its KV has

    def layer(self, layer: int) -> Any:
        return self.arenas[0][:, layer, 0], self.arenas[0][:, layer, 1]

    def bind(self, arrays: Any) -> Any:
        return OwnStep(self, arrays)

    def copy_blocks(self, pairs: Any) -> None:
        self.arenas[0][pairs[:, 1]] = self.arenas[0][pairs[:, 0]]

    def zero_blocks(self, blocks: Any) -> None:
        self.arenas[0][blocks] = 0

    def gather(self, blocks: Any, start: int, stop: int, out: Any, layout: str) -> Any:
        found = self.arenas[0][blocks]  # [n, layers, 2, block_size, heads, dim]
        k, v = (np.moveaxis(found[:, :, i], 1, 0) for i in (0, 1))
        return tuple(x.reshape(len(x), -1, *x.shape[-2:])[:, start:stop] for x in (k, v))

    # what its carrier has

    def submit(self, moves: Any, *, before: Any = None, on_done: Any = None, **_: Any) -> Done:
        for move in moves:
            src, dst = int(move["src_tier"]), int(move["dst_tier"])
            self.arenas[dst][move["dst_block"]] = self.arenas[src][move["src_block"]]
            self.moved.setdefault((src, dst), DirectionStats()).blocks += 1
        done = Done(moves["transfer"])
        for tell in (before, on_done):
            if tell is not None:
                tell(done)
        return done

    def watch(self, ticket: Any) -> float:
        return 1.0

    def stats(self) -> Any:
        return self.moved


class OwnStep:
    def __init__(self, kv: Own, arrays: Any) -> None:
        self.kv, self.arrays = kv, arrays

    def write(self, layer: int, k: Any, v: Any, stream: Any = None) -> None:
        block, offset = np.divmod(self.arrays.slot_mapping, self.kv.spec.block_size)
        for mine, new in zip(self.kv.layer(layer), (k, v), strict=True):
            mine[block, offset] = new

    def attend(self, layer: int, q: Any, **variant: Any) -> Any:
        a = self.arrays
        k, v = self.kv.layer(layer)
        return paged_attention(q, k, v, a.block_tables, a.seq_lens, a.q_indptr, **variant)


@pytest.mark.parametrize("disk", [None, pk.Disk("nowhere", pk.Blocks(40))])
def test_a_cache_runs_on_a_storage_written_from_the_protocol_alone(tmp_path, monkeypatch, disk):
    monkeypatch.chdir(tmp_path)
    own = Own()
    storage: Storage = own
    with pk.KVCache(SPEC, pk.Blocks(8), pk.Blocks(12), disk, storage=storage) as cache:
        toy = Toy(cache)
        for start in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5):  # five times what the device holds: hits come from below
            toy.use([start] * 17)
        hits = cache.stats().hit_tokens
        assert hits["host"] + hits.get("disk", 0) > 0, hits
        if disk is not None:
            assert sum(hits.values()) == 5 * 16, hits
        cache.used_on()
        assert cache.device_arena.shape == (8, SPEC.block_bytes)
        cache.check_integrity()
        all_free(cache)
    assert own.calls == ["open", "start", "used", "close", "close"], "its carrier is closed before it is"
    assert not list(tmp_path.iterdir()), "nothing of a disk was opened"


def test_the_usual_storage_can_be_given_and_serves_one_cache(tmp_path):
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(16))
    storage = TieredStorage(threads=1)
    with pk.KVCache(SPEC, pk.Blocks(8), None, disk, storage=storage) as cache:
        toy = Toy(cache)
        toy.use([1] * 9)
        with pytest.raises(pk.InvalidArgument, match="another cache's"):
            pk.KVCache(SPEC, pk.Blocks(8), storage=storage)
        toy.use([1] * 9)
        assert cache.stats().hit_tokens["device"] == 8, "the first cache goes on"
        cache.flush()
    with pk.KVCache(SPEC, pk.Blocks(8), None, disk, storage=TieredStorage()) as cache:
        Toy(cache).use([1] * 9)
        assert cache.stats().hit_tokens["disk"] == 8


def test_a_storage_whose_opening_fails_can_be_opened_again(tmp_path):
    (tmp_path / "file").write_text("in the way")
    storage = TieredStorage()
    with pytest.raises(pk.TierError):
        pk.KVCache(SPEC, pk.Blocks(8), None, pk.Disk(str(tmp_path / "file"), pk.Blocks(4)), storage=storage)
    with pk.KVCache(SPEC, pk.Blocks(8), storage=storage) as cache:
        Toy(cache).use([1] * 9)


class Half:
    def open(self, spec: Any, blocks: Any, disk: Any) -> Any:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        ("cpu", r"not str, which lacks open\(\), start\(\), used_by\(\), close\(\)"),
        (Half(), r"not Half, which lacks start\(\), used_by\(\)"),
        (TieredStorage, "make an object of it"),
    ],
)
def test_what_is_no_storage_is_refused(storage, says):
    with pytest.raises(pk.WrongType, match=says):
        pk.KVCache(SPEC, pk.Blocks(8), storage=storage)


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"threads": 3}, {"backend": object()}])
def test_options_of_the_usual_storage_beside_another_are_refused(option):
    with pytest.raises(pk.InvalidArgument, match="give them to storage="):
        pk.KVCache(SPEC, pk.Blocks(8), storage=Own(), **option)


def test_a_storage_is_not_open_before_its_cache_is():
    storage = TieredStorage()
    for name in ("kv", "carrier", "device_arena"):
        with pytest.raises(pk.ClosedError):
            getattr(storage, name)
    storage.close()


class Slow(Own):
    """Takes a moment for each submit, in which other callers come."""

    inside = most = 0

    def submit(self, moves: Any, **options: Any) -> Done:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.0005)
        self.inside -= 1
        return super().submit(moves, **options)


def test_callers_that_carry_out_moves_themselves_come_one_after_the_other():
    """Without a dispatcher's thread each caller makes rounds: no round ends another's tickets."""
    problems: list[BaseException] = []
    tenants = [None, pk.Namespace(tenant="a"), pk.Namespace(tenant="b")]
    own = Slow()
    cache = pk.KVCache(SPEC, pk.Blocks(24), pk.Blocks(24), storage=own)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        toys = [Toy(cache, salt) for salt in range(3)]
        for _ in range(60):
            who = choose.randrange(3)
            try:
                toys[who].use([choose.randrange(10)] * choose.randrange(1, 16), tenants[who])
            except pk.OutOfBlocks:
                pass
            except BaseException as problem:
                problems.append(problem)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(1200):  # two minutes; where two are inside, some may never come back
        if own.most > 1 or not any(thread.is_alive() for thread in threads):
            break
        time.sleep(0.1)
    assert (problems, own.most, [thread.is_alive() for thread in threads]) == ([], 1, [False] * 4)
    cache.check_integrity()
    assert all_free(cache)
    cache.close()


class Broken(Done):
    """Answers one question in a way that says nothing."""

    def __init__(self, transfers: Any, question: str, answer: Any) -> None:
        super().__init__(transfers)
        self.question, self.answer = question, answer

    @property
    def is_settled(self) -> Any:
        if self.question == "is_settled":
            raise self.answer
        return True

    def left(self) -> Any:
        return self.answer(self._count) if self.question == "left" else super().left()


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("is_settled", RuntimeError("the engine's events failed")),
        ("left", lambda count: np.zeros(count, int)),
        ("left", lambda count: None),
        ("left", lambda count: np.zeros(count + 1, bool)),
    ],
    ids=["raises", "numbers", "nothing", "too many"],
)
def test_a_handle_that_says_nothing_of_its_moves_costs_these_and_the_cache_goes_on(question, answer, synchronous):
    class Once(Own):
        is_synchronous = synchronous
        submitted = 0

        def submit(self, moves: Any, *, before: Any = None, on_done: Any = None, **_: Any) -> Done:
            self.submitted += 1
            if self.submitted != 2:
                return super().submit(moves, before=before, on_done=on_done)
            handle = Broken(moves["transfer"], question, answer)
            before(handle)
            on_done(handle)
            return handle

    own = Once()
    with pk.KVCache(SPEC, pk.Blocks(12), pk.Blocks(12), storage=own) as cache:
        toy, ended = Toy(cache), []
        worker = threading.Thread(target=lambda: ended.append([toy.use([start] * 9) for start in range(8)]))
        worker.start()
        worker.join(60)
        assert ended, "a caller hangs"
        assert own.submitted > 2
        cache.check_integrity()


def test_a_carrier_that_does_not_call_before_is_waited_for_all_the_same():
    class Silent(Own):
        def submit(self, moves: Any, *, before: Any = None, on_done: Any = None, **_: Any) -> Done:
            return super().submit(moves, on_done=on_done)

    with pk.KVCache(SPEC, pk.Blocks(8), pk.Blocks(12), storage=Silent()) as cache:
        toy = Toy(cache)
        for start in (1, 2, 3, 1, 2, 3):
            toy.use([start] * 17)
        assert cache.stats().hit_tokens["host"] > 0


def test_any_storage_serves_one_cache_at_a_time():
    own = Own()
    with pk.KVCache(SPEC, pk.Blocks(8), storage=own) as cache:
        with pytest.raises(pk.InvalidArgument, match="another cache's"):
            pk.KVCache(SPEC, pk.Blocks(8), storage=own)
        Toy(cache).use([1] * 9)
    pk.KVCache(SPEC, pk.Blocks(8), storage=own).close()


@pytest.mark.parametrize(
    ("opened", "error"),
    [(None, pk.WrongType), ([], pk.InvalidArgument), ([16, 0, 0], pk.InvalidArgument), ([8.0, 0, 0], pk.WrongType)],
)
def test_what_open_returns_is_checked(opened, error):
    class Lying(Own):
        def open(self, spec: Any, blocks: Any, disk: Any) -> Any:
            super().open(spec, blocks, disk)
            return opened

    own = Lying()
    with pytest.raises(error, match=r"open\(\)"):
        pk.KVCache(SPEC, pk.Blocks(8), storage=own)
    assert own.calls == ["open", "close"]


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_what_open_returns_may_be_any_sequence(tmp_path, kind):
    class Other(TieredStorage):
        def open(self, spec: Any, blocks: Any, disk: Any) -> Any:
            return kind(super().open(spec, blocks, disk))

    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(16))
    with pk.KVCache(SPEC, pk.Blocks(8), None, disk, storage=Other()) as cache:
        assert cache.stats().disk["state"] == "ok"


def test_a_carrier_that_fails_to_close_leaves_no_directory_locked(tmp_path, monkeypatch):
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(16))
    cache = pk.KVCache(SPEC, pk.Blocks(8), None, disk)
    carrier = cache._storage.carrier
    close = carrier.close
    monkeypatch.setattr(carrier, "close", lambda: (close(), 1 / 0))
    monkeypatch.setattr(cache._storage, "close", lambda: [tier.close() for tier in cache._storage.tiers.values()])
    with pytest.raises(ZeroDivisionError):
        cache.close()
    pk.KVCache(SPEC, pk.Blocks(8), None, disk).close()
