"""The static bar of the kernels, on texts with known counts and on the shipped kernels."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.results import ROOT, read_results, write_results
from bench.sass import __main__ as command
from bench.sass.__main__ import COMMITTED
from bench.sass.bar import MORE_IS_BETTER, compare, key
from bench.sass.cases import Case, Shape, cases, measure, toolkit
from bench.sass.disassembly import Instruction, parse
from bench.sass.errors import NoHotLoop, SassError, UnknownOpcode
from bench.sass.flow import Flow
from bench.sass.machines import MACHINES, ctas_per_sm
from bench.sass.model import Pass, bound, cycles, hot_pass
from bench.sass.opcodes import fma_flops, shared_bytes, tensor_flops, unit
from pagedkv.kernels.source import translation_unit
from tests.mutants.edits import edited

pytestmark = pytest.mark.checkout

HMMA = "HMMA.16816.F32.BF16 R4, R8, R12, R4"
HMMA_FLOPS = 4096
A100, H100, B200, RTX_5090 = MACHINES


def text(lines: str) -> str:
    """As nvdisasm writes it: labels as they are, a made-up address before each instruction."""
    found = ['\t.section\t.text.toy,"ax",@progbits', "toy:"]
    for number, line in enumerate(filter(None, map(str.strip, lines.splitlines()))):
        found.append(line if line.startswith(".L") else f"        /*{16 * number:04x}*/                   {line} ;")
    return "\n".join(found)


def flow(lines: str) -> Flow:
    return Flow(parse(text(lines)))


def counted(made: Pass) -> Counter[str]:
    """Turns by opcode."""
    found: Counter[str] = Counter()
    for one, turns in made.counts.items():
        found[one.opcode] += turns
    return found


LOOP = f"""
    MOV R1, R2
.L_x_0:
    @P2 BRA `(.L_x_1)
    LDSM.16.M88.4 R8, [R1]
    {HMMA}
    ISETP.NE.AND P1, PT, R1, RZ, PT
    @!P1 BRA `(.L_x_2)
    FSEL R4, R4, -INF, P1
    FSEL R5, R5, -INF, P1
.L_x_2:
    MUFU.EX2 R4, R4
    {HMMA.replace("R4", "R20")}
.L_x_1:
    IADD3 R1, R1, 0x10, RZ
    @!P0 BRA `(.L_x_0)
    EXIT
"""


def test_a_pass_has_all_work_and_leaves_out_what_can_be_gone_around() -> None:
    made = hot_pass(flow(LOOP), 2 * HMMA_FLOPS)
    assert counted(made) == {
        "BRA": 3, "LDSM.16.M88.4": 1, "HMMA.16816.F32.BF16": 2, "ISETP.NE.AND": 1, "MUFU.EX2": 1, "IADD3": 1,
    }  # fmt: skip
    assert (made.issued, made.flops, made.tiles, made.rolled, made.label) == (9, 2 * HMMA_FLOPS, 1, 0, ".L_x_0")


def test_copies_are_part_of_the_common_pass() -> None:
    lines = f"""
    .L_x_0:
        {HMMA}
        @P0 BRA `(.L_x_1)
        IADD3 R1, R1, 0x10, RZ
        LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64]
    .L_x_1:
        @P1 BRA `(.L_x_0)
        EXIT
    """
    assert counted(hot_pass(flow(lines), HMMA_FLOPS))["LDGSTS.E.BYPASS.LTC128B.128"] == 1


NESTED = f"""
.L_x_0:
    {HMMA}
.L_x_1:
    {HMMA.replace("R12", "R16")}
    LDS R9, [R3]
    @P0 BRA `(.L_x_1)
.L_x_2:
    F2FP.BF16.F32.PACK_AB R9, R9, R8
    @P3 BRA `(.L_x_2)
    @P1 BRA `(.L_x_0)
    EXIT
"""


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_an_inner_loop_is_taken_as_often_as_a_tile_needs(turns: int) -> None:
    made = hot_pass(flow(NESTED), (1 + turns) * HMMA_FLOPS)
    assert counted(made)["LDS"] == turns
    assert made.flops == (1 + turns) * HMMA_FLOPS
    assert made.issued == 1 + 3 * turns + 3


def test_an_inner_loop_without_tensor_work_is_counted_once_and_told() -> None:
    made = hot_pass(flow(NESTED), 2 * HMMA_FLOPS)
    assert counted(made)["F2FP.BF16.F32.PACK_AB"] == 1
    assert made.rolled == 1


def test_of_two_loops_of_whole_tiles_the_one_with_more_work_is_hot() -> None:
    lines = f"""
    .L_x_9:
        MOV R1, R2
    .L_x_0:
        {HMMA}
        {HMMA.replace("R4", "R20")}
        LDS R9, [R3]
        @P0 BRA `(.L_x_0)
    .L_x_1:
        {HMMA.replace("R4", "R24")}
        @P0 BRA `(.L_x_1)
        @P1 BRA `(.L_x_9)
        EXIT
    """
    made = hot_pass(flow(lines), HMMA_FLOPS)
    assert (made.label, made.tiles, made.issued) == (".L_x_0", 2, 4)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("IADD3 R1, R1, 0x10, RZ\nEXIT", "none"),
        (f"{HMMA}\nEXIT", "none"),
        (f".L_x_0:\n{HMMA}\n@P0 BRA `(.L_x_0)\nEXIT", ".L_x_0 4,096"),
    ],
    ids=["no tensor work", "no loop", "half a tile"],
)
def test_a_kernel_without_a_hot_loop_is_a_named_error(lines: str, says: str) -> None:
    with pytest.raises(NoHotLoop, match=rf"8,192 operations .* operations: {says}$"):
        hot_pass(flow(lines), 2 * HMMA_FLOPS)


def test_a_kernel_without_tensor_cores_is_followed_by_its_multiply_adds() -> None:
    lines = """
    .L_x_0:
        FFMA R4, R8, R9, R4
        @P2 BRA `(.L_x_1)
        FFMA2 R6, R8.F32x2.HI_LO, R10.F32x2.HI_LO, R6.F32x2.HI_LO
        FMUL R4, R4, R5
    .L_x_1:
        @P0 BRA `(.L_x_0)
        EXIT
    """
    made = hot_pass(Flow(parse(text(lines)), fma_flops), 64)
    assert (made.issued, made.flops, made.tiles) == (5, 3 * 64, 3)
    with pytest.raises(NoHotLoop, match="operations: none"):
        hot_pass(flow(lines), 64)


def test_code_for_diverged_warps_and_spinning_waits_are_left_out() -> None:
    lines = f"""
    .L_x_0:
        BRA.DIV UR4, `(.L_x_8)
        {HMMA}
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2
        @!P0 BRA `(.L_x_9)
    .L_x_1:
        @P1 BRA `(.L_x_0)
        EXIT
    .L_x_9:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2
        @!P0 BRA `(.L_x_9)
        BRA `(.L_x_1)
    .L_x_8:
        WARPSYNC.COLLECTIVE R15, `(.L_x_10)
    .L_x_10:
        BRA `(.L_x_0)
    """
    made = hot_pass(flow(lines), HMMA_FLOPS)
    assert (made.issued, made.rolled) == (5, 0)


@pytest.mark.parametrize(
    "branch",
    ["@!P0 BRA `(.L_x_0)", "BRA P1, `(.L_x_0)", "BRA.U !UP0, `(.L_x_0)", "@P0 BRA.U.ANY `(.L_x_0)",
     "@!P0 CALL.REL.NOINC `(.L_x_0)"],
)  # fmt: skip
def test_every_way_to_write_a_conditional_branch_goes_both_ways(branch: str) -> None:
    assert [flow(f".L_x_0:\n{HMMA}\n{branch}\nEXIT").next[0]] == [[0, 1]]


def test_a_branch_to_nowhere_is_a_named_error() -> None:
    with pytest.raises(SassError, match="a place that the text does not have"):
        flow("BRA `(.L_x_7)")


@pytest.mark.parametrize(
    ("opcode", "where"),
    [("IADD3.X", "alu"), ("FMNMX.FTZ", "alu"), ("IMAD.WIDE.U32", "imad"), ("FFMA.FTZ", "fma"), ("HADD2.F32", "fma"),
     ("MUFU.EX2", "mufu"), ("F2FP.F16.E4M3.UNPACK_B", "convert"), ("I2F.S8", "convert"),
     ("HGMMA.64x128x16.F32", "tensor"), ("LDSM.16.MT88.4", "shared"), ("LDG.E.128", "memory"),
     ("ULDC.64", "constant"), ("UIADD3", "uniform"), ("BSYNC.RECONVERGENT", "control")],
)  # fmt: skip
def test_every_kind_of_instruction_has_its_unit(opcode: str, where: str) -> None:
    assert unit(Instruction(opcode)) == where


@pytest.mark.parametrize("opcode", ["FROB.X", "UTCHMMA.2CTA", "IADD33"])
def test_an_unknown_opcode_in_the_hot_loop_is_a_named_error(opcode: str) -> None:
    made = hot_pass(flow(f".L_x_0:\n{HMMA}\n{opcode} R1, R2\n@P0 BRA `(.L_x_0)\nEXIT"), HMMA_FLOPS)
    with pytest.raises(UnknownOpcode, match=f"{opcode}: not in bench/sass/opcodes.py"):
        cycles(made, H100, 0)


def test_a_call_in_the_hot_loop_is_a_named_error() -> None:
    made = hot_pass(flow(f".L_x_0:\n{HMMA}\nCALL.REL.NOINC `($__internal_0)\n@P0 BRA `(.L_x_0)\nEXIT"), HMMA_FLOPS)
    with pytest.raises(UnknownOpcode, match="a call"):
        cycles(made, H100, 0)


@pytest.mark.parametrize(
    ("opcode", "flops"),
    [("HMMA.16816.F32", 4096), ("HMMA.1688.F32", 2048), ("QMMA.16832.F32.E4M3.E4M3", 8192), ("IMMA.16832.S8.S8", 8192),
     ("HGMMA.64x128x16.F32.BF16", 65536), ("QGMMA.64x64x32.F32.E4M3.E4M3", 65536), ("FFMA", 0)],
)  # fmt: skip
def test_tensor_instructions_do_what_their_shape_says(opcode: str, flops: int) -> None:
    assert tensor_flops(Instruction(opcode)) == flops


def test_a_tensor_instruction_of_an_unknown_shape_is_a_named_error() -> None:
    with pytest.raises(UnknownOpcode, match="without a shape"):
        tensor_flops(Instruction("HMMA.SP.F32"))


@pytest.mark.parametrize(
    ("opcode", "operands", "moved"),
    [("LDSM.16.M88.4", "", 512), ("LDSM.16.MT88.2", "", 256), ("LDS", "", 128), ("STS.64", "", 256),
     ("LDS.128", "", 512), ("LDGSTS.E.BYPASS.LTC128B.128", "", 512), ("SHFL.BFLY", "", 128), ("IADD3", "", 0),
     ("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR4], R24", 1536),
     ("HGMMA.64x128x16.F32.BF16", "R24, R8, gdesc[UR4], R24", 1024)],
)  # fmt: skip
def test_shared_memory_moves_what_an_instruction_reads_or_writes(opcode: str, operands: str, moved: int) -> None:
    assert shared_bytes(Instruction(opcode, operands)) == moved


def test_cycles_of_each_unit() -> None:
    lines = f"""
    .L_x_0:
        {HMMA}
        FFMA R1, R2, R3, R4
        FMUL R1, R2, R3
        IMAD R1, R2, R3, R4
        IADD3 R1, R1, R2, RZ
        MUFU.EX2 R1, R1
        F2FP.BF16.F32.PACK_AB R1, R1, R2
        LDSM.16.M88.4 R8, [R1]
        @P0 BRA `(.L_x_0)
        EXIT
    """
    made = hot_pass(flow(lines), HMMA_FLOPS)
    assert cycles(made, H100, 512.0) == {
        "issue": 9, "tensor": 6.4, "shared": 32, "fma": 3, "alu": 2, "imad": 2, "mufu": 8, "convert": 2,
    }  # fmt: skip
    on_a100 = cycles(made, A100, 0)
    assert (on_a100["tensor"], on_a100["fma"], on_a100["shared"]) == (8, 6, 16)
    assert cycles(made, RTX_5090, 0)["tensor"] == 32


def test_the_bound_is_the_fullest_units() -> None:
    units = {"issue": 100.0, "tensor": 50.0, "mufu": 0.0}
    name, rate = bound(units, H100, 1024.0)
    assert (name, rate) == ("issue", pytest.approx(132 * 4 * 1024 * 1.755e9 / 100 / 1e12))
    assert bound(units, H100, 1024.0, [("memory", 3.0)]) == ("memory", 3.0)
    assert bound(units | {"tensor": 200.0}, H100, 1024.0)[0] == "tensor"


@pytest.mark.parametrize(
    ("machine", "threads", "registers", "shared", "ctas"),
    [(H100, 128, 168, 66 << 10, 3), (H100, 128, 168, 80 << 10, 2), (H100, 128, 210, 10 << 10, 2),
     (A100, 128, 255, 90 << 10, 1), (H100, 384, 168, 166 << 10, 1), (RTX_5090, 768, 32, 1 << 10, 2),
     (H100, 128, 169, 1 << 10, 2)],
)  # fmt: skip
def test_ctas_are_limited_by_registers_shared_memory_and_threads(
    machine: Any, threads: int, registers: int, shared: int, ctas: int
) -> None:
    assert ctas_per_sm(machine, threads=threads, registers=registers, shared_bytes=shared) == ctas


def test_a_text_without_instructions_and_one_with_two_kernels_are_named_errors() -> None:
    with pytest.raises(SassError, match="no instructions"):
        parse("nothing\n")
    with pytest.raises(SassError, match="toy, toy"):
        parse(text("EXIT") + "\n" + text("EXIT"))


ROW = {
    "gpu": "H100 SXM", "arch": "sm_90", "kernel": "decode_mma", "variant": "bf16", "per": "KiB", "issue_slots": 40.0,
    "tensor_cycles": 20.0, "shared_cycles": 20.0, "registers": 100, "spill_bytes": 0, "ctas_per_sm": 4,
    "rolled_loops": 0, "bytes_in_flight": 100_000, "bound": 2.0, "unit": "TB/s", "binds": "issue",
}  # fmt: skip


@pytest.mark.parametrize("name", MORE_IS_BETTER)
@pytest.mark.parametrize("worse", [True, False])
def test_a_figure_that_moves_by_5_percent_either_way_asks_to_be_committed(name: str, worse: bool) -> None:
    up = worse != MORE_IS_BETTER[name]
    old = ROW | {name: 100.0}
    assert compare([old], [old | {name: 104.9 if up else 95.1}]) == []
    [line] = compare([old], [old | {name: 105.0 if up else 95.0}])
    assert line.startswith(f"{'worse' if worse else 'better'}: H100 SXM sm_90 decode_mma bf16: {name} 100.0 -> ")


def test_a_figure_is_worse_where_the_kernel_has_more_to_do_or_less_to_do_it_with() -> None:
    more = ("issue_slots", "tensor_cycles", "shared_cycles", "registers", "spill_bytes", "rolled_loops")
    less = ("ctas_per_sm", "bytes_in_flight", "bound")
    assert {*more, *less} == MORE_IS_BETTER.keys()
    old, new = (dict.fromkeys(more, a) | dict.fromkeys(less, b) for a, b in ((1.0, 2.0), (2.0, 1.0)))
    assert {line.partition(":")[0] for line in compare([ROW | old], [ROW | new])} == {"worse"}


@pytest.mark.parametrize("name", ["spill_bytes", "rolled_loops"])
def test_the_first_spill_or_rolled_loop_is_worse_than_none(name: str) -> None:
    assert [line.split(":")[0] for line in compare([ROW], [ROW | {name: 1}])] == ["worse"]


def test_loops_without_a_counterpart_are_told() -> None:
    other = ROW | {"variant": "e4m3"}
    assert compare([ROW], [ROW, other]) == ["new: H100 SXM sm_90 decode_mma e4m3 has no committed figures"]
    assert compare([ROW, other], [ROW])[0].startswith("gone: H100 SXM sm_90 decode_mma e4m3")


def test_another_unit_that_binds_is_told_though_no_figure_moved() -> None:
    assert ["issue -> memory" in line for line in compare([ROW], [ROW | {"binds": "memory"}])] == [True]


def test_worse_figures_come_first() -> None:
    found = compare([ROW], [ROW | {"bound": 3.0, "issue_slots": 50.0}])
    assert [line.split(":")[0] for line in found] == ["worse", "better"]


def test_the_committed_figures_are_of_all_loops_and_this_toolkit() -> None:
    document = read_results(COMMITTED)
    nvrtc = toolkit()
    expected = {(one.machine.name, one.arch(nvrtc), one.kernel.name, one.name) for one in cases()}
    assert {key(row) for row in document["rows"]} == expected
    assert document["nvrtc"].split(".")[0] == str(nvrtc.version[0])


@pytest.mark.parametrize("moved", ["worse", "better"])
def test_the_command_fails_on_a_figure_that_moved_until_it_is_committed(
    moved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a toy: nothing is compiled."""
    slots = {"worse": 42.1, "better": 37.9}[moved]
    now, place = ROW | {"issue_slots": slots}, tmp_path / "sass.json"
    of_toy = SimpleNamespace(kernel=SimpleNamespace(name=ROW["kernel"]), arch=lambda nvrtc: ROW["arch"])
    monkeypatch.setattr(command, "cases", lambda: [of_toy])
    monkeypatch.setattr(command, "measure", lambda case, nvrtc: now)
    monkeypatch.setattr(command, "toolkit", lambda: SimpleNamespace(version=(13, 5)))
    monkeypatch.setattr(command, "COMMITTED", place)
    monkeypatch.setattr(sys, "argv", ["bench.sass", "--check"])
    write_results(place, "sass", [ROW], env={})
    assert command.main() == 1
    said = capsys.readouterr().out
    assert f"{moved}: H100 SXM sm_90 decode_mma bf16: issue_slots 40.0 -> {slots}" in said
    assert "commit the figures" in said
    monkeypatch.setattr(sys, "argv", ["bench.sass", "--json", str(place)])
    assert command.main() == 0
    monkeypatch.setattr(sys, "argv", ["bench.sass", "--check"])
    assert command.main() == 0
    assert "within 5 %" in capsys.readouterr().out


def flagship(kernel: str) -> Case:
    return next(one for one in cases() if (one.machine, one.kernel.name, one.name) == (H100, kernel, "bf16"))


def committed(case: Case) -> list[Any]:
    wanted = (case.machine.name, case.kernel.name, case.name)
    rows = read_results(COMMITTED)["rows"]
    return [row for row in rows if (row["gpu"], row["kernel"], row["variant"]) == wanted]


def test_decode_tma_holds_its_committed_figures() -> None:
    case = flagship("decode_tma")
    assert compare(committed(case), [measure(case, toolkit())]) == []


def test_a_kernel_that_issues_more_in_its_loop_is_noticed() -> None:
    """One idle instruction before each product of the tensor cores."""
    case = flagship("decode_tma")

    def slower(kernel: str) -> str:
        product = 'asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE'
        return edited(kernel, translation_unit(kernel), ((product, 'asm volatile("nanosleep.u32 0;"); ' + product),))

    found = compare(committed(case), [measure(case, toolkit(), slower)])
    assert any(line.startswith("worse") and "issue_slots" in line for line in found), found


def test_decodes_tile_is_what_its_warps_fetch() -> None:
    case = flagship("decode_mma")
    shape = Shape.of(case.config, case.planned()[0])
    assert shape.tile_bytes // shape.warps == 16 * (128 + 128) * 2
    assert shape.warp_flops == 16 * HMMA_FLOPS


def of_latents(name: str, kernel: str = "decode_mla") -> Shape:
    case = next(one for one in cases() if (one.machine, one.kernel.name, one.name) == (H100, kernel, name))
    return Shape.of(case.config, case.planned()[0])


def test_a_tile_of_latents_is_fetched_once_for_both_products() -> None:
    shape = of_latents("16 heads")
    assert shape.tile_bytes == 32 * 576 * 2
    assert shape.warp_flops * shape.warps == 2 * 16 * 32 * (576 + 512)
    assert of_latents("32 heads").warp_flops == 2 * shape.warp_flops


def test_a_tile_that_tma_fetches_is_a_latents_whole_stage() -> None:
    shape = of_latents("64 heads", "decode_mla_wgmma")
    assert shape.warp_flops * shape.warps == 2 * 64 * 64 * (576 + 512)
    assert shape.bytes_in_flight == shape.tile_bytes == 64 * 576 * 2


def test_the_busiest_warp_counts_where_scores_are_not_divided_evenly() -> None:
    """Of 18 loads of 32 dims a quarter of the warps' groups has five."""
    assert of_latents("16 heads, e4m3").warp_flops == 2 * 16 * (16 * 5 * 32 + 32 * 512 // 8)


@pytest.mark.parametrize(
    ("kernel", "variant", "figure", "most"),
    [
        ("decode_mma", "bf16", "issue_slots", 45), ("decode_tma", "bf16", "issue_slots", 32),
        ("decode_mma", "e4m3", "issue_slots", 110), ("decode_tma", "e4m3", "issue_slots", 100),
        ("decode_tma", "16 rows", "ctas_per_sm", -2), ("prefill_wgmma", "bf16", "bound", -949),
    ],
)  # fmt: skip
def test_the_loops_keep_to_their_bars_on_an_h100(kernel: str, variant: str, figure: str, most: float) -> None:
    """The bars of the committed figures; a negative one is the least."""
    (row,) = [
        row
        for row in read_results(COMMITTED)["rows"]
        if (row["gpu"], row["kernel"], row["variant"]) == (H100.name, kernel, variant)
    ]
    assert row[figure] <= most if most > 0 else row[figure] >= -most


def test_decode_simt_has_a_row_where_no_other_kernel_decodes_the_latents() -> None:
    found = {(one.machine.name, one.name) for one in cases() if one.kernel.name == "decode_simt"}
    assert {(machine.name, "16 heads, e4m3 by token") for machine in MACHINES} < found
    assert {(RTX_5090.name, "16 heads"), (RTX_5090.name, "128 heads")} < found
    assert not {(A100.name, "128 heads"), (H100.name, "128 heads"), (RTX_5090.name, "128 heads, e4m3")} & found


def test_decode_simt_computes_a_key_in_every_warp_and_waits_for_the_next() -> None:
    case = next(one for one in cases() if one.kernel.name == "decode_simt" and one.name == "16 heads")
    shape = Shape.of(case.config, case.planned()[0])
    assert (shape.warp_flops, shape.tile_bytes // shape.warps, shape.bytes_in_flight) == (2 * 1088, 2 * 576, 0)


def test_a_kernel_of_which_no_cta_fits_computes_nothing() -> None:
    rows = read_results(COMMITTED)["rows"]
    assert all((row["bound"] > 0) == (row["ctas_per_sm"] > 0) == (row["binds"] != "no CTA fits") for row in rows)


def test_latents_are_bound_by_memory_up_to_32_heads_on_an_h100_and_more_heads_read_them_again() -> None:
    rows = {row["variant"]: row for row in read_results(COMMITTED)["rows"]
            if (row["gpu"], row["kernel"]) == (H100.name, "decode_mla")}  # fmt: skip
    assert [rows[f"{heads} heads"]["binds"] for heads in (16, 32)] == ["memory", "memory"]
    for figure in ("issue_slots", "tensor_cycles", "shared_cycles"):
        assert rows["128 heads"][figure] == pytest.approx(4 * rows["32 heads"][figure], rel=1e-3)


def test_latents_are_bound_by_shared_memory_on_a_b200_and_on_an_a100_if_quantised_by_issue_slots() -> None:
    """As docs/kernels.md says."""
    rows = {(row["gpu"], row["variant"]): row["binds"] for row in read_results(COMMITTED)["rows"]
            if row["kernel"] == "decode_mla"}  # fmt: skip
    assert {binds for (gpu, _), binds in rows.items() if gpu == B200.name} == {"shared"}
    on_a100 = {variant: binds for (gpu, variant), binds in rows.items() if gpu == A100.name}
    assert on_a100 == {
        "16 heads": "memory", "32 heads": "memory", "64 heads": "shared", "128 heads": "shared",
        "16 heads, e4m3": "issue", "128 heads, e4m3": "issue",
    }  # fmt: skip


@pytest.mark.slow
def test_all_loops_hold_the_committed_figures() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.sass", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within 5 %" in done.stdout


def test_all_figures_are_written_or_none() -> None:
    command = [sys.executable, "-m", "bench.sass", "--kernel", "decode_mma", "--json", "some.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "--json writes all figures" in done.stderr
