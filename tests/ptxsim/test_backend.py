"""The backend's arrays, its launches of real kernels, and the statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument
from tests.ptxsim.backend import GUARD, PtxsimBackend
from tests.ptxsim.cuda import run
from tests.ptxsim.errors import OutOfBounds, UninitialisedRead
from tests.ptxsim.stats import Stats
from tests.ptxsim.tensor_map import decode


@pytest.fixture
def backend() -> PtxsimBackend:
    return PtxsimBackend()


def test_arrays(backend: PtxsimBackend) -> None:
    given = np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2]
    made: list[Any] = [backend.empty((3, 5), np.float16), backend.zeros((7,), np.int32), backend.asarray(given)]
    assert np.isnan(made[0]).all()
    assert not made[1].any()
    np.testing.assert_array_equal(made[2], given)
    for array in made:
        assert array.ctypes.data % 16 == 0
        assert array.flags.c_contiguous
    assert backend.asarray(made[2]) is made[2]
    assert backend.asarray(made[2][1:]).base is not None
    copy = backend.to_host(made[2])
    copy[...] = 0
    np.testing.assert_array_equal(made[2], given)
    assert backend.empty((0, 4), np.float32).shape == (0, 4)
    backend.upload(made[1], np.arange(7))
    assert made[1].tolist() == list(range(7))


def test_neighbours_are_never_reached(backend: PtxsimBackend) -> None:
    arrays = [backend.zeros((16,), np.float32) for _ in range(8)]
    source = 'extern "C" __global__ void k(const float* a, float* b, int at) { b[0] = a[at]; }'
    for offset in (16, -1, 16 + GUARD // 4 - 1, -GUARD // 4):
        with pytest.raises(OutOfBounds):
            run(source, 1, 1, arrays[3], arrays[4], np.int32(offset))


def test_reads_of_what_nobody_wrote() -> None:
    backend = PtxsimBackend(track_unwritten=True)
    a, b = backend.empty((64,), np.int32), backend.zeros((64,), np.int32)
    from tests.ptxsim.cuda import OPTIONS
    from tests.ptxsim.launch import launch, pack_arguments
    from tests.ptxsim.loader import compile_ptx, program

    code = program(
        compile_ptx(
            'extern "C" __global__ void k(int* a, int* b, int n) { const int t = threadIdx.x; '
            "if (t < n) a[t] = 1; else b[t] = a[t]; }",
            "test.cu",
            ("-arch=compute_90", *OPTIONS),
        ),
        "k",
    )

    def go(n: int) -> None:
        params, arrays = pack_arguments(code, (a, b, np.int32(n)))
        launch(code, 1, 64, params, arrays, written=backend._shadows())

    with pytest.raises(UninitialisedRead, match="global memory nothing has written"):
        go(32)
    a[32:] = 5
    go(32)
    assert b[40] == 5


def test_tensor_maps(backend: PtxsimBackend) -> None:
    array = backend.zeros((4, 8, 64), np.float16)
    tensor_map = backend.tensor_map(array, (64, 8, 4), (128, 1024), (64, 8, 1), 128)
    assert tensor_map.dtype == np.dtype("V128")
    back = decode(tensor_map.tobytes())
    assert (back.address, back.element, back.dims, back.strides) == (array.ctypes.data, 2, (64, 8, 4), (2, 128, 1024))
    assert (back.box, back.swizzle, back.box_bytes) == ((64, 8, 1), 128, 1024)
    with pytest.raises(InvalidArgument):
        backend.tensor_map(array, (64, 8, 4), (100, 1024), (64, 8, 1), 128)


def test_too_much_shared_memory(backend: PtxsimBackend) -> None:
    from pagedkv.kernels.params import Params
    from pagedkv.kernels.variant import Variant

    with pytest.raises(ValueError, match="shared memory"):
        backend.launch(Variant("any"), (1, 1, 1), (32, 1, 1), Params(np.zeros(1, "V8"), ()), shared_bytes=300_000)


def test_sectors_and_bank_conflicts() -> None:
    source = """extern "C" __global__ void k(const float* a, float4* b) { __shared__ float s[32 * 33];
      const int t = threadIdx.x;
      s[t * STRIDE] = a[t * STEP]; __syncwarp(); b[t] = make_float4(s[t * STRIDE], 0, 0, 0); }"""
    for stride, step, cost, sectors in ((1, 1, 1, 4), (32, 8, 32, 32), (33, 2, 1, 8)):
        stats = Stats()
        arrays = [PtxsimBackend().zeros((256,), np.float32) for _ in range(2)]
        run(source, 2, 32, *arrays, macros=[f"STRIDE={stride}", f"STEP={step}"], stats=stats, races=False)
        assert stats.traffic["shared", 4].cost == 4 * cost
        assert stats.traffic["shared", 4].ideal == 4
        assert stats.traffic["global", 4].cost == 2 * sectors
        assert stats.traffic["global", 16].ratio == 1
        assert "sectors" in stats.report()
