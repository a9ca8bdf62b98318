"""From CUDA source to runnable programs: NVRTC to PTX, kept in memory and on disk."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pagedkv.kernels.nvrtc import default_nvrtc
from tests.ptxsim.parser import parse
from tests.ptxsim.program import Program, build
from tests.ptxsim.syntax import Module

_programs: dict[tuple[str, str], Program] = {}
_modules: dict[str, Module] = {}


def cache_dir() -> Path:
    """Folder of the PTX texts: ``$PTXSIM_CACHE``, or one in the system's temporary folder."""
    given = os.environ.get("PTXSIM_CACHE")
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"ptxsim-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_ptx(source: str, name: str, options: Sequence[str]) -> str:
    """PTX of a translation unit; compiled once per source, options and NVRTC version.

    Raises
    ------
    CompileError
        NVRTC refused it.
    """
    nvrtc = default_nvrtc()
    key = hashlib.blake2b(repr((source, name, tuple(options), nvrtc.version)).encode(), digest_size=16).hexdigest()
    path = cache_dir() / f"{key}.ptx"
    if path.exists():
        return path.read_text()
    text = nvrtc.compile(source, name, options, "ptx").code.decode()
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
    return text


def program(ptx: str, kernel: str) -> Program:
    """A kernel of a PTX text, ready to run; parsed once."""
    text_key = hashlib.blake2b(ptx.encode(), digest_size=16).hexdigest()
    key = (text_key, kernel)
    if key not in _programs:
        if text_key not in _modules:
            _modules.clear()  # one is enough for a source with many kernels
            _modules[text_key] = parse(ptx)
        _programs[key] = build(_modules[text_key], kernel)
    return _programs[key]
