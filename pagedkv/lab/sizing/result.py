"""A plan's results: sessions by tier, times to first token, machines that hold all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pagedkv.lab.sizing.machines import Machines
from pagedkv.lab.sizing.models import Model
from pagedkv.lab.sizing.shape import KVFormat
from pagedkv.lab.sizing.users import Users


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier's part.

    Attributes
    ----------
    tier : ``"device"``, ``"host"``, ``"disk"``, or ``"none"`` for sessions that are computed again.
    kv_bytes : room for KV, over all machines.
    capacity : sessions it can hold.
    users : sessions that lie there.
    first_token_s : least time until a user who comes back sees a token.
    load_bytes_per_s, limit_bytes_per_s : per server, the rate at which returning users read from it, and its
        limit.
    """

    tier: str
    kv_bytes: int
    capacity: int
    users: int
    first_token_s: float
    load_bytes_per_s: float = 0.0
    limit_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What :func:`plan` found.

    Attributes
    ----------
    model, machines, users, kv, weight_bits, block_size : the arguments.
    tensor_parallel : GPUs that serve one copy of the weights; `num_replicas` such copies.
    weight_bytes : of one copy.
    token_bytes, block_bytes : of KV, over all layers.
    session_bytes : blocks of one user's session, the shared prefix left out.
    shared_bytes : of the shared prefix, once per replica and server.
    device_session_bytes : as `session_bytes`, with what several GPUs of a replica keep twice.
    tiers : device, host, disk, none.
    contiguous_capacity : sessions on the GPUs if each had room for `max_tokens` at once.
    gpus_for_active, gpus_for_all : GPUs that would hold the active sessions, or all.
    disk_bytes_for_all : disk per server that would hold what device and host do not.
    """

    model: Model
    machines: Machines
    users: Users
    kv: KVFormat
    weight_bits: int
    block_size: int
    tensor_parallel: int
    num_replicas: int
    weight_bytes: int
    token_bytes: int
    block_bytes: int
    session_bytes: int
    shared_bytes: int
    device_session_bytes: int
    tiers: tuple[TierPlan, ...]
    contiguous_capacity: int
    gpus_for_active: int
    gpus_for_all: int
    disk_bytes_for_all: int

    @property
    def mean_first_token_s(self) -> float:
        """Over users who come back, each as likely as the other."""
        return sum(tier.users * tier.first_token_s for tier in self.tiers) / self.users.count

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON; sizes in bytes, times in seconds."""
        return asdict(self) | {
            "num_active": self.users.num_active,
            "num_servers": self.machines.num_servers,
            "mean_first_token_s": self.mean_first_token_s,
        }
