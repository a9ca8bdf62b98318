"""cvt between all types, roundings, saturation, packed and fp8 forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptxsim.cuda import C_TYPES, Asm, run_asm, sample
from tests.ptxsim.numerics import bf16_to_f32, f32_to_bf16

Row = NDArray[Any]
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def dtype(kind: str) -> np.dtype[Any]:
    return np.dtype(C_TYPES[kind][2])


def cvt(mods: str, to: str, source: str, expect: Any) -> Asm:
    return Asm(f"cvt.{mods}{to}.{source}", f"cvt.{mods}{to}.{source} %0, %1;", to, (source,), expect)


def to_integer(to: str, mode: str) -> Any:
    limits = np.iinfo(dtype(to))

    def convert(a: Row) -> Row:
        out = []
        for v in ROUND[mode](a.astype(np.float64)):
            value = 0 if np.isnan(v) else limits.max if v >= limits.max else limits.min if v <= limits.min else int(v)
            out.append(value)
        return np.array(out, dtype(to))

    return convert


CASES = [
    cvt("", to, source, lambda a, to=to: a.astype(dtype(to))) for to in INTEGERS for source in INTEGERS if to != source
]
CASES += [
    cvt(
        "sat.",
        to,
        source,
        lambda a, to=to: np.array(
            [min(max(int(v), np.iinfo(dtype(to)).min), np.iinfo(dtype(to)).max) for v in a], dtype(to)
        ),
    )
    for to, source in (("u16", "s32"), ("s16", "s32"), ("u32", "s32"), ("s32", "u32"), ("u32", "s64"), ("s32", "s64"))
]
CASES += [
    cvt(f"{mode}.", to, source, to_integer(to, mode))
    for to in ("s32", "u32", "s64", "u16")
    for source in ("f32", "f64", "f16")
    for mode in ROUND
]
CASES += [
    cvt(
        "rn.",
        to,
        source,
        lambda a, to=to: a.astype(np.float64).astype(dtype(to)) if to == "f16" else a.astype(dtype(to)),
    )
    for to in ("f32", "f64", "f16")
    for source in ("s32", "u32", "s16", "u64")
]
CASES += [
    cvt("", "f32", "f16", lambda a: a.astype(np.float32)),
    cvt("rn.", "f16", "f32", lambda a: a.astype(np.float16)),
    cvt("", "f64", "f32", lambda a: a.astype(np.float64)),
    cvt("rn.", "f32", "f64", lambda a: a.astype(np.float32)),
    cvt("rni.", "f32", "f32", np.rint),
    cvt("rzi.", "f32", "f32", np.trunc),
    cvt("rmi.", "f32", "f32", np.floor),
    cvt("sat.", "f32", "f32", lambda a: np.where(np.isnan(a), 0, np.clip(a, 0, 1))),
]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_to_one(one: Asm) -> None:
    values = sample(one.sources[0], 128, 4)
    np.testing.assert_array_equal(run_asm(CASES, one, values), one.expect(values))


def towards_zero(a: Row, kind: str) -> Row:
    with np.errstate(over="ignore"):
        if kind == "f16":
            near = a.astype(np.float16)
            return np.where(np.abs(near.astype(np.float64)) > np.abs(a), np.nextafter(near, np.float16(0)), near).view(
                np.uint16
            )
    return (a.view(np.uint32) >> 16).astype(np.uint16)


PACKED = [
    Asm("f16x2", "cvt.rn.f16x2.f32 %0, %1, %2;", "u32", ("f32", "f32"), lambda a: a.astype(np.float16).view(np.uint16)),
    Asm("f16x2.rz", "cvt.rz.f16x2.f32 %0, %1, %2;", "u32", ("f32", "f32"), lambda a: towards_zero(a, "f16")),
    Asm("bf16x2", "cvt.rn.bf16x2.f32 %0, %1, %2;", "u32", ("f32", "f32"), f32_to_bf16),
    Asm("bf16x2.rz", "cvt.rz.bf16x2.f32 %0, %1, %2;", "u32", ("f32", "f32"), lambda a: towards_zero(a, "bf16")),
    Asm(
        "relu",
        "cvt.rn.relu.f16x2.f32 %0, %1, %2;",
        "u32",
        ("f32", "f32"),
        lambda a: np.where(a > 0, a, 0).astype(np.float16).view(np.uint16),
    ),
]


@pytest.mark.parametrize("one", PACKED, ids=lambda one: one.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_packed(one: Asm) -> None:
    high, low = (np.nan_to_num(sample("f32", 64, seed), posinf=3e38, neginf=-3e38) for seed in (1, 2))
    got = run_asm(PACKED, one, high, low).view(np.uint16).reshape(-1, 2)
    np.testing.assert_array_equal(got[:, 0], one.expect(low))
    np.testing.assert_array_equal(got[:, 1], one.expect(high))


SIXTEEN = [
    Asm("bf16 to f32", "cvt.f32.bf16 %0, %1;", "f32", ("u16",), bf16_to_f32),
    Asm("f32 to bf16", "cvt.rn.bf16.f32 %0, %1;", "u16", ("f32",), f32_to_bf16),
    Asm(
        "f32 to tf32", "cvt.rna.tf32.f32 %0, %1;", "u32", ("f32",), lambda a: (a.view(np.uint32) + 0x1000) & 0xFFFFE000
    ),
    Asm(
        "bf16 to s32", "cvt.rzi.s32.bf16 %0, %1;", "s32", ("u16",), lambda a: np.trunc(bf16_to_f32(a)).astype(np.int32)
    ),
    Asm(
        "s8 of s32",
        "{.reg .s8 b; cvt.s8.s32 b, %1; cvt.s32.s8 %0, b;}",
        "s32",
        ("s32",),
        lambda a: a.astype(np.int8).astype(np.int32),
    ),
    Asm(
        "u8 of s32",
        "{.reg .u8 b; cvt.u8.s32 b, %1; cvt.u32.u8 %0, b;}",
        "u32",
        ("s32",),
        lambda a: a.astype(np.uint8).astype(np.uint32),
    ),
    Asm("pack s8", "cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;", "u32", ("s32", "s32"), None),
]


@pytest.mark.parametrize("one", SIXTEEN[:-1], ids=lambda one: one.name)
def test_other_sizes(one: Asm) -> None:
    if one.sources[0] == "u16":
        values: Row = f32_to_bf16(np.linspace(-300, 300, 64).astype(np.float32))
    elif one.sources[0] == "s32":
        values = sample("s32", 64, 2)
    else:
        values = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    np.testing.assert_array_equal(run_asm(SIXTEEN, one, values), one.expect(values))


def test_pack_saturates() -> None:
    a, b = np.array([5, 200, -200, 7] * 8, np.int32), np.array([-3, 1, 300, -129] * 8, np.int32)
    got = run_asm(SIXTEEN, SIXTEEN[-1], a, b)
    high, low = (np.clip(v, -128, 127).astype(np.int8).view(np.uint8).astype(np.uint32) for v in (a, b))
    np.testing.assert_array_equal(got, high << 8 | low)


FP8 = [
    Asm(f"{kind} {way}", text, *types, None)
    for kind in ("e4m3", "e5m2")
    for way, text, types in (
        (
            "from f32",
            f"{{.reg .b16 h; cvt.rn.satfinite.{kind}x2.f32 h, %1, %2; cvt.u32.u16 %0, h;}}",
            ("u32", ("f32", "f32")),
        ),
        ("from f16", f"{{.reg .b16 h; cvt.rn.satfinite.{kind}x2.f16x2 h, %1; cvt.u32.u16 %0, h;}}", ("u32", ("u32",))),
        ("to f16", f"cvt.rn.f16x2.{kind}x2 %0, %1;", ("u32", ("u16",))),
    )
]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8_as_ml_dtypes(kind: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    eight = np.dtype({"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind])
    cases = {one.name.split()[1] + one.name.split()[2]: one for one in FP8 if one.name.startswith(kind)}
    codes = np.arange(256, dtype=np.uint8)
    decoded = run_asm(FP8, cases["tof16"], codes.view(np.uint16)).view(np.float16)
    expected = codes.view(eight).astype(np.float32)
    np.testing.assert_array_equal(decoded.astype(np.float32), expected)

    rng = np.random.default_rng(0)
    largest = 448.0 if kind == "e4m3" else 57344.0
    values = np.concatenate(
        [rng.standard_normal(800) * np.exp2(rng.integers(-10, 10, 800)), expected[np.isfinite(expected)] * 1.0]
    )
    values = np.concatenate([values, (values[:-1] + values[1:]) / 2])
    values = np.clip(np.resize(values, 2048), -largest, largest).astype(np.float32)
    for name, given in (("fromf32", values), ("fromf16", values.astype(np.float16).astype(np.float32))):
        with np.errstate(all="ignore"):
            wanted = given.astype(eight).view(np.uint8)
        if name == "fromf32":
            got = run_asm(FP8, cases[name], given[1::2], given[::2])
        else:
            got = run_asm(FP8, cases[name], given.astype(np.float16).view(np.uint32))
        np.testing.assert_array_equal(got.astype(np.uint16).view(np.uint8), wanted)
    beyond = np.array([1e9, -1e9, np.inf, -np.inf] * 8, np.float32)
    got = run_asm(FP8, cases["fromf32"], beyond, beyond).astype(np.uint16).view(np.uint8).view(eight).astype(np.float32)
    np.testing.assert_array_equal(np.abs(got), largest)
