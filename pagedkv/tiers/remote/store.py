"""The interface of a remote store: bytes by key, within a time limit.

A store decides nothing and judges no content: :class:`pagedkv.tiers.remote.tier.RemoteTier` makes keys and heads,
checks every value, and decides when to ask. Any thread may call a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Failure: TypeAlias = Literal["connect", "timeout", "closed", "protocol"]
Came: TypeAlias = Callable[[int, int], None]

MISSING, UNUSABLE = -1, -2  # in place of a size: not there; of another size or type


class Unreachable(Exception):
    """A store did not answer in time, or not in its protocol: its content is unknown.

    The message names no password, secret, key or URL.

    Parameters
    ----------
    kind : ``"connect"``, ``"timeout"``, ``"closed"`` or ``"protocol"``
    """

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message)
        self.kind: Failure = kind


class Store(Protocol):
    """A store of values by key, shared with other processes.

    Every `until` is a time of the monotonic clock in seconds: the call ends by then, with an answer or with
    Unreachable. After a call that raised, no later call mistakes a late answer for its own.
    """

    def open(self, until: float) -> None:
        """Connect, and check that the server is one that this class can use.

        Raises
        ------
        Unreachable
            It does not answer: it may later.
        TierError
            It never will as it is: not such a server, too old, wrong password, unknown certificate. The message
            names the expected and the found server and the remedy, and no password.
        """

    def exists(self, keys: Sequence[str], until: float) -> list[bool]:
        """Whether the store has each key.

        Raises
        ------
        Unreachable
        """

    def get_into(
        self,
        keys: Sequence[str],
        heads: NDArray[np.uint8],
        rows: Sequence[NDArray[np.uint8]],
        until: float,
        came: Came,
    ) -> None:
        """Read each value: its first bytes into its head, all others into its row.

        Parameters
        ----------
        keys : n of them.
        heads : uint8 [n, head_bytes], C-contiguous
        rows : n arrays uint8 [row_bytes], contiguous, all of one length
        came : called as ``came(i, size)`` once for each value as it arrives, in any order, in the calling thread.
            `size` is that of head and row together, MISSING, or UNUSABLE; head and row hold anything in the last two
            cases. Values that came before a failure count.

        Raises
        ------
        Unreachable
        """

    def put(
        self, keys: Sequence[str], values: Iterable[tuple[bytes, NDArray[np.uint8]]], until: float
    ) -> list[str]:
        """Store values, each a head and a row; one that is there already is replaced, or kept.

        Parameters
        ----------
        values : as many as keys, made when their turn comes: a row may be overwritten when the next value is asked for.

        Returns
        -------
        list of str
            For each, "" if it is stored; else one word why the store refused it, such as ``"OOM"`` or ``"READONLY"``.

        Raises
        ------
        Unreachable
        """

    def remove(self, keys: Sequence[str], until: float) -> None:
        """Remove keys, those of which there are.

        Raises
        ------
        Unreachable
        """

    def remove_group(self, prefix: str, until: float) -> int:
        """Remove all keys that begin with `prefix`; how many there were.

        `prefix` is ASCII without wildcards. When this returns, none of those that were there at its beginning is left.

        Raises
        ------
        Unreachable
            Some may be left.
        """

    def close(self) -> None:
        """Give connections back. A second call does nothing."""


@runtime_checkable
class Tells(Protocol):
    """A store whose server gives an account of itself."""

    def info(self, until: float) -> dict[str, str]:
        """The server's facts by name, as INFO has them; a cluster's are those of one node.

        Raises
        ------
        Unreachable, TierError
        """


@runtime_checkable
class Lists(Protocol):
    """A store that can list its keys."""

    def groups(self, prefix: str, until: float) -> dict[str, dict[str, int]]:
        """``objects`` and ``bytes`` of the values under `prefix`, by the key's next part.

        Raises
        ------
        Unreachable
        """


def count_into(groups: dict[str, dict[str, int]], group: str, size: int) -> None:
    """Count a value of so many bytes."""
    counts = groups.setdefault(group, {"objects": 0, "bytes": 0})
    counts["objects"] += 1
    counts["bytes"] += size
