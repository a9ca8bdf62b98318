"""Options that shape a replay beside trace, policy and capacity.

Checked once, before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.core import POLICIES as POLICIES
from pagedkv.core import policies as registered
from pagedkv.core import policy_needs_chain
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.replay.capacity import LLAMA_3_8B_BYTES_PER_TOKEN, MAX_BYTES_PER_TOKEN, TIER_NAMES
from pagedkv.lab.replay.references import BOUNDS
from pagedkv.lab.replay.schedule import require_token_ms
from pagedkv.lab.replay.weights import LLAMA_3_8B, ModelShape
from pagedkv.lab.sizing.models import Model
from pagedkv.spec.sizes import Bytes, whole_number

KNOWN = (*POLICIES, *BOUNDS)
ENGINES = ("sim", "real")
DEMOTIONS = ("leaf_first", "oldest_first")
DEFAULT_BLOCK_BYTES = 64 << 10
PAGE_BYTES = 4096
MAX_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """How to replay.

    Attributes
    ----------
    engine : ``"sim"`` (the real tree and placement, no bytes) or ``"real"`` (a KVCache, every byte verified).
    demotion : ``"leaf_first"`` or ``"oldest_first"``: which end of a run goes down first.
    inclusive : tiers that keep their copy when a block is promoted (``"host"``, ``"disk"``).
    bytes_per_token : KV bytes of one token over all layers; sizes in bytes and the sim's traffic use it.
    block_bytes : payload of a block in the real engine, whole pages of 4 KiB.
    generating : time of an output token in milliseconds. A request holds its blocks from its arrival until its output
        is complete, in the bounds too; sim only. None: it takes no time.
    hazard_stake : for the policy ``hazard``: share of its recent gain over LRU that it may risk too. 0: the
        strict bound; inf: no bound; None: the policy's own. Sim only.
    layers : a model each of whose layers keeps only tokens that it can still read, as with ``KVCache(by_group=True)``;
        sim and ``lru`` only. None, or a model whose layers see equally far: every layer keeps every token.
    model : whose prefill weighs ``flop_weighted_hit_rate``, and weighs loads from disk in the real engine.
    """

    engine: str = "sim"
    demotion: str = "leaf_first"
    inclusive: tuple[str, ...] = ("disk",)
    bytes_per_token: int = LLAMA_3_8B_BYTES_PER_TOKEN
    block_bytes: int = DEFAULT_BLOCK_BYTES
    model: ModelShape = LLAMA_3_8B
    generating: float | None = None
    hazard_stake: float | None = None
    layers: Model | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidArgument(f"unknown engine {self.engine!r}; known: {', '.join(ENGINES)}")
        if self.demotion not in DEMOTIONS:
            raise InvalidArgument(f"unknown demotion order {self.demotion!r}; known: {', '.join(DEMOTIONS)}")
        for tier in self.inclusive:
            if tier not in TIER_NAMES[1:]:
                raise InvalidArgument(f"inclusive: {tier!r} is not one of {', '.join(TIER_NAMES[1:])}")
        if self.generating is not None:
            require_token_ms(self.generating)
            if self.engine != "sim":
                raise InvalidArgument(
                    f"generating: the engine {self.engine!r} runs one request at a time; take the engine 'sim'"
                )
        if self.hazard_stake is not None:
            _require_stake(self.hazard_stake)
            if self.engine != "sim":
                raise InvalidArgument(
                    f"hazard_stake: the engine {self.engine!r} keeps the policy's own bound; take the engine 'sim'"
                )
        if self.layers is not None and not isinstance(self.layers, Model):
            raise WrongType(f"layers: a model is one of pagedkv.lab.sizing, not of type {type(self.layers).__name__}")
        whole_number(self.bytes_per_token, "bytes per token", 1, MAX_BYTES_PER_TOKEN, unit=Bytes)
        whole_number(self.block_bytes, "block bytes", PAGE_BYTES, MAX_BLOCK_BYTES, unit=Bytes)
        if self.block_bytes % PAGE_BYTES:
            raise InvalidArgument(f"block bytes: {self.block_bytes} is not a multiple of {PAGE_BYTES}")


def _require_stake(stake: float) -> None:
    if isinstance(stake, bool) or not isinstance(stake, int | float):
        raise WrongType(f"hazard_stake: a share is a number, not {type(stake).__name__}")
    if math.isnan(stake) or stake < 0:
        raise InvalidArgument(f"hazard_stake: {stake} is not 0 or more; 0 is the strict bound, inf is none")


def check_policies(policies: Sequence[str]) -> None:
    """Every name is known, and there is one.

    Raises
    ------
    InvalidArgument, WrongType
    """
    if isinstance(policies, str) or not all(isinstance(policy, str) for policy in policies):
        raise WrongType("policies must be a list of names")
    for policy in policies:
        try:
            is_known = policy in BOUNDS or policy_needs_chain(policy) is not None  # finds other packages' too
        except InvalidArgument:
            is_known = False
        if not is_known:
            raise InvalidArgument(f"unknown policy {policy!r}; known: {', '.join((*registered(), *BOUNDS))}")
    if not policies:
        raise InvalidArgument(f"at least one policy is needed; known: {', '.join(KNOWN)}")
