"""A remote store in this process's memory: no server, and each call may be made slow."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.spec.remote import Objects
from pagedkv.tiers.remote.store import MISSING, UNUSABLE, Came

SCHEME = "small://"


class SmallStore:
    """A store; see :class:`pagedkv.tiers.remote.store.Store`.

    Parameters
    ----------
    delay : seconds that each call waits, now.
    """

    def __init__(self, delay: Callable[[], float]) -> None:
        self._delay, self._lock = delay, threading.Lock()
        self._values: dict[str, bytes] = {}

    def open(self, until: float) -> None:
        """It is there."""

    def exists(self, keys: Sequence[str], until: float) -> list[bool]:
        self._wait()
        with self._lock:
            return [key in self._values for key in keys]

    def get_into(
        self, keys: Sequence[str], heads: NDArray[np.uint8], rows: Sequence[NDArray[np.uint8]], until: float, came: Came
    ) -> None:
        self._wait()
        with self._lock:
            values = [self._values.get(key) for key in keys]
        for i, value in enumerate(values):
            if value is None:
                came(i, MISSING)
            elif len(value) != heads[i].nbytes + rows[i].nbytes:
                came(i, UNUSABLE)
            else:
                found = np.frombuffer(value, np.uint8)
                heads[i], rows[i][:] = found[: heads[i].nbytes], found[heads[i].nbytes :]
                came(i, len(value))

    def put(
        self, keys: Sequence[str], values: Iterable[tuple[bytes, NDArray[np.uint8]]], until: float
    ) -> list[str]:
        self._wait()
        whole = {key: head + row.tobytes() for key, (head, row) in zip(keys, values, strict=True)}
        with self._lock:
            self._values.update(whole)
        return [""] * len(keys)

    def remove(self, keys: Sequence[str], until: float) -> None:
        with self._lock:
            for key in keys:
                self._values.pop(key, None)

    def remove_group(self, prefix: str, until: float) -> int:
        self._wait()
        with self._lock:
            found = [key for key in self._values if key.startswith(prefix)]
            for key in found:
                del self._values[key]
        return len(found)

    def close(self) -> None:
        """Caches that are opened later find its values."""

    def _wait(self) -> None:
        if seconds := self._delay():
            time.sleep(seconds)


def remote(name: str) -> Objects:
    """Options of the small store of a name; a slow machine's lookups end in time."""
    return Objects(
        SCHEME + name, secret=b"a secret of ours", claims=24, min_blocks=1, lookup_s=5.0, read_s=30.0, write_s=30.0
    )


def serve_small_stores(delay: Callable[[], float]) -> None:
    """From now on, a URL of `SCHEME` names a store in this process. Call it once in a process."""
    opening: Any = importlib.import_module("pagedkv.tiers.remote.opening")
    real, stores = opening.open_store, dict[str, SmallStore]()

    def open_store(options: Any) -> Any:
        if isinstance(options, Objects) and options.url.startswith(SCHEME):
            return stores.setdefault(options.url, SmallStore(delay))
        return real(options)

    opening.open_store = open_store
