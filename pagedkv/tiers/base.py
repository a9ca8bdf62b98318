"""The interface of a tier: numbered blocks of equal size. No tokens, no decisions.

Two kinds. A `RamTier` has an ``arena`` that a copy may touch at any address. A `StoreTier` (disk, later
remote) has no addresses: it takes blocks together with a `Record` that names their content, and gives them
back only to a caller that names the same content. The caller that moves bytes owns source and destination until the
move is done; tiers do not check ownership, they only check that block ids exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.sizes import Blocks, Bytes, check_plain

DIGEST_BYTES = 32
NO_EXTRA = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class Name:
    """Names one block's content in a store of others, which keeps no tokens.

    Attributes
    ----------
    key : 32 bytes
        The block's chain key under the secret of those who share the store.
    namespace : 32 bytes
        Digest of the namespace that the block belongs to.
    """

    key: bytes
    namespace: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Names one block's content outside RAM.

    Equal records mean equal bytes, and nothing else does.

    Attributes
    ----------
    key : 32 bytes
        The block's chain key: stands for the namespace and all tokens up to the block's end.
    parent : 32 bytes
        The chain key of the block before, or the namespace's digest for a first block.
    namespace : 32 bytes
        Digest of the namespace that the block belongs to.
    tokens : int32 [block_size]
        The block's tokens, compared one by one on every read.
    extra : 32 bytes
        Digest of whatever besides tokens decides the content (images, audio); zeros if nothing does.
    """

    key: bytes
    parent: bytes
    namespace: bytes
    tokens: NDArray[np.int32]
    extra: bytes = field(default=NO_EXTRA)

    def __post_init__(self) -> None:
        for name in ("key", "parent", "namespace", "extra"):
            value = getattr(self, name)
            if not isinstance(value, bytes):
                raise WrongType(f"Record.{name} must be bytes, not {type(value).__name__}")
            if len(value) != DIGEST_BYTES:
                raise InvalidArgument(f"Record.{name} must have {DIGEST_BYTES} bytes, not {len(value)}")
        tokens = self.tokens
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
            raise WrongType("Record.tokens must be a one-dimensional int32 array")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        mine = (self.key, self.parent, self.namespace, self.extra)
        theirs = (other.key, other.parent, other.namespace, other.extra)
        return mine == theirs and np.array_equal(self.tokens, other.tokens)

    def __hash__(self) -> int:
        return hash(self.key)


class OpenTier(Protocol):
    """The common interface of the device, host and disk tiers, once they are open.

    A `pagedkv.Tier` names a tier; this is the object.
    """

    @property
    def name(self) -> str:
        """``"device"``, ``"host"``, ``"disk"`` or ``"remote"``."""

    @property
    def num_blocks(self) -> int:
        """Blocks the tier can hold; ids run from 0."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def close(self) -> None:
        """Give back the tier's memory and files. A second call does nothing."""


class RamTier(OpenTier, Protocol):
    """A tier whose blocks have addresses."""

    @property
    def arena(self) -> Any:
        """uint8 [num_blocks, block_bytes], C-contiguous: a NumPy array, or a CuPy array on a GPU."""

    @property
    def gpu(self) -> int | None:
        """The CUDA device that can reach the arena by asynchronous copy, or None."""

    @property
    def piece_bytes(self) -> int:
        """Bytes of the arena that are page-locked together, if any are."""

    def view(self, block: int) -> Any:
        """uint8 [block_bytes]: one block, without a copy."""


@runtime_checkable
class StoreTier(OpenTier, Protocol):
    """A tier whose blocks are named by records, and that may fail block by block.

    The disk takes a Record for each block, the remote tier a Name.
    """

    def write(
        self,
        blocks: NDArray[np.int32],
        records: Sequence[Any],
        arena: NDArray[np.uint8],
        src_blocks: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Store rows of `arena`; bool [n] says which blocks are stored; the others hold nothing."""

    def read(
        self,
        blocks: NDArray[np.int32],
        expected: Sequence[Any],
        arena: NDArray[np.uint8],
        dst_blocks: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Fill rows of `arena`; bool [n], True for rows that hold exactly their record's block."""


class LeavableTier(StoreTier, Protocol):
    """A store that may be left in the middle of a write.

    From `call_hangs` until as many `call_came_back`, no call that is inside names any bytes that it wrote in between:
    the memory they come from may have been reused.
    """

    @property
    def is_off(self) -> bool:
        """Whether reads are answered at once, with misses that say nothing about the stored blocks."""

    def call_hangs(self, num_blocks: int) -> None:
        """Report that a call for so many blocks hangs, and that the mover gives it up.

        It must not wait or log.
        """

    def log_state(self) -> None:
        """Called after `call_hangs`, without any lock: it may be worth a line in the log."""

    def call_came_back(self) -> None:
        """One of these calls has come back."""


def is_leavable(tier: OpenTier) -> TypeGuard[LeavableTier]:
    """Whether a write to `tier` may be left."""
    return hasattr(tier, "call_hangs")


def is_off(tier: OpenTier) -> bool:
    """Whether `tier` is a store that answers reads with misses at once, whatever it holds."""
    return is_leavable(tier) and tier.is_off


def is_store(tier: OpenTier) -> TypeGuard[StoreTier]:
    """Whether `tier` needs records; else it is a `RamTier`."""
    return not hasattr(tier, "arena")  # asked for every batch of moves: a Protocol's isinstance is 50 times slower


def block_ids(blocks: Any, num_blocks: int, what: str) -> NDArray[np.int32]:
    """`blocks` as a contiguous int32 array, each in ``[0, num_blocks)``.

    Raises
    ------
    WrongType
        Not a one-dimensional array of integers.
    InvalidArgument
        An id is out of range.
    """
    try:
        ids = np.asarray(blocks)
    except ValueError:
        raise WrongType(f"{what} must be a one-dimensional array of integers") from None
    if ids.ndim != 1 or ids.dtype.kind not in ("iu" if ids.size else "iubfO"):  # NumPy makes floats of an empty list
        raise WrongType(f"{what} must be a one-dimensional array of integers")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= num_blocks):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise InvalidArgument(f"{what}: block {wrong} is not in [0, {num_blocks})")
    return np.ascontiguousarray(ids, dtype=np.int32)


def check_arena(arena: Any, block_bytes: int, *, writeable: bool = False) -> NDArray[np.uint8]:
    """Return `arena` if it is NumPy uint8 with contiguous rows of `block_bytes`.

    With `writeable`, it must be writeable too.

    Raises
    ------
    WrongType
        It is something else.
    """
    ok = isinstance(arena, np.ndarray) and arena.dtype == np.uint8 and arena.ndim == 2
    if not ok or arena.shape[1] != block_bytes or not arena[:1].flags.c_contiguous or _overlap(arena):
        raise WrongType(f"an arena must be a uint8 array [n, {block_bytes}] of contiguous rows in CPU memory")
    if writeable and not arena.flags.writeable:
        raise WrongType("the arena that is read into must be writeable")
    return arena  # type: ignore[no-any-return]


def _overlap(arena: NDArray[np.uint8]) -> bool:
    """Whether rows share bytes."""
    return bool(arena.shape[0] > 1 and arena.strides[0] < arena.shape[1])


def check_size(num_blocks: int, block_bytes: int) -> None:
    """Raise unless both are positive whole numbers.

    Raises
    ------
    WrongType, InvalidArgument
    """
    for what, value, unit in (("num_blocks", num_blocks, Blocks), ("block_bytes", block_bytes, Bytes)):
        if not isinstance(value, unit):
            check_plain(value, what, "a plain int")
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise WrongType(f"{what} must be an int, not {type(value).__name__}")
        if value < 1:
            raise InvalidArgument(f"{what} must be at least 1, not {value}")
    if num_blocks >= 2**31:
        raise InvalidArgument(f"num_blocks must be below 2**31 (block ids are int32), not {num_blocks}")
