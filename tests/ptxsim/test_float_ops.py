"""float32, float64, f16 and bf16 arithmetic against NumPy.

NumPy mostly computes in float64 and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptxsim.cuda import Asm, run_asm, sample
from tests.ptxsim.numerics import bf16_to_f32, f32_to_bf16

COUNT = 512
Row = NDArray[Any]
TINY = np.finfo(np.float32).tiny


def flush(x: Row) -> Row:
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x).astype(np.float32)


def ftz(function: Callable[..., Row]) -> Callable[..., Row]:
    """Subnormals are zero before and after."""
    return lambda *columns: flush(np.float32(function(*(flush(c).astype(np.float64) for c in columns))))


def f32(text: str, sources: int, function: Callable[..., Any]) -> Asm:
    places = ", ".join(f"%{i}" for i in range(sources + 1))
    return Asm(text, f"{text} {places};", "f32", ("f32",) * sources, function)


def exact_fma(a: float, b: float, c: float) -> np.float32:
    """One rounding, by rational arithmetic."""
    with np.errstate(all="ignore"):
        if not all(np.isfinite(v) for v in (a, b, c)):
            return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
        value = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        if value == 0:
            return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
        near = np.float32(float(value))
        candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
        candidates = [x for x in candidates if np.isfinite(x)]
        best = min(abs(Fraction(float(x)) - value) for x in candidates) if candidates else 0
        ties = [x for x in candidates if abs(Fraction(float(x)) - value) == best]
        return min(ties, key=lambda x: int(np.float32(x).view(np.uint32)) & 1) if ties else near


def fma(*columns: Row) -> Row:
    return np.array([exact_fma(*row) for row in zip(*columns, strict=True)], np.float32)


def directed(function: Callable[..., Row], mode: str) -> Callable[..., Row]:
    def apply(*columns: Row) -> Row:
        exact = function(*(c.astype(np.longdouble) for c in columns))
        near = exact.astype(np.float32)
        down = np.where(near.astype(np.longdouble) > exact, np.nextafter(near, np.float32(-np.inf)), near)
        up = np.where(near.astype(np.longdouble) < exact, np.nextafter(near, np.float32(np.inf)), near)
        return {"rz": np.where(exact < 0, up, down), "rm": down, "rp": up}[mode].astype(np.float32)

    return apply


SINGLE = [
    f32("add.rn.ftz.f32", 2, ftz(lambda a, b: a + b)),
    f32("sub.rn.ftz.f32", 2, ftz(lambda a, b: a - b)),
    f32("mul.rn.ftz.f32", 2, ftz(lambda a, b: a * b)),
    f32("div.rn.ftz.f32", 2, ftz(lambda a, b: a / b)),
    f32("add.f32", 2, lambda a, b: a + b),
    f32("mul.rn.f32", 2, lambda a, b: a * b),
    f32("fma.rn.f32", 3, fma),
    f32("fma.rn.ftz.f32", 3, lambda a, b, c: flush(fma(flush(a), flush(b), flush(c)))),
    f32("min.ftz.f32", 2, lambda a, b: np.fmin(flush(a), flush(b))),
    f32("max.f32", 2, np.fmax),
    f32("max.NaN.f32", 2, np.maximum),
    f32("neg.f32", 1, np.negative),
    f32("abs.f32", 1, np.abs),
    f32("add.rz.f32", 2, directed(lambda a, b: a + b, "rz")),
    f32("mul.rm.f32", 2, directed(lambda a, b: a * b, "rm")),
    f32("mul.rp.f32", 2, directed(lambda a, b: a * b, "rp")),
    f32("add.sat.f32", 2, lambda a, b: np.where(np.isnan(a + b), 0, np.clip(a + b, 0, 1))),
    f32("copysign.f32", 2, lambda a, b: np.copysign(b, a)),
    f32("sqrt.rn.f32", 1, np.sqrt),
]
APPROXIMATE = [
    f32("ex2.approx.ftz.f32", 1, np.exp2),
    f32("lg2.approx.ftz.f32", 1, np.log2),
    f32("rcp.approx.ftz.f32", 1, lambda a: 1 / a),
    f32("rsqrt.approx.ftz.f32", 1, lambda a: 1 / np.sqrt(a)),
    f32("sin.approx.ftz.f32", 1, np.sin),
    f32("cos.approx.ftz.f32", 1, np.cos),
    f32("tanh.approx.f32", 1, np.tanh),
    f32("sqrt.approx.ftz.f32", 1, np.sqrt),
    f32("div.approx.ftz.f32", 2, lambda a, b: a / b),
    f32("div.full.ftz.f32", 2, lambda a, b: a / b),
    f32("rcp.rn.f32", 1, lambda a: 1 / a),
]
DOUBLE = [
    Asm(t, f"{t} %0, {', '.join(f'%{i + 1}' for i in range(n))};", "f64", ("f64",) * n, f)
    for t, n, f in (
        ("add.f64", 2, np.add),
        ("mul.rn.f64", 2, np.multiply),
        ("div.rn.f64", 2, np.divide),
        ("min.f64", 2, np.fmin),
        ("neg.f64", 1, np.negative),
        ("sqrt.rn.f64", 1, np.sqrt),
    )
]


@pytest.mark.parametrize("one", SINGLE, ids=lambda one: one.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_single(one: Asm) -> None:
    inputs = [sample("f32", COUNT, 3 + i) for i in range(len(one.sources))]
    np.testing.assert_array_equal(run_asm(SINGLE, one, *inputs), one.expect(*inputs).astype(np.float32))


@pytest.mark.parametrize("one", APPROXIMATE, ids=lambda one: one.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_approximate(one: Asm) -> None:
    inputs = [sample("f32", COUNT, 5 + i) for i in range(len(one.sources))]
    inputs = [np.where(np.abs(x) < TINY, 0, x) for x in inputs]
    expected = one.expect(*(x.astype(np.float64) for x in inputs)).astype(np.float32)
    expected = np.where(np.abs(expected) < TINY, 0, expected) if "ftz" in one.name else expected
    np.testing.assert_allclose(run_asm(APPROXIMATE, one, *inputs), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("one", DOUBLE, ids=lambda one: one.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_double(one: Asm) -> None:
    inputs = [sample("f64", COUNT, 3 + i) for i in range(len(one.sources))]
    np.testing.assert_array_equal(run_asm(DOUBLE, one, *inputs), one.expect(*inputs))


def test_fma_rounds_once_where_two_roundings_differ() -> None:
    """The product plus the sum lies just above a tie of float32, by less than float64 holds."""
    cases = [Asm("fma", "fma.rn.f32 %0, %1, %2, %3;", "f32", ("f32",) * 3, fma)]
    a = np.full(32, 1 + 2.0**-23, np.float32)
    b = np.full(32, 2.0**-24 * (1 - 2.0**-23 + 2.0**-24), np.float32)
    c = np.concatenate([np.ones(16), np.full(16, -1)]).astype(np.float32)
    np.testing.assert_array_equal(run_asm(cases, cases[0], a, b, c), fma(a, b, c))


def bits16(kind: str, values: Row) -> Row:
    return values.astype(np.float16).view(np.uint16) if kind == "f16" else f32_to_bf16(values.astype(np.float32))


def value16(kind: str, bits: Row) -> Row:
    return bits.view(np.float16).astype(np.float64) if kind == "f16" else bf16_to_f32(bits).astype(np.float64)


def half(kind: str, text: str, sources: int, function: Callable[..., Row]) -> Asm:
    places = ", ".join(f"%{i}" for i in range(sources + 1))

    def expect(*columns: Row) -> Row:
        return nearest16(kind, function(*(value16(kind, c.view(np.uint16)).astype(np.longdouble) for c in columns)))

    kinds = ("u32",) if text.endswith("x2") else ("u16",)
    return Asm(text, f"{text} {places};", kinds[0], kinds * sources, expect)


def nearest16(kind: str, exact: Row) -> Row:
    """Bits of the nearest 16-bit float of extended values; ties to even."""
    near = bits16(kind, exact.astype(np.float64))
    best, chosen = np.full(exact.shape, np.inf, np.longdouble), near.copy()
    for step in (0, 1, -1):
        bits = (near.astype(np.int32) + step).astype(np.uint16)
        gap = np.abs(value16(kind, bits).astype(np.longdouble) - exact)
        better = (gap < best) | ((gap == best) & (bits % 2 == 0))
        better &= np.isfinite(gap)
        best, chosen = np.where(better, gap, best), np.where(better, bits, chosen)
    return np.where(np.isfinite(value16(kind, near)), chosen, near)


HALVES = []
for k in ("f16", "bf16"):
    for suffix in ("", "x2"):
        HALVES += [
            half(k, f"add.rn.{k}{suffix}", 2, lambda a, b: a + b),
            half(k, f"sub.rn.{k}{suffix}", 2, lambda a, b: a - b),
            half(k, f"mul.rn.{k}{suffix}", 2, lambda a, b: a * b),
            half(k, f"fma.rn.{k}{suffix}", 3, lambda a, b, c: a * b + c),
            half(k, f"min.{k}{suffix}", 2, np.fmin),
            half(k, f"max.{k}{suffix}", 2, np.fmax),
            half(k, f"neg.{k}{suffix}", 1, np.negative),
            half(k, f"abs.{k}{suffix}", 1, np.abs),
        ]


@pytest.mark.parametrize("one", HALVES, ids=lambda one: one.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sixteen_bits(one: Asm) -> None:
    kind = "bf16" if "bf16" in one.name else "f16"
    width = 2 if one.name.endswith("x2") else 1
    rng = np.random.default_rng(7)
    columns = []
    for _ in one.sources:
        values = rng.standard_normal(COUNT * width) * np.exp2(rng.integers(-8, 9, COUNT * width))
        values[:4] = [0, np.inf, -0.0, 60000]
        columns.append(bits16(kind, rng.permutation(values)))
    got = run_asm(HALVES, one, *(c.view(np.uint32) if width == 2 else c for c in columns)).view(np.uint16)
    expected = one.expect(*columns)
    a, b = value16(kind, got), value16(kind, expected)
    np.testing.assert_array_equal(a, b)


def test_exponential_of_halves() -> None:
    cases = [
        Asm("f16", "ex2.approx.f16 %0, %1;", "u16", ("u16",), np.exp2),
        Asm("f16x2", "ex2.approx.f16x2 %0, %1;", "u32", ("u32",), np.exp2),
        Asm("bf16x2", "ex2.approx.ftz.bf16x2 %0, %1;", "u32", ("u32",), np.exp2),
        Asm("tanh", "tanh.approx.bf16x2 %0, %1;", "u32", ("u32",), np.tanh),
    ]
    for one in cases:
        kind = "bf16" if "b" in one.text[:30].split()[0] else "f16"
        bits = bits16(kind, np.linspace(-9, 5, 64 if one.result == "u32" else 32))
        got = run_asm(cases, one, bits.view(one.result.replace("u32", "uint32").replace("u16", "uint16")))
        expected = one.expect(value16(kind, bits))
        np.testing.assert_allclose(
            value16(kind, got.view(np.uint16)), expected, rtol=2**-8 if kind == "bf16" else 2**-11, atol=2e-8
        )
