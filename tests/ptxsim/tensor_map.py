"""A stand-in for the driver's tensor map: 128 bytes that say the same in the open.

Little-endian: magic u64, address u64, element bytes u8, rank u8, swizzle bytes u16, 4 spare bytes, dims 5 x u64,
strides 4 x u64 (bytes, of dimensions 1 to 4), box 5 x u32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.errors import AsyncCopyError

MAGIC = 0x70614D6D69537450
MAP_BYTES = 128
_LAYOUT = np.dtype(
    [
        ("magic", "<u8"), ("address", "<u8"), ("element", "u1"), ("rank", "u1"), ("swizzle", "<u2"), ("spare", "<u4"),
        ("dims", "<u8", 5), ("strides", "<u8", 4), ("box", "<u4", 5), ("pad", "V12"),
    ]
)  # fmt: skip
assert _LAYOUT.itemsize == MAP_BYTES


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves.

    Dimensions go from the contiguous one on.

    Attributes
    ----------
    address, element : first byte, bytes per element.
    dims, strides, box : extents, byte strides (the first is ``element``), elements per copy.
    swizzle : 0, 32, 64 or 128.
    """

    address: int
    element: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy writes."""
        return int(np.prod(self.box)) * self.element


def encode(
    address: int, element: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> NDArray[np.void]:
    """Pack the 128 bytes of a map, as one element of dtype V128.

    ``strides`` are those of all dimensions but the first.
    """
    rank = len(dims)
    record = np.zeros(1, _LAYOUT)
    record["magic"], record["address"], record["element"], record["rank"] = MAGIC, address, element, rank
    record["swizzle"] = swizzle
    record["dims"][0, :rank], record["box"][0, :rank] = dims, box
    record["strides"][0, : rank - 1] = strides
    return record.view(f"V{MAP_BYTES}")


def decode(octets: bytes) -> TensorMap:
    """Read a map back.

    Raises
    ------
    AsyncCopyError
        These are not the bytes of a map made here.
    """
    record = np.frombuffer(octets, _LAYOUT)[0]
    if int(record["magic"]) != MAGIC:
        raise AsyncCopyError("a tensor copy through 128 bytes that are no tensor map of PtxsimBackend.tensor_map")
    rank = int(record["rank"])
    element = int(record["element"])
    return TensorMap(
        int(record["address"]), element, tuple(record["dims"][:rank].tolist()),
        (element, *record["strides"][: rank - 1].tolist()), tuple(record["box"][:rank].tolist()),
        int(record["swizzle"]),
    )  # fmt: skip


def swizzled(addresses: NDArray[np.int64], swizzle: int) -> NDArray[np.int64]:
    """Return shared addresses after the permutation of 16-byte pieces.

    Bits 4.. are xored with bits 7.. .
    """
    if swizzle == 0:
        return addresses
    return addresses ^ (((addresses >> 7) & (swizzle // 16 - 1)) << 4)
