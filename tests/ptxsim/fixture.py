"""The CUDA kernels in the PTX interpreter as a fixture, for tests in other folders."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.errors import KernelsUnavailable


def interpreted_backend(*, races: bool = True) -> Any:
    """Make a module's fixture: a backend that runs kernels in the interpreter.

    The tests are skipped where NVRTC is missing.

    Parameters
    ----------
    races : whether accesses are checked for races, which takes longer; ``tests/kernels`` shows that there are none.
    """

    @pytest.fixture(scope="module")
    def backend() -> Any:
        from pagedkv.kernels.nvrtc import default_nvrtc
        from tests.ptxsim.backend import PtxsimBackend

        try:
            default_nvrtc()
        except KernelsUnavailable as error:
            pytest.skip(str(error))
        return PtxsimBackend(races=races)

    return backend
