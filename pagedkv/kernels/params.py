"""Kernel parameters: one C struct by value per kernel, whose layout is read from the .cuh that declares it.

The header is the contract (each pointer's shape stands beside it), so there is no second list of fields to keep equal.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument
from pagedkv.kernels.source import sources_dir

_TYPES = {"int": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64, "float": np.float32}
_STRUCT = re.compile(r"struct\s+(?:alignas\((\d+)\)\s+)?(\w+)\s*\{([^{}]*)\}\s*;")
_FIELD = re.compile(r"^(const\s+)?(\w+)\s*(\*?)\s*(\w+)(?:\[(\d+)\])?$")


@functools.cache
def _structs() -> dict[str, tuple[int, str]]:
    """All structs in the parameter headers by name: what ``alignas`` asks for (else 1), and the body."""
    found = {}
    for path in sorted((sources_dir() / "include" / "pagedkv").glob("*params.cuh")):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        found.update({name: (int(alignas or 1), body) for alignas, name, body in _STRUCT.findall(text)})
    return found


def struct_names() -> list[str]:
    """Names of all structs in the parameter headers."""
    return sorted(_structs())


def struct_dtype(name: str) -> np.dtype[Any]:
    """NumPy dtype of a parameter struct, laid out as the C compiler does; pointers are uint64.

    A field may be of another struct's type. Alignment follows C: each field at a multiple of its own.
    """
    return _layout(name)[0]


@functools.cache
def _layout(name: str) -> tuple[np.dtype[Any], int]:
    """A struct's dtype and its alignment, which NumPy knows only where no ``alignas`` raised it."""
    alignment, body = _structs()[name]
    names, formats, offsets, end = [], [], [], 0
    for statement in body.split(";"):
        text = " ".join(statement.split())
        if not text:
            continue
        match = _FIELD.match(text)
        if match is None:
            raise AssertionError(f"struct {name}: cannot read {text!r}")
        _, kind, pointer, field, count = match.groups()
        if pointer or kind in _TYPES:
            element: np.dtype[Any] = np.dtype(np.uint64 if pointer else _TYPES[kind])
            own = element.alignment
        else:
            element, own = _layout(kind)
        dtype = np.dtype((element, (int(count),))) if count else element
        offset = _round_up(end, own)
        names.append(field)
        formats.append(dtype)
        offsets.append(offset)
        end, alignment = offset + dtype.itemsize, max(alignment, own)
    layout = {"names": names, "formats": formats, "offsets": offsets, "itemsize": _round_up(end, alignment)}
    return np.dtype(layout, align=True), alignment  # type: ignore[call-overload]


def _round_up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def address(array: Any) -> int:
    """Where an array's first element lies: of a CuPy array (``data.ptr``), a NumPy array, or 0 for None."""
    if array is None:
        return 0
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.data.ptr)


@dataclass(slots=True)
class Params:
    """The filled struct of one launch, and the arrays it points into.

    Attributes
    ----------
    record : structured array of one element, passed by value.
    arrays : what must stay alive until the kernel has run; a simulator also checks accesses against their bounds.
    """

    record: NDArray[Any]
    arrays: tuple[Any, ...]


def fill(struct: str, **fields: Any) -> Params:
    """A struct's fields from numbers, arrays (addresses are stored), dicts (structs within) and opaque bytes (V128).

    Raises
    ------
    InvalidArgument
        A field is missing or unknown.
    """
    record = np.zeros(1, struct_dtype(struct))
    arrays: list[Any] = []
    _fill(record[0], fields, arrays, struct)
    return Params(record, tuple(arrays))


def _fill(target: Any, fields: dict[str, Any], arrays: list[Any], struct: str) -> None:
    names = set(target.dtype.names)
    if names != fields.keys():
        missing, unknown = sorted(names - fields.keys()), sorted(fields.keys() - names)
        raise InvalidArgument(f"{struct}: missing {missing}, unknown {unknown}")
    for name, value in fields.items():
        if isinstance(value, dict):
            _fill(target[name], value, arrays, f"{struct}.{name}")
        elif value is None or (target.dtype[name] == np.uint64 and getattr(value, "ndim", None)):
            target[name] = address(value)
            if value is not None:
                arrays.append(value)
        elif isinstance(value, np.ndarray) and value.dtype.kind == "V":  # opaque bytes, such as a tensor map
            target[name] = value.view(target.dtype[name])[0]
        else:
            target[name] = value
