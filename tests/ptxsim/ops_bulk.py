"""cp.async.bulk: lines and tensor tiles, moved by the asynchronous engine.

It moves them between global and shared memory.

Loads read their source when they are issued and land when no thread can go on without them; stores read shared memory
when they are issued and reach global memory at once, but count as under way until their group is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes
from tests.ptxsim.engine import Deferred
from tests.ptxsim.errors import AsyncCopyError, Misaligned, UnsupportedPtx
from tests.ptxsim.memory import PARAM_WINDOW
from tests.ptxsim.ops_mbarrier import places
from tests.ptxsim.ops_memory import address_of
from tests.ptxsim.registry import Step, require
from tests.ptxsim.syntax import Addr, Imm, Instruction
from tests.ptxsim.tensor_map import MAP_BYTES, TensorMap, decode, swizzled

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_RANKS = {"1d": 1, "2d": 2, "3d": 3, "4d": 4, "5d": 5}
_COMMON = (
    "async", "bulk", "tensor", "tile", "shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes",
    "bulk_group", "L2::cache_hint", *_RANKS,
)  # fmt: skip


def bind_bulk(ins: Instruction, m: Machine) -> Step:
    """Any cp.async.bulk instruction."""
    if ins.has("commit_group"):
        return m.engine.commit_stores
    if ins.has("wait_group"):
        allowed = ins.operands[0]
        assert isinstance(allowed, Imm)
        number = int(allowed.text, 0)

        def wait(active: Active) -> None:
            m.clocks.now += 1
            m.engine.wait_stores(active, number)

        return wait
    if ins.has("prefetch"):
        return lambda active: None
    require(ins, *_COMMON)
    spaces = [mod.split("::")[0] for mod in ins.mods if mod.split("::")[0] in ("shared", "global")]
    if spaces == ["shared", "global"]:
        return _bind_load(ins, m)
    if spaces == ["global", "shared"] and ins.has("bulk_group"):
        return _bind_store(ins, m)
    raise UnsupportedPtx("this form of cp.async.bulk")


def _bind_load(ins: Instruction, m: Machine) -> Step:
    tensor = ins.has("tensor")
    destination = address_of(m, ins.operands[0])
    source = ins.operands[1]
    assert isinstance(source, Addr)
    barrier = places(m, ins, ins.operands[2 if tensor else 3])
    plan = _TensorSide(m, ins, source) if tensor else None
    lines = None if tensor else (address_of(m, source), m.regs.source(ins.operands[2], "u32"))

    def load(active: Active) -> None:
        m.clocks.now += 1
        lanes = active.index
        to, bars = destination(active), barrier(active)
        for place, lane in zip(bars.tolist(), lanes.tolist(), strict=True):
            m.engine.at(place, lane)
        if plan is not None:
            for tensor_map, some in plan.maps(active):
                data = plan.gather(tensor_map, active, some)
                _issue(m, ins, lanes[some], to[some], data, bars[some], tensor_map.swizzle)
            return
        assert lines is not None
        sizes = np.broadcast_to(active.take(lines[1]), to.shape)
        for size in np.unique(sizes).tolist():
            some = np.flatnonzero(sizes == size)
            addresses = lines[0](active)[some]
            if size % 16 or (addresses % 16).any():
                raise Misaligned(
                    f"cp.async.bulk of {size} bytes from {int(addresses[0]):#x}: both must be multiples of 16"
                )
            pieces = addresses[:, None] + np.arange(0, size, 16)
            _issue(m, ins, lanes[some], to[some], _read_pieces(m, pieces, lanes[some]), bars[some], 0)

    return load


def _read_pieces(m: Machine, pieces: NDArray[np.int64], lanes: Lanes, valid: Row | None = None) -> Row:
    """16-byte pieces of global memory, (lanes, pieces); invalid ones are zero."""
    owner = np.repeat(lanes, pieces.shape[1])
    flat = pieces.reshape(-1)
    if valid is not None:
        keep = valid.reshape(-1)
        data = np.zeros(flat.shape, np.complex128)
        if keep.any():
            data[keep] = _checked(m, flat[keep], owner[keep], 16)
        return data.reshape(pieces.shape)
    return _checked(m, flat, owner, 16).reshape(pieces.shape)


def _checked(m: Machine, addresses: NDArray[np.int64], lanes: Lanes, width: int) -> Row:
    memory = m.global_memory
    number = memory.find(addresses, width, lanes)
    if memory.granule is not None:
        memory.each(number, addresses, lanes, lambda i, a, who: memory.read_check(i, a, width, who, False))
    return memory.raw(addresses, width)


def _issue(
    m: Machine, ins: Instruction, lanes: Lanes, to: NDArray[np.int64], data: Row, bars: NDArray[np.int64], swizzle: int
) -> None:
    """Mark the destination in flight; the data lands later.

    ``data`` is (lanes, 16-byte pieces).
    """
    engine = m.engine
    size = 16 * data.shape[1]
    align = 128 if ins.has("tensor") else 16
    if (to % align).any():
        raise Misaligned(f"{m.describe(int(lanes[0]))}: a bulk copy to shared memory at no multiple of {align} bytes")
    flat = shared_pieces(m, lanes, to, data.shape[1], swizzle)
    shadow = m.shared.shadow
    ctas = lanes // m.threads
    owner, copier = np.repeat(lanes, flat.shape[1]), np.repeat(m.lanes + ctas, flat.shape[1])
    if shadow is not None:
        rows, many = m.shared.rows(flat.reshape(-1), 16)
        shadow.check_write(rows, many, owner)
        shadow.mark_in_flight(rows, many, copier)

    def land() -> None:
        m.clocks.now += 1
        m.shared.views[16][flat // 16] = data
        if shadow is not None:
            shadow.record(*m.shared.rows(flat.reshape(-1), 16), copier)
        for place, cta in zip(bars.tolist(), ctas.tolist(), strict=True):
            barrier = engine.mbarriers.get(place)
            if barrier is None:
                raise AsyncCopyError(f"a bulk copy of CTA {cta} lands after its mbarrier was invalidated")
            clock = np.zeros(m.threads + 2, np.int64)
            clock[m.threads] = m.clocks.now
            barrier.clock = clock if barrier.clock is None else np.maximum(barrier.clock, clock)
            barrier.transactions -= size
            engine.complete(barrier)

    engine.deferred.append(Deferred(land, ins))


def shared_pieces(m: Machine, lanes: Lanes, to: NDArray[np.int64], count: int, swizzle: int) -> NDArray[np.int64]:
    """Return the flat shared bytes of each lane's 16-byte pieces, permuted.

    They are checked against the CTA's shared memory.
    """
    addresses = swizzled(to[:, None] + 16 * np.arange(count), swizzle)
    flat: NDArray[np.int64] = m.shared.flat_of(addresses.reshape(-1), 16, np.repeat(lanes, count))
    return flat.reshape(addresses.shape)


def _bind_store(ins: Instruction, m: Machine) -> Step:
    tensor = ins.has("tensor")
    target = ins.operands[0]
    assert isinstance(target, Addr)
    source = address_of(m, ins.operands[1])
    plan = _TensorSide(m, ins, target) if tensor else None
    line = None if tensor else address_of(m, target)
    size_row = None if tensor else m.regs.source(ins.operands[2], "u32")

    def store(active: Active) -> None:
        m.clocks.now += 1
        lanes, origin = active.index, source(active)
        if plan is not None:
            for tensor_map, some in plan.maps(active):
                pieces, valid = plan.pieces(tensor_map, active, some)
                data = _read_shared(m, lanes[some], origin[some], pieces.shape[1], tensor_map.swizzle)
                _write_global(m, pieces, data, lanes[some], valid)
            return
        assert line is not None
        assert size_row is not None
        sizes = np.broadcast_to(active.take(size_row), origin.shape)
        for size in np.unique(sizes).tolist():
            some = np.flatnonzero(sizes == size)
            if size % 16:
                raise Misaligned(f"cp.async.bulk of {size} bytes")
            pieces = line(active)[some][:, None] + np.arange(0, size, 16)
            data = _read_shared(m, lanes[some], origin[some], pieces.shape[1], 0)
            _write_global(m, pieces, data, lanes[some], np.ones(pieces.shape, bool))

    return store


def _read_shared(m: Machine, lanes: Lanes, origin: NDArray[np.int64], count: int, swizzle: int) -> Row:
    flat = shared_pieces(m, lanes, origin, count, swizzle)
    shadow = m.shared.shadow
    if shadow is not None:
        rows, many = m.shared.rows(flat.reshape(-1), 16)
        owner = np.repeat(lanes, flat.shape[1])
        shadow.read(rows, many, owner)
        m.engine.check_proxy(rows, many, owner, "a bulk store")
        shadow.log_read(rows, many, m.lanes + owner // m.threads)
    m.engine.stores_issued(lanes)
    return m.shared.views[16].take(flat // 16)


def _write_global(m: Machine, pieces: NDArray[np.int64], data: Row, lanes: Lanes, valid: Row) -> None:
    keep = valid.reshape(-1)
    if not keep.any():
        return
    flat, owner = pieces.reshape(-1)[keep], np.repeat(lanes, pieces.shape[1])[keep]
    m.global_memory.prepare_store(flat, 16, owner, False)
    m.global_memory.raw_store(flat, 16, data.reshape(-1)[keep])


class _TensorSide:
    """The tensor operand ``[map, {coordinates}]`` of a copy."""

    def __init__(self, m: Machine, ins: Instruction, operand: Addr) -> None:
        self.m, self.ins = m, ins
        self.rank = next(rank for name, rank in _RANKS.items() if ins.has(name))
        self.address = address_of(m, Addr(operand.base, operand.offset))
        self.coordinates = [m.regs.source(op, "s32") for op in operand.coords]
        if len(self.coordinates) != self.rank:
            raise UnsupportedPtx("a tensor copy with another number of coordinates")
        self._maps: dict[int, TensorMap] = {}

    def maps(self, active: Active) -> list[tuple[TensorMap, NDArray[np.int64]]]:
        """The tensor maps that the lanes name, each with its lanes' positions."""
        addresses = self.address(active)
        return [(self._map(a), np.flatnonzero(addresses == a)) for a in np.unique(addresses).tolist()]

    def _map(self, address: int) -> TensorMap:
        if address not in self._maps:
            m = self.m
            if address % 64:
                raise Misaligned(f"a tensor map at {address:#x}, which is no multiple of 64")
            if address >= PARAM_WINDOW:
                offset = address - PARAM_WINDOW
                octets = m.param.views[1][offset : offset + MAP_BYTES].tobytes()
            else:
                pieces = address + np.arange(0, MAP_BYTES, 16)
                m.global_memory.find(pieces, 16, np.zeros(len(pieces), np.int64))
                octets = m.global_memory.raw(pieces, 16).tobytes()
            tensor_map = decode(octets)
            if len(tensor_map.dims) != self.rank:
                raise AsyncCopyError(f"a {self.rank}-d copy through a map of {len(tensor_map.dims)} dimensions")
            self._check_swizzle(tensor_map)
            self._maps[address] = tensor_map
        return self._maps[address]

    @staticmethod
    def _check_swizzle(tensor_map: TensorMap) -> None:
        row = tensor_map.box[0] * tensor_map.element
        if tensor_map.swizzle and row != tensor_map.swizzle:
            raise UnsupportedPtx(f"rows of {row} bytes under a swizzle of {tensor_map.swizzle}")

    def pieces(self, tensor_map: TensorMap, active: Active, some: Row) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Addresses of the box's 16-byte pieces, (lanes, pieces), and which lie inside the tensor."""
        per_piece = 16 // tensor_map.element
        start = np.stack(
            [np.broadcast_to(active.take(c), (active.count,))[some].astype(np.int64) for c in self.coordinates]
        )
        counts = [tensor_map.box[0] // per_piece, *tensor_map.box[1:]]
        grid = np.indices(counts[::-1]).reshape(len(counts), -1)[::-1]
        grid[0] *= per_piece
        index = start[:, :, None] + grid[:, None, :]
        valid = np.ones(index.shape[1:], bool)
        addresses = np.full(index.shape[1:], tensor_map.address, np.int64)
        for axis, (extent, stride) in enumerate(zip(tensor_map.dims, tensor_map.strides, strict=True)):
            width = per_piece if axis == 0 else 1
            valid &= (index[axis] >= 0) & (index[axis] + width <= extent)
            addresses += index[axis] * stride
        edge = (index[0] < tensor_map.dims[0]) & (index[0] + per_piece > tensor_map.dims[0])
        if edge.any() or (start[0] % per_piece).any():
            raise UnsupportedPtx("a tensor copy whose first coordinate or dimension is no multiple of 16 bytes")
        return addresses, valid

    def gather(self, tensor_map: TensorMap, active: Active, some: Row) -> Row:
        """The box's data, zero outside the tensor."""
        addresses, valid = self.pieces(tensor_map, active, some)
        return _read_pieces(self.m, addresses, active.index[some], valid)
