"""The formulas on the lengths of real requests.

They need the shared traces (see PAGEDKV_SHARED).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pagedkv.lab.sizing import contiguous_utilisation, expected_waste, mean_waste, utilisation


@pytest.mark.parametrize(
    ("name", "requests", "contiguous", "paged", "lost_16", "lost_64"),
    [
        ("mooncake_conversation_dev", 7_689, 0.898, 0.0006, 7.49, 31.49),
        ("azure2023_conv_lengths", 19_366, 0.903, 0.0054, 7.47, 30.81),
        ("azure2023_code_lengths", 8_819, 0.735, 0.0037, 7.64, 31.89),
    ],
)
def test_the_waste_that_the_docs_give_is_that_of_the_traces(
    name: str, requests: int, contiguous: float, paged: float, lost_16: float, lost_64: float
) -> None:
    named = os.environ.get("PAGEDKV_SHARED")
    path = (Path(named) if named else Path(__file__).parents[3] / "shared") / "traces" / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here: set PAGEDKV_SHARED to the folder that holds traces/")
    with np.load(path, allow_pickle=False) as fields:
        lengths = fields["input_tokens"].astype(np.int64) + fields["output_tokens"]
    assert len(lengths) == requests
    assert round(1 - contiguous_utilisation(lengths, int(lengths.max())), 3) == contiguous
    assert round(1 - utilisation(lengths, 16), 4) == paged < 0.04
    assert round(mean_waste(lengths, 16), 2) == lost_16 == pytest.approx(expected_waste(16), rel=0.02)
    assert round(mean_waste(lengths, 64), 2) == lost_64 == pytest.approx(expected_waste(64), rel=0.03)
