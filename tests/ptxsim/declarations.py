"""Types, variables and brackets of PTX texts."""

from __future__ import annotations

import re
import struct

from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.syntax import Variable

_BRACE = re.compile(r"[{}]")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(param|local|shared|global|const)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.ptr\s*(?:\.\w+\s*)*?(?:\.align\s+\d+\s+)?)?\.(\w+)\s+([\w$%]+)((?:\s*\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$",
    re.DOTALL,
)
BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def size_of(kind: str) -> int:
    """Bytes of a fundamental type: ``f32`` -> 4, ``pred`` -> 1."""
    if kind == "pred":
        return 1
    found = re.match(r"[a-z]+(\d+)(x2|x4)?", kind)
    if found is None or found[1] not in BYTES:
        raise UnsupportedPtx(f"type {kind!r}")
    return BYTES[found[1]] * {None: 1, "x2": 2, "x4": 4}[found[2]]


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators that stand outside all brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    tail = text[start:].strip()
    return [*parts, tail] if tail or parts else []


def closing_brace(text: str, start: int) -> int:
    """Where the braces that open at ``start`` close."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise UnsupportedPtx("braces that do not close")


def variable(text: str) -> Variable:
    """Parse one variable's declaration.

    A kernel parameter, shared array, local depot or module-level constant.
    """
    flat = " ".join(text.split())
    found = _VARIABLE.match(flat)
    if found is None:
        raise UnsupportedPtx(f"declaration {flat!r}")
    space, align, kind, name, dims, initial = found.groups()
    element = size_of(kind)
    size: int | None = element
    for dim in re.findall(r"\[\s*(\d*)\s*\]", dims):
        size = None if dim == "" or size is None else size * int(dim)
    return Variable(name, space, size, int(align or element), _initial(initial, kind, element) if initial else b"")


def _initial(text: str, kind: str, element: int) -> bytes:
    out = b""
    for item in text.strip().strip("{}").replace("{", "").replace("}", "").split(","):
        value = item.strip()
        if value[:2] in ("0f", "0F", "0d", "0D"):
            out += int(value[2:], 16).to_bytes(element, "little")
        elif kind[0] == "f":
            out += struct.pack({4: "<f", 8: "<d"}[element], float(value))
        else:
            try:
                out += (int(value, 0) & ((1 << 8 * element) - 1)).to_bytes(element, "little")
            except ValueError:
                raise UnsupportedPtx(f"initial value {value!r}") from None
    return out
