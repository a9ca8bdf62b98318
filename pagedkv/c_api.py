"""The calls of ``pagedkv.h`` by address, for Numba, ctypes and cffi.

Names, signatures and structs are read from the header itself, whose comments are the reference.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv._core.c_api import get_include as get_include
from pagedkv._core.c_api.api import ADDRESS as ADDRESS
from pagedkv._core.c_api.api import handle_of as handle_of
from pagedkv.errors import InvalidArgument

_INTEGERS: dict[str, Any] = {
    "int": ctypes.c_int, "int8_t": ctypes.c_int8, "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64, "size_t": ctypes.c_size_t,
}  # fmt: skip


def names() -> list[str]:
    """Return the names of the calls, in the order of ``pagedkv_api``."""
    return [name for name, _, _ in _prototypes()]


def function(name: str) -> Callable[..., Any]:
    """Return a call as a ctypes function, which code compiled by Numba can call too.

    It releases the GIL while it runs. Pointers and handles travel as integers: an array's ``ctypes.data``, and
    :func:`handle_of` an object.

    Parameters
    ----------
    name : str
        Such as ``"table_step"``.

    Raises
    ------
    InvalidArgument
        The header has no call of this name.
    """
    for number, (known, result, arguments) in enumerate(_prototypes()):
        if known == name:
            kind = ctypes.CFUNCTYPE(result, *arguments)
            return kind(ctypes.c_void_p.from_address(ADDRESS + 16 + 8 * number).value or 0)
    raise InvalidArgument(f"pagedkv.h has no call {name!r}: it has {', '.join(names())}")


def struct(name: str) -> np.dtype[Any]:
    """Return the layout of a struct of the header as a NumPy dtype; pointers are integers.

    ``np.zeros(1, struct("pagedkv_step"))`` is one, and its ``ctypes.data`` the pointer to it.

    Raises
    ------
    InvalidArgument
        The header has no struct of this name, or it is opaque.
    """
    found = re.search(rf"typedef struct {re.escape(name)} {{([^{{}}]*)}} {re.escape(name)};", _header())
    if found is None or name == "pagedkv_api":
        raise InvalidArgument(f"pagedkv.h has no struct {name!r} whose fields a caller may see")
    fields: list[tuple[Any, ...]] = []
    for kind, field, count in re.findall(r"([\w ]+\W+)(\w+)(\[\w+\])?;", found[1]):
        shape = () if not count else (constants()[count[1:-1]],)
        fields.append((field, np.intp if "*" in kind else np.dtype(_INTEGERS[kind.strip()]), shape))
    return np.dtype(fields, align=True)


@cache
def constants() -> dict[str, int]:
    """Return the header's constants by name, the codes of errors among them."""
    given = re.findall(r"(PAGEDKV_\w+) = (-?\d+)", _header())
    given += re.findall(r"#define (PAGEDKV_ABI_\w+) (\d+)", _header())
    return {name: int(value) for name, value in given}


@cache
def _header() -> str:
    text = Path(get_include(), "pagedkv.h").read_text()
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


@cache
def _prototypes() -> list[tuple[str, Any, list[Any]]]:
    found = re.findall(r"([\w ]+[ *])\(\*(\w+)\)\(([^)]*)\);", _header())
    return [(name, _result(result), [_type(each) for each in given.split(",")]) for result, name, given in found]


def _type(declared: str) -> Any:
    return ctypes.c_ssize_t if "*" in declared else _INTEGERS[declared.split()[0]]


def _result(declared: str) -> Any:
    return ctypes.c_char_p if "char" in declared else None if declared.strip() == "void" else _type(declared)
