"""The ranks of a tensor-parallel cache: how many there are, and how they find each other."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import KW_ONLY, dataclass, field

from pagedkv.errors import InvalidArgument
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.paths import path_text
from pagedkv.spec.remote import check_secret, read_secret
from pagedkv.spec.scales import Scales
from pagedkv.spec.sizes import Blocks, Bytes, Size, check_size, number_of_seconds, parse_size, whole_number

MOST_RANKS = 64
MOST_ADDRESS = 107  # bytes of a unix socket's path, by the kernel


@dataclass(frozen=True, slots=True, repr=False)
class Ranks:
    """Processes of one machine that each hold a part of every block's KV heads.

    The deciding process (``KVCache(ranks=...)``) and every rank (``pagedkv.Rank``) are given an equal one.

    Parameters
    ----------
    address : path of the unix socket at which the deciding process waits for the ranks. It should lie in a directory
        that other users cannot enter.
    size : number of ranks, 1..64; it divides the KV heads.
    secret : 16 to 64 bytes, or the path of a file with them that only its owner may read.
    open_s : seconds, more than 0, that opening may take, until all ranks are there and have opened their tiers.
    silent_s : seconds, more than 0, after which a rank that does not answer is lost.

    Raises
    ------
    WrongType, InvalidArgument
    """

    address: str | os.PathLike[str]
    size: int
    _: KW_ONLY
    secret: bytes | str | os.PathLike[str] = field(repr=False)
    open_s: float = 60.0
    silent_s: float = 10.0

    def __post_init__(self) -> None:
        address = path_text(self.address, "address")
        if len(os.fsencode(address)) > MOST_ADDRESS:
            raise InvalidArgument(f"address {address!r} is too long: a unix socket's path has {MOST_ADDRESS} bytes")
        object.__setattr__(self, "address", address)
        object.__setattr__(self, "size", whole_number(self.size, "size", 1, MOST_RANKS))
        for name in ("open_s", "silent_s"):
            if not number_of_seconds(getattr(self, name), name):
                raise InvalidArgument(f"{name} must be more than 0: no rank could answer in time")
        if isinstance(self.secret, bytes):
            check_secret(self.secret)
        else:
            path_text(self.secret, "secret")

    def secret_bytes(self) -> bytes:
        """The secret, read from its file if it lies in one.

        Raises
        ------
        InvalidArgument
            The file cannot be read, can be read by others, or holds no secret. The message names the path alone.
        """
        return self.secret if isinstance(self.secret, bytes) else read_secret(path_text(self.secret, "secret"))

    def shard_spec(self, spec: KVSpec, rank: int) -> KVSpec:
        """The spec of one rank's part: its KV heads, and a model name that says which part.

        Raises
        ------
        InvalidArgument
            The KV heads cannot be split evenly, or there is no such rank.
        """
        rank = whole_number(rank, "rank", 0, self.size - 1)
        heads, rest = divmod(spec.num_kv_heads, self.size)
        if rest:
            fitting = [str(size) for size in range(1, spec.num_kv_heads + 1) if spec.num_kv_heads % size == 0]
            raise InvalidArgument(
                f"{spec.num_kv_heads} KV heads cannot be split evenly over {self.size} ranks: take one of "
                f"{', '.join(fitting)} ranks"
            )
        scales = spec.scales
        if isinstance(scales, Scales):
            scales = scales.of_heads(rank * heads, (rank + 1) * heads)
        model = f"{spec.model} rank {rank} of {self.size}"
        return dataclasses.replace(spec, num_kv_heads=heads, scales=scales, model=model)

    def share(self, size: Size, name: str = "size") -> Size:
        """One rank's share of a budget: an equal part of bytes, the same number of blocks.

        Raises
        ------
        WrongType, InvalidArgument
        """
        check_size(size, name)
        return size if isinstance(size, Blocks) else Bytes(parse_size(size) // self.size)

    def disk_of(self, disk: Disk, rank: int) -> Disk:
        """One rank's part of a disk tier: a directory inside the disk's, and its share."""
        where = os.path.join(disk.path, f"rank{rank}of{self.size}")
        return dataclasses.replace(disk, path=where, size=self.share(disk.size))

    def __repr__(self) -> str:
        return f"Ranks({self.address!r}, {self.size}, secret=...)"
