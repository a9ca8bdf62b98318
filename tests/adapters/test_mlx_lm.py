"""PromptCache on a stand-in for mlx_lm, with MLX's arrays: hits, trouble, restarts."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.adapters.mlx_lm import PromptCache
from tests.adapters import mlx_stub
from tests.adapters.lives import kill_once_written
from tests.adapters.mlx_stub import VOCAB, KVCache, Model, RotatingKVCache, generate

mx: Any = pytest.importorskip("mlx.core", reason="MLX is not installed")

SYSTEM = np.random.default_rng(3).integers(0, VOCAB, 300).tolist()
ONE, OTHER = [*SYSTEM, *range(40)], [*SYSTEM, *range(150, 210)]


@pytest.fixture(autouse=True)
def _runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in mlx_stub.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., PromptCache]]:
    with contextlib.ExitStack() as stack:

        def open_it(model: Model, size: str | None = "16MiB", memory: str = "4MiB", **options: Any) -> PromptCache:
            disk = None if size is None else pk.Disk(str(tmp_path / "kv"), size)
            return stack.enter_context(PromptCache(model, memory, disk, **{"revision": "toy", **options}))

        yield open_it


def answer(cache: PromptCache, model: Model, prompt: list[int], length: int = 6) -> list[int]:
    kv, rest = cache.fetch_nearest_cache("m", prompt)
    assert len(rest) >= 1
    kv = model.make_cache() if kv is None else kv
    assert [*prompt[: kv[0].offset], *rest] == prompt
    tokens = generate(model, kv, rest, length)
    cache.insert_cache("m", [*prompt, *tokens], kv)
    return tokens


def cold(model: Model, prompt: list[int], length: int = 6) -> list[int]:
    return generate(Model(model.dtype, model.seed), model.make_cache(), prompt, length)


def computed(cache: PromptCache, model: Model, prompt: list[int], length: int = 6) -> int:
    """Tokens that an answer computes; the answer is that of a cold run."""
    before = model.computed
    assert answer(cache, model, prompt, length) == cold(model, prompt, length)
    return model.computed - before


# ---- hits


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_two_conversations_in_turn_both_hit(opened: Any, dtype: str) -> None:
    model = Model(dtype)
    cache = opened(model)
    assert computed(cache, model, ONE) == 340 + 5
    assert computed(cache, model, OTHER) == 60 + 5
    assert computed(cache, model, ONE) == 1 + 5
    assert computed(cache, model, OTHER) == 1 + 5
    turn = [*ONE, *cold(model, ONE), 5, 6, 7]
    assert computed(cache, model, turn) == 4 + 5  # the last token of an answer is in no cache
    stats = cache.stats()
    assert stats.failures == {}
    assert stats.loaded_tokens == 300 + 339 + 359 + 345


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_comes_back_has_the_type_the_bytes_and_the_room_of_a_cache_that_computed_it(
    opened: Any, dtype: str
) -> None:
    model = Model(dtype)
    cache = opened(model)
    kv = model.make_cache()
    model(mx.array([ONE]), cache=kv)
    cache.insert_cache(None, ONE, kv)
    found, rest = cache.fetch_nearest_cache(None, ONE)
    assert rest == ONE[339:]
    for ours, theirs in zip(found, kv, strict=True):
        assert type(ours) is KVCache
        assert ours.offset == 339
        for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert mx.array_equal(one[..., :339, :], other[..., :339, :])
        keys = ours.keys
        ours.update_and_fetch(theirs.keys[..., 339:340, :], theirs.values[..., 339:340, :])
        assert ours.keys.shape == keys.shape  # it did not grow


def test_what_the_caller_does_with_its_caches_changes_nothing_here(opened: Any) -> None:
    model = Model()
    cache = opened(model)
    kv = model.make_cache()
    model(mx.array([ONE]), cache=kv)
    cache.insert_cache("m", ONE, kv)
    for layer in kv:
        layer.keys[...] = 7
        mx.eval(layer.keys)
    found, _ = cache.fetch_nearest_cache("m", ONE)
    for layer in found:
        np.array(layer.keys, copy=False)[:] = 9
        np.array(layer.values, copy=False)[:] = 9
    assert computed(cache, model, ONE) == 1 + 5


def test_a_disk_finds_them_after_a_restart(opened: Any) -> None:
    model = Model("bfloat16")
    for turn in range(2):
        cache = opened(model)
        assert computed(cache, model, ONE) == (1 if turn else 340) + 5
        assert cache.stats().failures == {}
        cache.close()


def test_caches_that_hold_fewer_or_more_tokens_than_the_text_are_kept_as_far_as_both_go(opened: Any) -> None:
    model = Model()
    cache = opened(model, size=None)
    kv = model.make_cache()
    model(mx.array([ONE]), cache=kv)
    cache.insert_cache(None, ONE[:300], kv)
    assert cache.explain(ONE).cached_tokens == 288  # whole blocks, and nothing of the last 40 tokens
    cache.insert_cache(None, [*ONE, *range(30)], kv)
    assert cache.explain([*ONE, *range(30)]).cached_tokens == 336


def test_short_prompts_are_computed(opened: Any) -> None:
    model = Model()
    cache = opened(model)
    computed(cache, model, ONE[:200])
    assert cache.stats().short_prompts == 2
    assert cache.stats().saved_tokens == 0


def test_what_the_caller_measures_reaches_the_cost_model(opened: Any) -> None:
    cache = opened(Model())
    assert cache.store.cache.costs.compute_s(1000, 0) is None
    for num_tokens in (500, 1000, 1500):
        cache.observe_prefill(num_tokens, num_tokens / 100)
    assert cache.store.cache.costs.compute_s(1000, 0) == pytest.approx(10, rel=0.2)


# ---- the face of mlx-lm's cache


def test_it_has_the_face_of_mlx_lms_own(opened: Any) -> None:
    model = Model()
    cache = opened(model)
    assert (len(cache), cache.nbytes) == (0, 0)
    assert cache  # empty, and yet a cache
    answer(cache, model, ONE)
    cache.checkpoint()
    blocks = -(-345 // 16)
    assert blocks - 1 <= len(cache) <= blocks
    assert cache.nbytes == len(cache) * cache.store.spec.block_bytes
    by_type = cache.stats_by_type()
    assert set(by_type) == {"memory", "disk"}
    assert by_type["memory"] == {"n_sequences": len(cache), "n_bytes": cache.nbytes}
    assert by_type["disk"]["n_sequences"] >= blocks - 1
    cache.trim_to(n_sequences=0, n_bytes=0)
    cache.insert_cache("m", OTHER, model.make_cache(), cache_type="system")
    assert computed(cache, model, ONE) == 1 + 5


def test_another_models_name_is_a_miss(opened: Any) -> None:
    model = Model()
    cache = opened(model)
    kv = model.make_cache()
    model(mx.array([ONE]), cache=kv)
    cache.insert_cache(("path", None, None), ONE, kv)
    assert cache.fetch_nearest_cache(("other", None, None), ONE) == (None, ONE)
    cache.insert_cache(("other", None, None), OTHER, kv)
    found, _ = cache.fetch_nearest_cache(("path", None, None), OTHER)
    assert found[0].offset == 300
    assert sum(cache.stats().failures.values()) == 2


def test_images_are_neither_looked_for_nor_kept(opened: Any) -> None:
    model = Model()
    cache = opened(model)
    image = [*ONE[:50], -(2**59), *ONE[51:]]
    kv = model.make_cache()
    model(mx.array([ONE]), cache=kv)
    cache.insert_cache("m", image, kv)
    assert cache.fetch_nearest_cache("m", image) == (None, image)
    assert cache.stats().saved_tokens == 0
    assert cache.stats().failures == {}


# ---- trouble


def test_an_exception_at_any_call_costs_a_hit_and_nothing_else(opened: Any) -> None:
    """Every call of MLX that the adapter makes fails once; every answer is that of a cold run."""
    number, failures = 0, 0
    while True:
        model = Model("bfloat16")
        cache = opened(model, size=None)
        cache._layers._mx = calls = mlx_stub.Calls()
        calls.fail_at = number
        for prompt in (ONE, OTHER, ONE, [*OTHER, 1, 2]):
            computed(cache, model, prompt)
        if calls.count <= number:
            break
        failures += sum(cache.stats().failures.values())
        computed(cache, model, ONE)
        assert computed(cache, model, ONE) <= 4 + 5  # and it goes on
        cache.close()
        number += 1
    assert number >= 8
    assert failures == number


WRONG: dict[str, Callable[[list[Any]], Any]] = {
    "QuantizedKVCache": lambda kv: [type("QuantizedKVCache", (), {})(), *kv[1:]],
    "RotatingKVCache": lambda kv: [RotatingKVCache(), *kv[1:]],
    "draft": lambda kv: [*kv, KVCache()],
    "as many tokens": lambda kv: [kv[0], KVCache()],
    "several shapes": lambda kv: [setattr(kv[1], "values", kv[1].values[..., :4]), kv][1],  # type: ignore[func-returns-value]
    "not mlx.core.float16": lambda kv: [setattr(kv[1], "keys", kv[1].keys.astype(mx.float32)), kv][1],  # type: ignore[func-returns-value]
    "tokens": lambda kv: [setattr(layer, "offset", 5000) for layer in kv] and kv,  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("reason", WRONG)
def test_caches_of_something_else_are_not_kept_and_that_is_said_once(opened: Any, reason: str, caplog: Any) -> None:
    model = Model()
    cache = opened(model)
    kv = model.make_cache()
    model(mx.array([ONE]), cache=kv)
    wrong = WRONG[reason](kv)
    with caplog.at_level(logging.WARNING, "pagedkv.adapters"):
        for _ in range(3):
            cache.insert_cache("m", ONE, wrong)
    assert cache.stats().saved_tokens == 0
    assert [(reason in kind, count) for kind, count in cache.stats().failures.items()] == [(True, 3)]
    assert len(caplog.records) == 1
    assert computed(cache, model, ONE) == 340 + 5
    assert computed(cache, model, ONE) == 1 + 5


@pytest.mark.parametrize("tokens", [["a"] * 300, [2**40] * 300, 5, None, [[1, 2], [3, 4]], [1.5] * 300])
def test_tokens_that_are_none_are_a_miss(opened: Any, tokens: Any) -> None:
    model = Model()
    cache = opened(model)
    kv = model.make_cache()
    model(mx.array([ONE]), cache=kv)
    assert cache.fetch_nearest_cache("m", tokens) == (None, tokens)
    cache.insert_cache("m", tokens, kv)
    assert cache.stats().failures
    assert computed(cache, model, ONE) == 340 + 5


def test_after_closing_it_is_a_miss(opened: Any) -> None:
    model = Model()
    cache = opened(model)
    answer(cache, model, ONE)
    cache.close()
    cache.close()
    assert computed(cache, model, ONE) == 340 + 5
    assert len(cache) >= 0


def test_an_interrupt_of_a_fetch_comes_out(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    cache = opened(model)
    answer(cache, model, ONE)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._layers, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.fetch_nearest_cache("m", ONE)
    monkeypatch.undo()
    found, _ = cache.fetch_nearest_cache("m", ONE)
    assert found[0].offset == 339


def test_threads_take_turns(opened: Any) -> None:
    cache = opened(Model(), size=None)
    wrong: list[str] = []

    def run(number: int) -> None:
        model = Model()
        for turn in range(4):
            prompt = [*SYSTEM, number, turn, *range(20)]
            if answer(cache, model, prompt, 2) != cold(model, prompt, 2):
                wrong.append(f"{number}.{turn}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.stats().failures == {}
    assert cache.stats().loaded_tokens >= 4 * 3 * 300  # each thread's own first prompt, at least


# ---- refusals


class Strange(Model):
    """A model that cannot be called."""

    def __call__(self, inputs: Any, cache: list[Any]) -> None:
        raise RuntimeError("no such call")


def _empty() -> Model:
    model = Model()
    model.kinds = []
    return model


REFUSED: dict[str, Callable[[], Model]] = {
    "RotatingKVCache": lambda: Model(kinds=[KVCache, RotatingKVCache]),
    "no layers": _empty,
    "several shapes": lambda: Model(v_dims=[4, 4]),
    "V of layer 1": lambda: Model(v_dims=[8, 4]),
    "int32": lambda: Model("int32"),
    "does not answer as expected.*no such call": Strange,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_cannot_be_cached_is_refused_and_untouched(tmp_path: Path, reason: str) -> None:
    model = REFUSED[reason]()
    names = set(vars(model))
    with pytest.raises(pk.NotSupported, match=f"(?s){reason}.*unchanged"):
        PromptCache(model, "1MiB", pk.Disk(str(tmp_path / "kv"), "8MiB"), revision="toy")
    assert set(vars(model)) == names
    assert not (tmp_path / "kv").exists()


def test_a_model_over_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def size(self) -> int:
            return 2

    monkeypatch.setattr(mx.distributed, "init", Group)
    with pytest.raises(pk.NotSupported, match="several processes"):
        PromptCache(Model(), "1MiB", revision="toy")


def test_arguments_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    for options in ({"revision": ""}, {"revision": 5}, {"memory": 5}, {"disk": "kv"}, {"min_tokens": -1}):
        with pytest.raises((pk.WrongType, pk.InvalidArgument)):
            PromptCache(Model(), **{"revision": "toy", **options})  # type: ignore[arg-type]


def test_without_the_runtime_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    with pytest.raises(ImportError, match="pip install mlx-lm"):
        PromptCache(Model(), revision="toy")


@pytest.mark.parametrize(("version", "warns"), [("0.32.0", 0), ("0.32.2", 0), ("0.32.3", 1), ("0.31.9", 1)])
def test_an_untested_version_is_one_warning(
    opened: Any, version: str, warns: int, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["mlx_lm"], "__version__", version)
    model = Model()
    cache = opened(model)
    computed(cache, model, ONE)
    assert computed(cache, model, ONE) == 1 + 5
    assert [record.getMessage().count("tested versions") for record in caplog.records] == [1] * warns


# ---- whose KV it is


def test_other_weights_revisions_and_versions_find_nothing_of_each_other(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def life(expected: bool, seed: int = 1, **options: Any) -> None:
        model = Model(seed=seed)
        cache = opened(model, size="64MiB", **options)
        assert (computed(cache, model, ONE) < 100) == expected
        cache.close()

    life(False)
    life(True)
    life(False, seed=3)  # other weights under one revision, which the probe tells
    life(True, seed=3)
    life(True)
    life(False, revision="other")
    monkeypatch.setattr(sys.modules["mlx_lm"], "__version__", "0.32.1")
    life(False)


def test_tenants_share_nothing(opened: Any) -> None:
    model = Model()
    cache = opened(model)
    with cache.namespace("alice"):
        answer(cache, model, ONE)
        assert computed(cache, model, ONE) == 1 + 5
    assert cache.explain(ONE).cached_tokens == 0
    with cache.namespace(pk.Namespace(tenant="bob")):
        assert computed(cache, model, ONE) == 340 + 5
    cache.checkpoint()  # nothing is on its way to disk then, so the purge drops it at once
    assert cache.purge("alice") > 0
    with cache.namespace("alice"):
        assert computed(cache, model, ONE) == 340 + 5


def test_without_a_namespace_a_store_for_tenants_computes(opened: Any) -> None:
    model = Model()
    cache = opened(model, require_namespace=True)
    computed(cache, model, ONE)
    assert cache.stats().failures == {"load: NamespaceRequired": 1, "save: NamespaceRequired": 1}


LIFE = """
    import sys
    import pagedkv as pk
    from pagedkv.adapters.mlx_lm import PromptCache
    from tests.adapters import mlx_stub
    sys.modules.update(mlx_stub.modules())
    from tests.adapters.test_mlx_lm import ONE, OTHER, answer
    model = mlx_stub.Model()
    cache = PromptCache(model, "4MiB", pk.Disk({path!r}, "16MiB"), revision="toy")
    answer(cache, model, ONE), answer(cache, model, OTHER)
"""


def test_a_process_that_was_killed_leaves_its_prompts(tmp_path: Path, opened: Any) -> None:
    """Nothing was closed or flushed: write-behind alone."""
    kill_once_written(LIFE.format(path=str(tmp_path / "kv")), 24)  # of 345 + 365 tokens, 300 of them shared
    model = Model()
    cache = opened(model)
    for prompt in (ONE, OTHER):
        computed(cache, model, prompt)
    assert cache.stats().loaded_tokens >= 0.95 * (len(ONE) + len(OTHER))
    assert cache.stats().failures == {}
