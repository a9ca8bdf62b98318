"""The calls that every adapter offers to its user, over its store."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TypeVar

from numpy.typing import ArrayLike

from pagedkv.adapters.store import PrefixStore
from pagedkv.adapters.store_stats import StoreStats
from pagedkv.cache.explain import Explanation
from pagedkv.spec.namespace import Namespace

_Adapter = TypeVar("_Adapter", bound="Face")


class Face:
    """Base of an adapter: a context manager that closes itself.

    Attributes
    ----------
    store : PrefixStore
    """

    store: PrefixStore

    def stats(self) -> StoreStats:
        """Counters so far."""
        return self.store.stats()

    def explain(self, tokens: ArrayLike) -> Explanation:
        """Which tokens of a prompt are in which tier."""
        return self.store.explain(tokens)

    def namespace(self, namespace: Namespace | str) -> contextlib.AbstractContextManager[None]:
        """Requests that begin inside the ``with`` block share KV with this namespace alone.

        See :meth:`pagedkv.adapters.store.PrefixStore.namespace`.
        """
        return self.store.namespace(namespace)

    def purge(self, namespace: Namespace | str) -> int:
        """Forget a namespace, also on disk."""
        return self.store.purge(namespace)

    def checkpoint(self) -> int:
        """Write all blocks that the disk lacks; the number that a restart finds."""
        return self.store.checkpoint()

    def close(self, *, write_s: float | None = 5.0) -> None:
        """Write blocks that the disk lacks, for `write_s` seconds at most; close. Twice is fine."""
        self.store.close(write_s=write_s)

    def __enter__(self: _Adapter) -> _Adapter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
