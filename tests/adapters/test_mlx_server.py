"""in_server() on a stand-in for mlx_lm.server: models in turn, refusals, failing calls."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.adapters.mlx_layers import PROBED
from pagedkv.adapters.mlx_server import in_server
from tests.adapters import mlx_stub
from tests.adapters.mlx_stub import KVCache, LRUPromptCache, Model, RotatingKVCache
from tests.adapters.test_mlx_lm import ONE, OTHER, cold

pytest.importorskip("mlx.core", reason="MLX is not installed")
KEY = ("path", None, None)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in for mlx_lm.server."""
    modules = mlx_stub.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["mlx_lm.server"]


def provider_of(model: Any, key: Any = KEY, kv_bits: int | None = None) -> Any:
    return SimpleNamespace(model=model, model_key=key, cli_args=SimpleNamespace(kv_bits=kv_bits))


def computed(generator: Any, prompt: list[int]) -> int:
    """Tokens that an answer computes; the answer is that of a cold run."""
    model = generator.model_provider.model
    before = model.computed
    assert generator.answer(prompt) == cold(model, prompt)
    return int(model.computed - before)


def test_the_server_is_given_our_cache_and_gets_its_own_back(server: Any) -> None:
    with in_server("4MiB") as started:
        generator = server.ResponseGenerator(provider_of(Model()), LRUPromptCache(10))
        assert [computed(generator, prompt) for prompt in (ONE, OTHER, ONE)] == [PROBED + 345, 65, 4 + 5]
        assert started[0].cache.stats().loaded_tokens == 300 + 336
        assert generator.prompt_cache.nbytes == 7 + started[0].cache.nbytes
        assert set(generator.prompt_cache.stats_by_type()) == {"assistant", "memory"}
        assert len(generator.prompt_cache) == len(started[0].cache) > 0
    assert server.ResponseGenerator is mlx_stub.ResponseGenerator
    assert computed(generator, ONE) == 345  # closed: the server goes on


def test_models_in_turn_never_find_each_others_kv(server: Any, tmp_path: Path) -> None:
    with in_server("4MiB", pk.Disk(str(tmp_path / "kv"), "64MiB")) as started:
        provider = provider_of(None)
        generator = server.ResponseGenerator(provider, LRUPromptCache(10))
        for path, seed, expected in (("a", 1, 345), ("b", 3, 345), ("a", 1, 6), ("a", 5, 345), ("b", 3, 6)):
            provider.model, provider.model_key = Model(seed=seed), (path, None, None)
            assert computed(generator, ONE) == PROBED + expected
        assert started[0].failures.counts() == {}


REFUSED: dict[str, Any] = {
    "draft model": lambda: provider_of(Model(), ("path", None, "draft")),
    "kv-bits": lambda: provider_of(Model(), kv_bits=8),
    "RotatingKVCache": lambda: provider_of(Model(kinds=[KVCache, RotatingKVCache])),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_goes_on_with_the_servers_own_cache(server: Any, reason: str, caplog: Any) -> None:
    own = LRUPromptCache(10)
    with in_server("4MiB"), caplog.at_level(logging.WARNING, "pagedkv.adapters"):
        generator = server.ResponseGenerator(REFUSED[reason](), own)
        for _ in range(3):
            computed(generator, ONE)
    assert own.calls == ["fetch", "insert", "trim_to"] * 3
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_a_disk_that_cannot_be_opened_leaves_the_server_its_own_cache(server: Any, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "kv").write_text("a file")
    own = LRUPromptCache(10)
    with in_server("4MiB", pk.Disk(str(tmp_path / "kv"), "64MiB")) as started:
        generator = server.ResponseGenerator(provider_of(Model()), own)
        for _ in range(3):
            computed(generator, ONE)
        assert started[0].failures.counts() == {"open: TierError": 1}
    assert own.calls[:2] == ["fetch", "insert"]


def test_without_the_runtime_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    with pytest.raises(ImportError, match="pip install mlx-lm"), in_server():
        pass
