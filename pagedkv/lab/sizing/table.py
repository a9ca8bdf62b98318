"""A plan as a table: the request, a session's cost, a line per tier, and problems."""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.lab.sizing.models import Model
from pagedkv.lab.sizing.result import Plan, TierPlan
from pagedkv.lab.sizing.shape import StateGroup
from pagedkv.spec.sizes import format_size

_MEANING = {"device": "hot", "host": "warm", "disk": "cold", "none": "computed again"}


def lines(plan: Plan) -> Iterator[str]:
    """A plan's text, line by line."""
    model, users, machines = plan.model, plan.users, plan.machines
    yield f"{model.name}: {shape(model)}; {params(model.params)} weights of {plan.weight_bits} bits, " + format_size(
        plan.weight_bytes
    )
    yield (
        f"KV in {plan.kv.name}: {format_size(plan.token_bytes)} per token, {format_size(plan.block_bytes)} per block "
        f"of {plan.block_size}, {format_size(plan.session_bytes)} per session of {users.tokens:,} tokens"
        + (f" beside {format_size(plan.shared_bytes)} that all share" if plan.shared_bytes else "")
    )
    yield (
        f"{machines.num_gpus:,} {machines.gpu.name} in {counted(machines.num_servers, 'server')}: "
        f"{counted(plan.num_replicas, 'replica')} of {plan.tensor_parallel}; {counted(users.count, 'user')}, "
        f"{users.num_active:,} of them active"
    )
    yield ""
    yield from _rows(plan)
    yield ""
    yield from notes(plan)


def _rows(plan: Plan) -> Iterator[str]:
    columns = ["tier", "", "room for KV", "holds users", "users here", "share", "first token"]
    loaded = plan.users.turns_per_hour > 0
    rows = [columns + (["read per server"] if loaded else [])]
    for tier in plan.tiers:
        cells = [
            *(tier.tier, _MEANING[tier.tier]),
            format_size(tier.kv_bytes) if tier.kv_bytes else "-",
            f"{tier.capacity:,}" if tier.kv_bytes else "-",
            f"{tier.users:,}",
            f"{100 * tier.users / plan.users.count:.2f} %",
            seconds(tier.first_token_s),
        ]
        rows.append(cells + ([_load(tier)] if loaded else []))
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for cells in (rows[0], ["-" * width for width in widths], *rows[1:]):
        padded = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        yield "  ".join(padded).rstrip()


def notes(plan: Plan) -> Iterator[str]:
    """Facts beyond the tiers' lines, and every way in which the plan does not work."""
    users, device = plan.users, plan.tiers[0]
    room = plan.model.context if users.max_tokens is None else users.max_tokens
    yield f"mean over users who come back: {seconds(plan.mean_first_token_s)}; least times, with no queue before them"
    yield (
        f"contiguous memory with room for {room:,} tokens each would hold {plan.contiguous_capacity:,} users on the "
        "device"
        + (f", {device.capacity / plan.contiguous_capacity:.1f} times fewer" if plan.contiguous_capacity else "")
    )
    yield f"all users on the device would take {plan.gpus_for_all:,} GPUs, the active ones {plan.gpus_for_active:,}"
    if plan.device_session_bytes > plan.session_bytes:
        more = format_size(plan.device_session_bytes)
        yield f"on the device a session takes {more}, for GPUs of a replica keep the same heads: there are too few"
    idle = plan.machines.num_gpus - plan.num_replicas * plan.tensor_parallel
    if idle:
        yield f"idle: {counted(idle, 'GPU')}, too few for one more replica"
    if users.num_active > device.capacity:
        yield f"TOO FEW GPUS: {users.num_active:,} users are active at once and the device holds {device.capacity:,}"
    if plan.tiers[-1].users:
        yield (
            f"NOT ALL FIT: {plan.tiers[-1].users:,} users are computed again; {format_size(plan.disk_bytes_for_all)} "
            f"of disk per server would hold them"
        )
    for tier in plan.tiers[1:3]:
        if tier.load_bytes_per_s > tier.limit_bytes_per_s:
            yield f"TOO SLOW: users who come back ask more of the {tier.tier} tier than it can give: {_load(tier)}"
    again = plan.tiers[-1].first_token_s
    slower = [_MEANING[tier.tier] for tier in plan.tiers[1:3] if tier.capacity and tier.first_token_s > again]
    if slower:
        yield f"computing again could be faster than a {' or '.join(slower)} start: at least {seconds(again)}"
    if any(group.window is not None or group.chunk is not None for group in plan.model.groups):
        yield "tokens behind a window or chunk count as given back, as with by_group=True; without: --keep-window"


def shape(model: Model) -> str:
    """The model's layers in words."""
    parts = []
    for group in model.groups:
        if isinstance(group, StateGroup):
            parts.append(f"{group.num_layers} layers with a state of {format_size(group.state_bytes)}")
            continue
        heads = f"{group.num_layers} layers of {group.num_kv_heads} KV heads x {group.head_dim}"
        if group.v_head_dim == 0:
            heads = f"{group.num_layers} layers of one latent x {group.head_dim}"
        elif group.v_head_dim is not None:
            heads += f" (V {group.v_head_dim})"
        for name, tokens in (("window", group.window), ("chunk", group.chunk)):
            heads += "" if tokens is None else f", {name} {tokens:,}"
        parts.append(heads)
    return " + ".join(parts)


def params(count: int) -> str:
    """A number of weights for people."""
    return f"{count / 10**9:.1f} B" if count >= 10**9 else f"{count / 10**6:.0f} M"


def counted(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def seconds(value: float) -> str:
    """A time for people: three digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}" if value * factor < 1000 else f"{value * factor:,.0f} {unit}"
    return f"{value * 1e6:.3g} us"


def _load(tier: TierPlan) -> str:
    if not tier.limit_bytes_per_s:
        return "-"
    return f"{format_size(int(tier.load_bytes_per_s))}/s of {format_size(int(tier.limit_bytes_per_s))}/s"
