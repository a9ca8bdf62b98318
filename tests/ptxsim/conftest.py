"""All tests here compile with NVRTC; none needs a GPU."""

from __future__ import annotations

import pytest

from pagedkv.errors import KernelsUnavailable
from pagedkv.kernels.nvrtc import default_nvrtc


@pytest.fixture(autouse=True, scope="session")
def _nvrtc() -> None:
    """Skip, with the command that installs it, where NVRTC is missing."""
    try:
        default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
