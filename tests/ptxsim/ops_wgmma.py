"""wgmma: matrix products of warpgroups with operands in shared memory (sm_90a).

Accumulators are NaN from the instruction until ``wait_group`` has returned, and writing them in between is an error.
Shared memory is read when the instruction is issued, but counts as being read until then too: writing it earlier is a
race. The registers of A are likewise read at once, but writing them too early is not caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes
from tests.ptxsim.engine import POISON
from tests.ptxsim.errors import DivergentWarp, UnsupportedPtx
from tests.ptxsim.numerics import bf16_to_f32, fp8_to_f32
from tests.ptxsim.ops_matrix import items_of, words_of
from tests.ptxsim.ops_warp import table_of
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Imm, Instruction, Reg, Vec
from tests.ptxsim.tensor_map import swizzled

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
_FORMATS: dict[str, tuple[int, Callable[[Row], Row]]] = {
    "f16": (2, lambda octets: octets.view(np.float16)),
    "bf16": (2, lambda octets: bf16_to_f32(octets.view(np.uint16))),
    "e4m3": (1, lambda octets: fp8_to_f32(octets, "e4m3")),
    "e5m2": (1, lambda octets: fp8_to_f32(octets, "e5m2")),
}


@opcode("wgmma")
def _bind_wgmma(ins: Instruction, m: Machine) -> Step:
    if ins.has("fence"):
        return lambda active: _warpgroups(m, active, str(ins))
    if ins.has("commit_group"):
        return lambda active: m.engine.commit_products(_warpgroups(m, active, str(ins)) and active)
    if ins.has("wait_group"):
        allowed = ins.operands[0]
        assert isinstance(allowed, Imm)
        number = int(allowed.text, 0)

        def wait(active: Active) -> None:
            _warpgroups(m, active, str(ins))
            m.clocks.now += 1
            m.engine.wait_products(active, number)

        return wait
    if ins.has("mma_async"):
        return _Product(ins, m).step
    raise UnsupportedPtx("this form of wgmma")


def _warpgroups(m: Machine, active: Active, text: str) -> bool:
    """Raise unless the active lanes are whole groups of four warps."""
    m.whole_warps(active, text)
    if not active.full or m.threads % 128:
        # Warpgroups start at threads 0, 128, ... of a CTA.
        threads = active.index % m.threads
        group = active.index // m.threads * (m.threads // 32 + 4) + threads // 128
        if (np.unique(group, return_counts=True)[1] != 128).any():
            raise DivergentWarp(f"divergent warpgroup: {text} needs all 128 threads of a warpgroup")
    return True


class _Product:
    """One wgmma.mma_async: its operands looked up once."""

    def __init__(self, ins: Instruction, m: Machine) -> None:
        self.ins, self.m = ins, m
        shape = next(mod for mod in ins.mods if mod.startswith("m64n"))
        d_kind, a_kind, b_kind = ins.mods[-3:]
        require(ins, "mma_async", "sync", "aligned", shape, d_kind, a_kind, b_kind)
        self.columns, self.depth = (int(part) for part in shape[4:].split("k"))
        if a_kind not in _FORMATS or b_kind not in _FORMATS or d_kind not in ("f32", "f16"):
            raise UnsupportedPtx("wgmma of these types")
        self.size, self.decode_a = _FORMATS[a_kind]
        self.decode_b = _FORMATS[b_kind][1]
        if self.depth * self.size != 32 or _FORMATS[b_kind][0] != self.size:
            raise UnsupportedPtx(f"wgmma of shape {shape}")
        self.packed = d_kind == "f16"
        kind = "b32" if self.packed else "f32"
        items = items_of(ins.operands[0])
        self.names = [op.name if isinstance(op, Reg) else "" for op in items]
        self.targets = [m.regs.target(op, kind) for op in items]
        if len(self.targets) != self.columns // (4 if self.packed else 2):
            raise UnsupportedPtx("wgmma with another number of accumulators")
        self.from_registers = isinstance(ins.operands[1], Vec)
        if self.from_registers:
            self.a_tables = [table_of(m, m.regs.source(op, "b32")) for op in items_of(ins.operands[1])]
        else:
            self.a_descriptor = m.regs.source(ins.operands[1], "b64")
        self.b_descriptor = m.regs.source(ins.operands[2], "b64")
        scale = ins.operands[3]
        self.keeps = m.regs.source(scale, "u32" if isinstance(scale, Imm) else "pred")
        numbers = [int(op.text, 0) for op in ins.operands[4:] if isinstance(op, Imm)]
        self.sign = numbers[0] * numbers[1]
        transposes = numbers[2:]
        self.transpose_b = bool(transposes[-1]) if transposes else False
        self.transpose_a = bool(transposes[0]) if len(transposes) == 2 else False

    def step(self, active: Active) -> None:
        """Multiply, for all active warpgroups at once."""
        m = self.m
        _warpgroups(m, active, str(self.ins))
        m.clocks.now += 1
        warps = active.warps
        lanes = active.index
        leaders = lanes[::128]
        right = self._load(self.b_descriptor, active, leaders, self.columns, self.transpose_b, self.decode_b)
        if self.from_registers:
            left = self._fragments(warps)
        else:
            left = self._load(self.a_descriptor, active, leaders, 64, self.transpose_a, self.decode_a)
        m.engine.products_issued(leaders)
        product = self.sign * np.matmul(left.astype(np.float64), right.astype(np.float64).transpose(0, 2, 1))
        # Lane 4*g+t of warp w holds, of each 8 columns, the pair 2t of rows 16w+g and 16w+g+8.
        quads = product.reshape(len(leaders), 4, 2, 8, self.columns // 8, 4, 2)
        keep = np.broadcast_to(self.keeps, (m.lanes,)).astype(bool)[lanes].reshape(-1, 32)
        group = np.repeat(m.engine.open_groups(leaders), 128).reshape(-1, 32)
        for i, (name, target) in enumerate(zip(self.names, self.targets, strict=True)):
            sums = m.engine.sums_in(name, target.view(np.uint32))
            pending = sums.group[lanes] >= 0
            m.engine.untouched(sums, name, lanes[pending])
            old_bits = np.where(pending, sums.real[lanes], sums.row[lanes]).reshape(-1, 32)
            if self.packed:
                values = quads[:, :, i % 2, :, i // 2].reshape(-1, 32, 2)
                old = old_bits.view(np.float16).reshape(-1, 32, 2)
                new = (values + np.where(keep[:, :, None], old, 0)).astype(np.float16).view(np.uint32)[..., 0]
            else:
                values = quads[:, :, i // 2 % 2, :, i // 4, :, i % 2].reshape(-1, 32)
                new = (values + np.where(keep, old_bits.view(np.float32), 0)).astype(np.float32).view(np.uint32)
            sums.real.reshape(-1, 32)[warps] = new
            sums.row.reshape(-1, 32)[warps] = POISON
            sums.group.reshape(-1, 32)[warps] = group

    def _fragments(self, warps: Any) -> Row:
        """A from registers: (warpgroups, 64, depth)."""
        words = words_of(self.a_tables, warps)
        tile = 16 // self.size
        octets = np.ascontiguousarray(words).view(np.uint8)
        values = self.decode_a(octets.reshape(-1)).reshape(len(words), 2, 2, 8, tile)  # (k half, row half, row, k)
        return values.transpose(0, 2, 3, 1, 4).reshape(-1, 64, self.depth)

    def _load(
        self, descriptor: Row, active: Active, leaders: Lanes, rows: int, transposed: bool, decode: Callable[[Row], Row]
    ) -> Row:
        """Load an operand from shared memory: (warpgroups, rows, depth).

        Transposed: rows are the contiguous dimension.
        """
        m = self.m
        words = np.broadcast_to(descriptor, (m.lanes,))[active.index].reshape(-1, 128)
        if (words != words[:, :1]).any():
            raise DivergentWarp(f"{self.ins}: threads of a warpgroup give different descriptors")
        given = words[:, 0].astype(np.int64)
        start, lead, stride = ((given >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        kinds = np.unique(words[:, 0] >> np.uint64(62))
        if len(kinds) > 1 or ((given >> 49) & 7).any():
            raise UnsupportedPtx("descriptors of different swizzles, or with a base offset")
        swizzle = _SWIZZLES[int(kinds[0])]
        offsets = _offsets(rows, self.depth, self.size, swizzle, transposed)
        addresses = start[:, None] + offsets[0] + lead[:, None] * offsets[1] + stride[:, None] * offsets[2]
        flat = m.shared.flat_of(swizzled(addresses, swizzle).reshape(-1), 16, np.repeat(leaders, addresses.shape[1]))
        self._check(flat, np.repeat(leaders, addresses.shape[1]))
        octets = m.shared.views[16].take(flat >> 4).view(np.uint8)
        values = decode(octets)
        if not transposed:
            return values.reshape(len(leaders), rows, self.depth)
        return values.reshape(len(leaders), self.depth, rows).transpose(0, 2, 1)

    def _check(self, flat: Row, owners: Lanes) -> None:
        m = self.m
        shadow = m.shared.shadow
        if shadow is None:
            return
        rows, many = m.shared.rows(flat, 16)
        shadow.read(rows, many, owners)
        m.engine.check_proxy(rows, many, owners, "wgmma")
        shadow.log_read(rows, many, m.lanes + m.ctas + owners // m.threads)


def _offsets(rows: int, depth: int, size: int, swizzle: int, transposed: bool) -> tuple[Row, Row, Row]:
    """Return the offsets of each 16-byte piece of an operand.

    Constant bytes, leading strides and strides from the descriptor's start.

    Not transposed (K contiguous): 8 rows of ``swizzle`` bytes form an atom, atoms follow by the stride; without a
    swizzle, 8 rows of 16 bytes do, and pieces along K follow by the leading stride. Transposed: a row of an atom is one
    K index, with ``swizzle`` bytes of the other dimension; further ones follow by the leading stride, 8 K indices by
    the stride.
    """
    if not transposed:
        row, piece = (
            grid.reshape(-1) for grid in np.meshgrid(np.arange(rows), np.arange(depth * size // 16), indexing="ij")
        )
        if swizzle:
            return row % 8 * swizzle + piece * 16, np.zeros_like(row), row // 8
        return row % 8 * 16, piece, row // 8
    if not swizzle or size != 2:
        raise UnsupportedPtx("a transposed wgmma operand without a swizzle, or of 8 bits")
    k, piece = (grid.reshape(-1) for grid in np.meshgrid(np.arange(depth), np.arange(rows * size // 16), indexing="ij"))
    per_atom = swizzle // 16
    return k % 8 * swizzle + piece % per_atom * 16, piece // per_atom, k // 8
