"""The systems that are compared.

How KV is allocated, and what of it is shared, tiered and preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagedkv.errors import InvalidArgument

Preemption: TypeAlias = Literal["measured", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve.

    Attributes
    ----------
    name : str
    what : in words.
    paged : blocks; else one contiguous region per request.
    reserve : of contiguous allocation: ``"max"``, ``"pow2"`` or ``"exact"``.
    shared, tiered : prefixes; tiers under the device.
    preempts : whether a request begins when its prompt fits, to be suspended when blocks run out; else its worst case
        must fit.
    loads_beside : whether requests run while prefixes of others are loaded; else every load holds them up.
    preemption : how a request is suspended where there is a colder tier: by what is cheaper as measured, or always so.
    share : the blocks that a prompt takes of one that is computed beside it, as ``SchedulerOptions(share=)``.
    by_group : whether of each layer only its reach is kept, as ``KVCache(by_group=True)``; for models whose layers do
        not see equally far.
    """

    name: str
    what: str
    paged: bool = True
    reserve: str = ""
    shared: bool = False
    tiered: bool = False
    preempts: bool = True
    preemption: Preemption = "measured"
    loads_beside: bool = True
    share: Literal["step", "never"] = "step"
    by_group: bool = False


SYSTEMS = {
    system.name: system
    for system in (
        System("contiguous", "a region of the longest length for each request", paged=False, reserve="max"),
        System("pow2", "a region of its final length, rounded up to a power of two", paged=False, reserve="pow2"),
        System("exact", "a region of its final length, known beforehand", paged=False, reserve="exact"),
        System("reserved", "blocks, for the worst case from the start: no request is preempted", preempts=False),
        System("paged", "blocks as they are needed; preempted requests are computed again"),
        System("shared", "and equal prefixes held once and found again", shared=True),
        System("tiered", "and what leaves the device goes to colder tiers", shared=True, tiered=True),
        System(
            "groups", "tiered, but layers with a window or chunks keep only the tokens in reach",
            shared=True, tiered=True, by_group=True,
        ),
        System(
            "stalling", "tiered, but a load holds up all that run", shared=True, tiered=True, loads_beside=False
        ),
        System(
            "repeating", "tiered, but prompts that come together each compute their common beginning",
            shared=True, tiered=True, share="never",
        ),
        System(
            "swapping", "tiered, but suspended requests are always swapped",
            shared=True, tiered=True, preemption="swap",
        ),
        System(
            "recomputing", "tiered, but suspended requests are always recomputed",
            shared=True, tiered=True, preemption="recompute",
        ),
    )
}  # fmt: skip
DEFAULT_SYSTEMS = ("contiguous", "pow2", "exact", "paged", "shared", "tiered")


def choose(names: Sequence[str]) -> list[System]:
    """Systems by name.

    Raises
    ------
    InvalidArgument
    """
    for name in names:
        if name not in SYSTEMS:
            raise InvalidArgument(f"unknown system {name[:40]!r}; known: {', '.join(SYSTEMS)}")
    if not names:
        raise InvalidArgument(f"at least one system is needed; known: {', '.join(SYSTEMS)}")
    return [SYSTEMS[name] for name in dict.fromkeys(names)]
