"""A launch worked out once and repeated.

The same kernel over arrays of the same shapes, for layer after layer.

Checking arrays and filling a struct from Python costs more than a launch. A wrapper does it when it meets a signature
(shapes, strides, dtypes, alignment of all its arrays) for the first time; from then on only addresses change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.kernels.backend import Backend, Dim3
from pagedkv.kernels.params import Params, address, fill
from pagedkv.kernels.variant import Variant

MAX_RECIPES = 4096  # per kernel; then the table is emptied


def signature(array: Any) -> Hashable:
    """All that checks and launches depend on, but the address and the values; None for None.

    The last is the device, or on the host a negative number, by whether the array may be written.
    """
    if array is None:
        return None
    try:
        if isinstance(array, np.ndarray):
            return array.shape, array.strides, array.dtype, address(array) & 15, -1 - array.flags.writeable
        data = array.data
        return array.shape, array.strides, array.dtype, data.ptr & 15, data.device_id
    except AttributeError:  # no array: the checks say so
        return str(type(array))


def place(array: Any) -> Hashable:
    """Signature and address: equal for arrays of one form over the same memory."""
    form = signature(array)
    return (form, address(array)) if isinstance(form, tuple) else form


def interned(form: Hashable) -> int:
    """A number for a form, the same for equal ones: it is hashed faster than a nested tuple."""
    return _numbers.setdefault(form, next(_counted))


_numbers: dict[Hashable, int] = {}
_counted = itertools.count()  # two threads never draw one number


class Filled:
    """A parameter struct of one launch, filled but for addresses.

    Attributes
    ----------
    params : the struct as a backend takes it.
    words : the struct as 64-bit words.
    """

    __slots__ = ("params", "words")

    def __init__(self, image: bytes, struct: np.dtype[Any]) -> None:
        content = bytearray(image)
        self.params = Params(np.frombuffer(content, struct), ())
        self.words = memoryview(content).cast("Q")


class Recipe:
    """A launch but for some addresses.

    Threads may launch it at once: each takes a struct of its own.

    Parameters
    ----------
    variant, grid, block, shared_bytes : a grid with a 0 launches nothing.
    record : the struct, filled but for the addresses.
    names : the pointer fields in the order in which launches give the arrays, ``"rope.cos"`` for nested ones.
    """

    __slots__ = ("_given", "_image", "_spare", "_struct", "block", "grid", "places", "shared_bytes", "variant")

    def __init__(
        self,
        variant: Variant,
        grid: Dim3,
        block: Dim3,
        record: NDArray[Any],
        names: Sequence[str],
        shared_bytes: int = 0,
    ) -> None:
        self.variant, self.grid, self.block, self.shared_bytes = variant, grid, block, shared_bytes
        self._image, self._struct = record.tobytes(), record.dtype
        self.places = tuple(field_offset(record.dtype, name) // 8 for name in names)
        self._spare: list[Filled] = []
        # place and index of each array that is not None: of those on the device, and of those on the host
        self._given: tuple[list[tuple[int, int]], list[tuple[int, int]]] | None = None

    def take(self, arrays: Sequence[Any]) -> Filled:
        """A struct with the addresses of these arrays, one per name.

        An array is None in all launches or in none, and on the host in all or in none.
        """
        try:
            filled = self._spare.pop()
        except IndexError:
            filled = Filled(self._image, self._struct)
        words, given = filled.words, self._given
        if given is None:
            sides: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
            for index, (word, array) in enumerate(zip(self.places, arrays, strict=True)):
                if array is not None:
                    sides[isinstance(array, np.ndarray)].append((word, index))
            given = self._given = sides
        device, host = given
        for word, index in device:
            words[word] = arrays[index].data.ptr
        for word, index in host:
            words[word] = address(arrays[index])
        return filled

    def give_back(self, filled: Filled) -> None:
        """The launch has copied the struct: another may have it."""
        filled.params.arrays = ()
        self._spare.append(filled)

    def launch(self, backend: Backend, arrays: Sequence[Any], stream: Any, others: tuple[Any, ...] = ()) -> None:
        """Start the kernel over these arrays.

        Parameters
        ----------
        arrays : as :meth:`take`.
        others : further arrays that the struct points into from the start.
        """
        if 0 in self.grid:
            return
        filled = self.take(arrays)
        filled.params.arrays = (*arrays, *others)
        backend.launch(
            self.variant, self.grid, self.block, filled.params, shared_bytes=self.shared_bytes, stream=stream
        )
        self.give_back(filled)


class Recipes:
    """One kernel's recipes by signature.

    Parameters
    ----------
    struct : name of the parameter struct.
    arrays : its pointer fields in the order in which launches give the arrays, ``"rope.cos"`` for nested ones.
    """

    def __init__(self, struct: str, arrays: Sequence[str]) -> None:
        self._struct, self._arrays = struct, arrays
        self._known: dict[Hashable, Recipe] = {}

    def get(self, key: Hashable, make: Callable[[], tuple[Variant, Dim3, Dim3, dict[str, Any]]]) -> Recipe:
        """The recipe of a signature; ``make`` checks everything and builds it on first use.

        ``make`` gives variant, grid, block and all fields of the struct that are no arrays; a nested struct is a dict.
        """
        recipe = self._known.get(key)
        if recipe is None:
            variant, grid, block, fields = make()
            params = fill(self._struct, **_with_nulls(fields, self._arrays))
            recipe = Recipe(variant, grid, block, params.record, self._arrays)
            if len(self._known) >= MAX_RECIPES:
                self._known.clear()
            self._known[key] = recipe
        return recipe


def _with_nulls(fields: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The fields with None for every array, in nested dicts of their own."""
    found = {name: dict(value) if isinstance(value, dict) else value for name, value in fields.items()}
    for name in names:
        inner, _, last = name.rpartition(".")
        (found.setdefault(inner, {}) if inner else found)[last] = None
    return found


def field_offset(struct: np.dtype[Any], name: str) -> int:
    """Bytes from the struct's start to a field, which may be nested."""
    first, _, rest = name.partition(".")
    assert struct.fields is not None
    inner, offset = struct.fields[first][:2]
    return int(offset) + (field_offset(inner, rest) if rest else 0)
