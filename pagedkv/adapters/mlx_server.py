"""Puts PromptCache into ``mlx_lm.server``, in the place of its own prompt cache.

    import mlx_lm.server
    import pagedkv as pk
    from pagedkv.adapters.mlx_server import in_server

    with in_server("4GiB", pk.Disk("kv", "50GiB")):
        mlx_lm.server.main()

The server makes its cache before it knows a model. So ours is opened at a model's first request, in the thread that
generates; another model closes it. A model that is refused goes on with the server's own cache.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pagedkv.adapters.failures import Failures, log
from pagedkv.adapters.mlx_lm import PromptCache
from pagedkv.spec.budgets import Disk
from pagedkv.spec.sizes import Size


@contextlib.contextmanager
def in_server(
    memory: Size = "4GiB", disk: Disk | None = None, *, revision: str = "", **options: Any
) -> Iterator[list[ServerCache]]:
    """Servers that start inside the block use our cache.

    Parameters
    ----------
    memory, disk, options : as for :class:`pagedkv.adapters.mlx_lm.PromptCache`.
    revision : added to the paths of the model and its adapter, which name the KV.

    Yields
    ------
    list of ServerCache
        One for each server that has started; they are closed at the end of the block.

    Raises
    ------
    ImportError
        mlx-lm is not installed.
    """
    try:
        from mlx_lm import server as module
    except ImportError as problem:
        raise ImportError("pagedkv.adapters.mlx_server is for mlx_lm.server: pip install mlx-lm") from problem
    server: Any = module
    theirs: Any = server.ResponseGenerator
    started: list[ServerCache] = []

    def opens(model: Any, key: Any) -> PromptCache:
        name = " ".join(str(part) for part in (*key[:2], revision) if part)
        return PromptCache(model, memory, disk, revision=name, **options)

    class ResponseGenerator(theirs):  # type: ignore[misc]
        """The server's, with our cache."""

        def __init__(self, model_provider: Any, prompt_cache: Any) -> None:
            started.append(ServerCache(model_provider, prompt_cache, opens))
            super().__init__(model_provider, started[-1])

    server.ResponseGenerator = ResponseGenerator
    try:
        yield started
    finally:
        if server.ResponseGenerator is ResponseGenerator:
            server.ResponseGenerator = theirs
        for cache in started:
            cache.close()


class ServerCache:
    """The cache of the model that the server has loaded, or its own one where ours is refused.

    The thread that generates makes all calls but :meth:`close`.

    Parameters
    ----------
    provider : the server's ModelProvider.
    own : the server's LRUPromptCache.
    opens : makes the cache of a model from it and the server's key.

    Attributes
    ----------
    cache : PromptCache or None
        Of the model that was asked for last.
    failures : Failures
        Of opening.
    """

    def __init__(self, provider: Any, own: Any, opens: Callable[[Any, Any], PromptCache]) -> None:
        self._provider, self._own, self._opens = provider, own, opens
        self.cache: PromptCache | None = None
        self.failures = Failures()
        self._key: Any = None
        self._model: Callable[[], Any] = lambda: None
        self._is_over = False

    def fetch_nearest_cache(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        """As of ``LRUPromptCache``."""
        found: tuple[list[Any] | None, Sequence[int]] = self._of(model).fetch_nearest_cache(model, tokens)
        return found

    def insert_cache(
        self, model: Any, tokens: Sequence[int], prompt_cache: Sequence[Any], *, cache_type: str = "assistant"
    ) -> None:
        """As of ``LRUPromptCache``."""
        self._of(model).insert_cache(model, tokens, prompt_cache, cache_type=cache_type)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Shorten the server's own cache; ours keeps to its `memory`."""
        self._own.trim_to(n_sequences=n_sequences, n_bytes=n_bytes)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Of both caches."""
        return {**self._own.stats_by_type(), **(self.cache.stats_by_type() if self.cache else {})}

    def __len__(self) -> int:
        """Texts of the server's own cache, and blocks of ours."""
        return len(self._own) + (len(self.cache) if self.cache else 0)

    @property
    def nbytes(self) -> int:
        """Bytes in memory of both caches."""
        return int(self._own.nbytes) + (self.cache.nbytes if self.cache else 0)

    def close(self) -> None:
        """Close the cache; the server's own one goes on. Twice is fine."""
        self._is_over = True
        self._close()

    def _close(self) -> None:
        cache, self.cache, self._key = self.cache, None, None
        if cache is not None:
            with self.failures.guard("close"):
                cache.close()

    def _of(self, key: Any) -> Any:
        """The cache of a model: ours, or the server's own."""
        model = self._provider.model
        if key != self._key or model is not self._model():  # else it is open, or was refused
            self._close()
            with self.failures.guard("open"):
                self._open(model, key)
        return self._own if self.cache is None else self.cache

    def _open(self, model: Any, key: Any) -> None:
        self._key, self._model = key, weakref.ref(model)
        reason = self._reason_against(key)
        if reason:
            log.warning("%s: the server's own prompt cache is used: %s", key[0], reason)
        elif not self._is_over:
            self.cache = self._opens(model, key)

    def _reason_against(self, key: Any) -> str:
        if self._provider.model_key != key:
            return "another model is loaded"
        if key[2] is not None:
            return "a draft model has KV of its own"
        if getattr(self._provider.cli_args, "kv_bits", None) is not None:
            return "its KV is quantised (--kv-bits)"
        return ""
