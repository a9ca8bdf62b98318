"""The interface of the object that holds, computes and moves a cache's KV bytes.

The cache decides, on integers and tokens; a Storage does the rest. The product's own is
:class:`pagedkv.cache.tiered.TieredStorage`. The simulator has one without bytes, which takes virtual time
(:mod:`pagedkv.lab.simulate.virtual`); tests have others. A storage that has an attribute `runtime`
(:class:`pagedkv.cache.runtime.Runtime`) also brings the clock and the threads of its cache.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.budgets import Disk
from pagedkv.spec.groups import GroupLayout
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.tiers import DirectionStats, DiskStats, Name, Record, StoredBlock


class StepTables(Protocol):
    """What writing and attention need of a step.

    Attributes
    ----------
    block_tables : int32 [num_seqs, max_blocks], padded with -1
    seq_lens : int32 [num_seqs], this step's tokens included
    q_indptr : int32 [num_seqs + 1]
    slot_mapping : int64 [num_tokens]
    """

    @property
    def block_tables(self) -> NDArray[np.int32]: ...
    @property
    def seq_lens(self) -> NDArray[np.int32]: ...
    @property
    def q_indptr(self) -> NDArray[np.int32]: ...
    @property
    def slot_mapping(self) -> NDArray[np.int64]: ...


class BoundStep(Protocol):
    """The KV of one step: its slots to write, its sequences to attend to."""

    def write(self, layer: int, k: Any, v: Any, stream: Any = None) -> None:
        """Put the new tokens' K and V [num_tokens, num_kv_heads, head_dim] into the step's slots."""

    def attend(
        self, layer: int, q: Any, *, return_lse: bool = False, out: Any = None, stream: Any = None, **variant: Any
    ) -> Any:
        """Attention of the new tokens: ``o``, or ``(o, lse)``."""


class KV(Protocol):
    """The device's K and V: device_kv.py on the CPU, gpu_kv.py on a GPU.

    Attributes
    ----------
    decode : turns stored values into floats where NumPy lacks the dtype; None where it has it, and on a GPU.
    is_synchronous : whether the work of a step is done when its last call returns, so that its time can be measured.
    """

    decode: Any
    is_synchronous: bool

    def layer(self, layer: int) -> tuple[Any, Any]:
        """K and V of a layer, [num_blocks, block_size, num_kv_heads, head_dim] views."""

    def layer_scales(self, layer: int) -> tuple[Any, Any] | None:
        """Scales of K and V of a layer; None where the dtype has none."""

    def bind(self, arrays: StepTables, part: int = 0) -> BoundStep:
        """What one step writes and reads.

        Where layers see different parts of a step it is bound once for each: part 0 is the whole, a chunk its tokens.
        """

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks, (source, destination) int32 [n, 2]."""

    def zero_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Fill whole blocks with zeros, int32 [n]."""

    def gather(
        self, blocks: NDArray[np.int32], start: int, stop: int, out: tuple[Any, Any] | None, layout: str
    ) -> tuple[Any, Any]:
        """K and V of tokens `start` to `stop` - 1 of a sequence with these blocks.

        Each [num_layers, stop - start, num_kv_heads, head_dim] with layout ``"NHD"``, [num_layers, num_kv_heads,
        stop - start, head_dim] with ``"HND"``.
        """


class Handle(Protocol):
    """The future of the moves of one `Carrier.submit`.

    :class:`pagedkv.tiers.Ticket` has the contract of each call.
    """

    @property
    def is_settled(self) -> bool:
        """Whether the results are final."""

    @property
    def seconds(self) -> float:
        """From its making until it was settled."""

    def results(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ids of the transfers, ascending, and whether each arrived as a whole."""

    def tried(self) -> NDArray[np.bool_]:
        """For each of these transfers: False where it failed without a word against its source."""

    def left(self) -> NDArray[np.bool_]:
        """For each move: whether a call that hangs may still touch its memory."""

    def when_back(self, tell: Callable[[NDArray[np.intp]], object]) -> None:
        """Have ``tell(moves)`` called for the remaining moves, once the call is back."""


class Carrier(Protocol):
    """Carries out moves between tiers: :class:`pagedkv.tiers.Mover`, or what stands in for it.

    Attributes
    ----------
    is_synchronous : whether every move is over when `submit` returns. Callers that need room then carry out the core's
        decisions themselves; else the cache has a thread for it. An interrupt (Ctrl-C, a signal handler's exception,
        no memory) can then come out of `submit`: by that time nothing may read or write the moves' blocks any more.
    lane_bytes : int64 [num_groups], optional
        Of a carrier over groups of layers: bytes that moving a page takes, by the move's lane.
    write_bytes : int64 [num_groups], optional
        The same of a write to the disk.
    """

    is_synchronous: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def submit(
        self,
        moves: NDArray[np.void],
        *,
        deadline_s: float | None = None,
        on_done: Callable[[Any], object] | None = None,
        here: bool = False,
        before: Callable[[Any], object] | None = None,
    ) -> Handle:
        """Begin moves, as :meth:`pagedkv.tiers.Mover.submit` does; where it raises, none has begun."""

    def watch(self, ticket: Any) -> float:
        """Give up what takes too long of a handle; seconds after which to ask again."""

    def stats(self) -> Mapping[tuple[int, int], DirectionStats]:
        """Counters by (source tier, destination tier)."""

    def close(self) -> None:
        """Finish the submitted moves, and begin no others. A second call does nothing."""


def bytes_of(moves: NDArray[np.void], carrier: Carrier, by_group: bool) -> int:
    """The bytes that a carrier moves for these."""
    sizes = getattr(carrier, "lane_bytes", None) if by_group else None
    return len(moves) * carrier.block_bytes if sizes is None else int(sizes[moves["lane"]].sum())


def written(group: NDArray[np.void], carrier: Carrier) -> tuple[int, int, int | None]:
    """Blocks that moves to the disk write, blocks before them, and bytes.

    Pages of short groups of layers are in the bytes alone, which are None where all blocks are alike.
    """
    depths = group["depth"][group["lane"] == 0]
    sizes = getattr(carrier, "write_bytes", None)
    num_bytes = None if sizes is None else int(sizes[group["lane"]].sum())
    return len(depths), int(depths[0]) if len(depths) else 0, num_bytes


class Store(Protocol):
    """The disk tier, which outlives the process; see :class:`pagedkv.tiers.DiskTier`."""

    @property
    def secret(self) -> bytes:
        """Key of the chain that names blocks."""

    @property
    def write_bytes(self) -> int:
        """Bytes that writing one block takes."""

    @property
    def state(self) -> str:
        """``"ok"``, ``"read_only"`` or ``"off"``."""

    def records(self) -> Iterable[StoredBlock]:
        """Every block that it holds."""

    def invalidate(self, blocks: NDArray[np.int32]) -> None:
        """Make slots hold nothing."""

    def purge(self, namespace: bytes) -> None:
        """Forget a namespace by its digest, in writing."""

    def flush(self) -> bool:
        """Whether everything written so far is on the disk."""

    def stats(self) -> DiskStats:
        """State and counters."""


class Storage(Protocol):
    """The tiers of one cache, the kernels of the hottest, and the mover between them.

    The cache calls `open`, then `start`, then uses the attributes, then calls `close`. Where `open` raises, it has
    given back everything; where anything after it raises, the cache calls `close`.

    Attributes
    ----------
    kv : from `open` on.
    store : from `open` on; None without a disk tier that outlives the process.
    carrier : from `start` on.
    """

    @property
    def kv(self) -> KV:
        """What writes and attends."""

    @property
    def store(self) -> Store | None:
        """The disk tier."""

    @property
    def carrier(self) -> Carrier:
        """What moves blocks."""

    @property
    def device_arena(self) -> Any:
        """The device's bytes, uint8 [num_blocks, block_bytes].

        Raises
        ------
        PagedKVError
            There are none.
        """

    def open(self, spec: KVSpec, blocks: Sequence[int], disk: Disk | None) -> list[int]:
        """Allocate the tiers' memory and files.

        Parameters
        ----------
        spec : the shape of a block's KV.
        blocks : of device, host and disk; 0 for a tier that is not wanted.
        disk : where the disk tier lies, if there is one.

        Returns
        -------
        The blocks of each tier that is open: as asked, but 0 for a disk that is not required and could not be had.
        """

    def start(self, describe: Callable[[NDArray[np.void]], list[Record | Name]] | None) -> None:
        """Begin to take moves.

        Parameters
        ----------
        describe : callable, optional
            Moves to or from `store` and `remote` -> the Record or Name of each. None without either.
        """

    def used_by(self, stream: Any) -> None:
        """Make moves wait for kernels that the caller launched on a stream."""

    def close(self) -> None:
        """Give everything back. A second call does nothing."""


class GroupStorage(Storage, Protocol):
    """A storage that can also hold groups of layers, for ``KVCache(by_group=True)``.

    Its `kv` then has ``copy_pages`` and ``zero_pages``, and its `carrier` ``lane_bytes`` and ``write_bytes``.
    """

    def lay_out(self, layout: GroupLayout) -> None:
        """Choose the layout of the tiers' memory, before `open`.

        The numbers of `open` are then extents: in memory of this layout, on the disk those of disk_lanes.py.
        """


_CALLS = ("open", "start", "used_by", "close")


def holds_groups(storage: Storage) -> TypeGuard[GroupStorage]:
    """Whether it is a :class:`GroupStorage`."""
    return callable(getattr(storage, "lay_out", None))


def check_storage(storage: Any) -> Storage:
    """Return `storage` if it has all attributes of a Storage.

    Raises
    ------
    WrongType
        The error names the missing attribute.
    """
    kind = storage if isinstance(storage, type) else type(storage)
    missing = [f"{name}()" for name in _CALLS if not callable(getattr(kind, name, None))]
    if missing or isinstance(storage, type):
        what = f"the class {kind.__name__}" if kind is storage else kind.__name__
        lacks = f", which lacks {', '.join(missing)}" if missing else "; make an object of it"
        raise WrongType(f"storage must be a pagedkv.cache.storage.Storage, not {what}{lacks}")
    return storage  # type: ignore[no-any-return]


def check_opened(opened: Any, asked: Sequence[int], disk: Disk | None) -> list[int]:
    """The result of a Storage's `open`, as a list.

    As asked, but perhaps 0 for a disk that is not required.

    Raises
    ------
    WrongType, InvalidArgument
    """
    try:
        blocks = [operator.index(count) for count in opened]
    except TypeError:
        raise WrongType(f"a storage's open() must return the blocks of each tier, not {opened!r:.60}") from None
    without = [*asked[:-1], 0] if disk is not None and not disk.required else list(asked)
    if blocks not in (list(asked), without):
        raise InvalidArgument(f"a storage's open() returned {blocks} blocks by tier, and {list(asked)} were asked for")
    return blocks


_claiming = threading.Lock()
_claims: dict[int, weakref.ref[Any]] = {}  # by the id of a storage that is open: the cache that has it


def claim_storage(storage: Storage, cache: Any) -> None:
    """From now on `storage` is this cache's, until it is released or the cache is gone.

    Raises
    ------
    InvalidArgument
        It is another cache's.
    """
    with _claiming:
        known = _claims.get(id(storage))
        if known is not None and known() is not None:
            raise InvalidArgument("this storage is another cache's already; make one for each cache")
        _claims[id(storage)] = weakref.ref(cache, partial(_forget, id(storage)))


def release_storage(storage: Storage, cache: Any) -> None:
    """The cache that claimed it is closed; another cache's claim stays."""
    with _claiming:
        known = _claims.get(id(storage))
        if known is not None and known() is cache:
            del _claims[id(storage)]


def _forget(number: int, gone: weakref.ref[Any]) -> None:
    """A cache was collected without being closed.

    The collector comes at any moment, so this takes no lock.
    """
    if _claims.get(number) is gone:
        _claims.pop(number, None)
