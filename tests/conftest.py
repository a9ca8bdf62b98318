"""Set up every run: refuse a package that is not compiled, skip GPU tests without a GPU."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Generator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.model.kept import kept

# How long an example takes, or its making, says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def _package_dir() -> Path:
    """Folder of the pagedkv that tests import, found without importing it."""
    spec = importlib.util.find_spec("pagedkv")
    if spec is None or not spec.submodule_search_locations:
        raise pytest.UsageError("pagedkv is not installed here: pip install -e '.[test]'")
    return Path(next(iter(spec.submodule_search_locations)))


def _compiled(source: Path) -> Path | None:
    """The extension module that was built in place from a ``.pyx``, if there is one."""
    candidates = (source.with_name(source.stem + suffix) for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One worker more than there are cores, because many tests wait."""
    cores = yield
    return cores if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else cores + 1


def pytest_configure() -> None:
    """Let workers share compiled modules: they inherit the name of the folder."""
    kept()


def pytest_report_header() -> list[str]:
    """Name the pagedkv under test and modules older than their source.

    Refuses a tree that is not compiled.
    """
    package = _package_dir()
    sources = sorted(package.rglob("*.pyx"))  # none in an installed wheel
    built = {source: _compiled(source) for source in sources}
    if sources and not any(built.values()):
        raise pytest.UsageError(
            f"{package} is a source tree without compiled modules, and Python finds it before any "
            "installed pagedkv. Build it in place: pip install -e '.[test]'"
        )
    stale = [
        source.stem
        for source, module in built.items()
        if module is None or module.stat().st_mtime < source.stat().st_mtime
    ]
    lines = [f"pagedkv: {package}"]
    if stale:
        lines.append(f"older than their source: {', '.join(stale)} (python setup.py build_ext --inplace)")
    return lines


def _has_gpu() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount() > 0)
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` on machines without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU or no CuPy here"))


def pytest_collection_finish() -> None:
    """Keep what pytest has collected out of later garbage collections.

    Some tests run fifty collections, at half a second each.
    """
    gc.collect()
    gc.freeze()
