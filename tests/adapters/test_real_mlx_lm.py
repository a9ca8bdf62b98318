"""PromptCache on mlx-lm itself, also in its server: ``pytest -m runtimes``.

The model is a Llama of two layers with random weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.adapters.mlx_lm import PromptCache
from tests.adapters.lives import ROOT, kill_once_written
from tests.adapters.mlx_server_bed import make

pytestmark = pytest.mark.runtimes
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed (docs/testing.md)", exc_type=ImportError)
mx: Any = pytest.importorskip("mlx.core")

VOCAB = 512
SYSTEM = np.random.default_rng(3).integers(0, VOCAB, 300).tolist()
ONE, OTHER = [*SYSTEM, *range(40)], [*SYSTEM, *range(150, 210)]
DTYPES = ["float32", "float16", "bfloat16"]


def new(dtype: str = "float32", seed: int = 0, heads: int = 2) -> Any:
    from mlx_lm.models import llama

    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(
        model_type="llama", hidden_size=128, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=heads, rms_norm_eps=1e-5, vocab_size=VOCAB, tie_word_embeddings=False,
    ))  # fmt: skip
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


def fresh(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)  # type: ignore[no-any-return]


def generate(model: Any, kv: list[Any], rest: list[int], length: int = 8) -> list[int]:
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(rest), model, max_tokens=length, prompt_cache=kv)]


def answer(cache: PromptCache, model: Any, prompt: list[int], length: int = 8) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt came from the cache."""
    kv, rest = cache.fetch_nearest_cache("m", prompt)
    kv = fresh(model) if kv is None else kv
    tokens = generate(model, kv, rest, length)
    cache.insert_cache("m", [*prompt, *tokens], kv)
    return tokens, len(prompt) - len(rest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversations_in_turn_hit_with_the_tokens_of_a_cold_run(dtype: str) -> None:
    model = new(dtype)
    cold = {tuple(prompt): generate(model, fresh(model), prompt) for prompt in (ONE, OTHER)}
    with PromptCache(model, "16MiB", revision="toy") as cache:
        for prompt, expected in ((ONE, 0), (OTHER, 300), (ONE, 336), (OTHER, 359)):
            assert answer(cache, model, prompt) == (cold[tuple(prompt)], expected)
        assert cache.stats().failures == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_that_were_computed(dtype: str, tmp_path: Path) -> None:
    model = new(dtype)
    kv = fresh(model)
    mx.eval(model(mx.array([ONE]), cache=kv))
    for turn in range(2):
        with PromptCache(model, "16MiB", pk.Disk(str(tmp_path / "kv"), "64MiB"), revision="toy") as cache:
            if not turn:
                cache.insert_cache("m", ONE, kv)
            found, rest = cache.fetch_nearest_cache("m", ONE)
            assert rest == ONE[339:]
            for ours, theirs in zip(found, kv, strict=True):
                assert (ours.keys.dtype, ours.keys.shape, ours.offset) == (theirs.keys.dtype, theirs.keys.shape, 339)
                for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                    assert mx.array_equal(one[..., :339, :], other[..., :339, :])
            trimmed = [one.trim(1) for one in kv]
            assert trimmed == [1, 1]
            behind, own = (model(mx.array([ONE[339:]]), cache=caches) for caches in (found, kv))
            assert mx.array_equal(behind, own)


LIFE = """
    import pagedkv as pk
    from pagedkv.adapters.mlx_lm import PromptCache
    from tests.adapters.test_real_mlx_lm import ONE, answer, new
    model = new("bfloat16")
    cache = PromptCache(model, "16MiB", pk.Disk({path!r}, "64MiB"), revision="toy")
    answer(cache, model, ONE)
"""


def test_a_process_that_was_killed_leaves_its_prompt_to_the_same_weights_alone(tmp_path: Path) -> None:
    kill_once_written(LIFE.format(path=str(tmp_path / "kv")), 21)
    for seed, least in ((1, 0), (0, 323)):
        model = new("bfloat16", seed)
        expected = generate(model, fresh(model), ONE)
        with PromptCache(model, "16MiB", pk.Disk(str(tmp_path / "kv"), "64MiB"), revision="toy") as cache:
            tokens, hit = answer(cache, model, ONE)
            assert tokens == expected
            assert (hit >= least) if least else hit == 0
            assert cache.stats().failures == {}


def test_tenants_share_nothing() -> None:
    model = new()
    with PromptCache(model, "16MiB", revision="toy") as cache:
        with cache.namespace("alice"):
            assert [answer(cache, model, ONE)[1] for _ in range(2)] == [0, 336]
        with cache.namespace("bob"):
            assert answer(cache, model, ONE)[1] == 0


def test_windows_quantised_and_recurrent_layers_are_refused() -> None:
    from mlx_lm.models import cache as caches

    model = new()
    for kind in (lambda: caches.RotatingKVCache(64), caches.QuantizedKVCache, lambda: caches.ArraysCache(2)):
        model.make_cache = lambda kind=kind: [caches.KVCache(), kind()]
        with pytest.raises(pk.NotSupported, match="do not keep K and V of each token"):
            PromptCache(model, "16MiB", revision="toy")
    del model.make_cache
    with PromptCache(model, "16MiB", revision="toy") as cache:
        kv = [layer.to_quantized(32, 8) for layer in _filled(model)]
        cache.insert_cache("m", ONE, kv)
        assert list(cache.stats().failures) == ["insert: layer 0 has a QuantizedKVCache, not a plain KVCache"]


def _filled(model: Any) -> list[Any]:
    kv = fresh(model)
    mx.eval(model(mx.array([ONE]), cache=kv))
    return kv


# ---- in mlx_lm.server

TEXT = " ".join(f"w{7 * number % 500}" for number in range(320))


class Server:
    """A process of mlx_lm.server on a model's folder."""

    def __init__(self, model: Path, cache: Path | str, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log
        command = [sys.executable, "-m", "tests.adapters.mlx_server_bed", str(model), str(cache), str(self.port)]
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [*command, *options], cwd=ROOT, stderr=file, stdout=file, env={**os.environ, "HF_HUB_OFFLINE": "1"}
            )
        self.until(lambda: "Starting httpd" in self.log(), "it did not start")

    def log(self) -> str:
        return self._log.read_text()

    def until(self, holds: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + 120
        while not holds():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < end, f"{otherwise}: {self.log()}"
            time.sleep(0.05)

    def ask(self, text: str, **options: Any) -> tuple[str, int]:
        """The answer, and the tokens of the prompt that came from a cache."""
        body = json.dumps({"prompt": text, "max_tokens": 8, "temperature": 0, **options}).encode()
        address = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        for _ in range(100):
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(request, timeout=60) as reply:
                said = json.load(reply)
                return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]
            time.sleep(0.1)  # it binds its port after it has said so
        raise AssertionError(self.log())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def serve(cache: str = "kv", *options: str, **changes: Any) -> Server:
            make(tmp_path / "model", **changes)
            place = cache if cache == "-" else tmp_path / cache
            server = Server(tmp_path / "model", place, tmp_path / "log", *options)
            stack.callback(server.kill)
            return server

        yield serve


def test_the_server_finds_prompts_again_also_after_a_kill(served: Any) -> None:
    plain = served("-")
    expected, _ = plain.ask(TEXT)
    assert len(set(expected.split())) > 3
    plain.kill()
    server = served()
    assert server.ask(TEXT) == (expected, 0)
    assert server.ask(TEXT) == (expected, 319)
    assert server.ask(TEXT, seed=3) == (expected, 319)  # served alone, not in a batch

    def written() -> bool:
        server.ask("w1 w2")  # the server logs the sizes of its cache at each request
        return any(int(count) >= 20 for count in re.findall(r"- disk: (\d+) sequences", server.log()))

    server.until(written, "the blocks were not written")
    server.kill()
    assert "Traceback" not in server.log()
    server = served()
    text, hit = server.ask(TEXT)
    assert text == expected
    assert hit >= 0.95 * 320
    server.kill()
    other = served(seed=1)  # other weights in the same folder
    text, hit = other.ask(TEXT)
    assert hit == 0
    assert text != expected


def test_a_server_with_quantised_kv_goes_on_with_its_own_cache(served: Any) -> None:
    server = served("kv", "--kv-bits", "8", "--kv-group-size", "32")
    first, _ = server.ask(TEXT)
    second, hit = server.ask(TEXT)
    assert first == second
    assert hit >= 319  # mlx-lm's own
    assert server.log().count("the server's own prompt cache is used") == 1
