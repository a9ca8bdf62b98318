"""The kernels' sources: where the .cu files are, and one translation unit per .cu.

A unit contains all that the .cu includes.

The unit carries ``#line`` marks, so messages and debug lines name the real file. Its hash covers every header: CuPy's
own cache key does not.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from pagedkv.errors import KernelsUnavailable

_INCLUDE = re.compile(r'^\s*#\s*include\s+"pagedkv/([\w.]+)"', re.MULTILINE)


@functools.lru_cache(maxsize=1)
def sources_dir() -> Path:
    """Folder of the .cu files: inside the installed package, or beside it in a checkout.

    Raises
    ------
    KernelsUnavailable
        Neither is there: the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (folder / "include" / "pagedkv").is_dir():
            return folder
    raise KernelsUnavailable(f"the CUDA sources (kernels_cu) are missing beside {package}: install pagedkv again")


def kernel_names() -> list[str]:
    """Names of all kernels: one ``extern "C"`` entry of the same name in each .cu."""
    return sorted(path.stem for path in sources_dir().glob("*.cu"))


@functools.cache
def translation_unit(kernel: str) -> str:
    """The .cu of a kernel with its own headers in place of their #include lines, each once.

    Raises
    ------
    KernelsUnavailable
        There is no such kernel.
    """
    path = sources_dir() / f"{kernel}.cu"
    if not path.exists():
        raise KernelsUnavailable(f"there is no kernel {kernel!r}; there are {', '.join(kernel_names())}")
    return _expand(path, set())


def source_hash(kernel: str) -> str:
    """32 hex digits over a kernel's translation unit, headers included."""
    return hashlib.blake2b(translation_unit(kernel).encode(), digest_size=16).hexdigest()


def _expand(path: Path, seen: set[Path]) -> str:
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        found = _INCLUDE.match(line)
        if found is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        header = sources_dir() / "include" / "pagedkv" / found[1]
        if header not in seen:
            seen.add(header)
            lines += [_expand(header, seen), f'#line {number + 1} "{path.name}"']
        else:
            lines.append("")
    return "\n".join(lines)
