"""mma.sync, ldmatrix, stmatrix, movmatrix.

Products are exact and summed in float64, then rounded once to the accumulator's type: hardware sums in another order
and with fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.numerics import bf16_to_f32, fp8_to_f32
from tests.ptxsim.ops_memory import address_of, memory_of, space_of
from tests.ptxsim.ops_warp import table_of
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Instruction, Operand, Vec

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_FORMATS: dict[str, Callable[[Row], Row]] = {
    "f16": lambda words: words.view(np.float16),
    "bf16": lambda words: bf16_to_f32(words.view(np.uint16)),
    "tf32": lambda words: (words & np.uint32(0xFFFFE000)).view(np.float32),
    "s8": lambda words: words.view(np.int8),
    "u8": lambda words: words.view(np.uint8),
    "e4m3": lambda words: fp8_to_f32(words.view(np.uint8), "e4m3"),
    "e5m2": lambda words: fp8_to_f32(words.view(np.uint8), "e5m2"),
}
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8}
_SHAPES = {
    "m16n8k16": ("f16", "bf16", "s8", "u8", "e4m3", "e5m2"),
    "m16n8k8": ("f16", "bf16", "tf32"),
    "m16n8k4": ("tf32",),
    "m16n8k32": ("s8", "u8", "e4m3", "e5m2"),
}


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """Elements of ``{...}``, or the one operand."""
    return operand.items if isinstance(operand, Vec) else (operand,)


def words_of(tables: list[Row], warps: Any) -> Row:
    """Fragments of the active warps: (warps, registers, 32) 32-bit words."""
    first = tables[0][warps]
    out = np.empty((len(first), len(tables), 32), np.uint32)
    out[:, 0] = first
    for i, table in enumerate(tables[1:], start=1):
        out[:, i] = table[warps]
    return out


def _tables(m: Machine, operand: Operand, kind: str) -> list[Row]:
    """The registers of a fragment, each as (warps, 32)."""
    return [table_of(m, m.regs.source(op, kind)) for op in items_of(operand)]


@opcode("mma")
def _bind_mma(ins: Instruction, m: Machine) -> Step:
    shape = next((mod for mod in ins.mods if mod in _SHAPES), "")
    d_kind, a_kind, b_kind, c_kind = ins.mods[-4:]
    require(ins, "sync", "aligned", shape, "row", "col", "satfinite", d_kind, a_kind, b_kind, c_kind)
    if not shape or a_kind not in _SHAPES[shape] or b_kind not in _SHAPES[shape] or ins.has("satfinite"):
        raise UnsupportedPtx("mma of this shape and these types")
    if c_kind != d_kind or d_kind not in ("f32", "f16", "s32") or (d_kind == "s32") != (a_kind in ("s8", "u8")):
        raise UnsupportedPtx(f"mma accumulating {c_kind} to {d_kind}")
    depth = int(shape.split("k")[1])
    decode_a, decode_b = _FORMATS[a_kind], _FORMATS[b_kind]
    per_word = 32 // _BITS[a_kind]
    tile = 4 * per_word  # columns of A that one register covers in a quad
    tiles = depth // tile
    a, b = (_tables(m, operand, "b32") for operand in ins.operands[1:3])
    if len(a) != 2 * tiles or len(b) != tiles:
        raise UnsupportedPtx("mma with this many registers")
    packed = d_kind == "f16"
    accumulator = "b32" if packed else d_kind
    c = _tables(m, ins.operands[3], accumulator)
    d = [m.regs.target(op, accumulator).reshape(-1, 32) for op in items_of(ins.operands[0])]
    wide: Any = np.int64 if d_kind == "s32" else np.float64

    def step(active: Active) -> None:
        warps = m.whole_warps(active, "mma")
        words_a, words_b = words_of(a, warps), words_of(b, warps)
        count = len(words_a)
        # A word of lane 4*g+t in register 2*i+h holds row g+8*h, columns tile*i + per_word*t...
        left = decode_a(words_a).reshape(count, tiles, 2, 8, tile).transpose(0, 2, 3, 1, 4).reshape(count, 16, depth)
        right = decode_b(words_b).reshape(count, tiles, 8, tile).transpose(0, 2, 1, 3).reshape(count, 8, depth)
        product = np.matmul(left.astype(wide), right.astype(wide).transpose(0, 2, 1))
        quads = product.reshape(count, 2, 32, 2)  # (half, lane, column of the pair)
        for half in range(2):
            if packed:
                old = np.ascontiguousarray(c[half][warps])
                total = quads[:, half] + old.view(np.float16).reshape(count, 32, 2)
                d[half][warps] = total.astype(np.float16).view(np.uint32)[..., 0]
                continue
            for column in range(2):
                i = 2 * half + column
                d[i][warps] = quads[:, half, :, column] + c[i][warps]

    return step


def _matrix_addresses(m: Machine, active: Active, ins: Instruction, address: Any) -> tuple[Any, Row]:
    """Active warps, and (warps, 32) row addresses."""
    warps = m.whole_warps(active, ins.opcode)
    return warps, address(active).reshape(-1, 32)


def _count(ins: Instruction) -> int:
    return int(next(mod for mod in ins.mods if mod in ("x1", "x2", "x4"))[1])


@opcode("ldmatrix")
def _bind_ldmatrix(ins: Instruction, m: Machine) -> Step:
    """8x8 matrices of 16-bit elements; lane 8*i+r gives the address of row r of matrix i."""
    require(ins, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    number, transpose = _count(ins), ins.has("trans")
    targets = [m.regs.target(op, "b32") for op in items_of(ins.operands[0])]
    address, memory = address_of(m, ins.operands[1]), memory_of(m, space_of(ins))
    if len(targets) != number:
        raise UnsupportedPtx("ldmatrix with another number of registers")
    first_lanes = np.arange(32) < 8 * number

    def step(active: Active) -> None:
        m.clocks.now += 1
        warps, _ = _matrix_addresses(m, active, ins, address)
        some = active
        if number < 4:
            some = m.active((active.mask.reshape(-1, 32) & first_lanes).reshape(-1))
        rows = memory.load(address(some), 16, some)
        cells = rows.view(np.uint16).reshape(-1, number, 8, 8)
        if transpose:
            cells = cells.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(cells).view(np.uint32).reshape(-1, number, 32)
        for i, target in enumerate(targets):
            target.reshape(-1, 32)[warps] = words[:, i]

    return step


@opcode("stmatrix")
def _bind_stmatrix(ins: Instruction, m: Machine) -> Step:
    """The inverse of ldmatrix."""
    require(ins, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    number, transpose = _count(ins), ins.has("trans")
    sources = _tables(m, ins.operands[1], "b32")
    address, memory = address_of(m, ins.operands[0]), memory_of(m, space_of(ins))
    if len(sources) != number:
        raise UnsupportedPtx("stmatrix with another number of registers")
    first_lanes = np.arange(32) < 8 * number

    def step(active: Active) -> None:
        m.clocks.now += 1
        warps = m.whole_warps(active, "stmatrix")
        some = m.active((active.mask.reshape(-1, 32) & first_lanes).reshape(-1))
        cells = words_of(sources, warps).view(np.uint16).reshape(-1, number, 8, 8)
        if transpose:
            cells = cells.transpose(0, 1, 3, 2)
        values = np.ascontiguousarray(cells).reshape(-1, 8).view(np.complex128)[:, 0]
        memory.store(address(some), 16, values, some)

    return step


@opcode("movmatrix")
def _bind_movmatrix(ins: Instruction, m: Machine) -> Step:
    """Transpose an 8x8 matrix held one word per lane."""
    require(ins, "sync", "aligned", "m8n8", "trans", "b16")
    target, source = m.regs.target(ins.operands[0], "b32"), m.regs.source(ins.operands[1], "b32")

    def step(active: Active) -> None:
        warps = m.whole_warps(active, "movmatrix")
        cells = words_of([table_of(m, source)], warps).view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        target.reshape(-1, 32)[warps] = np.ascontiguousarray(cells).view(np.uint32).reshape(-1, 32)

    return step
