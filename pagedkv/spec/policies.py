"""Options of eviction policies that have any: they belong to the policy, not to the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Real
from typing import Any

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.sizes import whole_number


@dataclass(frozen=True, slots=True)
class Hazard:
    """The policy ``hazard``, with options: ``KVCache(policy=Hazard(stake=0))``.

    ``policy="hazard"`` is ``Hazard()``. What the options mean: docs/policies.md, "The bound of hazard".

    Attributes
    ----------
    stake : float
        Share of what it won over LRU in the last `window` requests that may be at risk too; 0: a strict bound, inf:
        none.
    slack : float
        Share of the accesses of any `window` requests by which hits may fall below LRU's, 0 or more.
    window : int
        Requests, 100 at least.
    learned : str or os.PathLike, optional
        A directory where what it learned is kept between runs; made if it does not exist, its parent must. Default:
        the disk tier's directory; without one, nothing is kept.

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
        raise WrongType(f"policy must be the name of a policy or a pagedkv.Hazard, not {type(policy).__name__}")
    return str(policy), Hazard() if policy == "hazard" else None
