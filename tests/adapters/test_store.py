"""PrefixStore: hits, failures that its caller must not notice, tenants, restarts."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import textwrap
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.adapters import model_cache
from pagedkv.adapters.model_cache import with_defaults
from pagedkv.adapters.probe import Probe
from pagedkv.adapters.store import PrefixStore

LAYERS, K_BYTES, V_BYTES, BLOCK = 2, 8, 12, 16
SPEC = pk.KVSpec.of([pk.Rows(K_BYTES, V_BYTES)] * LAYERS, block_size=BLOCK, model="toy@1")
TEXT = np.random.default_rng(1).integers(0, 1000, 600).astype(np.int32)


def kv_of(tokens: Any, salt: int = 0) -> tuple[Any, Any]:
    """KV in which each row names the tokens before it."""
    sums = np.cumsum(np.asarray(tokens, np.int64) * 31 + salt).astype(np.uint8)
    rows = [sums[None, :, None, None] + np.arange(width, dtype=np.uint8) for width in (K_BYTES, V_BYTES)]
    return tuple(np.repeat(side, LAYERS, axis=0) for side in rows)  # type: ignore[return-value]


def save(store: PrefixStore, tokens: Any, **options: Any) -> int:
    k, v = kv_of(tokens)
    return store.save(tokens, lambda start, stop: (k[:, start:stop], v[:, start:stop]), **options)


def load(store: PrefixStore, tokens: Any, **options: Any) -> int:
    """Load a prefix; its bytes are right."""
    arrays: list[Any] = []

    def into(num_tokens: int) -> tuple[Any, Any]:
        arrays.extend(np.empty((LAYERS, num_tokens, 1, width), np.uint8) for width in (K_BYTES, V_BYTES))
        return arrays[0], arrays[1]

    found = store.load(tokens, into, **options)
    if found:
        for ours, theirs in zip(arrays, kv_of(tokens[:found]), strict=True):
            assert np.array_equal(ours, theirs)
    return found


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def open_it(size: str | None = "8MiB", memory: str = "1MiB", spec: pk.KVSpec = SPEC, **options: Any) -> Any:
            disk = None if size is None else pk.Disk(str(tmp_path / "kv"), size, **options.pop("disk", {}))
            return stack.enter_context(PrefixStore(spec, memory, disk, **options))

        yield open_it


# ---- hits


def test_a_saved_text_is_found_up_to_its_last_token(opened: Any) -> None:
    store = opened()
    assert load(store, TEXT) == 0
    assert save(store, TEXT) == 600
    assert store.find(TEXT) == 592
    assert load(store, TEXT) == 599
    assert load(store, np.append(TEXT, [1, 2, 3])) == 600  # the last, partly filled block as well
    stats = store.stats()
    assert (stats.prompts, stats.loaded_tokens, stats.saved_tokens) == (3, 599 + 600, 600)
    assert stats.failures == {}
    assert sum(stats.hit_tokens.values()) == 600


def test_it_is_found_after_a_restart_with_its_tail(opened: Any) -> None:
    store = opened()
    save(store, TEXT)
    store.close()
    store = opened()
    assert load(store, np.append(TEXT, 5)) == 600
    assert store.stats().hit_tokens["disk"] == 592


def test_only_what_is_new_is_read(opened: Any) -> None:
    store = opened()
    save(store, TEXT[:400])
    asked: list[tuple[int, int]] = []
    k, v = kv_of(TEXT)

    def read(start: int, stop: int) -> tuple[Any, Any]:
        asked.append((start, stop))
        return k[:, start:stop], v[:, start:stop]

    assert store.save(TEXT, read) == 200
    assert asked == [(400, 600)]
    assert store.save(TEXT, read) == 0
    assert len(asked) == 1
    assert load(store, TEXT) == 599


def test_a_prefix_that_the_runtime_has_is_no_hit(opened: Any) -> None:
    store = opened()
    save(store, TEXT)
    assert load(store, TEXT, beyond=599) == 0
    assert load(store, TEXT, beyond=100) == 599


def test_a_load_that_takes_longer_than_computing_is_declined(opened: Any) -> None:
    store = opened()
    save(store, TEXT)
    assert load(store, TEXT, beyond=590) == 599  # nothing is known of computing yet
    store.observe_prefill(1_000_000, 1e-6)
    assert load(store, TEXT, beyond=590) == 0
    assert store.stats().declined_loads == 1


def test_short_prompts_are_left_alone(opened: Any) -> None:
    store = opened()
    assert save(store, TEXT[:255]) == 0
    assert load(store, TEXT[:255]) == 0
    assert store.stats().short_prompts == 2
    assert save(store, TEXT[:256]) == 256
    assert store.find(TEXT[:256]) == 256


def test_a_text_larger_than_memory_is_kept_as_far_as_it_fits(opened: Any) -> None:
    store = opened(size=None, memory=pk.Blocks(20))
    assert save(store, TEXT) == 320
    assert load(store, TEXT) == 320
    assert store.stats().failures == {}


def test_arrays_may_have_heads_before_tokens(opened: Any) -> None:
    spec = pk.KVSpec(2, 3, 4, "float32", model="heads@1")
    store = opened(spec=spec)
    k = np.random.default_rng(0).standard_normal((2, 3, 300, 4)).astype(np.float32)
    assert store.save(TEXT[:300], lambda a, b: (k[:, :, a:b], -k[:, :, a:b]), layout="HND") == 300
    out = np.zeros_like(k), np.zeros_like(k)
    found = store.load(TEXT[:300], lambda n: (out[0][:, :, :n], out[1][:, :, :n]), layout="HND")
    assert found == 299
    assert np.array_equal(out[0][:, :, :299], k[:, :, :299])
    assert np.array_equal(out[1][:, :, :299], -k[:, :, :299])


# ---- trouble


@pytest.mark.parametrize("problem", [RuntimeError("boom"), MemoryError(), pk.LayoutMismatch("shape")])
def test_a_caller_that_fails_costs_a_hit_and_nothing_else(opened: Any, problem: Exception, caplog: Any) -> None:
    store = opened()

    def fails(*_: int) -> Any:
        raise problem

    with caplog.at_level(logging.WARNING, "pagedkv.adapters"):
        assert store.save(TEXT, fails) == 0
        assert store.save(TEXT, fails) == 0
        assert save(store, TEXT) == 600
        assert store.load(TEXT, fails) == 0
        assert load(store, TEXT, apply=fails) == 0
    kind = type(problem).__name__
    assert store.stats().failures == {f"save: {kind}": 2, f"load: {kind}": 2}
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert load(store, TEXT) == 599
    store.cache.check_integrity()


@pytest.mark.parametrize("tokens", [["a"], [[1, 2]], [2**40] * 300, [0.5] * 300, None, object()])
def test_tokens_that_are_none_are_a_miss(opened: Any, tokens: Any) -> None:
    store = opened(min_tokens=1)
    assert store.find(tokens) == 0
    assert store.load(tokens, lambda n: pytest.fail("no hit")) == 0
    assert store.save(tokens, lambda a, b: pytest.fail("no tokens")) == 0
    assert sum(store.stats().failures.values()) == 3


def test_arrays_that_do_not_fit_are_a_miss(opened: Any) -> None:
    store = opened()
    assert store.save(TEXT, lambda a, b: (np.zeros((1, 2)), None)) == 0
    save(store, TEXT)
    assert store.load(TEXT, lambda n: (np.zeros(3), np.zeros(3))) == 0
    assert store.stats().failures == {"save: LayoutMismatch": 1, "load: LayoutMismatch": 1}


def test_a_closed_store_is_a_miss(opened: Any) -> None:
    store = opened()
    save(store, TEXT)
    store.close()
    store.close()
    assert load(store, TEXT) == 0
    assert save(store, TEXT) == 0
    assert store.find(TEXT) == 0


def test_an_interrupt_comes_out(opened: Any) -> None:
    store = opened()

    def interrupted(*_: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(TEXT, interrupted)

    def late(number: int, frame: object) -> None:
        raise TimeoutError("the program's own")

    before = signal.signal(signal.SIGUSR1, late)
    try:
        with pytest.raises(TimeoutError):
            store.save(TEXT, lambda a, b: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert save(store, TEXT) == 600
    store.cache.check_integrity()


# ---- tenants


def test_tenants_share_nothing(opened: Any) -> None:
    store = opened()
    with store.namespace("alice"):
        save(store, TEXT)
        assert load(store, TEXT) == 599
        with store.namespace(pk.Namespace(tenant="bob")):
            assert load(store, TEXT) == 0
        assert load(store, TEXT) == 599
        space = store.current()
        assert store.explain(TEXT).cached_tokens == 592
    assert load(store, TEXT) == 0
    assert load(store, TEXT, namespace=space) == 599  # as a stream does that began inside
    store.purge("alice")
    with store.namespace("alice"):
        assert load(store, TEXT) == 0


def test_a_store_for_tenants_alone_serves_no_other_request(opened: Any) -> None:
    store = opened(require_namespace=True)
    assert save(store, TEXT) == 0
    assert store.stats().failures == {"save: NamespaceRequired": 1}
    with store.namespace("alice"):
        assert save(store, TEXT) == 600


def test_two_stores_have_namespaces_of_their_own(tmp_path: Path) -> None:
    with PrefixStore(SPEC, "1MiB") as one, PrefixStore(SPEC, "1MiB") as other, one.namespace("alice"):
        assert one.current() == pk.Namespace(tenant="alice")
        assert other.current() == pk.Namespace()


# ---- on disk


def test_by_default_all_is_written_within_a_budget(opened: Any) -> None:
    store = opened()
    save(store, TEXT)
    assert store.checkpoint() == 38  # 37 whole blocks, and the last one
    assert store.cache.stats().disk["refused_by_write_budget"] == 0
    store.close()
    other = opened(disk={"write": "never"})
    assert load(other, TEXT) == 599


def test_an_option_that_nobody_has_is_named_with_those_there_are(tmp_path: Path) -> None:
    for disk in (None, pk.Disk(tmp_path / "kv", "1MiB")):
        with pytest.raises(pk.WrongType, match=r"no option 'rule'; .* pin_budget, policy, "):
            PrefixStore(SPEC, "1MiB", disk, rule="lru")
    assert not (tmp_path / "kv").exists()


def test_a_disk_whose_share_holds_no_block_is_refused_by_the_size_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(pk.InvalidArgument, match=r"Disk\(size='20KiB'\) .* does not hold one block .* larger size"):
        PrefixStore(SPEC, "1MiB", pk.Disk(tmp_path / "kv", "20KiB"))
    assert not list((tmp_path / "kv").glob("*/ABOUT")), "other models may have its room"
    PrefixStore(SPEC, "1MiB", pk.Disk(tmp_path / "kv", "1MiB")).close()


@pytest.mark.parametrize("failures", [1, 6])
def test_a_store_that_cannot_be_opened_for_a_while_is_there_afterwards(tmp_path: Path, failures: int) -> None:
    disk = pk.Disk(tmp_path / "kv", "1MiB")
    with PrefixStore(SPEC, "1MiB", disk) as store:
        assert save(store, TEXT) == 600
        size = store.cache.stats().blocks["disk"]["capacity"]
    folder = folder_in(tmp_path)
    (folder / "FULL").touch()  # so that it is to grow
    for _ in range(failures):
        with pytest.raises(pk.InvalidArgument, match="policy"):
            PrefixStore(SPEC, "1MiB", disk, policy="unknown")
    assert json.loads((folder / "ABOUT").read_text())["bytes"] < (1 << 20) * 5 // 8, "others may have the rest"
    (folder / "FULL").unlink()
    with PrefixStore(SPEC, "1MiB", disk) as store:
        assert store.find(TEXT) >= 592
        assert store.cache.stats().blocks["disk"]["capacity"] <= size + 1, "by its files"


def folder_in(root: Path) -> Path:
    (found,) = [path for path in (root / "kv").iterdir() if path.is_dir()]
    return found


@pytest.mark.parametrize("text", ["", "{", '{"bytes": -1}', '{"bytes": 5}', '{"bytes": 0.5}', '{"bytes": 99999999999}'])
def test_a_damaged_note_of_the_size_costs_nothing(tmp_path: Path, text: str) -> None:
    disk = pk.Disk(tmp_path / "kv", "1MiB")
    with PrefixStore(SPEC, "1MiB", disk) as store:
        save(store, TEXT)
    (folder_in(tmp_path) / "ABOUT").write_text(text)
    for _ in range(2):
        with PrefixStore(SPEC, "1MiB", disk) as store:
            assert store.find(TEXT) >= 592


def test_a_full_store_without_room_to_grow_is_opened_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = pk.Disk(tmp_path / "kv", "1MiB", required=False)
    with PrefixStore(SPEC, "1MiB", disk) as store:
        save(store, TEXT)
    (folder_in(tmp_path) / "FULL").touch()
    opened = model_cache.KVCache

    def without_room(*args: Any, disk: pk.Disk, **options: Any) -> pk.KVCache:
        if int(disk.size) > 600_000:  # half of the budget, and a part of the rest
            if disk.required:
                raise pk.TierError("needs more bytes to grow")
            return opened(*args, **options)
        return opened(*args, disk=disk, **options)

    monkeypatch.setattr(model_cache, "KVCache", without_room)
    with PrefixStore(SPEC, "1MiB", disk) as store:
        assert store.find(TEXT) >= 592


def test_a_folder_made_without_a_probe_is_not_emptied_by_one(tmp_path: Path) -> None:
    disk = pk.Disk(tmp_path / "kv", "1MiB")
    with PrefixStore(SPEC, "1MiB", disk) as store:
        save(store, TEXT)
    probe = Probe(np.ones((2, 3)), np.ones((2, 3)))
    with PrefixStore(SPEC, "1MiB", disk, probe=probe) as store:
        assert store.find(TEXT) == 0, "whose KV that is nothing says"
    with PrefixStore(SPEC, "1MiB", disk) as store:
        assert store.find(TEXT) >= 592


def test_stats_say_in_words_what_was_saved(tmp_path: Path) -> None:
    with PrefixStore(SPEC, "1MiB") as store:
        of_store, of_cache = str(store.stats()).split("\n")
    assert of_store == "0 prompts; 0 of 0 tokens loaded (0.0%) in 0 s, 0 saved in 0 s; failures: none"
    assert of_cache.startswith("0 sequences;")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("all", "all", "50GiB")),
        ({"write_budget": "10GiB"}, ("all", "all", "10GiB")),
        ({"write": "evicted"}, ("evicted", "cost", "50GiB")),
        ({"write": "never"}, ("never", "cost", "50GiB")),
        ({"admission": "second_hit"}, ("all", "second_hit", "50GiB")),
        ({"write": "all", "admission": "all", "write_budget": "1GiB"}, ("all", "all", "1GiB")),
    ],
)  # fmt: skip
def test_one_option_of_a_disk_changes_no_other(given: dict[str, Any], wanted: tuple[str, str, str]) -> None:
    disk = with_defaults(pk.Disk("kv", "20GiB", **given))
    assert (disk.write, disk.admission, disk.write_budget) == wanted


def test_a_smaller_budget_still_writes_all_at_once(opened: Any) -> None:
    store = opened(disk={"write_budget": "1GiB"})
    save(store, TEXT)
    assert store.checkpoint() == 38
    assert store.cache.stats().disk["refused_by_write_budget"] == 0


def test_a_disk_that_cannot_be_opened_is_an_error_or_left_out(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(pk.TierError, match=r"notes\.txt"):
        PrefixStore(SPEC, "1MiB", pk.Disk(str(tmp_path), "8MiB"))
    with PrefixStore(SPEC, "1MiB", pk.Disk(str(tmp_path), "8MiB", required=False)) as store:
        assert save(store, TEXT) == 600
        assert load(store, TEXT) == 592  # only a disk keeps the last, partly filled block
        assert store.folder is None
    assert "left out" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_probe_of_another_model_gets_another_folder(opened: Any) -> None:
    ours, theirs = (Probe(np.full((2, 3), x, np.float32), np.ones((2, 3))) for x in (1.0, 1.5))
    store = opened(probe=ours)
    save(store, TEXT)
    store.close()
    store = opened(probe=theirs)
    assert load(store, TEXT) == 0
    save(store, TEXT)
    store.close()
    for probe in (ours, theirs):  # each finds its own
        store = opened(probe=probe)
        assert load(store, TEXT) == 599
        store.close()
    with pytest.raises(pk.LayoutMismatch, match="K of layer 0 differs"):
        opened(probe=Probe(np.zeros((2, 3)), np.ones((2, 3))), on_mismatch="refuse")
    store = opened(probe=Probe(np.zeros((2, 3)), np.ones((2, 3))), on_mismatch="reset")
    assert load(store, TEXT) == 0


LIFE = """
    import numpy as np, os, signal, sys
    sys.path.insert(0, {tests!r})
    import pagedkv as pk
    from test_store import SPEC, TEXT, save
    from pagedkv.adapters.store import PrefixStore
    store = PrefixStore(SPEC, "1MiB", pk.Disk({path!r}, "8MiB"))
    assert save(store, TEXT) == 600
    {end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("store.checkpoint(); os.kill(os.getpid(), signal.SIGKILL)", -9), ("pass", 0), ("sys.exit(3)", 3)],
)
def test_it_survives_its_process_however_that_ends(tmp_path: Path, end: str, status: int) -> None:
    """A kill after the writes, and ends at which nothing closes the store but atexit."""
    path = str(tmp_path / "kv")
    script = textwrap.dedent(LIFE).format(tests=str(Path(__file__).parent), path=path, end=end)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == status
    with PrefixStore(SPEC, "1MiB", pk.Disk(path, "8MiB")) as store:
        assert load(store, np.append(TEXT, 1)) == 600


def test_blocks_of_generators_end_in_any_order() -> None:
    def stream(store: PrefixStore, who: str) -> Generator[pk.Namespace, None, None]:
        with store.namespace(who):
            while True:
                yield store.current()

    with PrefixStore(SPEC, "1MiB") as store:
        alice, bob = stream(store, "alice"), stream(store, "bob")
        assert next(alice) == pk.Namespace(tenant="alice")
        assert next(bob) == pk.Namespace(tenant="bob")
        alice.close()
        assert next(bob) == pk.Namespace(tenant="bob")
        bob.close()
        assert store.current() == pk.Namespace()
