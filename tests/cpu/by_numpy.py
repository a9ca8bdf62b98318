"""Expected results of `write_kv` and `merge_states`, in plain NumPy and float64.

They are slow, and short enough to be read.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
SOURCES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64,
}  # fmt: skip


def converted(values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return the nearest numbers of a cache's dtype.

    float64 goes straight to float32 and float16, else by way of float32.
    """
    dtype = np.dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in (np.float16, np.float32):
            return values.astype(dtype)
        floats = values.astype(np.float32)
        if dtype == np.int8:
            return np.nan_to_num(np.clip(np.rint(floats), -127, 127), nan=0).astype(np.int8)
        largest = LARGEST.get(dtype.name, np.inf)
        return np.clip(floats, -largest, largest).astype(dtype)


def scale_of(values: NDArray[Any], dtype: Any) -> NDArray[np.float32]:
    """The scale under which each row's largest number becomes the type's."""
    sizes = np.abs(values.astype(np.float32))
    found: NDArray[np.float32] = sizes.max(axis=-1, initial=0) / np.float32(LARGEST[np.dtype(dtype).name])
    return found


def write(
    values: NDArray[Any], cache: NDArray[Any], slots: Any, scale: NDArray[np.float32] | None = None, mode: str = "none"
) -> None:
    """K or V into the slots of a cache, token by token."""
    for row, slot in zip(values, np.asarray(slots).tolist(), strict=True):
        if slot < 0:
            continue
        place = divmod(slot, cache.shape[1])
        if scale is None:
            cache[place] = converted(row, cache.dtype)
            continue
        with np.errstate(all="ignore"):
            if mode == "token_head" and row.size:
                scale[place] = scale_of(row, cache.dtype)
            by = np.broadcast_to(scale[place] if mode == "token_head" else scale, row.shape[:1])[:, None]
            cache[place] = converted(np.where(by == 0, np.float32(0), row.astype(np.float32) / by), cache.dtype)


def merge(states: NDArray[Any], lses: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Merge states, each weighted by e^lse.

    States without keys (-inf) do not count, whatever their values.
    """
    wide = lses.astype(np.float64)
    most = wide.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        weights = np.exp(wide - np.where(most == -np.inf, 0, most))
        weights = np.ones_like(weights) if len(states) == 1 else weights
        total = weights.sum(axis=0)
        parts = np.where(weights[..., None] == 0, 0, states.astype(np.float64) * (weights / total)[..., None])
        merged = np.where((most == -np.inf)[..., None], 0, parts.sum(axis=0))
        return merged, np.where(most == -np.inf, -np.inf, most + np.log(total))


def same_bits(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """The same numbers to the last bit and sign, and NaN in the same places, whichever NaN."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    bits = np.dtype(f"u{found.dtype.itemsize}")
    found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
    with np.errstate(invalid="ignore"):
        nan = np.isnan(expected.astype(np.float64))
        np.testing.assert_array_equal(np.isnan(found.astype(np.float64)), nan)
    np.testing.assert_array_equal(np.where(nan, 0, found.view(bits)), np.where(nan, 0, expected.view(bits)))
