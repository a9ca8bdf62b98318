"""Cycles of each unit for a warp's pass through a hot loop, and the fullest unit's bound.

Bounds are upper ones: each unit is taken to be full all the time, on all multiprocessors, with the others hidden behind
it. Latency, waiting, the work before and after the loop, and power are not in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bench.sass.disassembly import Instruction
from bench.sass.errors import NoHotLoop
from bench.sass.flow import Flow, Loop
from bench.sass.machines import SHARED_BYTES, SUB_PARTITIONS, Machine
from bench.sass.opcodes import shared_bytes, tensor_flops, unit


@dataclass(frozen=True)
class Pass:
    """A warp's common pass through the hot loop of a kernel.

    Attributes
    ----------
    label : of the loop's head.
    counts : how often each instruction is issued.
    tiles : of the warp's share of a tile, how many.
    flops : operations of these tiles.
    rolled : inner loops on the path without work: counted once, because their turns are not known.
    """

    label: str
    counts: Counter[Instruction]
    tiles: int
    flops: int
    rolled: int

    @property
    def issued(self) -> int:
        """Instructions, each an issue slot."""
        return sum(self.counts.values())


def hot_pass(flow: Flow, tile_flops: int) -> Pass:
    """The pass of the innermost loop that does whole tiles of the flow's work.

    An inner loop with work is taken as often as a tile's work needs. Of several such loops the one with the most work
    wins, then the one with the fewest instructions.

    Parameters
    ----------
    tile_flops : operations of one warp's share of a tile.

    Raises
    ------
    NoHotLoop
        No loop's pass does whole tiles; the message says what each does.
    """
    found: list[tuple[Loop, Pass]] = []
    for loop in sorted(flow.loops, key=lambda one: len(one.blocks)):
        if flow.work(loop.blocks) and not any(inner.blocks < loop.blocks for inner, _ in found):
            made = _pass(flow, loop, tile_flops)
            if made is not None:
                found.append((loop, made))
    if not found:
        seen = ", ".join(
            f"{flow.label(one.head)} {flow.work(one.blocks):,}" for one in flow.loops if flow.work(one.blocks)
        )
        raise NoHotLoop(
            f"no loop's pass does a whole number of tiles of {tile_flops:,} operations a warp; loops with "
            f"work, and their operations: {seen or 'none'}"
        )
    return max((made for _, made in found), key=lambda one: (one.flops, -one.issued))


def _pass(flow: Flow, loop: Loop, tile_flops: int) -> Pass | None:
    path = flow.path(loop)
    inner = [one for one in flow.loops if one.blocks < loop.blocks and one.head in path]
    working = [one for one in inner if flow.work([block for block in path if block in one.blocks])]
    repeated = max(working, key=lambda one: len(one.blocks)).blocks if working else frozenset[int]()
    turned = flow.work([block for block in path if block in repeated])
    once = flow.work(path) - turned
    total = -(-(once + turned) // tile_flops) * tile_flops  # whole tiles
    turns = (total - once) // turned if turned else 1
    if once + turns * turned != total:
        return None
    counts: Counter[Instruction] = Counter()
    for block in path:
        for instruction in flow.instructions(block):
            counts[instruction] += turns if block in repeated else 1
    return Pass(flow.label(loop.head), counts, total // tile_flops, total, len(inner) - len(working))


def cycles(made: Pass, machine: Machine, fetched_bytes: float) -> dict[str, float]:
    """Cycles of a pass on each unit of a sub-partition.

    Parameters
    ----------
    fetched_bytes : of KV that TMA writes into shared memory for the pass; copies by instructions count themselves.

    Returns
    -------
    dict
        ``issue``, ``tensor``, ``shared`` (of the whole multiprocessor, so four times a warp's) and the units of
        ``machine.cycles``.

    Raises
    ------
    UnknownOpcode
        The table of opcodes does not name an instruction.
    """
    found = dict.fromkeys(("issue", "tensor", "shared", *machine.cycles), 0.0)
    moved = fetched_bytes
    for instruction, times in made.counts.items():
        where = unit(instruction)
        found["issue"] += times
        moved += times * shared_bytes(instruction)
        if where == "tensor":
            of_warpgroups = instruction.base.endswith("GMMA")
            rate = machine.wgmma_flops if of_warpgroups else machine.mma_flops
            found["tensor"] += times * tensor_flops(instruction) * _narrow(instruction) / rate
        elif where in machine.cycles:
            found[where] += times * machine.cycles[where]
        if where == "imad":
            found["fma"] += times * machine.cycles["fma"]
    found["shared"] = SUB_PARTITIONS * moved / SHARED_BYTES
    return found


def _narrow(instruction: Instruction) -> float:
    """Time of an instruction of 8-bit types over one of 16-bit types for the same work."""
    return 0.5 if instruction.base in ("QMMA", "IMMA", "QGMMA", "IGMMA") else 1.0


def bound(
    units: dict[str, float], machine: Machine, work: float, most: Iterable[tuple[str, float]] = ()
) -> tuple[str, float]:
    """The unit that fills first, and the rate of `work` at which it is full, in 1e12 a second.

    Parameters
    ----------
    work : bytes or operations of a warp's pass.
    most : further limits, by name.
    """
    rates = {
        name: machine.sms * SUB_PARTITIONS * work / took * machine.clock / 1e3 for name, took in units.items() if took
    }
    rates.update(most)
    name = min(rates, key=lambda one: rates[one])
    return name, rates[name]
