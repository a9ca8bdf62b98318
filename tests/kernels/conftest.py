"""The backends every kernel test runs on.

The PTX interpreter always, and a GPU through CuPy where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedkv.errors import KernelsUnavailable
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.nvrtc import default_nvrtc


@pytest.fixture(scope="session", params=["ptxsim", pytest.param("cupy", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    try:
        default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    if request.param == "ptxsim":
        from tests.ptxsim.backend import PtxsimBackend

        yield PtxsimBackend()
        return
    from pagedkv.kernels.cupy_backend import CupyBackend

    try:
        yield CupyBackend()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
