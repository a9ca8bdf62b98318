"""The sections of the bench, in their order, each a list of groups of entries.

The most important groups come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.attention import ceilings, moves, ours
from bench.attention.arena import Arena
from bench.attention.device import Device
from bench.attention.problems import Problem
from bench.attention.scales import Scale
from bench.attention.shapes import Shape, zipf_lens
from bench.attention.systems import Entry, Group, Section, System, attention_entry


@dataclass(frozen=True, slots=True)
class Peers:
    """Other libraries, by what they compute."""

    decode: tuple[System, ...] = ()
    prefill: tuple[System, ...] = ()
    cascade: tuple[System, ...] = ()
    contiguous: tuple[System, ...] = ()  # decode without paging


@dataclass(frozen=True, slots=True)
class Bench:
    """What sections are made from."""

    device: Device
    arena: Arena
    scale: Scale
    peers: Peers
    problem_of: Callable[[Shape], Problem]

    def entries(self, case: str, systems: Iterable[System], shape: Shape, **fields: Any) -> list[Entry]:
        """One entry per system; that of ours which the library would choose itself is marked."""
        chosen = ours.default_kernel(self.device, shape)
        found = []
        for system in systems:
            default = isinstance(system, ours.Kernel) and system.is_default(chosen)
            marks = {"default": True} if default else {}
            found.append(attention_entry(case, system, shape, self.device, self.problem_of, **marks, **fields))
        return found

    def group(self, case: str, systems: Iterable[System], shape: Shape, **fields: Any) -> Group:
        """The same as a group."""
        return Group(tuple(self.entries(case, systems, shape, **fields)))


def ceilings_section(bench: Bench) -> tuple[Group, ...]:
    return ceilings.groups(bench.device, bench.arena, min(bench.scale.ceiling_bytes, bench.arena.num_bytes))


def core(bench: Bench) -> tuple[Group, ...]:
    """Main kernels and peers on all shapes first, then the kernels for study."""
    shapes = [
        (f"{model.name} {name}", Shape(model, lens), {"model": model.name, "batch": name, "group": model.group_size})
        for name, lens in bench.scale.core
        for model in bench.scale.models
    ]
    main = [bench.group(case, (*ours.DECODE, *bench.peers.decode), shape, **about) for case, shape, about in shapes]
    study = [bench.group(case, (*ours.STUDY, *bench.peers.contiguous), shape, **about) for case, shape, about in shapes]
    return (*main, *study)


def paging(bench: Bench) -> tuple[Group, ...]:
    """The same batch in four layouts, timed in turn.

    Contiguous, in blocks in order, in blocks in random order, in a layer of a pool.
    """
    found = []
    for name, lens in bench.scale.paging:
        shape = Shape(bench.scale.model, lens)
        case = f"{shape.model.name} {name}"
        entries: list[Entry] = []
        for layout in ("contiguous", "sequential", "shuffled", "pool"):
            about = {"layout": layout, "batch": name}
            entries += bench.entries(f"{case} {layout}", ours.DECODE, replace(shape, layout=layout), **about)
        found.append(Group(tuple(entries)))
    return tuple(found)


def skew(bench: Bench) -> tuple[Group, ...]:
    """Lengths by Zipf's law, and as many requests of equal lengths with as much KV."""
    count, longest, shortest = bench.scale.zipf
    lens = zipf_lens(count, longest, shortest)
    model = bench.scale.model
    equal = (-(-sum(lens) // count),) * count
    systems = (*ours.DECODE, *bench.peers.decode, *ours.STUDY[:2])
    skewed = bench.entries(f"{model.name} zipf {shortest}..{longest}", systems, Shape(model, lens), lengths="zipf")
    uniform = bench.entries(f"{model.name} uniform {equal[0]}", systems, Shape(model, equal), lengths="uniform")
    return tuple(Group(pair) for pair in zip(skewed, uniform, strict=True))


def blocks(bench: Bench) -> tuple[Group, ...]:
    """One batch in blocks of several sizes; all sizes of our default kernel timed in turn."""
    name, lens = bench.scale.blocks
    model = bench.scale.model
    shapes = [(size, Shape(model, lens, block_size=size)) for size in bench.scale.block_sizes]
    case = f"{model.name} {name} block size"

    def sweep(system: System) -> Group:
        entries: list[Entry] = []
        for size, shape in shapes:
            entries += bench.entries(f"{case} {size}", (system,), shape, block_size=size)
        return Group(tuple(entries))

    return tuple(sweep(system) for system in (*ours.DECODE, *bench.peers.decode))


def small(bench: Bench) -> tuple[Group, ...]:
    """KV that fits into the cache many times over: latency.

    Also with the plan computed before every call.
    """
    with_plan = replace(ours.DECODE[0], name=f"{ours.DECODE[0].name}, plan too", plan_too=True)
    systems = (*ours.DECODE, with_plan, *bench.peers.decode)
    return tuple(
        bench.group(f"{model.name} {name}", systems, Shape(model, lens)) for model, (name, lens) in bench.scale.small
    )


def prefill(bench: Bench) -> tuple[Group, ...]:
    """Chunks of prompts, causal, and a mixed batch."""
    found = []
    for name, queries, keys in bench.scale.prefill:
        shape = Shape(bench.scale.model, keys, queries)
        found.append(bench.group(f"{shape.model.name} {name}", (*ours.PREFILL, *bench.peers.prefill), shape))
    return tuple(found)


def cascade(bench: Bench) -> tuple[Group, ...]:
    """A prefix that all requests share: in levels, and as if nothing were shared."""
    found = []
    for count in bench.scale.requests:
        for prefix in bench.scale.prefixes:
            shape = Shape(bench.scale.model, (prefix + bench.scale.suffix,) * count, prefix=prefix)
            systems = (ours.Cascade(), *bench.peers.cascade, replace(ours.ANY, name="flat decode"))
            found.append(bench.group(f"prefix {prefix} x {count}", systems, shape, prefix=prefix, requests=count))
    return tuple(found)


def fp8(bench: Bench) -> tuple[Group, ...]:
    """The same batch with KV in bfloat16 and in fp8 e4m3."""
    found = []
    systems = (*ours.DECODE, *bench.peers.decode)
    for dtype in ("bfloat16", "float8_e4m3"):  # each fills the arena once
        for model, (name, lens) in bench.scale.fp8:
            shape = Shape(model, lens, kv_dtype=dtype)
            batch = f"{model.name} {name}"
            found.append(bench.group(f"{batch} {dtype}", systems, shape, batch=batch, kv_dtype=dtype))
    return tuple(found)


def moves_section(bench: Bench) -> tuple[Group, ...]:
    shape = Shape(bench.scale.model, bench.scale.moves[1])
    return moves.groups(bench.device, bench.arena, shape, bench.problem_of, bench.scale.new_tokens)


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    title: str
    seconds: float
    groups: Callable[[Bench], tuple[Group, ...]]


PARTS = (
    _Part("ceilings", "Ceilings", 20, ceilings_section),
    _Part("core", "Decode, the core set", 170, core),
    _Part("paging", "Decode: contiguous, in order, shuffled, a layer of a pool", 25, paging),
    _Part("skew", "Decode, skewed lengths", 30, skew),
    _Part("blocks", "Decode by block size", 40, blocks),
    _Part("small", "Small decode under a CUDA graph", 25, small),
    _Part("prefill", "Prefill", 60, prefill),
    _Part("cascade", "Shared prefix", 45, cascade),
    _Part("fp8", "fp8 KV", 40, fp8),
    _Part("moves", "Writing, copying, gathering", 15, moves_section),
)
NAMES = tuple(part.name for part in PARTS)


def sections(bench: Bench, only: Sequence[str] = NAMES) -> list[Section]:
    """The chosen sections; the ceilings always, since every share needs them."""
    return [
        Section(part.name, part.title, part.seconds, part.groups(bench))
        for part in PARTS
        if part.name in only or part.name == "ceilings"
    ]
