"""What only some tests of the core ask for."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def native_hazard() -> ModuleType:
    """Module ``native_hazard``, compiled when its first test asks for it."""
    from tests.model.native import compiled  # only here: other tests do not pay for the compiler's modules

    return compiled(Path(__file__).parent, ["native_hazard"])


@pytest.fixture(scope="session")
def native_generations() -> ModuleType:
    """Module ``native_generations``, compiled when its first test asks for it."""
    from tests.model.native import compiled  # only here: other tests do not pay for the compiler's modules

    return compiled(Path(__file__).parent, ["native_generations"])


@pytest.fixture(scope="session")
def native_registry() -> ModuleType:
    """Module ``native_registry``, compiled when its first test asks for it."""
    from tests.model.native import compiled

    return compiled(Path(__file__).parent, ["native_registry"])
