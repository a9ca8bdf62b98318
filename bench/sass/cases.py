"""The hot loops under the bar, variants of the attention kernels, and the figures of each.

A row has one loop on one GPU, of decode_simt only where no other kernel decodes the config. Decode's figures are per
KiB of KV, prefill's per MFLOP. Where the query heads of a KV head need several CTAs, each reads the KV, one from the
memory and the others from the L2: a KiB then costs the work of them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.sass.disassembly import Instruction, disassemble, parse
from bench.sass.errors import SassError
from bench.sass.flow import Flow
from bench.sass.machines import MACHINES, Machine, ctas_per_sm
from bench.sass.model import bound, cycles, hot_pass
from bench.sass.opcodes import fma_flops, tensor_flops
from pagedkv.kernels.config import AttentionConfig, Tiling
from pagedkv.kernels.dtypes import ITEMSIZES
from pagedkv.kernels.nvrtc import Nvrtc
from pagedkv.kernels.precompile import architecture
from pagedkv.kernels.recorder import Recorder
from pagedkv.kernels.select import KERNELS, Kernel, choose, make_plan
from pagedkv.kernels.shipped import FLAGSHIP, LATENTS, PREFILL_TOKENS
from pagedkv.kernels.source import translation_unit
from pagedkv.kernels.toolkits import installed_nvrtcs
from pagedkv.kernels.tuning import REFERENCE
from pagedkv.kernels.variant import Variant

TOOLKIT = 13  # major version of the NVRTC that the bar is for
DECODE, PREFILL = ("decode_mma", "decode_tma"), ("prefill_mma", "prefill_wgmma")
MLA = ("decode_mla", "decode_mla_wgmma", REFERENCE)
LOOPS = (*DECODE, *PREFILL, *MLA)
KEYS, LOAD_BYTES = 16, 32  # of decode_mla's scores: keys of a warp, and bytes of a key in one load
E4M3: dict[str, Any] = {"kv_dtype": "float8_e4m3", "scale_mode": "tensor"}
CONFIGS: dict[str, tuple[AttentionConfig, tuple[str, ...]]] = {  # by variant, with the kernels that have a row for it
    "bf16": (FLAGSHIP, (*DECODE, *PREFILL)),
    "16 rows": (replace(FLAGSHIP, group_size=16), DECODE),
    "64 dims": (replace(FLAGSHIP, head_dim=64, head_dim_v=64), ("prefill_wgmma",)),
    "256 dims": (replace(FLAGSHIP, head_dim=256, head_dim_v=256), ("prefill_mma",)),
    "soft cap": (replace(FLAGSHIP, soft_cap=True), ("prefill_mma",)),
    "e4m3": (replace(FLAGSHIP, **E4M3), (*DECODE, *PREFILL)),
    "int8": (replace(FLAGSHIP, kv_dtype="int8", scale_mode="token_head"), (*DECODE, *PREFILL)),
    **{f"{heads} heads": (replace(LATENTS, group_size=heads), MLA) for heads in (16, 32, 64, 128)},
    **{f"{heads} heads, e4m3": (replace(LATENTS, group_size=heads, **E4M3), MLA) for heads in (16, 128)},
    "16 heads, e4m3 by token": (replace(LATENTS, kv_dtype="float8_e4m3", scale_mode="token_head"), MLA),
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
        return self.kernel.name.startswith("decode")

    def operations(self, instruction: Instruction) -> int:
        """Those of an instruction that are the kernel's work: on tensor cores, or without them."""
        return (fma_flops if self.kernel.name == REFERENCE else tensor_flops)(instruction)

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
            for name, (config, kernels) in CONFIGS.items():
                if kernel.name not in kernels or kernel.unsupported(config, machine.capability) is not None:
                    continue
                if kernel.name != REFERENCE or choose(config, machine.capability).name == REFERENCE:
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
        :class:`~bench.sass.model.Pass`); ``bound`` in ``unit`` ("TB/s" or "TFLOP/s"), and what ``binds``. Where no
        CTA fits on a multiprocessor the bound is 0.

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
    made = hot_pass(Flow(parse(disassemble(compiled.code)), case.operations), shape.warp_flops)
    kv_bytes = made.tiles * shape.tile_bytes / shape.warps
    units = cycles(made, case.machine, kv_bytes if tiling.box_tokens else 0)
    readers = -(-case.config.group_size // tiling.row_tile) if case.decodes else 1
    work = kv_bytes / readers if case.decodes else float(made.flops)
    per = work / 1024 if case.decodes else work / 1e6
    limits = [("memory", case.machine.memory), ("L2", case.machine.l2 / readers)] if case.decodes else []
    ctas = ctas_per_sm(
        case.machine,
        threads=tiling.threads,
        registers=int(used[1]),
        shared_bytes=tiling.shared_bytes + int(used[2] or 0),
    )
    binds, most = bound(units, case.machine, work, limits) if ctas else ("no CTA fits", 0.0)
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
        "bound": float(f"{most:.3g}"),
        "unit": "TB/s" if case.decodes else "TFLOP/s",
        "binds": binds,
    }


@dataclass(frozen=True)
class Shape:
    """A tile of a CTA.

    Attributes
    ----------
    warp_flops : operations of a warp for a tile of keys; of the busiest, where they are not alike.
    tile_bytes : of a tile's K and V; of latents, K's alone.
    warps : that compute.
    bytes_in_flight : of K and V that a CTA has asked for while it computes a tile.
    """

    warp_flops: int
    tile_bytes: int
    warps: int
    bytes_in_flight: int

    @classmethod
    def of(cls, config: AttentionConfig, tiling: Tiling) -> Shape:
        """The tile of a config's tiling.

        The ring has STAGES tiles, or halves of them where TMA fetches K and V. Without a ring a tile is a key for
        every warp, which it computes when it has come.
        """
        macros = dict(tiling.macros)
        dims = config.head_dim + config.head_dim_v
        size = ITEMSIZES[config.kv_dtype]
        warps = macros.get("COMPUTE_THREADS", tiling.threads) // 32
        keys = tiling.tile_tokens if "STAGES" in macros else warps
        tile = keys * (config.head_dim if config.v_in_k else dims) * size
        stage = tile // 2 if tiling.box_tokens and not config.v_in_k else tile
        flops = 2 * tiling.row_tile * keys * dims // warps
        if tiling.kernel == "decode_mla":
            groups, loads = keys // KEYS, config.head_dim * size // LOAD_BYTES
            most = -(-loads // (warps // groups)) * LOAD_BYTES // size  # of K's dims
            flops = 2 * tiling.row_tile * (KEYS * most + keys * config.head_dim_v // warps)
        in_flight = macros.get("STAGES", 1) * stage - tile
        return cls(warp_flops=flops, tile_bytes=tile, warps=warps, bytes_in_flight=in_flight)
