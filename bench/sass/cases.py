"""The hot loops under the bar, variants of the attention kernels, and the figures of each.

A row has one loop on one GPU. Decode's figures are per KiB of KV, prefill's per MFLOP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.sass.disassembly import disassemble, parse
from bench.sass.errors import SassError
from bench.sass.flow import Flow
from bench.sass.machines import MACHINES, Machine, ctas_per_sm
from bench.sass.model import bound, cycles, hot_pass
from pagedkv.kernels.config import AttentionConfig, Tiling
from pagedkv.kernels.dtypes import ITEMSIZES
from pagedkv.kernels.nvrtc import Nvrtc
from pagedkv.kernels.precompile import architecture
from pagedkv.kernels.recorder import Recorder
from pagedkv.kernels.select import KERNELS, Kernel, make_plan
from pagedkv.kernels.shipped import FLAGSHIP, PREFILL_TOKENS
from pagedkv.kernels.source import translation_unit
from pagedkv.kernels.toolkits import installed_nvrtcs
from pagedkv.kernels.variant import Variant

TOOLKIT = 13  # major version of the NVRTC that the bar is for
LOOPS = ("decode_mma", "decode_tma", "prefill_mma", "prefill_wgmma")
DECODE_ONLY = ("16 rows", "int8")
CONFIGS = {
    "bf16": FLAGSHIP,
    "16 rows": replace(FLAGSHIP, group_size=16),
    "e4m3": replace(FLAGSHIP, kv_dtype="float8_e4m3", scale_mode="tensor"),
    "int8": replace(FLAGSHIP, kv_dtype="int8", scale_mode="token_head"),
}
_USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")
_SPILLS = re.compile(r"(\d+) bytes (?:spill stores|spill loads)")


@dataclass(frozen=True)
class Case:
    """One kernel for one config on one GPU."""

    machine: Machine
    kernel: Kernel
    name: str
    config: AttentionConfig

    @property
    def decodes(self) -> bool:
        """Whether it is bound to KV's bytes, not to operations."""
        return self.kernel.max_rows > 0

    def arch(self, nvrtc: Nvrtc) -> str:
        """The architecture to compile for, such as ``sm_90a``."""
        return architecture(self.planned()[1], self.machine.capability, nvrtc)

    def planned(self) -> tuple[Tiling, Variant]:
        """The tiling and the variant of the kernel, as its plan names them."""
        queries = 1 if self.decodes else PREFILL_TOKENS
        plan = make_plan(
            Recorder(self.machine.capability),
            self.config,
            kernel=self.kernel.name,
            max_q_len=queries,
            max_tokens=queries,
            max_seq_len=1,
            num_kv_heads=1,
            max_sequences=1,
        )
        return plan.tiling, next(one for one in plan.variants() if one.kernel == self.kernel.name)


def cases() -> Iterator[Case]:
    """Every loop that the bar holds, GPU by GPU."""
    for machine in MACHINES:
        for kernel in KERNELS:
            if kernel.name not in LOOPS:
                continue
            for name, config in CONFIGS.items():
                if kernel.unsupported(config, machine.capability) is not None:
                    continue
                if kernel.max_rows or name not in DECODE_ONLY:
                    yield Case(machine, kernel, name, config)


def toolkit() -> Nvrtc:
    """The NVRTC that the bar is for.

    Raises
    ------
    SassError
        It is not installed.
    """
    for nvrtc in installed_nvrtcs():
        if nvrtc.version[0] == TOOLKIT:
            return nvrtc
    raise SassError(f"NVRTC {TOOLKIT} is not installed: pip install 'nvidia-cuda-nvrtc>={TOOLKIT}' and its headers")


def measure(case: Case, nvrtc: Nvrtc, text: Callable[[str], str] = translation_unit) -> dict[str, Any]:
    """Compile a case, find its hot loop and count it.

    Parameters
    ----------
    text : a kernel's name -> its translation unit.

    Returns
    -------
    dict
        ``gpu``, ``arch``, ``kernel``, ``variant``, ``per`` ("KiB" or "MFLOP"); per that: ``issue_slots``,
        ``tensor_cycles`` (of a sub-partition) and ``shared_cycles`` (of the multiprocessor); ``registers`` of a
        thread, ``spill_bytes``, ``ctas_per_sm``, ``bytes_in_flight`` per multiprocessor, ``rolled_loops`` (those of
        :class:`~bench.sass.model.Pass`); ``bound`` in ``unit`` ("TB/s" or "TFLOP/s"), and what ``binds``.

    Raises
    ------
    CompileError, SassError
    """
    tiling, variant = case.planned()
    arch = architecture(variant, case.machine.capability, nvrtc)
    options = (*variant.options(arch), "--ptxas-options=-v")
    compiled = nvrtc.compile(text(variant.kernel), f"{variant.kernel}.cu", options)
    used = _USED.search(compiled.log)
    if used is None:
        raise SassError(f"{variant.kernel}: the compiler does not say how many registers it used")
    shape = Shape.of(case.config, tiling)
    made = hot_pass(Flow(parse(disassemble(compiled.code))), shape.tile_flops // shape.warps)
    kv_bytes = made.tiles * shape.tile_bytes / shape.warps
    units = cycles(made, case.machine, kv_bytes if tiling.box_tokens else 0)
    work = kv_bytes if case.decodes else float(made.flops)
    per = work / 1024 if case.decodes else work / 1e6
    binds, most = bound(units, case.machine, work, [("memory", case.machine.memory)] if case.decodes else [])
    ctas = ctas_per_sm(
        case.machine,
        threads=tiling.threads,
        registers=int(used[1]),
        shared_bytes=tiling.shared_bytes + int(used[2] or 0),
    )
    return {
        "gpu": case.machine.name,
        "arch": arch,
        "kernel": variant.kernel,
        "variant": case.name,
        "per": "KiB" if case.decodes else "MFLOP",
        "issue_slots": round(units["issue"] / per, 2),
        "tensor_cycles": round(units["tensor"] / per, 2),
        "shared_cycles": round(units["shared"] / 4 / per, 2),
        "registers": int(used[1]),
        "spill_bytes": sum(map(int, _SPILLS.findall(compiled.log))),
        "ctas_per_sm": ctas,
        "bytes_in_flight": ctas * shape.bytes_in_flight,
        "rolled_loops": made.rolled,
        "bound": round(most, 2 if case.decodes else 0),
        "unit": "TB/s" if case.decodes else "TFLOP/s",
        "binds": binds,
    }


@dataclass(frozen=True)
class Shape:
    """A tile of a CTA.

    Attributes
    ----------
    tile_flops, tile_bytes : tensor operations for a tile of keys, and the bytes of its K and V.
    warps : that compute.
    bytes_in_flight : of K and V that a CTA has asked for while it computes a tile.
    """

    tile_flops: int
    tile_bytes: int
    warps: int
    bytes_in_flight: int

    @classmethod
    def of(cls, config: AttentionConfig, tiling: Tiling) -> Shape:
        """The tile of a config's tiling.

        The ring has STAGES tiles, or halves of them where TMA fetches.
        """
        macros = dict(tiling.macros)
        elements = tiling.tile_tokens * (config.head_dim + config.head_dim_v)
        tile = elements * ITEMSIZES[config.kv_dtype]
        stage = tile // 2 if tiling.box_tokens else tile
        return cls(
            tile_flops=2 * tiling.row_tile * elements,
            tile_bytes=tile,
            warps=macros.get("COMPUTE_THREADS", tiling.threads) // 32,
            bytes_in_flight=macros["STAGES"] * stage - tile,
        )
