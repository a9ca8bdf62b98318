"""PrefixStore: cached KV of prompts' beginnings, for runtimes that keep their own KV.

An adapter asks it before a prompt is computed (``find``, ``load``), and hands over the KV afterwards (``save``):

    store = PrefixStore(spec, memory="2GiB", disk=pk.Disk("kv", "20GiB"))
    space = store.current()                                    # the namespace of this request: fixed when it begins
    n = store.load(prompt, into=lambda n: (k[:, :n], v[:, :n]), namespace=space)
    ...                                                        # the runtime computes tokens n and later
    store.save(tokens, read=lambda start, stop: (k[:, start:stop], v[:, start:stop]), namespace=space)

**A cache's trouble is a miss.** ``find``, ``load`` and ``save`` raise no Exception: a failure is 0 tokens, counted by
its kind in ``stats().failures`` and logged once per kind (:mod:`pagedkv.adapters.failures`).
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.adapters.failures import Failures
from pagedkv.adapters.model_cache import open_model_cache
from pagedkv.adapters.probe import Probe
from pagedkv.adapters.store_stats import StoreStats
from pagedkv.cache.cost_model import Line
from pagedkv.cache.explain import Explanation
from pagedkv.errors import NamespaceRequired, WrongType
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.namespace import Namespace
from pagedkv.spec.sizes import Size, check_flag, whole_number

MIN_TOKENS = 256  # shorter prompts are computed faster than people notice
# the ``with store.namespace(...)`` blocks around a call, the inner one last. Those of generators may end in another
# order than they began: each takes out its own entry
_spaces: contextvars.ContextVar[tuple[tuple[weakref.ref[PrefixStore], Namespace], ...]] = contextvars.ContextVar(
    "pagedkv_adapters_spaces"
)

Arrays = tuple[Any, Any]  # K and V


class PrefixStore:
    """KV of prefixes in memory and on disk.

    One thread at a time calls ``load`` and ``save``; any thread may call the rest.

    Parameters
    ----------
    spec : KVSpec
        Its ``model`` must name everything that the KV depends on: weights, adapters, positions, the runtime's version.
    memory : Size
        How much KV stays in memory, such as ``"2GiB"``.
    disk : Disk, optional
        A directory and how much of it all models together may use. Each fingerprint of a spec has a folder of its own
        in it (:mod:`pagedkv.adapters.folders`). Unless it names another `write`, `admission` or `write_budget`, all
        that is saved is written, within ``"50GiB"`` per day. Its ``on_mismatch`` is for a damaged store;
        ``required=False`` goes on in memory alone where the disk cannot be opened.
    probe : Probe, optional
        KV that the runtime computes for fixed tokens: compared with that of the folder.
    on_mismatch : ``"beside"``, ``"reset"`` or ``"refuse"``
        What becomes of a folder with another probe: it stays and another one is used; it is emptied; an error.
    min_tokens : int
        Prompts with fewer tokens are neither looked for nor saved.
    require_namespace : bool
        Refuse requests outside of ``with store.namespace(...)``; they are computed, and counted as failures.
    options : further options of :class:`pagedkv.KVCache`.

    Attributes
    ----------
    spec : KVSpec
    cache : KVCache
        For looking in; closed with the store.
    failures : Failures
        For the adapter's own: ``with store.failures.guard("set_data"): ...`` and ``store.failures.add(...)``.

    Raises
    ------
    WrongType, InvalidArgument, LayoutMismatch
    TierError
        The disk cannot be opened, or another process has this model's folder open.
    """

    def __init__(
        self,
        spec: KVSpec,
        memory: Size,
        disk: Disk | None = None,
        *,
        probe: Probe | None = None,
        on_mismatch: str = "beside",
        min_tokens: int = MIN_TOKENS,
        require_namespace: bool = False,
        **options: Any,
    ) -> None:
        self._min_tokens = whole_number(min_tokens, "min_tokens", 0, 2**31 - 1)
        check_flag(require_namespace, "require_namespace")
        self._require_namespace = require_namespace
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = {"load": 0.0, "save": 0.0}
        self.failures = Failures()
        self._hit_tokens: Mapping[str, int] = {}
        self._load_line = Line()  # seconds of a whole load by its tokens, the adapter's part included
        self.cache, self._folder = open_model_cache(spec, memory, disk, probe, on_mismatch, options)
        self.spec = self.cache.spec
        self._capacity = self.cache.stats().blocks["device"]["capacity"] * spec.block_size
        _open_stores.add(self)

    # ---- around a prompt

    def find(self, tokens: ArrayLike, *, namespace: Namespace | None = None) -> int:
        """How many leading tokens of a prompt are cached, in whole blocks; nothing moves.

        Returns
        -------
        int
            0 for a prompt of fewer than `min_tokens` tokens, and where the question fails.
        """
        found = 0
        with self.failures.guard("find"):
            prompt = _as_tokens(tokens)
            if len(prompt) >= self._min_tokens:
                found = sum(self.cache.match(prompt, namespace or self.current()).values())
        return found

    def load(
        self,
        tokens: ArrayLike,
        into: Callable[[int], Arrays],
        *,
        beyond: int = 0,
        namespace: Namespace | None = None,
        layout: str = "NHD",
        apply: Callable[[int], object] | None = None,
    ) -> int:
        """Copy the KV of a prompt's longest cached prefix into arrays of the caller.

        Parameters
        ----------
        tokens : int32 [n]
            The prompt. At least its last token is left to compute.
        into : called once with the number of tokens, if there is a hit
            Returns where their K and V go: [num_layers, num_tokens, num_kv_heads, head_dim], any strides.
        beyond : int
            Tokens that the runtime has already. A prefix that is not longer, or so little longer that computing the
            rest is faster by the rates measured so far, is no hit.
        namespace : default: that of the ``with store.namespace(...)`` around the call
        layout : ``"NHD"``, or ``"HND"`` for arrays [num_layers, num_kv_heads, num_tokens, head_dim].
        apply : called with the number of tokens once the arrays are filled
            For the adapter's part; an exception of it is a failed load. The time that it takes counts as loading.

        Returns
        -------
        int
            Tokens whose KV lies in the arrays; 0 for a miss. After a failure the arrays may hold anything.
        """
        began = perf_counter()
        loaded = 0
        with self.failures.guard("load"):
            prompt = _as_tokens(tokens)
            self._add(prompts=1, prompt_tokens=len(prompt))
            space = namespace or self.current()
            if self._may_hit(prompt, beyond, space):
                loaded = self._load(prompt, into, beyond, space, layout, apply)
        self._seconds["load"] += perf_counter() - began
        return loaded

    def save(
        self,
        tokens: ArrayLike,
        read: Callable[[int, int], Arrays | None],
        *,
        namespace: Namespace | None = None,
        layout: str = "NHD",
    ) -> int:
        """Cache the KV of all these tokens.

        The last, partly filled block is kept as well where there is a disk.

        Parameters
        ----------
        tokens : int32 [n]
            The tokens whose KV the runtime has.
        read : called with `start` and `stop`, at most once
            Returns K and V of the tokens ``start`` to ``stop - 1``, which are not cached yet; None to save nothing.
        namespace, layout : as for :meth:`load`.

        Returns
        -------
        int
            Tokens that were not cached before; 0 if saving fails. If memory cannot hold all, as many as it can.
        """
        began = perf_counter()
        saved = 0
        with self.failures.guard("save"):
            text = _as_tokens(tokens)[: self._capacity]
            if len(text) >= max(self._min_tokens, 1):
                saved = self._save(text, read, namespace or self.current(), layout)
            else:
                self._add(short_prompts=1)
        self._seconds["save"] += perf_counter() - began
        return saved

    def observe_prefill(self, num_tokens: int, seconds: float, context: int = 0) -> None:
        """Report how long the runtime took to compute tokens of a prompt, after `context` others.

        Loads that would take longer than computing are declined once this is known.
        """
        with self.failures.guard("observe_prefill"):
            self.cache.observe_prefill(num_tokens, seconds, context)

    # ---- whose KV it is

    @contextlib.contextmanager
    def namespace(self, namespace: Namespace | str) -> Iterator[None]:
        """Give the requests that begin inside the block, in this thread or task, a namespace.

        They share KV with no other namespace. A stream begins when its first piece is taken: take it inside the block.
        A generator that yields inside the block gives the code between its pieces that namespace, too.

        Parameters
        ----------
        namespace : Namespace, or the name of a tenant.

        Raises
        ------
        WrongType, InvalidArgument
        """
        if isinstance(namespace, str):
            namespace = Namespace(tenant=namespace)
        if not isinstance(namespace, Namespace):
            raise WrongType(f"namespace must be a pagedkv.Namespace or a tenant's name, not {type(namespace).__name__}")
        entry = weakref.ref(self), namespace
        _spaces.set((*_spaces.get(()), entry))
        try:
            yield
        finally:
            _spaces.set(tuple(one for one in _spaces.get(()) if one is not entry))

    def current(self) -> Namespace:
        """The namespace of a request that begins now.

        Raises
        ------
        NamespaceRequired
            The store wants one, and the call is not inside ``with store.namespace(...)``.
        """
        found = next((space for store, space in reversed(_spaces.get(())) if store() is self), None)
        if found is None and self._require_namespace:
            raise NamespaceRequired("this store wants each request inside `with store.namespace(...)`")
        return found or Namespace()

    def purge(self, namespace: Namespace | str) -> int:
        """Forget a namespace, also on disk: :meth:`pagedkv.KVCache.purge`."""
        return self.cache.purge(Namespace(tenant=namespace) if isinstance(namespace, str) else namespace)

    # ---- looking in

    def explain(self, tokens: ArrayLike, namespace: Namespace | None = None) -> Explanation:
        """Which tokens are in which tier, as :meth:`pagedkv.KVCache.explain`."""
        return self.cache.explain(tokens, namespace or self.current())

    def stats(self) -> StoreStats:
        """Counters so far."""
        with self._counting:
            counts, hits = self._counts.copy(), dict(self._hit_tokens)
        return StoreStats(
            prompts=counts["prompts"], prompt_tokens=counts["prompt_tokens"], loaded_tokens=counts["loaded_tokens"],
            saved_tokens=counts["saved_tokens"], short_prompts=counts["short_prompts"],
            declined_loads=counts["declined_loads"], load_s=self._seconds["load"], save_s=self._seconds["save"],
            failures=self.failures.counts(), hit_tokens=hits, cache=self.cache.stats(),
        )  # fmt: skip

    @property
    def folder(self) -> str | None:
        """The path of this model's folder; None without a disk."""
        return None if self._folder is None else str(self._folder.path)

    # ---- life

    def checkpoint(self) -> int:
        """Write all that the disk lacks, as :meth:`pagedkv.KVCache.checkpoint`."""
        return self.cache.checkpoint()

    def close(self, *, write_s: float | None = 5.0) -> None:
        """Write blocks that the disk lacks, for `write_s` seconds at most; close. Twice is fine."""
        _open_stores.discard(self)
        try:
            self.cache.close(write_s=write_s)
        finally:
            if self._folder is not None:
                self._folder.close()

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _add(self, **counts: int) -> None:
        with self._counting:
            self._counts.update(counts)

    def _may_hit(self, prompt: NDArray[Any], beyond: int, space: Namespace) -> bool:
        """Whether a hit is possible that pays, before anything moves."""
        if len(prompt) < self._min_tokens:
            self._add(short_prompts=1)
            return False
        size = self.spec.block_size
        most = min(sum(self.cache.match(prompt, space).values()) + size - 1, len(prompt) - 1)
        if most < size or most <= beyond:
            return False
        if not beyond:
            return True  # the cache itself weighs loads from disk against computing
        computing_s = self.cache.costs.compute_s(most - beyond, beyond)
        line = self._load_line.fit()
        if computing_s is None or line is None or line[0] + line[1] * most <= computing_s:
            return True
        self._add(declined_loads=1)
        return False

    def _load(
        self,
        prompt: NDArray[Any],
        into: Callable[[int], Arrays],
        beyond: int,
        space: Namespace,
        layout: str,
        apply: Callable[[int], object] | None,
    ) -> int:
        began = perf_counter()
        with self.cache.sequence(prompt[: self._capacity + 1], space, on_trial=True) as seq:
            found = seq.num_computed
            if found <= beyond or not found:
                return 0
            seq.gather(out=into(found), layout=layout)
            if apply is not None:
                apply(found)
            self.cache.count(seq)
            self._hit_tokens = seq.hit_tokens
        self._load_line.add(found, perf_counter() - began)
        self._add(loaded_tokens=found)
        return found

    def _save(
        self, text: NDArray[Any], read: Callable[[int, int], Arrays | None], space: Namespace, layout: str
    ) -> int:
        with self.cache.sequence(text, space, on_trial=True) as seq:
            known = seq.num_computed
            if known >= len(text) - 1:
                return 0  # a prompt's last token is always computed
            values = read(known, len(text))
            if values is None:
                return 0
            seq.scatter(*values, start=known, layout=layout)
        self._add(saved_tokens=len(text) - known)
        return len(text) - known


def _as_tokens(tokens: ArrayLike) -> NDArray[Any]:
    """Tokens as an array [n] that can be cut; the cache checks the rest.

    Raises
    ------
    WrongType
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise WrongType(f"tokens must be integers [n], got {array.dtype} {array.shape}")
    return array


_open_stores: weakref.WeakSet[PrefixStore] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the stores that are open when the program ends."""
    for store in list(_open_stores):
        with contextlib.suppress(Exception):
            store.close()
