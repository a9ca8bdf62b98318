"""Stand-ins for the peers' heavy imports.

Their bookkeeping loads without a GPU stack.

The peers' schedulers import kernels, image codecs and grammar engines at module level and use none of them
for KV bookkeeping. A stubbed module gives a fresh class for every capitalised name, a mock for every other.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock


class _StubClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value: Any = MagicMock(name=name)
        if name[:1].isupper():
            value = _StubClass(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, value)
        return value


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: frozenset[str]) -> None:
        self._roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StubModule(spec.name)
        module.__path__ = []
        module.__file__ = "stub"
        module.__dict__["__version__"] = "0.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def install(*roots: str) -> None:
    """Answer every import of these packages and their submodules with a stub.

    Whether they are installed or not.
    """
    sys.meta_path.insert(0, _StubFinder(frozenset(roots)))
