"""Logic, shifts and bit fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.elementwise import function_step, ufunc_step
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Imm, Instruction

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_BITS = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")


@opcode("and", "or", "xor", "not", "cnot")
def _bind_logic(ins: Instruction, m: Machine) -> Step:
    require(ins, "pred", "b16", "b32", "b64")
    target = m.regs.target(ins.operands[0], ins.type)
    sources = [m.regs.source(op, ins.type) for op in ins.operands[1:]]
    if ins.opcode == "cnot":
        return function_step(lambda a: a == 0, target, *sources)
    pred = ins.type == "pred"
    table: dict[str, Any] = {
        "and": np.logical_and if pred else np.bitwise_and, "or": np.logical_or if pred else np.bitwise_or,
        "xor": np.logical_xor if pred else np.bitwise_xor, "not": np.logical_not if pred else np.invert,
    }  # fmt: skip
    return ufunc_step(table[ins.opcode], target, *sources)


@opcode("shl", "shr")
def _bind_shift(ins: Instruction, m: Machine) -> Step:
    """Amounts beyond the width give 0, or copies of the sign: NumPy's shifts do the same."""
    require(ins, *_BITS)
    kind = ins.type
    if ins.opcode == "shl" or kind[0] == "b":
        kind = f"u{kind[1:]}"
    target, value = m.regs.target(ins.operands[0], kind), m.regs.source(ins.operands[1], kind)
    amount = m.regs.source(ins.operands[2], "u32")
    ufunc = np.left_shift if ins.opcode == "shl" else np.right_shift
    if amount.ndim == 0:
        return ufunc_step(ufunc, target, value, np.minimum(amount, 255).astype(target.dtype))
    return function_step(lambda a, b: ufunc(a, np.minimum(b, 255).astype(a.dtype)), target, value, amount)


@opcode("shf")
def _bind_funnel(ins: Instruction, m: Machine) -> Step:
    """Bind a funnel shift of the 64 bits {b, a}.

    It returns the upper word of a left shift, the lower word of a right shift.
    """
    require(ins, "l", "r", "clamp", "wrap", "b32")
    target = m.regs.target(ins.operands[0], "b32")
    a, b, c = (m.regs.source(op, "b32") for op in ins.operands[1:])
    left, wrap = ins.has("l"), ins.has("wrap")

    def shift(low: Row, high: Row, amount: Row) -> Row:
        n = (amount & np.uint32(31) if wrap else np.minimum(amount, 32)).astype(np.uint64)
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        if left:
            return ((both << n) >> np.uint64(32)).astype(np.uint32)
        return (both >> n).astype(np.uint32)

    return function_step(shift, target, a, b, c)


@opcode("lop3")
def _bind_lop3(ins: Instruction, m: Machine) -> Step:
    """Any logical function of three words, given by its truth table."""
    require(ins, "b32")
    target = m.regs.target(ins.operands[0], "b32")
    a, b, c = (m.regs.source(op, "b32") for op in ins.operands[1:4])
    table = ins.operands[4]
    if not isinstance(table, Imm):
        raise UnsupportedPtx("a truth table that is no literal")
    bits = int(table.text, 0)

    def evaluate(x: Row, y: Row, z: Row) -> Row:
        out = np.zeros(np.broadcast_shapes(x.shape, y.shape, z.shape), np.uint32)
        for row in range(8):
            if bits >> row & 1:
                out = out | ((x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z))
        return out

    return function_step(evaluate, target, a, b, c)


@opcode("popc", "clz", "brev", "bfind", "ffs")
def _bind_counts(ins: Instruction, m: Machine) -> Step:
    require(ins, *_BITS, "shiftamt")
    kind = ins.type
    width = 64 if kind.endswith("64") else 32
    value = m.regs.source(ins.operands[1], kind)
    target = m.regs.target(ins.operands[0], kind if ins.opcode == "brev" else "u32")
    if ins.opcode == "popc":
        return function_step(lambda a: np.bitwise_count(a), target, value)
    if ins.opcode == "brev":
        return function_step(lambda a: _reverse(a, width), target, value)
    if ins.opcode == "clz":
        return function_step(lambda a: width - _length(a), target, value)
    if ins.opcode == "bfind":
        shift = ins.has("shiftamt")

        def find(a: Row) -> Row:
            magnitude = np.where(a < 0, ~a, a) if kind[0] == "s" else a
            length = _length(magnitude.view(f"u{width // 8}"))
            place = width - length if shift else length - 1
            return np.where(length == 0, 0xFFFFFFFF, place).astype(np.uint32)

        return function_step(find, target, value)
    raise UnsupportedPtx(ins.opcode)


def _length(a: Row) -> NDArray[np.int64]:
    """Number of significant bits."""
    out = np.zeros(a.shape, np.int64)
    rest = a.astype(np.uint64)
    for step in (32, 16, 8, 4, 2, 1):
        big = rest >= np.uint64(1) << np.uint64(step)
        out += np.where(big, step, 0)
        rest = np.where(big, rest >> np.uint64(step), rest)
    return out + (rest > 0)


def _reverse(a: Row, width: int) -> Row:
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(-1, width // 8)
    bits = np.unpackbits(octets, axis=1, bitorder="little")[:, ::-1]
    packed = np.packbits(bits, axis=1, bitorder="little")
    return packed.view(a.dtype).reshape(a.shape)


@opcode("bfe")
def _bind_extract(ins: Instruction, m: Machine) -> Step:
    """Bit field: zero or sign extended."""
    require(ins, "u32", "s32", "u64", "s64")
    kind = ins.type
    width = int(kind[1:])
    target, value = m.regs.target(ins.operands[0], kind), m.regs.source(ins.operands[1], kind)
    position, count = (m.regs.source(op, "u32") for op in ins.operands[2:])

    def extract(a: Row, b: Row, c: Row) -> Row:
        pos, length = (b & 0xFF).astype(np.int64), (c & 0xFF).astype(np.int64)
        wide = np.broadcast_to(a, np.broadcast_shapes(a.shape, pos.shape, length.shape)).astype(f"u{width // 8}")
        shifted = wide >> np.minimum(pos, 64).astype(wide.dtype)
        ones = np.array(-1).astype(np.int64).astype(wide.dtype)
        mask = np.where(length >= width, ones, ~(ones << np.minimum(length, 64).astype(wide.dtype)))
        out = shifted & mask
        if kind[0] == "s":
            top = np.minimum(pos + length - 1, width - 1)
            sign = (wide >> np.maximum(top, 0).astype(wide.dtype)) & wide.dtype.type(1)
            out = np.where((sign == 1) & (length > 0), out | ~mask, out)
        return out.astype(wide.dtype).view(target.dtype)

    return function_step(extract, target, value, position, count)


@opcode("bfi")
def _bind_insert(ins: Instruction, m: Machine) -> Step:
    """Insert the low bits of a into b."""
    require(ins, "b32", "b64")
    kind = ins.type
    width = int(kind[1:])
    target = m.regs.target(ins.operands[0], kind)
    a, b = (m.regs.source(op, kind) for op in ins.operands[1:3])
    position, count = (m.regs.source(op, "u32") for op in ins.operands[3:])

    def insert(x: Row, y: Row, c: Row, d: Row) -> Row:
        dtype = target.dtype
        pos, length = np.minimum(c & 0xFF, 64).astype(dtype), np.minimum(d & 0xFF, 64).astype(dtype)
        ones = ~dtype.type(0)
        mask = np.where(length >= width, ones, ~(ones << length)) << pos
        return (y & ~mask) | ((x << pos) & mask)

    return function_step(insert, target, a, b, position, count)


@opcode("prmt")
def _bind_permute(ins: Instruction, m: Machine) -> Step:
    """Pick four of the eight bytes {b, a}; a selector's top bit replicates the byte's sign."""
    require(ins, "b32")
    target = m.regs.target(ins.operands[0], "b32")
    a, b, selector = (m.regs.source(op, "b32") for op in ins.operands[1:])

    def permute(x: Row, y: Row, s: Row) -> Row:
        lanes = np.broadcast_shapes(x.shape, y.shape, s.shape) or (1,)
        octets = np.empty((*lanes, 8), np.uint8)
        octets.view(np.uint32)[..., 0], octets.view(np.uint32)[..., 1] = x, y
        out = np.empty((*lanes, 4), np.uint8)
        for i in range(4):
            nibble = s >> np.uint32(4 * i)
            if s.ndim == 0:
                byte = octets[..., int(nibble) & 7]
            else:
                byte = np.take_along_axis(octets, (nibble & np.uint32(7)).astype(np.int64)[:, None], 1)[:, 0]
            if s.ndim or int(nibble) & 8:
                replicate = (nibble & np.uint32(8)) != 0
                byte = np.where(replicate, np.where(byte & 0x80, 0xFF, 0), byte)
            out[..., i] = byte
        return out.view(np.uint32)[..., 0]

    return function_step(permute, target, a, b, selector)


@opcode("bmsk")
def _bind_mask(ins: Instruction, m: Machine) -> Step:
    """A mask of b ones from bit a on."""
    require(ins, "clamp", "b32")
    target = m.regs.target(ins.operands[0], "b32")
    a, b = (m.regs.source(op, "b32") for op in ins.operands[1:])

    def mask(x: Row, y: Row) -> Row:
        start, length = np.minimum(x, 32).astype(np.uint64), np.minimum(y, 32).astype(np.uint64)
        ones = (np.uint64(1) << length) - np.uint64(1)
        return ((ones << start) & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return function_step(mask, target, a, b)


@opcode("szext")
def _bind_szext(ins: Instruction, m: Machine) -> Step:
    """Sign or zero extend the low b bits."""
    require(ins, "clamp", "wrap", "u32", "s32")
    target = m.regs.target(ins.operands[0], ins.type)
    value, amount = m.regs.source(ins.operands[1], ins.type), m.regs.source(ins.operands[2], "u32")
    wrap = ins.has("wrap")

    def extend(a: Row, b: Row) -> Row:
        n = (b & np.uint32(31) if wrap else np.minimum(b, 32)).astype(np.int64)
        drop = (32 - n).astype(np.int64)
        wide = a.astype(np.int64) << (drop + 32)
        if a.dtype.kind == "u":
            return (wide.view(np.uint64) >> (drop + 32).astype(np.uint64)).astype(np.uint32)
        return (wide >> (drop + 32)).astype(np.int32)

    return function_step(extend, target, value, amount)
