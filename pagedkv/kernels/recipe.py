"""A launch worked out once and repeated.

The same kernel over arrays of the same shapes, for layer after layer.

Checking arrays and filling a struct from Python costs more than a launch. A wrapper does it when it meets a signature
(shapes, strides, dtypes, alignment of all its arrays) for the first time; from then on only addresses change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.kernels.backend import Backend, Dim3
from pagedkv.kernels.params import Params, address, fill
from pagedkv.kernels.variant import Variant

MAX_RECIPES = 4096  # per kernel; then the table is emptied


def signature(array: Any) -> Hashable:
    """All that checks and launches depend on, but the address and the values; None for None."""
    if array is None:
        return None
    try:
        writeable = array.flags.writeable if isinstance(array, np.ndarray) else type(array)
        return array.shape, array.strides, array.dtype, address(array) % 16, writeable
    except AttributeError:  # no array: the checks say so
        return str(type(array))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A launch but for the addresses.

    Parameters
    ----------
    variant, grid, block : a grid with a 0 launches nothing.
    struct : dtype of the params.
    image : the struct as uint64 words, with 0 for every address. Copying a structured array would go field by field.
    words : where in it the addresses go.
    """

    variant: Variant
    grid: Dim3
    block: Dim3
    struct: np.dtype[Any]
    image: NDArray[np.uint64]
    words: NDArray[np.intp]

    def launch(self, backend: Backend, arrays: Sequence[Any], stream: Any) -> None:
        """Start the kernel over these arrays, one per word, None where there is none."""
        if 0 in self.grid:
            return
        image = self.image.copy()
        image[self.words] = [address(array) for array in arrays]
        params = Params(image.view(self.struct), tuple(array for array in arrays if array is not None))
        backend.launch(self.variant, self.grid, self.block, params, stream=stream)


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
            struct = params.record.dtype
            words = np.array([_offset(struct, name) // 8 for name in self._arrays], np.intp)
            recipe = Recipe(variant, grid, block, struct, params.record.view(np.uint64), words)
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


def _offset(struct: np.dtype[Any], name: str) -> int:
    """Bytes from the struct's start to a field, which may be nested."""
    first, _, rest = name.partition(".")
    assert struct.fields is not None
    inner, offset = struct.fields[first][:2]
    return int(offset) + (_offset(inner, rest) if rest else 0)
