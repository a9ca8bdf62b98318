"""A stand-in for mlx_lm on arrays of MLX: caches, a model, the server's prompt cache.

The row of a token depends on the row before it, and the next token on all rows, so a wrong KV gives wrong tokens. All
numbers are whole and below 256, which bfloat16 holds exactly.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

LAYERS, HEADS, DIM, VOCAB = 2, 3, 8, 251


class Injected(Exception):
    """A call that was told to fail."""


class KVCache:
    """As mlx_lm.models.cache.KVCache: room in steps, written in place."""

    step = 256

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0

    def update_and_fetch(self, keys: Any, values: Any) -> None:
        import mlx.core as mx

        before, self.offset = self.offset, self.offset + keys.shape[2]
        if self.keys is None or self.offset > self.keys.shape[2]:
            grown = -(-keys.shape[2] // self.step) * self.step
            sides = []
            for held, new in ((self.keys, keys), (self.values, values)):
                more = mx.zeros((*new.shape[:2], grown, new.shape[3]), new.dtype)
                sides.append(more if held is None else mx.concatenate([held[..., :before, :], more], axis=2))
            self.keys, self.values = sides
        self.keys[..., before : self.offset, :] = keys
        self.values[..., before : self.offset, :] = values


class RotatingKVCache(KVCache):
    """A sliding window."""


class Model:
    """A model of mlx-lm; `seed` stands for its weights."""

    def __init__(self, dtype: str = "float16", seed: int = 1, kinds: Any = None, v_dims: Any = None) -> None:
        self.args = SimpleNamespace(vocab_size=VOCAB)
        self.dtype, self.seed, self.computed = dtype, seed, 0
        self.kinds = kinds or [KVCache] * LAYERS
        self.v_dims = v_dims or [DIM] * len(self.kinds)

    def make_cache(self) -> list[Any]:
        return [kind() for kind in self.kinds]

    def __call__(self, inputs: Any, cache: list[Any]) -> None:
        import mlx.core as mx

        tokens = np.array(inputs)[0].tolist()
        at = cache[0].offset
        before = int(cache[-1].keys[0, 0, at - 1, 0].item()) if at else 0
        numbers = []
        for token in tokens:
            before = (before * 31 + token * self.seed + 7 * at + 1) % 251
            numbers.append(before)
            at += 1
        for number, layer in enumerate(cache):
            step = 0 if layer is cache[-1] else 11 * (number + 1)
            rows = np.array(numbers)[None, :, None] + 5 * np.arange(HEADS)[:, None, None] + np.arange(DIM) + step
            k = mx.array((rows % 251)[None].astype(np.float32)).astype(getattr(mx, self.dtype))
            v = mx.array(((3 * rows + 1) % 251)[None, ..., : self.v_dims[number]].astype(np.float32))
            layer.update_and_fetch(k, v.astype(k.dtype))
        self.computed += len(tokens)


def next_token(cache: list[Any]) -> int:
    """Of all rows and their places."""
    total = 0
    for layer in cache:
        for side in (layer.keys, layer.values):
            rows = np.array(side.astype(_float32()))[0, :, : layer.offset].astype(np.int64)
            total += int((rows * (1 + np.arange(rows.size).reshape(rows.shape) % 13)).sum())
    return total % VOCAB


def _float32() -> Any:
    import mlx.core as mx

    return mx.float32


class Calls:
    """The module ``mlx.core``, whose calls are counted, and may be made to fail."""

    def __init__(self) -> None:
        import mlx.core as mx

        self._mx, self.count, self.fail_at = mx, 0, -1

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._mx, name)
        if name not in ("array", "eval"):
            return found

        def call(*args: Any) -> Any:
            self.count += 1
            if self.count - 1 == self.fail_at:
                raise Injected(name)
            return found(*args)

        return call


class LRUPromptCache:
    """As the server's own; it keeps nothing."""

    def __init__(self, max_size: int = 10) -> None:
        self.calls: list[str] = []

    def __len__(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return 7

    def fetch_nearest_cache(self, model: Any, tokens: Any) -> Any:
        self.calls.append("fetch")
        return None, tokens

    def insert_cache(self, model: Any, tokens: Any, prompt_cache: Any, *, cache_type: str = "assistant") -> None:
        self.calls.append("insert")

    def trim_to(self, *, n_sequences: Any = None, n_bytes: Any = None) -> None:
        self.calls.append("trim_to")

    def stats_by_type(self) -> Any:
        return {"assistant": {"n_sequences": 0, "n_bytes": 7}}


class ResponseGenerator:
    """The server's, without a thread, with the calls of its ``_serve_single``."""

    def __init__(self, model_provider: Any, prompt_cache: Any) -> None:
        self.model_provider, self.prompt_cache = model_provider, prompt_cache

    def answer(self, prompt: list[int], length: int = 6) -> list[int]:
        provider = self.model_provider
        _ = len(self.prompt_cache), self.prompt_cache.nbytes, self.prompt_cache.stats_by_type().items()
        cache, rest = self.prompt_cache.fetch_nearest_cache(provider.model_key, list(prompt))
        cache = provider.model.make_cache() if cache is None else cache
        tokens = generate(provider.model, cache, rest, length)
        self.prompt_cache.insert_cache(provider.model_key, [*prompt, *tokens], cache)
        self.prompt_cache.trim_to(n_bytes=1 << 30)
        return tokens


def generate(model: Model, cache: list[Any], rest: Any, length: int) -> list[int]:
    """Tokens behind a prompt; the last one is not computed."""
    import mlx.core as mx

    tokens: list[int] = []
    pending = list(rest)
    for _ in range(length):
        model(mx.array([pending]), cache=cache)
        tokens.append(next_token(cache))
        pending = tokens[-1:]
    return tokens


def modules(version: str = "0.32.2") -> dict[str, Any]:
    """The modules as they are imported, by name."""
    names = ("mlx_lm", "mlx_lm.models", "mlx_lm.models.cache", "mlx_lm.server")
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    made["mlx_lm"].__version__ = version
    made["mlx_lm"].models, made["mlx_lm"].server = made["mlx_lm.models"], made["mlx_lm.server"]
    cache = made["mlx_lm.models"].cache = made["mlx_lm.models.cache"]
    cache.KVCache, cache.make_prompt_cache = KVCache, lambda model: model.make_cache()
    made["mlx_lm.server"].ResponseGenerator = ResponseGenerator
    return made
