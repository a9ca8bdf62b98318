"""The unit that an instruction occupies, the bytes it moves and the products it computes."""

from __future__ import annotations

import re

from bench.sass.disassembly import Instruction
from bench.sass.errors import UnknownOpcode

WARP = 32  # threads

_UNITS = {
    "alu": (
        "BMSK FLO FMNMX FMNMX3 FSEL FSET FSETP IABS IADD IADD3 IMNMX ISETP LEA LOP3 MOV P2R PLOP3 POPC PRMT R2P SEL "
        "SGXT SHF VABSDIFF VIADD VIADDMNMX VIMNMX VIMNMX3"
    ),
    "imad": "IDP IMAD",
    "fma": "CS2R FADD FADD2 FCHK FFMA FFMA2 FMUL FMUL2 HADD2 HFMA2 HMNMX2 HMUL2 HSET2 HSETP2",
    "mufu": "MUFU",
    "convert": "F2F F2FP F2I F2IP FRND I2F I2FP I2I I2IP",
    "tensor": "HGMMA HMMA IGMMA IMMA QGMMA QMMA",
    "shared": "ATOMS LDGSTS LDS LDSM MATCH MOVM REDUX SHFL STS STSM",
    "memory": "ATOM ATOMG LD LDG LDL RED REDG ST STG STL UBLKCP UTMALDG UTMASTG UTMAPF",
    "constant": "LDC LDCU ULDC",
    "uniform": (
        "ELECT R2UR S2R S2UR UBMSK UFADD UFFMA UFLO UFMUL UFSEL UFSETP UF2FP UF2I UI2F UI2FP UIADD3 UIMAD UIMNMX "
        "UISETP ULEA ULOP3 UMOV UP2UR UPLOP3 UPOPC UPRMT UR2UP USEL USGXT USHF UVIADD UVIMNMX UVIRTCOUNT"
    ),
    "control": (
        "ACQBULK ARRIVES BAR BPT BRA BREAK BSSY BSYNC CALL CCTL CGAERRBAR DEPBAR ENDCOLLECTIVE ERRBAR EXIT FENCE "
        "LDGDEPBAR LEPC MEMBAR NANOSLEEP NOP RET SYNCS UCGABAR USETMAXREG VOTE VOTEU WARPGROUP WARPSYNC YIELD"
    ),
}
_UNIT_OF = {name: unit for unit, names in _UNITS.items() for name in names.split()}
_MMA = re.compile(r"\.16(?P<n>8)(?P<k>8|16|32|64)(?:\.|$)")
_GMMA = re.compile(r"\.(?P<m>64)x(?P<n>\d+)x(?P<k>\d+)(?:\.|$)")
_GMMA_BYTES = {"HGMMA": 2, "QGMMA": 1, "IGMMA": 1}  # of an operand's element
WARPGROUP = 4  # warps


def unit(instruction: Instruction) -> str:
    """The unit that executes an instruction, beside the issue slot that each takes.

    Raises
    ------
    UnknownOpcode
        The table has no such opcode: add it, with the unit that NVIDIA's profiler counts it for.
    """
    found = _UNIT_OF.get(instruction.base)
    if instruction.base == "CALL" and not (instruction.target or "").startswith(".L"):
        raise UnknownOpcode(f"{instruction.opcode} {instruction.operands}: a call, whose function would not be counted")
    if found is None:
        raise UnknownOpcode(f"{instruction.opcode}: not in bench/sass/opcodes.py; add it there with its unit")
    return found


def is_copy(instruction: Instruction) -> bool:
    """Whether it fetches KV into shared memory without a register."""
    return instruction.base in ("LDGSTS", "UTMALDG", "UBLKCP")


def fma_flops(instruction: Instruction) -> int:
    """Operations of a warp's float32 multiply-add; 0 for every other instruction."""
    return {"FFMA": 2 * WARP, "FFMA2": 4 * WARP}.get(instruction.base, 0)


def tensor_flops(instruction: Instruction) -> int:
    """Operations of one warp's share of a tensor instruction; 0 for every other one.

    Raises
    ------
    UnknownOpcode
        A tensor instruction whose shape does not stand in its name.
    """
    if _UNIT_OF.get(instruction.base) != "tensor":
        return 0
    if instruction.base in _GMMA_BYTES:
        shape, warps = _GMMA.search(instruction.opcode), WARPGROUP
        rows = int(shape["m"]) if shape else 0
    else:
        shape, warps = _MMA.search(instruction.opcode), 1
        rows = 16
    if shape is None:
        raise UnknownOpcode(f"{instruction.opcode}: a tensor instruction without a shape that bench/sass knows")
    return 2 * rows * int(shape["n"]) * int(shape["k"]) // warps


def shared_bytes(instruction: Instruction) -> int:
    """Bytes that shared memory moves for a warp's instruction, or its share of a warpgroup's."""
    base, parts = instruction.base, instruction.parts
    if base in _GMMA_BYTES:
        shape = _GMMA.search(instruction.opcode)
        assert shape is not None  # tensor_flops came first
        from_shared = int(shape["n"]) + (int(shape["m"]) if _both_from_shared(instruction) else 0)
        return from_shared * int(shape["k"]) * _GMMA_BYTES[base] // WARPGROUP
    if base in ("LDSM", "STSM"):
        return 128 * (4 if "4" in parts else 2 if "2" in parts else 1)
    if base in ("LDS", "STS", "LDGSTS", "ATOMS"):
        return WARP * (16 if "128" in parts else 8 if "64" in parts else 4)
    return 128 if base in ("SHFL", "MOVM") else 0


def _both_from_shared(instruction: Instruction) -> bool:
    """Whether A comes from shared memory as well as B: a descriptor follows the result."""
    operands = [operand.strip() for operand in instruction.operands.split(",")]
    return len(operands) > 1 and operands[1].startswith("gdesc")
