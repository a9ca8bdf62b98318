"""Custom masks as packed bits: draft trees, prefix-LM, anything but a range of keys.

Sequence ``s`` begins at byte ``mask_indptr[s]``. Counted from there, bit ``i * seq_len + key`` says whether its
query ``i`` sees ``key``; the first bit of a byte is its lowest (``np.packbits`` with ``bitorder="little"``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pack_mask(masks: Iterable[ArrayLike]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """One mask for each sequence, as bits that attention takes.

    Parameters
    ----------
    masks : bool [q_len, seq_len] for each sequence, True where the query sees the key.

    Returns
    -------
    mask : uint8 [num_bytes], each sequence from a byte of its own on; the bits that are left over are 0.
    mask_indptr : int64 [num_seqs + 1], in bytes.

    Raises
    ------
    TypeError, ValueError
        A mask that is not boolean, or has not two axes.
    """
    pieces = [np.zeros(0, dtype=np.uint8)]
    for seq, array in enumerate(map(np.asarray, masks)):
        if array.dtype != np.bool_:
            raise TypeError(f"the mask of sequence {seq} must be bool, not {array.dtype}")
        if array.ndim != 2:
            raise ValueError(f"the mask of sequence {seq} must be [q_len, seq_len], got shape {array.shape}")
        pieces.append(np.packbits(array.reshape(-1), bitorder="little"))
    return np.concatenate(pieces), np.cumsum([piece.size for piece in pieces], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PackedMask:
    """The bits of all sequences of a call.

    Parameters
    ----------
    bits : uint8 [num_bytes].
    indptr : integers [num_seqs + 1], rising from 0 to num_bytes.

    Raises
    ------
    TypeError
        An array of the wrong kind.
    ValueError
        Shapes or offsets that do not fit together.
    """

    bits: NDArray[Any]
    indptr: NDArray[Any]

    def __post_init__(self) -> None:
        bits, indptr = self.bits, self.indptr
        if bits.dtype != np.uint8:
            raise TypeError(f"mask must be packed bits in uint8, not {bits.dtype}")
        if indptr.dtype.kind not in "iu":
            raise TypeError(f"mask_indptr must be integers, not {indptr.dtype}")
        if bits.ndim != 1 or indptr.ndim != 1:
            raise ValueError(f"mask and mask_indptr must have one axis, got shapes {bits.shape} and {indptr.shape}")
        if not indptr.size or indptr[0] != 0 or indptr[-1] != bits.size or np.any(indptr[1:] < indptr[:-1]):
            raise ValueError(f"mask_indptr must rise from 0 to {bits.size}, the number of bytes in mask")

    def check(self, q_indptr: NDArray[Any], seq_lens: NDArray[Any]) -> None:
        """Refuses lengths whose bits are not all there; more bytes than needed do no harm."""
        if len(self.indptr) != len(seq_lens) + 1:
            raise ValueError(f"{len(self.indptr)} offsets in mask_indptr, {len(seq_lens)} sequences")
        for seq in range(len(seq_lens)):
            given = 8 * (int(self.indptr[seq + 1]) - int(self.indptr[seq]))
            needed = (int(q_indptr[seq + 1]) - int(q_indptr[seq])) * int(seq_lens[seq])
            if given < needed:
                raise ValueError(f"the mask of sequence {seq} has {given} bits, its queries and keys need {needed}")

    def rows(self, seq: int, q_len: int, seq_len: int) -> NDArray[np.bool_]:
        """The mask of a sequence, bool [q_len, seq_len]."""
        piece = self.bits[int(self.indptr[seq]) : int(self.indptr[seq + 1])]
        flat = np.unpackbits(piece, count=q_len * seq_len, bitorder="little")
        return flat.reshape(q_len, seq_len).astype(np.bool_)
