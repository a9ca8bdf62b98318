"""Why a file cannot be read as GGUF, in words for who gave it.

No GGUF, an unknown version, cut short, or damaged.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import gguf

from examples.llama_numpy.gguf_reader import Reader

MAGIC = b"GGUF"
VERSIONS = (2, 3)
AGAIN = "get the file again"


class _Table(Reader):
    """Reads metadata and the table of tensors, and no tensors.

    Attributes
    ----------
    end : byte at which the last tensor of the table ends.
    """

    end = 0

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            *_, dims, kind, offset = field.parts
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            num_bytes = math.prod(map(int, dims)) // block * size
            self.end = max(self.end, start_offs + int(offset[0]) + num_bytes)


def why_unreadable(path: Path) -> str:
    """What is wrong with a file that the GGUF reader refuses, and what to do.

    Raises
    ------
    OSError
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version = file.read(4), int.from_bytes(file.read(4), "little")
    if magic != MAGIC[: size or 1]:
        return f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}; give a .gguf file"
    if size >= 8 and version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        return f"its GGUF version is {version}, versions {known} can be read; convert it, or {AGAIN}"
    end = 0
    with contextlib.suppress(Exception):  # whatever damage makes the reader raise, there is no table then
        end = _Table(path).end
    if end > size:
        return f"cut short: it has {size:,} bytes, and its tensors end at byte {end:,}; {AGAIN}"
    return f"cut short or damaged: its {size:,} bytes do not hold the tables and tensors that its header names; {AGAIN}"
