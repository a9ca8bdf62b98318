"""The ``gguf`` package's reader, made safe against false counts.

The package trusts a file's counts; this holds them against the file's size.
"""

from __future__ import annotations

from typing import Any

import gguf

MAX_DEPTH = 4  # of arrays in arrays; models have none
MAX_ELEMENTS = 1 << 21  # of all arrays, each a NumPy array to the reader; a vocabulary of 256K tokens comes to 1.3M
SMALLEST = {gguf.GGUFValueType.STRING: 8, gguf.GGUFValueType.ARRAY: 12}  # bytes of an element; numbers have their own


class Reader(gguf.GGUFReader):
    """Reads metadata and tensors.

    Raises
    ------
    ValueError
        As the package does, and at once where a count or a nesting cannot be meant: more than the file has bytes for.
    """

    _depth = 0
    _elements = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **options: Any) -> Any:
        found = super()._get(offset, dtype, count, *rest, **options)
        if len(found) != int(count):
            raise ValueError(f"the file ends within the {int(count):,} values at byte {int(offset):,}")
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = gguf.GGUFValueType(int(self._get(orig_offs, "u4")[0])), int(self._get(orig_offs + 4, "u8")[0])
        number = self.gguf_scalar_to_np.get(kind)
        smallest = SMALLEST[kind] if number is None else number().itemsize
        self._elements += count
        if count * smallest > len(self.data) - orig_offs:
            raise ValueError(f"an array of {count:,} elements does not fit into the file")
        if self._elements > MAX_ELEMENTS:
            raise ValueError(f"its metadata has more than {MAX_ELEMENTS:,} elements")
        if self._depth == MAX_DEPTH:
            raise ValueError(f"arrays are nested more than {MAX_DEPTH} deep")
        self._depth += 1
        try:
            return super()._get_field_parts(orig_offs, raw_type)
        finally:
            self._depth -= 1
