"""A numeric fingerprint: the KV that a runtime computes for a few fixed tokens.

A cache directory keeps the KV that was computed when it was made. An adapter computes the same tokens again before it
uses the directory: other weights, adapters, rotations of K and settings of positions give other numbers, whether the
runtime names them or not.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import FileFormatError, LayoutMismatch

TOLERANCE = 1e-2  # of a layer's norm: more than threads and instruction sets change, less than other weights do


class Probe:
    """K and V of the fixed tokens, as numbers.

    Parameters
    ----------
    k, v : [num_layers, ...] of numbers, kept as float32. uint8: bytes whose meaning the adapter does not know; they
        must be equal.

    Raises
    ------
    LayoutMismatch
        They have no layers, or not as many as each other.
    """

    def __init__(self, k: NDArray[Any], v: NDArray[Any]) -> None:
        if k.ndim < 2 or v.ndim < 2 or len(k) != len(v) or not len(k):
            raise LayoutMismatch(f"a probe needs K and V [num_layers, ...], got {k.shape} and {v.shape}")
        self.k, self.v = (side.copy() if side.dtype == np.uint8 else side.astype(np.float32) for side in (k, v))

    def difference(self, other: Probe, tolerance: float = TOLERANCE) -> str:
        """Describe the first difference to `other` beyond the tolerance; empty if there is none.

        Per layer, ``norm(ours - theirs) > tolerance * norm(theirs)``. A NaN or an infinity is a difference.
        """
        for name, ours, theirs in (("K", self.k, other.k), ("V", self.v, other.v)):
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                return f"{name} is {ours.dtype} {ours.shape}, and was {theirs.dtype} {theirs.shape}"
            for layer in range(len(ours)):
                if np.array_equal(ours[layer], theirs[layer]):
                    continue
                if ours.dtype == np.uint8:
                    return f"the bytes of {name} of layer {layer} differ"
                with np.errstate(all="ignore"):
                    norm = float(np.linalg.norm(theirs[layer].astype(np.float64)))
                    apart = float(np.linalg.norm(ours[layer].astype(np.float64) - theirs[layer]))
                    close = np.isfinite(norm) and apart <= tolerance * norm
                if not close:
                    return f"{name} of layer {layer} differs by {apart:.3g}, and its norm is {norm:.3g}"
        return ""

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which is whole or not there.

        Raises
        ------
        OSError
        """
        path = Path(path)
        unfinished = path.with_name(path.name + ".new")
        with open(unfinished, "wb") as file:
            np.savez(file, k=self.k, v=self.v)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Probe:
        """The probe that :meth:`write` has written.

        Raises
        ------
        FileFormatError
            It is damaged.
        OSError
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls(arrays["k"], arrays["v"])
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile, TypeError, AttributeError) as problem:
            raise FileFormatError(path, "", f"no probe can be read from it ({problem})") from problem
