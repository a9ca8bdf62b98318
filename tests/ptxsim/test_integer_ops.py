"""Integer arithmetic and bit instructions against Python's integers and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ptxsim.cuda import C_TYPES, Asm, run, run_asm, sample

COUNT = 256


def each(function: Callable[..., int], kind: str) -> Callable[..., Any]:
    """A reference on Python integers, whose result wraps to the type."""
    bits = 8 * np.dtype(C_TYPES[kind][2]).itemsize

    def apply(*columns: Any) -> Any:
        values = [function(*(int(v) for v in row)) & ((1 << bits) - 1) for row in zip(*columns, strict=True)]
        return np.array(values, f"u{bits // 8}").view(C_TYPES[kind][2])

    return apply


def case(text: str, result: str, sources: tuple[str, ...], function: Callable[..., int], name: str = "") -> Asm:
    places = ", ".join(f"%{i}" for i in range(len(sources) + 1))
    return Asm(name or text, f"{text} {places};" if ";" not in text else text, result, sources, each(function, result))


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return a if b == 0 else a - quotient(a, b) * b


def shift_left(a: int, n: int, bits: int) -> int:
    return a << n if n < bits else 0


def field(a: int, pos: int, length: int, bits: int, signed: bool) -> int:
    pos, length = pos & 255, length & 255
    if not length:
        return 0
    value = (a & ((1 << bits) - 1)) >> pos
    sign = (a & ((1 << bits) - 1)) >> min(pos + length - 1, bits - 1) & 1
    mask = (1 << min(length, bits)) - 1
    value &= mask
    return value | ~mask if signed and sign else value


def insert(a: int, b: int, pos: int, length: int, bits: int) -> int:
    pos, length = pos & 255, length & 255
    mask = ((1 << length) - 1) << pos & ((1 << bits) - 1)
    return b & ~mask | (a << pos) & mask


def permute(a: int, b: int, selector: int) -> int:
    octets = (a | b << 32).to_bytes(8, "little")
    out = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = octets[nibble & 7]
        out |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * i
    return out


def funnel(a: int, b: int, c: int, left: bool, wrap: bool) -> int:
    n = c & 31 if wrap else min(c, 32)
    both = b << 32 | a
    return (both << n) >> 32 if left else both >> n


def dot4(a: int, b: int, c: int, signed: bool) -> int:
    total = c
    for i in range(4):
        x, y = a >> 8 * i & 255, b >> 8 * i & 255
        total += ((x ^ 128) - 128) * ((y ^ 128) - 128) if signed else x * y
    return total


def lop(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def find(a: int, bits: int, shift: bool) -> int:
    length = (~a if a < 0 else a).bit_length()
    return -1 if not length else bits - length if shift else length - 1


CASES: list[Asm] = []
for width in ("16", "32", "64"):
    for sign in "us":
        t = sign + width
        CASES += [
            case(f"add.{t}", t, (t, t), lambda a, b: a + b),
            case(f"sub.{t}", t, (t, t), lambda a, b: a - b),
            case(f"mul.lo.{t}", t, (t, t), lambda a, b: a * b),
            case(f"mul.hi.{t}", t, (t, t), lambda a, b, n=int(width): a * b >> n),
            case(f"mad.lo.{t}", t, (t, t, t), lambda a, b, c: a * b + c),
            case(f"min.{t}", t, (t, t), min),
            case(f"max.{t}", t, (t, t), max),
            case(f"div.{t}", t, (t, t), quotient),
            case(f"rem.{t}", t, (t, t), remainder),
            case(f"shr.{t}", t, (t, "u32"), lambda a, n: a >> n),
        ]
        if width != "64":
            wide = sign + str(2 * int(width))
            CASES.append(case(f"mul.wide.{t}", wide, (t, t), lambda a, b: a * b))
            CASES.append(case(f"mad.wide.{t}", wide, (t, t, wide), lambda a, b, c: a * b + c))
    t, n = f"s{width}", int(width)
    CASES += [
        case(f"neg.s{width}", t, (t,), lambda a: -a),
        case(f"abs.s{width}", t, (t,), abs),
        case(f"and.b{width}", t, (t, t), lambda a, b: a & b),
        case(f"or.b{width}", t, (t, t), lambda a, b: a | b),
        case(f"xor.b{width}", t, (t, t), lambda a, b: a ^ b),
        case(f"not.b{width}", t, (t,), lambda a: ~a),
        case(f"cnot.b{width}", t, (t,), lambda a: int(a == 0)),
        case(f"shl.b{width}", t, (t, "u32"), lambda a, k, n=n: shift_left(a, k, n)),
        case(f"shr.b{width}", f"u{width}", (f"u{width}", "u32"), lambda a, k: a >> k),
    ]
for width in ("32", "64"):
    n = int(width)
    CASES += [
        case(f"popc.b{width}", "u32", (f"u{width}",), lambda a: a.bit_count()),
        case(f"clz.b{width}", "u32", (f"u{width}",), lambda a, n=n: n - a.bit_length()),
        case(f"brev.b{width}", f"u{width}", (f"u{width}",), lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2)),
        case(f"bfind.u{width}", "u32", (f"u{width}",), lambda a, n=n: find(a, n, False)),
        case(f"bfind.s{width}", "u32", (f"s{width}",), lambda a, n=n: find(a, n, False)),
        case(f"bfind.shiftamt.u{width}", "u32", (f"u{width}",), lambda a, n=n: find(a, n, True)),
        case(f"bfe.u{width}", f"u{width}", (f"u{width}", "u32", "u32"), lambda a, b, c, n=n: field(a, b, c, n, False)),
        case(f"bfe.s{width}", f"s{width}", (f"s{width}", "u32", "u32"), lambda a, b, c, n=n: field(a, b, c, n, True)),
        case(
            f"bfi.b{width}", f"u{width}", (f"u{width}", f"u{width}", "u32", "u32"),
            lambda a, b, c, d, n=n: insert(a, b, c, d, n),
        ),
    ]  # fmt: skip
CASES += [
    case("prmt.b32", "u32", ("u32", "u32", "u32"), permute),
    case("prmt.b32 %0, %1, %2, 0x7531;", "u32", ("u32", "u32"), lambda a, b: permute(a, b, 0x7531), "prmt imm"),
    case("prmt.b32 %0, %1, %2, 0xb9a8;", "u32", ("u32", "u32"), lambda a, b: permute(a, b, 0xB9A8), "prmt sign"),
    case("lop3.b32 %0, %1, %2, %3, 0xe8;", "u32", ("u32", "u32", "u32"), lambda a, b, c: lop(a, b, c, 0xE8), "lop3"),
    case("shf.l.clamp.b32", "u32", ("u32", "u32", "u32"), lambda a, b, c: funnel(a, b, c, True, False)),
    case("shf.l.wrap.b32", "u32", ("u32", "u32", "u32"), lambda a, b, c: funnel(a, b, c, True, True)),
    case("shf.r.clamp.b32", "u32", ("u32", "u32", "u32"), lambda a, b, c: funnel(a, b, c, False, False)),
    case("shf.r.wrap.b32", "u32", ("u32", "u32", "u32"), lambda a, b, c: funnel(a, b, c, False, True)),
    case("dp4a.s32.s32", "s32", ("u32", "u32", "s32"), lambda a, b, c: dot4(a, b, c, True)),
    case("dp4a.u32.u32", "u32", ("u32", "u32", "u32"), lambda a, b, c: dot4(a, b, c, False)),
    case("sad.s32", "s32", ("s32", "s32", "s32"), lambda a, b, c: c + abs(a - b)),
    case("mul24.lo.u32", "u32", ("u32", "u32"), lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    case("add.sat.s32", "s32", ("s32", "s32"), lambda a, b: max(-(2**31), min(2**31 - 1, a + b))),
    case("sub.sat.s32", "s32", ("s32", "s32"), lambda a, b: max(-(2**31), min(2**31 - 1, a - b))),
    case("bmsk.clamp.b32", "u32", ("u32", "u32"), lambda a, b: ((1 << min(b, 32)) - 1) << min(a, 32)),
    case("szext.wrap.u32", "u32", ("u32", "u32"), lambda a, b: a & ((1 << (b & 31)) - 1)),
    case("szext.clamp.s32", "s32", ("s32", "u32"), lambda a, b: field(a, 0, min(b, 32), 32, True)),
    case(
        "{.reg .u32 lo, hi; mov.b64 {lo, hi}, %1; add.cc.u32 lo, lo, 7; addc.u32 hi, hi, 0; mov.b64 %0, {lo, hi};}",
        "u64", ("u64",), lambda a: a + 7, "add.cc",
    ),
    case(
        "{.reg .u32 lo, hi; mov.b64 {lo, hi}, %1; sub.cc.u32 lo, lo, 7; subc.u32 hi, hi, 0; mov.b64 %0, {lo, hi};}",
        "u64", ("u64",), lambda a: a - 7, "sub.cc",
    ),
    case(
        "{.reg .u16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {b, a};}",
        "u32", ("u32",), lambda a: a >> 16 | (a & 0xFFFF) << 16, "mov halves",
    ),
]  # fmt: skip


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_as_python(one: Asm) -> None:
    inputs = [sample(kind, COUNT, 10 + i) for i, kind in enumerate(one.sources)]
    np.testing.assert_array_equal(run_asm(CASES, one, *inputs), one.expect(*inputs))


def test_shifts_by_whole_words_through_c() -> None:
    out = np.zeros(32, np.uint32)
    source = """extern "C" __global__ void k(unsigned* out, unsigned n) {
      unsigned r; asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(0xffffffffu), "r"(n + threadIdx.x));
        out[threadIdx.x] = r; }"""
    run(source, 1, 32, out, np.uint32(16))
    assert out.tolist() == [(0xFFFFFFFF << n) & 0xFFFFFFFF if n < 32 else 0 for n in range(16, 48)]


def test_division_by_constants_and_64_bit_division() -> None:
    a = sample("s64", 64, 1)
    b = np.where(sample("s64", 64, 2) == 0, 3, sample("s64", 64, 2))
    out = np.zeros((3, 64), np.int64)
    source = """extern "C" __global__ void k(const long long* a, const long long* b, long long* out) {
      const int t = threadIdx.x; out[t] = a[t] / b[t]; out[64 + t] = a[t] % b[t];
        out[128 + t] = a[t] / 7 + (int)a[t] % 13; }"""
    run(source, 1, 64, a, b, out)
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert out[0].tolist() == [quotient(x, y) for x, y in pairs]
    assert out[1].tolist() == [remainder(x, y) for x, y in pairs]
    assert out[2].tolist() == [quotient(int(x), 7) + remainder(int(x.astype(np.int32)), 13) for x in a]
