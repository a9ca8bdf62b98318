"""Rates of the units of four GPUs: published peaks, or assumptions where none exist.

Cycles are those for which one warp instruction occupies a unit of its sub-partition (a quarter of a multiprocessor).
``mma_flops`` are FLOPs of ``mma.sync`` in 16-bit types per sub-partition and cycle. A100: the data sheet's 312 TFLOP/s.
H100: 62 % of 989 TFLOP/s, which is what ``mma.sync`` reaches of the peak that only ``wgmma`` has. B200: as the H100, an
assumption, because nothing is published for ``mma.sync`` on it. RTX 5090: 209.5 TFLOP/s with float32 accumulation.
``memory`` is 90 % of the data sheet's bandwidth, as an H100's 3.0 of 3.35 TB/s. The rates of ``alu``, ``imad`` and
``convert`` are those of the CUDA programming guide's table of throughputs; where sources differ, the faster. The L2's
reads: 5,120 bytes a cycle, of the A100's white paper; that the others reach as many is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

SUB_PARTITIONS = 4
SHARED_BYTES = 128  # that a multiprocessor's shared memory moves in a cycle
REGISTERS = 65536  # of a multiprocessor
RESERVED_SHARED_BYTES = 1 << 10  # of each CTA, for the driver
L2_BYTES = 5120  # that the L2 gives all multiprocessors in a cycle


@dataclass(frozen=True)
class Machine:
    """One GPU.

    Attributes
    ----------
    name, capability : the product, and its compute capability.
    sms, clock : multiprocessors, and their clock in GHz.
    memory : reachable bandwidth in TB/s.
    mma_flops, wgmma_flops : of tensor instructions per sub-partition and cycle; 0 where there are none.
    sm_shared_bytes, sm_threads : of a multiprocessor.
    cycles : of one warp instruction on each unit; an ``imad`` occupies ``fma`` as well.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    clock: float
    memory: float
    mma_flops: float
    wgmma_flops: float
    sm_shared_bytes: int
    sm_threads: int
    cycles: MappingProxyType[str, float] = field(repr=False)

    @property
    def l2(self) -> float:
        """Bandwidth of reads from the L2 in TB/s."""
        return L2_BYTES * self.clock / 1e3


def _rates(*, fma: float = 1.0, alu: float = 2.0, imad: float = 2.0) -> MappingProxyType[str, float]:
    return MappingProxyType({"fma": fma, "alu": alu, "imad": imad, "mufu": 8.0, "convert": 2.0})


MACHINES = (
    Machine("A100 SXM 80 GB", (8, 0), 108, 1.41, 1.84, 512, 0, 164 << 10, 2048, _rates(fma=2.0)),
    Machine("H100 SXM", (9, 0), 132, 1.755, 3.0, 640, 1024, 228 << 10, 2048, _rates()),
    Machine("B200", (10, 0), 148, 1.85, 7.2, 640, 0, 228 << 10, 2048, _rates()),
    Machine("RTX 5090", (12, 0), 170, 2.41, 1.61, 128, 0, 100 << 10, 1536, _rates(alu=1.0, imad=1.0)),
)


def ctas_per_sm(machine: Machine, *, threads: int, registers: int, shared_bytes: int) -> int:
    """CTAs that a multiprocessor holds at once.

    Parameters
    ----------
    threads : of a CTA.
    registers : of a thread; a warp's are rounded up to 256.
    shared_bytes : of a CTA, dynamic and static.
    """
    warps = -(-threads // 32)
    by_registers = REGISTERS // (warps * -(-registers * 32 // 256) * 256)
    by_shared = machine.sm_shared_bytes // (shared_bytes + RESERVED_SHARED_BYTES)
    return min(by_registers, by_shared, machine.sm_threads // (32 * warps))
