"""Builds ``examples/cpp_engine`` against this Python and the installed header."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import pagedkv

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "examples" / "cpp_engine"
CXX = (sysconfig.get_config_var("CXX") or "c++").split()[0]


def link_flags() -> list[str]:
    """Flags that link this Python's library; the test is skipped where there is none."""
    library, folder = sysconfig.get_config_var("LDLIBRARY") or "", sysconfig.get_config_var("LIBDIR") or ""
    if not library.endswith(".so") or not Path(folder, library).exists():
        pytest.skip(f"this Python has no shared library to link: {Path(folder, library)}")
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", f"-l{library.removeprefix('lib').removesuffix('.so')}"]


def built(folder: Path, *flags: str, include: str | None = None) -> Path:
    """Compile the engine into `folder`; skip the test where that cannot be done."""
    python = sysconfig.get_path("include")
    if shutil.which(CXX) is None or not Path(python, "Python.h").exists():
        pytest.skip(f"no compiler {CXX}, or no Python.h")
    engine = folder / "engine"
    command = [
        *(CXX, "-std=c++11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", *flags),
        *(f"-I{include or pagedkv.get_include()}", "-isystem", python, f'-DPYTHON="{sys.executable}"'),
        *(str(SOURCES / "main.cpp"), *link_flags(), "-pthread", "-o", str(engine)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
    return engine
