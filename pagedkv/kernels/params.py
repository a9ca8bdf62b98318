"""Kernel parameters: one C struct by value per kernel.

Its layout is read from the .cuh that declares it.

The header is the contract (each pointer's shape stands beside it), so there is no second list of fields to keep equal.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument
from pagedkv.kernels.source import sources_dir

_TYPES = {"int": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64, "float": np.float32}
_CODES = {"i4": "i", "u4": "I", "i8": "q", "u8": "Q", "f4": "f"}  # of NumPy -> of the struct module
_STRUCT = re.compile(r"struct\s+(?:alignas\((\d+)\)\s+)?(\w+)\s*\{([^{}]*)\}\s*;")
_FIELD = re.compile(r"^(const\s+)?(\w+)\s*(\*?)\s*(\w+)(?:\[(\d+)\])?$")


@functools.cache
def _structs() -> dict[str, tuple[int, str]]:
    """All structs in the parameter headers by name: their ``alignas`` (else 1) and body."""
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
    """A struct's dtype and alignment.

    NumPy knows the alignment only where no ``alignas`` raised it.
    """
    alignment, body = _structs()[name]
    names, formats, offsets, end = [], [], [], 0
    for field, kind, count in _fields(body, name):
        if kind in _TYPES:
            element: np.dtype[Any] = np.dtype(_TYPES[kind])
            own = element.alignment
        else:
            element, own = _layout(kind)
        dtype = np.dtype((element, (count,))) if count else element
        offset = _round_up(end, own)
        names.append(field)
        formats.append(dtype)
        offsets.append(offset)
        end, alignment = offset + dtype.itemsize, max(alignment, own)
    layout = {"names": names, "formats": formats, "offsets": offsets, "itemsize": _round_up(end, alignment)}
    return np.dtype(layout, align=True), alignment  # type: ignore[call-overload]


def _fields(body: str, struct_name: str) -> Iterator[tuple[str, str, int]]:
    """Name, type and count (0: no array) of each field; a pointer's type is u64."""
    for statement in body.split(";"):
        text = " ".join(statement.split())
        if text:
            match = _FIELD.match(text)
            if match is None:
                raise AssertionError(f"struct {struct_name}: cannot read {text!r}")
            _, kind, pointer, field, count = match.groups()
            yield field, "u64" if pointer else kind, int(count or 0)


def _round_up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def address(array: Any) -> int:
    """Address of an array's first element: CuPy (``data.ptr``), NumPy, or 0 for None."""
    if array is None:
        return 0
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)


@dataclass(slots=True)
class Params:
    """The filled struct of one launch, and the arrays it points into.

    Attributes
    ----------
    record : structured array of one element, passed by value.
    arrays : must stay alive until the kernel has run; a simulator also checks accesses against their bounds. None
        stands for a null pointer.
    """

    record: NDArray[Any]
    arrays: tuple[Any, ...]


def fill(name: str, **fields: Any) -> Params:
    """A struct's fields from numbers and arrays, whose addresses are stored; None is 0.

    A struct within it is a dict, an element of its dtype, or opaque bytes (V128); an array within it is any array.

    Raises
    ------
    InvalidArgument
        A field is missing or unknown, or a value does not fit.
    """
    dtype = struct_dtype(name)
    content = bytearray(dtype.itemsize)
    arrays: list[Any] = []
    _fill(_form(name), content, 0, fields, arrays)
    return Params(np.frombuffer(content, dtype), tuple(arrays))


@dataclass(frozen=True, slots=True)
class _Form:
    """How a struct is written: its numbers in one go, then its nested structs."""

    name: str
    fields: frozenset[str]
    packer: struct.Struct
    numbers: tuple[str, ...]
    pointers: frozenset[str]  # the 64-bit unsigned ones of them
    nested: tuple[tuple[str, int, np.dtype[Any], str], ...]  # name, offset, dtype, of which struct ("" for an array)


@functools.cache
def _form(name: str) -> _Form:
    dtype = struct_dtype(name)
    code, end = "<", 0
    numbers, pointers, nested = [], [], []
    kinds = {field: kind for field, kind, _ in _fields(_structs()[name][1], name)}
    for field, (kind, offset, *_) in (dtype.fields or {}).items():
        if kind.subdtype is None and kind.names is None:
            code += f"{offset - end}x{_CODES[kind.str[1:]]}"
            end = offset + kind.itemsize
            numbers.append(field)
            pointers += [field] if kind == np.uint64 else []
        else:
            nested.append((field, offset, kind, "" if kind.subdtype is not None else kinds[field]))
    names = frozenset(dtype.names or ())
    return _Form(name, names, struct.Struct(code), tuple(numbers), frozenset(pointers), tuple(nested))


def _fill(form: _Form, content: bytearray, base: int, fields: dict[str, Any], arrays: list[Any]) -> None:
    if fields.keys() != form.fields:
        missing, unknown = sorted(form.fields - fields.keys()), sorted(fields.keys() - form.fields)
        raise InvalidArgument(f"{form.name}: missing {missing}, unknown {unknown}")
    values = []
    for name in form.numbers:
        value = fields[name]
        if value is None:
            value = 0
        elif name in form.pointers and getattr(value, "ndim", None):
            arrays.append(value)
            value = address(value)
        values.append(value)
    try:
        form.packer.pack_into(content, base, *values)
    except struct.error as error:
        given = ", ".join(f"{name} = {value}" for name, value in zip(form.numbers, values, strict=True))
        raise InvalidArgument(f"{form.name}: a value does not fit ({error}) among {given}") from error
    for name, offset, dtype, struct_name in form.nested:
        value, begin = fields[name], base + offset
        if isinstance(value, dict):
            _fill(_form(struct_name), content, begin, value, arrays)
        else:
            opaque = isinstance(value, np.ndarray | np.void) and value.dtype.kind == "V"
            raw = value.tobytes() if opaque else np.broadcast_to(np.asarray(value, dtype.base), dtype.shape).tobytes()
            if len(raw) != dtype.itemsize:
                raise InvalidArgument(f"{form.name}.{name} takes {dtype.itemsize} bytes, got {len(raw)}")
            content[begin : begin + len(raw)] = raw
