"""A prefix cache over memory and disk in the place of mlx-lm's ``LRUPromptCache``.

    cache = PromptCache(model, "4GiB", pagedkv.Disk("kv", "50GiB"), revision="qwen3-8b@1a2b")
    kv, rest = cache.fetch_nearest_cache(None, tokens)
    kv = kv or make_prompt_cache(model)
    for token, _ in generate_step(mx.array(rest), model, prompt_cache=kv): ...
    cache.insert_cache(None, tokens + generated, kv)

Tokens are shared between all texts that begin alike, and found again after a restart. A failure of the cache is a miss:
it is counted, logged once per kind, and the prompt is computed. :mod:`pagedkv.adapters.mlx_server` puts it into
``mlx_lm.server``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.adapters.face import Face
from pagedkv.adapters.failures import refusing
from pagedkv.adapters.mlx_layers import Layers
from pagedkv.adapters.store import MIN_TOKENS, PrefixStore
from pagedkv.adapters.versions import is_tested
from pagedkv.errors import InvalidArgument, NotSupported
from pagedkv.observe.callbacks import Log
from pagedkv.spec.budgets import Disk
from pagedkv.spec.namespace import Namespace
from pagedkv.spec.sizes import Size

log = Log(logging.getLogger("pagedkv.adapters"))

TESTED = ("0.32.0", "0.32.2")  # versions of mlx-lm, the first and the last one
BLOCK_SIZE = 16  # tokens
_UNKNOWN = object()


class PromptCache(Face):
    """The prefix cache of one model, with the methods of mlx-lm's ``LRUPromptCache``.

    Any thread may call it; one at a time is served. MLX wants arrays used in the thread that made them: fetch, generate
    and insert in one thread, as mlx-lm's server does.

    Parameters
    ----------
    model : a model of mlx-lm, as ``mlx_lm.load`` returns it; it is not kept.
    memory, disk, on_mismatch, min_tokens, require_namespace, options
        As for :class:`pagedkv.adapters.store.PrefixStore`. One directory serves many models; each has a folder of its
        own, found by `revision`, the version of mlx-lm and the KV that the model computes for 8 fixed tokens.
    revision : str
        Names the weights, the adapters and all else that the KV depends on, such as ``"qwen3-8b@1a2b"``.
    block_size : int
        Tokens of a block.

    Attributes
    ----------
    store : PrefixStore

    Raises
    ------
    ImportError
        mlx-lm is not installed.
    NotSupported
        Not all layers have a plain ``KVCache`` of one shape, or the model is spread over several processes.
    WrongType, InvalidArgument, LayoutMismatch, TierError
        The memory or the disk cannot be used.
    """

    def __init__(
        self,
        model: Any,
        memory: Size = "1GiB",
        disk: Disk | None = None,
        *,
        revision: str,
        on_mismatch: str = "beside",
        block_size: int = BLOCK_SIZE,
        min_tokens: int = MIN_TOKENS,
        require_namespace: bool = False,
        **options: Any,
    ) -> None:
        mx, caches, version = _runtime()
        if not isinstance(revision, str) or not revision:
            raise InvalidArgument(f"revision must name the weights, such as 'qwen3-8b@1a2b', not {revision!r}")
        what = f"this {type(model).__name__}"
        with refusing(what, f"mlx-lm {version} does not answer as expected"):
            if mx.distributed.init().size() > 1:
                raise NotSupported(what, "it is spread over several processes, whose hits may differ")
            self._layers = Layers(model, mx, caches)
        if not is_tested(version, TESTED):
            log.warning("mlx-lm %s is not among the tested versions (%s to %s)", version, *TESTED)
        self.store = PrefixStore(
            self._layers.spec(block_size, f"{revision} mlx-lm={version}"), memory, disk, probe=self._layers.probe,
            on_mismatch=on_mismatch, min_tokens=min_tokens, require_namespace=require_namespace, **options,
        )  # fmt: skip
        self._using = threading.Lock()
        self._key: Any = _UNKNOWN

    # ---- as mlx-lm calls it

    def fetch_nearest_cache(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        """New caches with a prompt's longest cached prefix, and the tokens that are left.

        Parameters
        ----------
        model : the caller's name of the model
            The first one that is used is that of this cache; others are misses.
        tokens : the prompt. At least its last token is left to compute.

        Returns
        -------
        caches : list of KVCache, or None for a miss
            The caller's own: changing them changes nothing here.
        rest : tokens that the caches do not hold.
        """
        made: list[Any] = []
        with self._using, self.store.failures.guard("fetch"):
            ids = self._text(model, tokens)
            if ids is not None:
                found, made = self._fetch(ids)
                if found:
                    return made, tokens[found:]
        return None, tokens

    def insert_cache(
        self, model: Any, tokens: Sequence[int], prompt_cache: Sequence[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep the KV of a text; it is copied.

        Parameters
        ----------
        model : the caller's name of the model, as for :meth:`fetch_nearest_cache`.
        tokens : the text. Tokens at its end that the caches do not hold yet are left out.
        prompt_cache : the model's caches.
        cache_type : mlx-lm's kind of a text. It changes nothing: the order of use alone decides what stays.
        """
        with self._using, self.store.failures.guard("insert"):
            ids = self._text(model, tokens)
            if ids is None:
                return
            reason = self._layers.reason_against(prompt_cache)
            if reason:
                self.store.failures.add("insert", reason)
                return
            held = min(len(ids), prompt_cache[0].offset)
            self.store.save(
                ids[:held], lambda start, stop: self._layers.read(prompt_cache, start, stop), layout="HND"
            )  # fmt: skip

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Do nothing: `memory` is allocated once, and freeing blocks gives none of it back."""

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """For each tier, blocks as ``n_sequences`` and their ``n_bytes``.

        Texts share blocks, so texts have no number of bytes.
        """
        found: dict[str, dict[str, int]] = {}
        with self.store.failures.guard("stats"):
            for tier, blocks in self.store.cache.stats().blocks.items():
                count = int(blocks["cached"])
                name = "memory" if tier == "device" else tier
                found[name] = {"n_sequences": count, "n_bytes": count * self.store.spec.block_bytes}
        return found

    def __len__(self) -> int:
        """Blocks in memory: texts share them, so there is no number of texts."""
        return self.stats_by_type().get("memory", {}).get("n_sequences", 0)

    def __bool__(self) -> bool:
        """A cache without blocks is one, too."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the KV in memory."""
        return self.stats_by_type().get("memory", {}).get("n_bytes", 0)

    # ---- for the caller

    def observe_prefill(self, num_tokens: int, seconds: float, context: int = 0) -> None:
        """Report how long tokens of a prompt took.

        Loads from disk that would take longer are declined from then on.
        """
        self.store.observe_prefill(num_tokens, seconds, context)

    def namespace(self, namespace: Namespace | str) -> contextlib.AbstractContextManager[None]:
        """Calls inside the ``with`` block share KV with this namespace alone.

        Fetch and insert are two calls: put both inside.
        """
        return self.store.namespace(namespace)

    def close(self, *, write_s: float | None = 5.0) -> None:
        """Write blocks that the disk lacks, for `write_s` seconds at most; close.

        Later calls are misses.
        """
        with self._using:
            self.store.close(write_s=write_s)

    # ---- inside

    def _text(self, model: Any, tokens: Sequence[int]) -> NDArray[Any] | None:
        """The tokens as an array; None where they are not those of a text for this model."""
        if self._key is _UNKNOWN:
            self._key = model
        if not (model is self._key or (isinstance(model, str | tuple) and model == self._key)):
            self.store.failures.add("model", "another model's name: this cache serves the first one alone")
            return None
        ids = np.asarray(tokens)
        if len(ids) and ids.dtype.kind == "i" and ids.min() < 0:
            return None  # mlx-lm's server names images by negative numbers
        return ids

    def _fetch(self, ids: NDArray[Any]) -> tuple[int, list[Any]]:
        made: list[Any] = []
        arrays: list[NDArray[Any]] = []

        def into(found: int) -> tuple[NDArray[Any], NDArray[Any]]:
            arrays[:] = self._layers.room(self._layers.capacity(len(ids)))
            return arrays[0][:, :, :found], arrays[1][:, :, :found]

        def apply(found: int) -> None:
            made[:] = self._layers.make(arrays[0], arrays[1], found)

        return self.store.load(ids, into, layout="HND", apply=apply), made


def _runtime() -> tuple[Any, Any, str]:
    """``mlx.core``, ``mlx_lm.models.cache``, and the version of mlx-lm."""
    try:
        import mlx.core as mx
        import mlx_lm
        from mlx_lm.models import cache
    except ImportError as problem:
        raise ImportError(
            "pagedkv.adapters.mlx_lm is for mlx-lm, which cannot be imported here: pip install mlx-lm "
            "(on Linux: pip install 'mlx-lm[cpu]')"
        ) from problem
    return mx, cache, str(mlx_lm.__version__)
