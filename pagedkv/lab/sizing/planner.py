"""Plans from model, machines and users: what fits where, and how long a user waits.

The wait is of a user who comes back to KV in each tier.

Every user has a session of so many tokens. As many sessions as fit lie on the GPUs, as many of the rest in host memory,
then on disk; what fits nowhere is computed again. Times are the least that one user can wait who meets no queue; a load
passes the tiers one after the other, so a cold start is a read, a copy and a step.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.sizing.checks import block_tokens, real_number
from pagedkv.lab.sizing.machines import Machines
from pagedkv.lab.sizing.models import Model
from pagedkv.lab.sizing.replica import Memory, gpus_per_replica, session_bytes
from pagedkv.lab.sizing.result import Plan, TierPlan
from pagedkv.lab.sizing.shape import KVFormat, token_bytes
from pagedkv.lab.sizing.sharing import MAX_SEQUENCES, shareable_blocks
from pagedkv.lab.sizing.timing import decode_seconds, prefill_seconds, transfer_seconds
from pagedkv.lab.sizing.users import Users
from pagedkv.spec.sizes import format_size

SECONDS_PER_HOUR = 3600


def plan(
    model: Model,
    machines: Machines,
    users: Users,
    *,
    kv: KVFormat | None = None,
    weight_bits: int = 16,
    block_size: int = 16,
    tensor_parallel: int | None = None,
    memory_share: float = 0.9,
    kv_share: float | None = None,
    step_s: float | None = None,
) -> Plan:
    """Lay users' KV out over machines.

    Parameters
    ----------
    kv : format of K and V; default float16.
    weight_bits : bits of a weight.
    tensor_parallel : GPUs per copy of the weights; None: the smallest power of two whose memory holds the weights and
        one session of `max_tokens`. KV heads are spread over them; where there are fewer heads than GPUs (a latent
        counts as one), several GPUs keep the same head.
    memory_share : share (0..1) of a GPU's memory for weights and KV together.
    kv_share : share of it for KV alone; the weights have to fit into the rest. Takes the place of `memory_share`.
    step_s : time of one decode step; None: the least that memory needs for the KV of the running sequences, and for the
        weights that they meet (of a mixture, as many as so many tokens can meet).

    Raises
    ------
    WrongType
    InvalidArgument
        Among others: the weights and a session do not fit, with the numbers.
    """
    for value, kind, name in ((model, Model, "model"), (machines, Machines, "machines"), (users, Users, "users")):
        if not isinstance(value, kind):
            raise WrongType(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
    kv, size, weights = kv or KVFormat(), block_tokens(block_size), model.weight_bytes(weight_bits)
    room = model.context if users.max_tokens is None else users.max_tokens
    if users.tokens > room:
        raise InvalidArgument(
            f"sessions of {users.tokens} tokens do not fit into a context of {room}: take fewer tokens, or a larger "
            "max_tokens"
        )
    memory = Memory(
        machines.gpu.memory_bytes, weights, real_number(memory_share, "memory_share", 0, 1),
        None if kv_share is None else real_number(kv_share, "kv_share", 0, 1),
    )  # fmt: skip
    gpus = gpus_per_replica(machines.num_gpus, tensor_parallel, memory, model, room, size, kv)
    replicas, servers, on_gpus = machines.num_gpus // gpus, machines.num_servers, memory.for_kv(gpus)
    common = shareable_blocks(min(users.shared_prefix, users.tokens - 1), size)  # each session owns its last block
    own, shared = session_bytes(model, users.tokens, common, size, kv)
    device_own, device_shared = session_bytes(model, users.tokens, common, size, kv, gpus)
    longest, _ = session_bytes(model, room, 0, size, kv, gpus)

    per_replica = _holds(on_gpus, device_shared, device_own)
    if not per_replica:
        raise InvalidArgument(
            f"{gpus} GPUs have {format_size(on_gpus)} for KV; a session of {users.tokens} tokens needs "
            f"{format_size(device_own + device_shared)}: more GPUs per replica, a smaller KV format or shorter sessions"
        )
    capacities = [per_replica * replicas] + [
        _holds(budget, shared, own) * servers for budget in (machines.host_bytes, machines.disk_bytes)
    ]
    lying = list(_fill(users.count, capacities))

    if step_s is None:
        running = min(-(-users.num_active // replicas), per_replica)
        met = min(model.params, max(running, 1) * model.params_per_token)
        read = -(-met * weight_bits // 8), running * (device_own + device_shared)
        hot = decode_seconds(*read, machines.gpu.read_bytes_per_s * gpus)
    else:
        hot = real_number(step_s, "step_s")
    copy, load = _ways_up(machines, gpus, own)
    again = prefill_seconds(model.params_per_token, users.tokens - common * size, machines.gpu.flops_per_s * gpus)
    waits = (hot, hot + copy, hot + load, hot + again)
    loads = _loads(machines, users.turns_per_hour / SECONDS_PER_HOUR * own, lying)
    links = machines.gpu.link_bytes_per_s * min(machines.gpus_per_server, machines.num_gpus)
    limits = (0.0, links, machines.disk_bytes_per_s, 0.0)
    rooms = (on_gpus * replicas, machines.host_bytes * servers, machines.disk_bytes * servers, 0)
    tiers = zip(("device", "host", "disk", "none"), rooms, [*capacities, 0], lying, waits, loads, limits, strict=True)
    return Plan(
        model, machines, users, kv, weight_bits, size, gpus, replicas, weights, token_bytes(model.groups, kv),
        block_bytes=token_bytes(model.groups, kv) * size,
        session_bytes=own,
        shared_bytes=shared,
        device_session_bytes=device_own,
        tiers=tuple(TierPlan(*one) for one in tiers),
        contiguous_capacity=_holds(on_gpus, 0, longest) * replicas,
        gpus_for_active=-(-users.num_active // per_replica) * gpus,
        gpus_for_all=-(-users.count // per_replica) * gpus,
        disk_bytes_for_all=_disk_for(users.count - lying[0] - lying[1], servers, own, shared),
    )  # fmt: skip


def _ways_up(machines: Machines, gpus: int, num_bytes: int) -> tuple[float, float]:
    """Seconds from host and disk to the device.

    Over all links and disks of a replica's servers.
    """
    copy = transfer_seconds(num_bytes, machines.gpu.link_bytes_per_s * gpus)
    servers = -(-gpus // machines.gpus_per_server)
    return copy, copy + transfer_seconds(num_bytes, machines.disk_bytes_per_s * servers)


def _loads(machines: Machines, user_bytes_per_s: float, lying: list[int]) -> tuple[float, float, float, float]:
    """Bytes/s that returning users read from each tier on one server.

    What comes from disk passes the links too.
    """
    each = user_bytes_per_s / machines.num_servers
    return 0.0, (lying[1] + lying[2]) * each, lying[2] * each, 0.0


def _holds(budget: int, once: int, each: int) -> int:
    """Sessions in a budget that also holds their shared prefix; 0 where it does not fit."""
    return min(max(budget - once, 0) // each, MAX_SEQUENCES)


def _fill(count: int, capacities: Iterable[int]) -> Iterable[int]:
    """Sessions in each tier, hottest first; last, those that fit nowhere."""
    for capacity in capacities:
        yield min(count, capacity)
        count -= min(count, capacity)
    yield count


def _disk_for(count: int, servers: int, own: int, shared: int) -> int:
    """Disk per server for so many sessions; none for none."""
    return -(-count // servers) * own + shared if count else 0
