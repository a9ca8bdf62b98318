"""A pytest plugin: so many of the collected tests, evenly spread over them.

    PAGEDKV_SAMPLE=500:1 python -m pytest -p tests.reliability.sampled tests/core

keeps about 500, another selection for another second number.
"""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the others."""
    wanted, seed = map(int, os.environ["PAGEDKV_SAMPLE"].split(":"))
    if len(items) <= wanted:
        return
    kept = {(i * len(items) + seed % len(items)) // wanted % len(items) for i in range(wanted)}
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i not in kept])
    items[:] = [item for i, item in enumerate(items) if i in kept]
