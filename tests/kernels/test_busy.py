"""Few long row tiles keep a GPU busy, as computed from the lists of prefill_plan."""

from __future__ import annotations

import pytest

from pagedkv.errors import KernelsUnavailable
from pagedkv.kernels.nvrtc import default_nvrtc
from tests.kernels.busy import KERNELS, NUM_SMS, PAGE, PROBLEMS, drawn, load


@pytest.fixture(autouse=True, scope="module")
def _with_a_compiler() -> None:
    try:
        default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["chunk of 64 at 32k", "cascade, 32k shared by 64 requests"])
def test_a_chunk_and_a_shared_prefix_keep_120_of_132_multiprocessors_busy(kernel: str, name: str) -> None:
    (problem,) = (one for one in PROBLEMS if one.name == name)
    found = load(problem, kernel)
    assert found.row_tiles == 16
    assert found.busy_sms >= 120
    assert found.share >= 0.85


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_long_decode_beside_a_prefill_is_no_single_ctas_work(kernel: str) -> None:
    (problem,) = (one for one in PROBLEMS if one.name.startswith("decode"))
    assert load(problem, kernel).longest < 300


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_prompt_of_many_row_tiles_is_not_divided(kernel: str) -> None:
    (problem,) = (one for one in PROBLEMS if one.name.startswith("prompt"))
    found = load(problem, kernel)
    assert found.items == found.row_tiles > 8 * NUM_SMS
    assert found.share > 0.9


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert drawn(page) == page, "python -m tests.kernels.busy"
