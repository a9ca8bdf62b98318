"""The hot loops under the bar, variants of the attention kernels, and the figures of each.

A row has one loop on one GPU. Decode's figures are per KiB of KV, prefill's per MFLOP. Where the query heads of a KV
head need several CTAs, each reads the KV, one from the memory and the others from the L2: a KiB then costs the work of
them all.
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
from pagedkv.kernels.shipped import FLAGSHIP, LATENTS, PREFILL_TOKENS
from pagedkv.kernels.source import translation_unit
from pagedkv.kernels.toolkits import installed_nvrtcs
from pagedkv.kernels.variant import Variant

TOOLKIT = 13  # major version of the NVRTC that the bar is for
LOOPS = ("decode_mla", "decode_mla_wgmma", "decode_mma", "decode_tma", "prefill_mma", "prefill_wgmma")
DECODE_ONLY = ("16 rows", "int8")
KEYS, LOAD_BYTES = 16, 32  # of decode_mla's scores: keys of a warp, and bytes of a key in one load
CONFIGS = {
    "bf16": FLAGSHIP,
    "16 rows": replace(FLAGSHIP, group_size=16),
    "e4m3": replace(FLAGSHIP, kv_dtype="float8_e4m3", scale_mode="tensor"),
    "int8": replace(FLAGSHIP, kv_dtype="int8", scale_mode="token_head"),
    **{f"{heads} heads": replace(LATENTS, group_size=heads) for heads in (16, 32, 64, 128)},
    **{
        f"{heads} heads, e4m3": replace(LATENTS, group_size=heads, kv_dtype="float8_e4m3", scale_mode="tensor")
        for heads in (16, 128)
    },
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
                case = Case(machine, kernel, name, config)
                if case.decodes or name not in DECODE_ONLY:
                    yield case


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
    made = hot_pass(Flow(parse(disassemble(compiled.code))), shape.warp_flops)
    kv_bytes = made.tiles * shape.tile_bytes / shape.warps
    units = cycles(made, case.machine, kv_bytes if tiling.box_tokens else 0)
    readers = -(-case.config.group_size // tiling.row_tile) if case.decodes else 1
    work = kv_bytes / readers if case.decodes else float(made.flops)
    per = work / 1024 if case.decodes else work / 1e6
    limits = [("memory", case.machine.memory), ("L2", case.machine.l2 / readers)] if case.decodes else []
    binds, most = bound(units, case.machine, work, limits)
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
    warp_flops : tensor operations of a warp for a tile of keys; of the busiest, where they are not alike.
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

        The ring has STAGES tiles, or halves of them where TMA fetches K and V.
        """
        macros = dict(tiling.macros)
        dims = config.head_dim + config.head_dim_v
        size = ITEMSIZES[config.kv_dtype]
        tile = tiling.tile_tokens * (config.head_dim if config.v_in_k else dims) * size
        stage = tile // 2 if tiling.box_tokens and not config.v_in_k else tile
        warps = macros.get("COMPUTE_THREADS", tiling.threads) // 32
        flops = 2 * tiling.row_tile * tiling.tile_tokens * dims // warps
        if tiling.kernel == "decode_mla":
            groups, loads = tiling.tile_tokens // KEYS, config.head_dim * size // LOAD_BYTES
            most = -(-loads // (warps // groups)) * LOAD_BYTES // size  # of K's dims
            flops = 2 * tiling.row_tile * (KEYS * most + tiling.tile_tokens * config.head_dim_v // warps)
        return cls(warp_flops=flops, tile_bytes=tile, warps=warps, bytes_in_flight=macros["STAGES"] * stage - tile)
