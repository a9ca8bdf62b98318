"""The native driver is compiled when its first test asks for it."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def native_driver() -> ModuleType:
    """Module ``native_driver``."""
    from tests.model import native  # only here: other tests do not pay for the compiler's modules

    return native.native_driver()
