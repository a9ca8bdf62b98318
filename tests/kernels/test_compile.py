"""Every shipped variant, compiled for every architecture by NVRTC 12 and 13.

The tests check warnings, entries, spills and instructions.

Nothing is run. The slow run takes a sample of every kernel's variants, in which each pair of architecture and
compiler has its turn; ``-m full`` takes them all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from bench.sass.disassembly import disassemble, disassembler
from pagedkv.kernels import decode_mma
from pagedkv.kernels.jit import available_cpus
from pagedkv.kernels.recorder import Recorder
from pagedkv.kernels.shipped import FLAGSHIP, shipped
from pagedkv.kernels.source import kernel_names, translation_unit
from pagedkv.kernels.toolkits import installed_nvrtcs
from pagedkv.kernels.variant import Variant

ARCHITECTURES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_90a": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
OF_LATENTS = {"sm_86": (8, 6), "sm_89": (8, 9)}  # where decode_mla has tilings of its own; other kernels' are sm_80's
ARCHITECTURES |= OF_LATENTS
PAIRS = tuple(itertools.product(ARCHITECTURES, (12, 13)))
SAMPLE = {"decode_mma": 10, "decode_tma": 8, "prefill_mma": 10, "prefill_wgmma": 4, "decode_mla": 14}
SAMPLE_OF_OTHERS = 4

# Bytes of stack and spills that the attention kernels may have, for these head dims: the hot ones none.
SPILL_BUDGETS = dict.fromkeys(("decode_mla", "decode_mla_wgmma", "decode_mma", "prefill_mma", "prefill_wgmma"), 0)
SPILL_BUDGETS |= dict.fromkeys(("decode_tma", "decode_simt"), 16)
BUDGETED_DIMS = {"64", "128", "576"}
# Of prefill_mma with 32 rows per warp, whose loop takes all 255 registers: on sm_120 NVRTC 12 keeps sums of the rows in
# local memory, which it reads and writes once per tile.
SPILL_BUDGET_OF_32_ROWS = 64
# Of decode_mla over e4m3 with a scale, two of whose CTAs share a multiprocessor: NVRTC 12 keeps six registers in local
# memory on sm_90, NVRTC 13 none.
SPILL_BUDGET_OF_FP8_LATENTS = 24
# Of decode_simt over e4m3 latents on sm_80, which has no instruction that converts them.
SPILL_BUDGET_OF_CONVERSIONS = 144
# SASS that must be there, as regular expressions over whole opcodes, in variants whose rows are 16 bytes aligned.
WIDE_LOADS, WIDE_STORES = r"LDG\.E\.(64|128)\b.*", r"STG\.E\.(64|128)\b.*"
EXPECTED = {
    "decode_simt": (r"LDG\.E\.128.*",),
    "decode_mma": (r"LDGSTS\.E\.BYPASS\..*128", r"LDSM\..*", r"HMMA\.16816\.F32.*"),
    "decode_tma": (r"UTMALDG.*", r"LDSM\..*", r"HMMA\.16816\.F32.*", r"SYNCS\..*"),
    "decode_mla": (r"LDGSTS\.E\.BYPASS\..*128", r"LDSM\..*", r"HMMA\.16816\.F32.*"),
    "decode_mla_wgmma": (r"HGMMA\..*", r"UTMALDG.*", r"LDSM\..*", r"UTMACCTL\.PF.*"),
    "prefill_mma": (r"LDGSTS\.E\.BYPASS\..*128", r"LDSM\..*", r"HMMA\.16816\.F32.*"),
    "prefill_wgmma": (r"HGMMA\..*", r"UTMALDG.*", r"UTMACCTL\.PF.*"),
    "write_kv": (WIDE_LOADS, WIDE_STORES),
    "gather_kv": (WIDE_LOADS, WIDE_STORES),
    "scatter_kv": (WIDE_LOADS, WIDE_STORES),
    "merge_state": (WIDE_LOADS, WIDE_STORES),
    "merge_states": (WIDE_LOADS, WIDE_STORES),
    "bench_read": (WIDE_LOADS,),
}
# All that ptxas -v says of a kernel without warnings.
KNOWN_LOG = re.compile(
    r"ptxas info\s+: (\d+ bytes gmem|Compiling entry function|Function properties for|Used \d+ registers|Compile time)"
    r"|ptxas\s+\.\s+\d+ bytes stack frame"
)
OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)")


@dataclass(frozen=True)
class Case:
    """One variant, one architecture, one major version of NVRTC."""

    variant: Variant
    arch: str
    major: int

    def __str__(self) -> str:
        return f"{self.variant}-{self.arch}-nvrtc{self.major}"


def concerns(arch: str, kernel: str) -> bool:
    """Whether a kernel can have tilings of its own for an architecture."""
    return arch not in OF_LATENTS or kernel == "decode_mla"


def variants_of(kernel: str, arch: str) -> list[Variant]:
    """A kernel's shipped variants for an architecture; ``sm_90a`` gets all that run on an H100."""
    if not concerns(arch, kernel):
        return []
    every = (one for one in shipped(ARCHITECTURES[arch]) if one.kernel == kernel)
    return [one for one in every if arch.endswith("a") or not one.arch_features]


def pairs_of(kernel: str) -> list[tuple[str, int]]:
    """The architectures a kernel is compiled for, with each compiler."""
    return [pair for pair in PAIRS if variants_of(kernel, pair[0])]


def sample() -> Iterator[Case]:
    """A few cases of every kernel, spread over its variants; the pairs take turns."""
    for shift, kernel in enumerate(kernel_names()):
        pairs = pairs_of(kernel)
        count = SAMPLE.get(kernel, SAMPLE_OF_OTHERS) if pairs else 0
        for number in range(count):
            arch, major = pairs[(3 * number + shift) % len(pairs)]
            mine = variants_of(kernel, arch)
            yield Case(mine[number * len(mine) // count], arch, major)


class Farm:
    """Compiles and disassembles cases on all CPUs."""

    def __init__(self) -> None:
        self.nvrtcs = {nvrtc.version[0]: nvrtc for nvrtc in installed_nvrtcs()}
        self.disassembles = disassembler() is not None
        self.pool = ThreadPoolExecutor(available_cpus())

    def problems(self, cases: list[Case]) -> Iterator[tuple[Case, str]]:
        """What is wrong with each case; nothing for what is as it should be."""
        missing = {case.major for case in cases} - self.nvrtcs.keys()
        if missing:
            pytest.skip(f"no NVRTC {missing.pop()} here")
        for case, found in zip(cases, self.pool.map(self._problems, cases), strict=True):
            yield case, "; ".join(found)

    def _problems(self, case: Case) -> list[str]:
        kernel, macros = case.variant.kernel, dict(case.variant.macros)
        options = (*case.variant.options(case.arch), "--ptxas-options=-v")
        compiled = self.nvrtcs[case.major].compile(translation_unit(kernel), f"{kernel}.cu", options)
        lines = [line for line in compiled.log.splitlines() if line.strip()]
        found = [f"the compiler says {line!r}" for line in lines if not KNOWN_LOG.match(line)]
        entries = re.findall(r"Compiling entry function '(\w+)'", compiled.log)
        if entries != [kernel]:
            found.append(f"the entries are {entries}")
        budgeted = macros.get("HEAD_DIM") in BUDGETED_DIMS and macros.get("DEBUG") != "1"
        budget = SPILL_BUDGETS.get(kernel) if budgeted else None
        if macros.get("WARP_ROWS") == "32" and case.arch == "sm_120" and budget is not None:
            budget = SPILL_BUDGET_OF_32_ROWS
        fp8 = macros.get("KV_TYPE") == "e4m3" and macros.get("SCALE_MODE") != "0"
        if kernel == "decode_simt" and fp8 and macros.get("HEAD_DIM") == "576" and case.arch == "sm_80":
            budget = SPILL_BUDGET_OF_CONVERSIONS
        if kernel == "decode_mla" and fp8 and case.arch.startswith("sm_90") and case.major == 12 and budget is not None:
            budget = SPILL_BUDGET_OF_FP8_LATENTS
        if budget is not None:
            spills = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", compiled.log)
            found += [f"{number} bytes {what}" for number, what in spills if int(number) > budget]
        static = sum(int(number) for number in re.findall(r"(\d+) bytes smem", compiled.log))
        if static + int(macros.get("SHARED_BYTES", "0")) > Recorder(ARCHITECTURES[case.arch]).shared_limit:
            found.append(f"{static} + {macros['SHARED_BYTES']} bytes of shared memory are more than a CTA may have")
        if self.disassembles and kernel in EXPECTED:
            opcodes = opcodes_of(compiled.code)
            if budget == 0:
                found += [f"{opcode} goes to local memory" for opcode in opcodes if re.match(r"(LDL|STL)\b", opcode)]
            if int(macros.get("VEC", "8")) > 1:
                found += [
                    f"no {name}" for name in EXPECTED[kernel] if not any(re.fullmatch(name, op) for op in opcodes)
                ]
        return found


def opcodes_of(cubin: bytes) -> set[str]:
    """All opcodes of a cubin."""
    return set(OPCODE.findall(disassemble(cubin)))


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    made = Farm()
    yield made
    made.pool.shutdown(cancel_futures=True)


def test_every_kernel_ships_variants_for_the_h100() -> None:
    shipping = {one.kernel for one in shipped((9, 0))}
    assert set(kernel_names()) == shipping


def test_the_sample_meets_every_architecture_with_both_compilers() -> None:
    chosen = list(sample())
    assert {(case.arch, case.major) for case in chosen} == set(PAIRS)
    assert {case.variant.kernel for case in chosen} == set(kernel_names())


@pytest.mark.parametrize(("head_dim", "asked"), [(64, "LTC64B"), (128, "LTC128B")])
def test_copies_of_a_heads_row_do_not_fetch_the_next_heads(farm: Farm, head_dim: int, asked: str) -> None:
    if not farm.disassembles:
        pytest.skip("no nvdisasm here")
    config = replace(FLAGSHIP, head_dim=head_dim, head_dim_v=head_dim, kv_dtype="float8_e4m3", scale_mode="tensor")
    variant = decode_mma.tiling(config).variant(config, "even")
    compiled = farm.nvrtcs[13].compile(translation_unit("decode_mma"), "decode_mma.cu", variant.options("sm_90"))
    copies = [opcode for opcode in opcodes_of(compiled.code) if opcode.startswith("LDGSTS.E.BYPASS")]
    assert copies
    assert all(asked in opcode for opcode in copies), copies


@pytest.mark.slow
@pytest.mark.parametrize("kernel", kernel_names())
def test_a_sample_of_a_kernels_variants_compiles_to_what_it_promises(farm: Farm, kernel: str) -> None:
    report(farm, [case for case in sample() if case.variant.kernel == kernel])


@pytest.mark.full
@pytest.mark.parametrize(
    ("kernel", "arch", "major"),
    [(kernel, *pair) for kernel in kernel_names() for pair in PAIRS if concerns(pair[0], kernel)],
)
def test_all_of_a_kernels_variants_compile_to_what_they_promise(farm: Farm, kernel: str, arch: str, major: int) -> None:
    found = variants_of(kernel, arch)
    if not found:
        pytest.skip(f"{kernel} is not for {arch}")
    report(farm, [Case(one, arch, major) for one in found])


def report(farm: Farm, cases: list[Case]) -> None:
    bad = [f"{case}: {problem}" for case, problem in farm.problems(cases) if problem]
    assert not bad, "\n".join(bad)
