"""The backends that compute attention on arrays.

On the CPU the reference computes it, and the kernels do in the PTX interpreter.
"""

from __future__ import annotations

import pytest

from pagedkv.attention.places import Device
from pagedkv.errors import KernelsUnavailable


@pytest.fixture(params=["cpu", "kernels"])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cpu":
        return "cpu"
    from pagedkv.kernels.nvrtc import default_nvrtc
    from tests.ptxsim.backend import PtxsimBackend

    try:
        default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return PtxsimBackend()
