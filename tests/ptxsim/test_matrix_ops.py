"""mma.sync, ldmatrix, stmatrix and movmatrix, against plain matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptxsim.cuda import run
from tests.ptxsim.numerics import bf16_to_f32, f32_to_bf16, f32_to_fp8, fp8_to_f32

WARPS = 3
Row = NDArray[Any]


@dataclass(frozen=True)
class Shape:
    """One mma: its depth, element type, accumulator, and registers."""

    depth: int
    kind: str
    accumulator: str

    @property
    def per_word(self) -> int:
        return {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4}[self.kind]

    def __str__(self) -> str:
        return f"m16n8k{self.depth} {self.kind} to {self.accumulator}"


SHAPES = [
    *(Shape(depth, "f16", "f32") for depth in (16, 8)),
    *(Shape(depth, "bf16", "f32") for depth in (16, 8)),
    Shape(16, "f16", "f16"),
    *(Shape(depth, "tf32", "f32") for depth in (8, 4)),
    Shape(32, "u8", "s32"),
    *(Shape(depth, "s8", "s32") for depth in (32, 16)),
    *(Shape(32, kind, "f32") for kind in ("e4m3", "e5m2")),
]


def elements(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Row, Row]:
    """Stored elements and their values."""
    values = rng.standard_normal(shape).astype(np.float32)
    if kind == "f16":
        half = values.astype(np.float16)
        return half, half.astype(np.float64)
    if kind == "bf16":
        bits = f32_to_bf16(values)
        return bits, bf16_to_f32(bits).astype(np.float64)
    if kind == "tf32":
        single = (values.view(np.uint32) & 0xFFFFE000).view(np.float32)
        return single, single.astype(np.float64)
    if kind in ("s8", "u8"):
        whole = rng.integers(0 if kind == "u8" else -128, 256 if kind == "u8" else 128, shape).astype(
            np.int8 if kind == "s8" else np.uint8
        )
        return whole, whole.astype(np.float64)
    codes = f32_to_fp8(values, kind)
    return codes, fp8_to_f32(codes, kind).astype(np.float64)


def fragment(matrix: Row, per_word: int) -> Row:
    """Return the words of lanes, (tiles, 32).

    A lane has row lane/4 and columns per_word*(lane%4)... of each 8 x 4*per_word tile.
    """
    rows, columns = matrix.shape
    tiles = matrix.reshape(rows // 8, 8, columns // (4 * per_word), 4 * per_word).transpose(2, 0, 1, 3)
    return np.ascontiguousarray(tiles).reshape(-1, 8, 4, per_word).view(np.uint32).reshape(-1, 32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mma(shape: Shape) -> None:
    rng = np.random.default_rng(5)
    a_stored, a = elements(shape.kind, (WARPS, 16, shape.depth), rng)
    b_stored, b = elements(shape.kind, (WARPS, 8, shape.depth), rng)
    kind = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[shape.accumulator]
    c = (rng.standard_normal((WARPS, 16, 8)) * 8).astype(kind)
    words = [
        np.stack([fragment(one, shape.per_word) for one in stored]).transpose(1, 0, 2).reshape(-1, 32 * WARPS).copy()
        for stored in (a_stored, b_stored)
    ]
    per_acc = 2 if kind == np.float16 else 1
    if per_acc == 2:
        c_words = c.reshape(WARPS, 2, 8, 4, 2).view(np.uint32).transpose(1, 0, 2, 3, 4).reshape(2, -1).copy()
    else:
        c_words = c.reshape(WARPS, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1).view(np.uint32).copy()
    na, nb, nc = len(words[0]), len(words[1]), len(c_words)

    def regs(first: int, count: int) -> str:
        return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"

    inputs = ", ".join(
        f'"r"({name}[{i} * n + t])' for name, count in (("a", na), ("b", nb), ("c", nc)) for i in range(count)
    )
    outputs = ", ".join(f'"=r"(d[{i}])' for i in range(nc))
    types = f"{shape.accumulator}.{shape.kind}.{shape.kind}.{shape.accumulator}"
    text = (
        f"mma.sync.aligned.m16n8k{shape.depth}.row.col.{types} {regs(0, nc)}, {regs(nc, na)}, {regs(nc + na, nb)}, "
        f"{regs(nc + na + nb, nc)};"
    )
    if shape.accumulator == "f32":  # registers of PTX have kinds, bits do not
        outputs, inputs = outputs.replace('"=r"', '"=f"'), inputs.replace('"r"(c', '"f"(c')
    acc = "float" if shape.accumulator == "f32" else "unsigned"
    source = f"""extern "C" __global__ void k(const unsigned* a, const unsigned* b, const {acc}* c, {acc}* out) {{
      const int t = threadIdx.x, n = blockDim.x; {acc} d[{nc}];
      asm volatile("{text}" : {outputs} : {inputs});
      for (int i = 0; i < {nc}; ++i) out[i * n + t] = d[i]; }}"""
    out = np.zeros_like(c_words)
    run(source, 1, 32 * WARPS, words[0], words[1], c_words, out)
    if per_acc == 2:
        got = out.reshape(2, WARPS, 8, 4).transpose(1, 0, 2, 3).copy().view(np.float16).reshape(WARPS, 16, 8)
    else:
        got = out.view(kind).reshape(2, 2, WARPS, 8, 4).transpose(2, 0, 3, 4, 1).reshape(WARPS, 16, 8)
    expected = np.einsum("wik,wjk->wij", a, b) + c.astype(np.float64)
    np.testing.assert_allclose(
        got.astype(np.float64), expected, rtol=2e-3 if per_acc == 2 else 1e-6, atol=1e-3 if per_acc == 2 else 1e-5
    )


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix(number: int, trans: bool) -> None:
    how = ".trans" if trans else ""
    names, later = (", ".join(f"%{i + first}" for i in range(number)) for first in (0, 1))
    source = f"""extern "C" __global__ void k(const uint4* a, unsigned* words, uint4* back) {{
      __shared__ uint4 s[64], r[64]; const int t = threadIdx.x, w = t / 32, l = t % 32; unsigned d[{number}];
      s[t] = a[t]; r[t] = uint4(); __syncthreads();
      const unsigned from = (unsigned)__cvta_generic_to_shared(s + w * 32 + l),
        to = (unsigned)__cvta_generic_to_shared(r + w * 32 + l);
      asm volatile("ldmatrix.sync.aligned.m8n8.x{number}{how}.shared.b16 {{{names}}}, [%{number}];"
                   : {", ".join(f'"=r"(d[{i}])' for i in range(number))} : "r"(from) : "memory");
      for (int i = 0; i < {number}; ++i) words[i * 64 + t] = d[i];
      asm volatile("stmatrix.sync.aligned.m8n8.x{number}{how}.shared.b16 [%0], {{{later}}};"
                   :: "r"(to), {", ".join(f'"r"(d[{i}])' for i in range(number))} : "memory");
      __syncthreads(); back[t] = r[t]; }}"""
    a = np.arange(2 * 4 * 64, dtype=np.uint16).reshape(2, 4, 8, 8)
    words, back = np.zeros((number, 2, 8, 4), np.uint32), np.zeros_like(a)
    run(source, 1, 64, a, words, back)
    got = words.view(np.uint16).transpose(1, 0, 2, 3).reshape(2, number, 8, 8)
    np.testing.assert_array_equal(got, a[:, :number].transpose(0, 1, 3, 2) if trans else a[:, :number])
    np.testing.assert_array_equal(back[:, :number], a[:, :number])


def test_movmatrix() -> None:
    source = """extern "C" __global__ void k(const unsigned* a, unsigned* out) { unsigned d;
      asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a[threadIdx.x])); out[threadIdx.x] = d; }"""
    a = np.arange(128, dtype=np.uint16).reshape(2, 8, 8)
    out = np.zeros_like(a)
    run(source, 1, 64, a, out)
    np.testing.assert_array_equal(out, a.transpose(0, 2, 1))
