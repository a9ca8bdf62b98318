"""The scheduler: runs a program's blocks over groups of lanes.

It takes the lowest block first, until all lanes have ended.

Lanes at one block run together (lanes that parted meet again at the lowest block, as structured code does). Lanes that
wait at a barrier or an mbarrier are set aside. A group that polls memory steps back when others can run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim import ftz
from tests.ptxsim.active import Active, Lanes, Mask
from tests.ptxsim.clocks import Clocks
from tests.ptxsim.control import Barriers
from tests.ptxsim.engine import AsyncEngine
from tests.ptxsim.errors import BarrierError, Deadlock, DivergentWarp, PtxsimError
from tests.ptxsim.global_memory import GlobalMemory
from tests.ptxsim.memory import GenericMemory, LocalMemory, ParamMemory
from tests.ptxsim.opcodes import bind, bind_terminator, require_known
from tests.ptxsim.program import Program
from tests.ptxsim.registers import Registers
from tests.ptxsim.registry import Step
from tests.ptxsim.shared_memory import SharedMemory
from tests.ptxsim.stats import Stats
from tests.ptxsim.syntax import Instruction

Dim3 = tuple[int, int, int]
Extent = tuple[int, int, bool, "NDArray[np.uint8] | None"]
POLL_PATIENCE = 64  # turns that a polling group gets in a row while others wait
POLL_LIMIT = 4000  # turns of polling groups without any progress before they count as stuck


class Machine:
    """One launch of one kernel.

    Parameters
    ----------
    program : what runs.
    grid, block : CTAs and threads.
    params : bytes of the parameter block.
    extents : memory the kernel may touch: (start, end, writeable, initialised bytes or None).
    shared_bytes : dynamic shared memory.
    races : check for races (and for reads of unwritten shared memory).
    stats : counts sectors and bank conflicts, or None.
    num_sms : for ``%smid`` and ``%nsmid``.
    """

    def __init__(
        self,
        program: Program,
        grid: Dim3,
        block: Dim3,
        params: bytes,
        extents: list[Extent],
        *,
        shared_bytes: int = 0,
        races: bool = True,
        stats: Stats | None = None,
        num_sms: int = 4,
    ) -> None:
        self.program, self.grid, self.block, self.stats = program, grid, block, stats
        self.ctas, self.block_threads = grid[0] * grid[1] * grid[2], block[0] * block[1] * block[2]
        self.threads = -(-self.block_threads // 32) * 32
        self.lanes = self.ctas * self.threads
        self.progress = 0
        self.steps = 0  # instructions executed, however many lanes took part
        self.polled = False
        self.races = races
        self.shared_size = program.static_shared + shared_bytes
        self.clocks = Clocks(self.ctas, self.threads, program.uses_fine_clocks and races, program.uses_fences and races)
        variables, addresses = self._place_globals()
        self.global_memory = GlobalMemory(self, extents + variables, program.granule_global if races else None)
        self.shared = SharedMemory(self, self.shared_size, program.granule_shared if races else None)
        self.local = LocalMemory(self, program.local_size)
        self.param = ParamMemory(self, params)
        self.generic = GenericMemory(self)
        self.engine = AsyncEngine(self)
        thread = np.arange(self.lanes) % self.threads
        self.live: Mask = thread < self.block_threads
        self.live_count = int(np.count_nonzero(self.live))
        self.live_ctas = np.ones(self.ctas, bool)
        self.cta_of_lane = np.arange(self.lanes) // self.threads
        symbols = program.symbols | addresses | program.param_offsets
        self.regs = Registers(
            program.function.registers, self.lanes, self._specials(shared_bytes, num_sms), symbols, program.constants
        )
        self.groups: dict[int, Active] = {}
        self.barriers = Barriers(self)
        self._turn = 0
        self._steps: list[tuple[list[Step], Step] | None] = [None] * len(program.blocks)
        for ins in program.function.code:
            require_known(ins)

    def _place_globals(self) -> tuple[list[Extent], dict[str, int]]:
        """Memory for module-level variables."""
        self._global_arrays, extents, addresses = [], [], {}
        for variable in self.program.global_variables:
            size = variable.size or 0
            array = np.zeros(size // 16 + 2, np.complex128).view(np.uint8)
            array[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
            self._global_arrays.append(array)
            start = array.ctypes.data
            addresses[variable.name] = start
            extents.append((start, start + size, variable.space == "global", None))
        return extents, addresses

    def _specials(self, shared_bytes: int, num_sms: int) -> dict[str, NDArray[Any]]:
        thread, cta = np.arange(self.lanes) % self.threads, np.arange(self.lanes) // self.threads
        rows: dict[str, Any] = {}
        for names, numbers, dims in ((("tid", "ntid"), thread, self.block), (("ctaid", "nctaid"), cta, self.grid)):
            strides = (1, dims[0], dims[0] * dims[1])
            for axis, letter in enumerate("xyz"):
                rows[f"%{names[0]}.{letter}"] = numbers // strides[axis] % dims[axis]
                rows[f"%{names[1]}.{letter}"] = dims[axis]
        lane = thread % 32
        bit = np.uint64(1) << lane.astype(np.uint64)
        rows |= {
            "%laneid": lane, "%warpid": thread // 32, "%nwarpid": self.threads // 32, "%smid": cta % num_sms,
            "%nsmid": num_sms, "%gridid": 0, "%dynamic_smem_size": shared_bytes, "%total_smem_size": self.shared_size,
            "%lanemask_eq": bit, "%lanemask_lt": bit - 1, "%lanemask_le": bit * 2 - 1,
            "%lanemask_gt": 0xFFFFFFFF - (bit * 2 - 1), "%lanemask_ge": 0xFFFFFFFF - (bit - 1),
            "%clusterid.x": rows["%ctaid.x"], "%cluster_ctarank": 0, "%cluster_nctarank": 1, "%cluster_ctaid.x": 0,
        }  # fmt: skip
        table = {name: np.ascontiguousarray(np.asarray(value).astype(np.uint32)) for name, value in rows.items()}
        table["%gridid"] = np.zeros((), np.uint64)
        return table

    # What steps use.

    def active(self, mask: Mask) -> Active:
        """A set of lanes."""
        return Active(mask, self.live_count)

    def restrict(self, active: Active, row: Mask, negated: bool) -> Active:
        """The lanes of a set whose predicate holds."""
        return Active(active.mask & ~row if negated else active.mask & row, self.live_count)

    def describe(self, lane: int) -> str:
        """Words for a lane, or for the asynchronous engine."""
        if lane >= self.lanes:
            name = "copy engine" if lane < self.lanes + self.ctas else "tensor core"
            return f"the {name} of CTA {self._coordinates((lane - self.lanes) % self.ctas, self.grid)}"
        thread, cta = lane % self.threads, lane // self.threads
        return f"thread {self._coordinates(thread, self.block)} of CTA {self._coordinates(cta, self.grid)}"

    @staticmethod
    def _coordinates(number: int, dims: Dim3) -> str:
        x, y, z = number % dims[0], number // dims[0] % dims[1], number // (dims[0] * dims[1])
        return f"({x},{y},{z})" if dims[1] * dims[2] > 1 else str(x)

    def whole_warps(self, active: Active, name: str) -> Lanes | slice:
        """The warps of a ``.sync.aligned`` instruction.

        Raises
        ------
        DivergentWarp
            Some lanes of a warp are elsewhere.
        """
        warps = active.warps
        if warps is None:
            rows = active.mask.reshape(-1, 32)
            count = rows.sum(axis=1)
            warp = int(np.argmax((count > 0) & (count < 32)))
            here = _ranges(np.flatnonzero(rows[warp]))
            raise DivergentWarp(
                f"divergent warp: {name} needs all 32 lanes of a warp, but only lanes {here} "
                f"of the warp of {self.describe(warp * 32)} are here"
            )
        return warps

    # Scheduling.

    def send(self, block: int, active: Active) -> None:
        """Let lanes go on at a block, together with those already there."""
        if not active.count:
            return
        there = self.groups.get(block)
        self.groups[block] = active if there is None else self.active(there.mask | active.mask)

    def end_lanes(self, active: Active) -> None:
        """Lanes have ended."""
        self.live = self.live & ~active.mask
        self.live_count -= active.count
        self.live_ctas = self.live.reshape(self.ctas, -1).any(axis=1)
        self.progress += 1

    def run(self) -> None:
        """Run to the end.

        Raises
        ------
        PtxsimError
            What the kernel did wrong.
        """
        self.send(0, self.active(self.live.copy()))
        try:
            with np.errstate(all="ignore"), ftz.flushing():
                self._schedule()
            self.engine.finish()
        finally:
            self.regs.release()

    def _schedule(self) -> None:
        last, turns, idle, progress = -1, 0, 0, 0
        while self.groups or self._wake():
            block = min(self.groups)
            if block <= last:  # a loop: does it poll?
                turns = turns + 1 if self.polled else 0
                self.polled = False
                if turns > POLL_PATIENCE:
                    idle = idle + 1 if self.progress == progress else 0
                    progress, turns = self.progress, 0
                    block = self._rotate(idle)
            last = block
            self._run_block(block)

    def _rotate(self, idle: int) -> int:
        """A polling group steps back for the others, in turn."""
        if idle > 1 and self.engine.deliver():
            return min(self.groups)
        if idle > POLL_LIMIT // POLL_PATIENCE:
            raise Deadlock(f"deadlock: threads poll memory that no thread changes any more{self._who_waits()}")
        blocks = sorted(self.groups)
        self._turn += 1
        return blocks[self._turn % len(blocks)]

    def _bound(self, block: int) -> tuple[list[Step], Step]:
        """Return the steps of a block and of its end.

        They are made when the block first runs: much of a kernel never does.
        """
        code = self.program.blocks[block]
        bound = [bind(ins, self) for ins in code.body], bind_terminator(code.end, block, self)
        self._steps[block] = bound
        return bound

    def _run_block(self, block: int) -> None:
        active = self.groups.pop(block)
        body, end = self._steps[block] or self._bound(block)
        self.steps += len(body) + 1
        steps = iter(body)
        try:
            for step in steps:
                step(active)
        except PtxsimError as error:
            done = len(body) - steps.__length_hint__() - 1  # type: ignore[attr-defined]
            self._locate(error, self.program.blocks[block].body[done])
            raise
        try:
            end(active)
        except PtxsimError as error:
            last = self.program.blocks[block].end
            if last is not None:
                self._locate(error, last)
            raise

    def _locate(self, error: PtxsimError, ins: Instruction) -> None:
        if not error.where:
            error.where = (
                f"\n  at {ins.source or 'unknown source'}: {ins} (PTX line {ins.line}, kernel {self.program.name})"
            )

    def _wake(self) -> bool:
        """No lane can run: let asynchronous work land, at the last moment.

        Returns False when all lanes have ended.

        Raises
        ------
        Deadlock, BarrierError
            Lanes wait for what cannot come.
        """
        if self.engine.deliver() or self.engine.release():
            return True
        if self.groups:
            return False
        if not self.live_count:
            return False
        exited = [mask for mask in self.barriers.waiting.values() if self._has_exited(mask)]
        error = BarrierError if exited else Deadlock
        raise error(
            ("threads have exited before a barrier" if exited else "deadlock: no thread can go on") + self._who_waits()
        )

    def _has_exited(self, mask: Mask) -> bool:
        ctas = mask.reshape(self.ctas, -1).any(axis=1)
        real = np.arange(self.lanes) % self.threads < self.block_threads
        return bool((~self.live & real).reshape(self.ctas, -1).any(axis=1)[ctas].any())

    def _who_waits(self) -> str:
        lines = []
        for (barrier, _, block), mask in self.barriers.waiting.items():
            lines.append(f"{self._group(mask)} at barrier {barrier}: {self.barrier_text(block)}")
        for block, active in self.groups.items():
            body = self.program.blocks[block].body
            lines.append(
                f"{self._group(active.mask)} polling: {self._text(body[0] if body else self.program.blocks[block].end)}"
            )
        lines += [f"{self._group(mask)} at an mbarrier: {self._text(ins)}" for mask, ins in self.engine.waiters()]
        ended = ~self.live & (np.arange(self.lanes) % self.threads < self.block_threads)
        if ended.any():
            lines.append(f"{self._group(ended)}: ended")
        return "".join(f"\n  {line}" for line in lines)

    def barrier_text(self, block: int) -> str:
        """The barrier after which lanes go on at a block."""
        return self._text(self.program.blocks[block - 1].end)

    @staticmethod
    def _text(ins: Instruction | None) -> str:
        return "?" if ins is None else f"{ins} ({ins.source})"

    def _group(self, mask: Mask) -> str:
        cta = int(np.argmax(mask.reshape(self.ctas, -1).any(axis=1)))
        threads = np.flatnonzero(mask.reshape(self.ctas, -1)[cta])
        more = int(np.count_nonzero(mask.reshape(self.ctas, -1).any(axis=1))) - 1
        return f"threads {_ranges(threads)} of CTA {self._coordinates(cta, self.grid)}" + (
            f" (and of {more} more)" if more else ""
        )


def _ranges(numbers: NDArray[np.int64]) -> str:
    """``0-31, 64``."""
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    starts, ends = np.r_[numbers[:1], numbers[breaks + 1]], np.r_[numbers[breaks], numbers[-1:]]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts.tolist(), ends.tolist(), strict=True))
