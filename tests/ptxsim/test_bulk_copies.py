"""cp.async.bulk: lines, and tensor tiles through a tensor map, both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ptxsim.cuda import run
from tests.ptxsim.errors import AsyncCopyError, DataRace, Deadlock, Misaligned, OutOfBounds, UninitialisedRead
from tests.ptxsim.tensor_map import encode
from tests.ptxsim.test_mbarrier import HEAD

LOAD = (
    HEAD
    + """struct alignas(64) Map { u64 words[16]; };
extern "C" __global__ void k(const __grid_constant__ Map map, int x, int y, int z, int4* out, int pieces) {
  extern __shared__ __align__(1024) char s[]; __shared__ u64 b; const int t = threadIdx.x;
  if (t == 0) { init(&b, 1); }
  __syncthreads();
  if (t == 0) {
    expect(&b, BYTES);
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(at(s)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(at(&b)) : "memory");
  }
  WAIT
  for (int i = t; i < pieces; i += 32) out[i] = ((const int4*)s)[i]; }"""
)


def tensor(swizzle: int) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int]]:
    """An array [5, 6, 64] of 16-bit numbers, its map, and the box.

    Its rows lie apart; the box is (columns, rows, planes).
    """
    base = np.arange(5 * 7 * 80, dtype=np.uint16).reshape(5, 7, 80)
    array = base[:, :6, :64]
    box = (max(swizzle, 32) // 2, 4, 2)
    return array, encode(array.ctypes.data, 2, (64, 6, 5), (160, 1120), box, swizzle), box


def load(swizzle: int, x: int, y: int, z: int, *, wait: str = "wait(&b, 0);", extra: int = 0) -> np.ndarray:
    array, tensor_map, box = tensor(swizzle)
    size = int(np.prod(box)) * 2
    out = np.zeros(size, np.uint8)
    source = LOAD.replace("BYTES", str(size + extra)).replace("WAIT", wait)
    params: list[Any] = [tensor_map.tobytes(), np.int32(x), np.int32(y), np.int32(z), out, np.int32(size // 16)]
    run_with(source, array, params, size)
    return out


def run_with(source: str, array: np.ndarray, params: list[Any], size: int) -> None:
    """The array is reached through the map only: it is registered besides the arguments."""
    from tests.ptxsim.cuda import OPTIONS
    from tests.ptxsim.launch import launch, pack_arguments
    from tests.ptxsim.loader import compile_ptx, program

    code = program(compile_ptx(source, "test.cu", ("-arch=compute_90", *OPTIONS)), "k")
    block, arrays = pack_arguments(code, params)
    launch(code, 1, 32, block, [*arrays, array], shared_bytes=size + 1024)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("corner", [(0, 0, 0), (16, 3, 4), (-16, -2, -1), (0, 5, 2)])
def test_tiles_with_zeros_outside(swizzle: int, corner: tuple[int, int, int]) -> None:
    x, y, z = corner
    if swizzle == 128:
        x *= 2
    out = load(swizzle, x, y, z)
    array, _, box = tensor(swizzle)
    padded = np.zeros((5 + 16, 6 + 16, 64 + 256), np.uint16)
    padded[8:13, 8:14, 128:192] = array
    expected = (
        np.ascontiguousarray(padded[8 + z :, 8 + y :, 128 + x :][: box[2], : box[1], : box[0]])
        .view(np.uint8)
        .reshape(-1)
    )
    place = np.arange(0, len(expected), 16)
    if swizzle:
        place = place ^ ((place >> 7 & swizzle // 16 - 1) << 4)
    got = out.reshape(-1, 16)[place // 16].reshape(-1)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"wait": ""}, UninitialisedRead, "in flight|which nothing"),
        ({"extra": 16}, Deadlock, "threads 0-31 of CTA 0 at an mbarrier"),
    ],
)
def test_tiles_must_be_waited_for(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        load(128, 0, 0, 0, **change)


def test_maps_are_checked() -> None:
    array, tensor_map, box = tensor(0)
    size = int(np.prod(box)) * 2
    source = LOAD.replace("BYTES", str(size)).replace("WAIT", "wait(&b, 0);")
    rest = [np.int32(0), np.int32(0), np.int32(0), np.zeros(size, np.uint8), np.int32(size // 16)]
    with pytest.raises(AsyncCopyError, match="no tensor map"):
        run_with(source, array, [bytes(128), *rest], size)
    beyond = encode(array.ctypes.data, 2, (64, 6, 500), (160, 1120), box, 0)
    with pytest.raises(OutOfBounds):
        run_with(source, array, [beyond.tobytes(), np.int32(0), np.int32(0), np.int32(400), *rest[3:]], size)
    with pytest.raises(Misaligned, match="multiple of 128"):
        run_with(source.replace("at(s))", "at(s) + 16)"), array, [tensor_map.tobytes(), *rest], size)


LINE = (
    HEAD
    + """extern "C" __global__ void k(const int4* a, int4* out, int n) {
  __shared__ __align__(128) int4 s[64]; __shared__ u64 b; const int t = threadIdx.x;
  if (t == 0) init(&b, 1); __syncthreads();
  if (t == 0) { expect(&b, n);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at(s)), "l"(a), "r"(n), "r"(at(&b)) : "memory"); }
  wait(&b, 0);
  int4 v = s[t]; v.x += 1; REUSE
  s[t] = v; FENCE __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(out),
      "r"(at(s)), "r"(n) : "memory");
    asm volatile("cp.async.bulk.commit_group;"); WAIT }
  AFTER }"""
)
FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
WAIT_STORE = 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");'


def line(reuse: str = "", fence: str = FENCE, wait: str = WAIT_STORE, after: str = "", size: int = 512) -> None:
    a, out = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    source = LINE.replace("REUSE", reuse).replace("FENCE", fence).replace("WAIT", wait).replace("AFTER", after)
    run(source, 1, 32, a, out, np.int32(size))
    expected = np.where(np.arange(128) % 4 == 0, a[:128] + 1, a[:128])
    np.testing.assert_array_equal(out[:128], expected)


def test_a_line_there_and_back() -> None:
    line()
    line(
        after="__syncthreads(); s[t] = int4(); out[60].x = s[t].x;".replace(
            "out[60].x = s[t].x;", "if (s[t].x) out[60].x = 1;"
        )
    )


def test_what_lines_can_get_wrong() -> None:
    with pytest.raises(AsyncCopyError, match=r"without a fence\.proxy\.async"):
        line(fence="")
    with pytest.raises(DataRace, match="unsynchronised read by the copy engine"):
        line(wait="", after="__syncthreads(); ((volatile int*)s)[t * 4] = 3;")
    with pytest.raises(Misaligned, match="multiples of 16"):
        line(size=500)
