"""RankStore: the disk tiers of all ranks as one, to the deciding process.

Each rank keeps its part of a block under the same number and the same name in a directory of its own. A block is there
if all ranks have it: what only some wrote before a crash is not found again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import PagedKVError, TierError
from pagedkv.tiers.disk.circuit_breaker import State
from pagedkv.tiers.disk.stats import DiskStats
from pagedkv.tiers.disk.tier import StoredBlock
from pagedkv.tiers.ranks.frames import Kind, pack_ids, unpack_stored
from pagedkv.tiers.ranks.group import Group
from pagedkv.tiers.ranks.handshake import Opened
from pagedkv.tiers.ranks.wire import Broken

STORE_S = 60.0  # that a call to the disks may take
STATS_S = 5.0



class RankStore:
    """The disk tiers of all ranks.

    Parameters
    ----------
    group : Group
    opened : what each rank said of its tiers.
    """

    def __init__(self, group: Group, opened: list[Opened]) -> None:
        self._group = group
        self.secret = opened[0].secret  # of the first rank: all keep its names
        self.write_bytes = sum(each.write_bytes for each in opened)
        self._stats = DiskStats("ok", 0, 0, {}, {}, 0)

    @property
    def state(self) -> State:
        """The worst of the ranks' states; ``"off"`` where a rank is lost."""
        return cast(State, self._group.state)

    def records(self) -> Iterator[StoredBlock]:
        """Every block that all ranks hold under one name, by ascending block id.

        Raises
        ------
        TierError
        """
        by_rank: list[dict[int, StoredBlock]] = [{} for _ in range(self._group.size)]
        is_more, is_first = True, True
        while is_more:
            pages = self._group.ask(Kind.RECORDS, b"first" if is_first else b"next", STORE_S, "list its disk's blocks")
            is_more, is_first = False, False
            for rank, page in enumerate(pages):
                try:
                    found = unpack_stored(page)
                except Broken as problem:
                    raise TierError(f"rank {rank} {problem}") from None
                by_rank[rank].update((each.block, each) for each in found)
                is_more = is_more or bool(found)
        for block, first in sorted(by_rank[0].items()):
            others = (found.get(block) for found in by_rank[1:])
            if all(other is not None and other.record == first.record for other in others):
                yield first

    def invalidate(self, blocks: NDArray[np.int32]) -> None:
        """Make slots hold nothing, at all ranks.

        Raises
        ------
        TierError
        """
        self._group.ask(Kind.INVALIDATE, pack_ids(blocks), STORE_S, "forget blocks of its disk")

    def purge(self, namespace: bytes) -> None:
        """Forget a namespace by its digest, in writing, at all ranks.

        Raises
        ------
        TierError
            A rank has not confirmed it; the error names it.
        """
        self._group.ask(Kind.PURGE, namespace, STORE_S, "purge its disk")

    def flush(self) -> bool:
        """Whether everything written so far is on the disks of all ranks."""
        try:
            return all(said == b"yes" for said in self._group.ask(Kind.FLUSH, b"", STORE_S, "flush its disk"))
        except PagedKVError:
            return False

    def stats(self) -> DiskStats:
        """The worst state, and the sums of counters, or the last known where a rank is silent."""
        try:
            told = [json.loads(said) for said in self._group.ask(Kind.STATS, b"", STATS_S, "count")]
            numbers = ("blocks_read", "blocks_written", "writes_refused", "hung", "progress_failures")
            sums = {name: sum(int(each[name]) for each in told) for name in numbers}
            reasons = {name: _added([each[name] for each in told]) for name in ("misses", "write_errors")}
            self._stats = DiskStats(state=self.state, **sums, **reasons)  # type: ignore[arg-type]
        except (PagedKVError, ValueError, KeyError, TypeError):
            pass
        known = self._stats
        return DiskStats(
            self.state, known.blocks_read, known.blocks_written, dict(known.misses), dict(known.write_errors),
            known.writes_refused, known.hung, known.progress_failures,
        )  # fmt: skip


def _added(counts: list[dict[str, int]]) -> dict[str, int]:
    """Sum of counters by name."""
    return {name: sum(int(each.get(name, 0)) for each in counts) for each in counts for name in each}
