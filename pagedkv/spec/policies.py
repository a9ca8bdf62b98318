"""Options of eviction policies that have any: they belong to the policy, not to the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Real
from typing import Any

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.sizes import check_plain, whole_number


@dataclass(frozen=True, slots=True)
class Hazard:
    """The policy ``hazard``, with options: ``KVCache(policy=Hazard(stake=0))``.

    ``policy="hazard"`` is ``Hazard()``. The options: docs/policies.md, "The bound of hazard".

    Attributes
    ----------
    stake : float
        Share of its gain over LRU in the last `window` requests that it may risk too; 0: a strict bound; inf: none.
    slack : float
        Share of the accesses of any `window` requests by which hits may fall below LRU's, 0 or more.
    window : int
        Requests, 100 at least.
    learned : str or os.PathLike, optional
        A directory that keeps the learned weights between runs; the first write makes it, with the folders above it.
        ``~`` is the user's home. Default: the disk tier's directory; without one, nothing is kept.

    Raises
    ------
    WrongType, InvalidArgument
    """

    stake: float = 1.0
    slack: float = 0.005
    window: int = 10_000
    learned: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("stake", "slack"):
            value = getattr(self, name)
            check_plain(value, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise WrongType(f"{name} must be a number, not {type(value).__name__}")
            if not value >= 0:  # type: ignore[operator]
                raise InvalidArgument(f"{name} must be 0 or more, not {value}")
        whole_number(self.window, "window", 100, 2**40)


def named(policy: Any) -> tuple[str, Hazard | None]:
    """A policy's name, and its options if it has any.

    Raises
    ------
    WrongType
    """
    if isinstance(policy, Hazard):
        return "hazard", policy
    if not isinstance(policy, str):
        raise WrongType(f"policy must be a name such as 'lru', or a pagedkv.Hazard, not {type(policy).__name__}")
    return str(policy), Hazard() if policy == "hazard" else None
