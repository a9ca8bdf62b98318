"""Every instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedkv import cpu
from pagedkv.cpu import _attend


@pytest.fixture(params=["avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels in use."""
    if request.param not in _attend.isas():
        pytest.skip(f"this CPU has no {request.param}")
    before = cpu.isa()
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """What a test does to the number of threads is undone."""
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)
