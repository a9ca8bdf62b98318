"""``pagedkv inspect``: the content of a cache directory, from the headers alone.

Reads no payload and changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import numpy as np

from pagedkv._core.no_token import NO_TOKEN
from pagedkv.spec.sizes import format_size
from pagedkv.tiers.disk.file_system import file_system_of
from pagedkv.tiers.disk.format import Geometry
from pagedkv.tiers.disk.superblock import Superblock
from pagedkv.tools.store.reader import Problem, StoreReader
from pagedkv.tools.store.scan import DAMAGED, LOST, ORDINARY, TAKEN, TORN, ChainBuilder, Chains, Tick, batches, settled
from pagedkv.tools.store.show import age, counted, print_table


@dataclass
class NamespaceContent:
    """The live blocks of one namespace; times are Unix seconds of the oldest and newest write."""

    blocks: int
    tokens: int
    oldest: int
    newest: int


@dataclass(frozen=True)
class Survey:
    """The findings.

    Attributes
    ----------
    path, superblock, key, open_by, problems : see `StoreReader`.
    states : slots by state, of `ORDINARY`, `DAMAGED` and `LOST`; every one is there that such a store can have.
    namespaces : by digest
    chains : None without the right KEY.
    file_system : its type, "" if unknown.
    file_bytes, allocated_bytes, free_bytes : sizes on disk.
    learned : kinds of namespaces of which an eviction policy's tables lie here.
    pages : of each short group, different live ones.
    """

    path: str
    superblock: Superblock
    key: str
    open_by: int | None
    problems: list[Problem]
    states: dict[str, int]
    namespaces: dict[bytes, NamespaceContent]
    chains: Chains | None
    file_system: str
    file_bytes: int
    allocated_bytes: int
    free_bytes: int
    learned: list[str]
    pages: list[int]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON. Digests are hexadecimal, times Unix seconds."""
        state, g = self.superblock, self.superblock.geometry
        chains = self.chains
        return {
            "path": self.path,
            "superblock": {
                "format": state.major,
                "uuid": state.uuid.hex(),
                "fingerprint": state.fingerprint.hex(),
                "created_at": state.created_at,
                "clean": state.clean,
                "epoch": state.epoch,
                "next_generation": state.next_generation,
                "geometry": {name: size for name, size in asdict(g).items() if size},
                "purges": [{"namespace": digest.hex(), "before": barrier} for digest, barrier in state.purges],
            },
            "key": self.key,
            "open_by": self.open_by,
            "problems": [asdict(problem) for problem in self.problems],
            "slots": self.states,
            "namespaces": {
                digest.hex(): {
                    "blocks": found.blocks,
                    "bytes": found.blocks * g.block_bytes,
                    "tokens": found.tokens,
                    "oldest": found.oldest,
                    "newest": found.newest,
                }
                for digest, found in self._by_size()
            },
            "chains": chains and {
                "whole_blocks": chains.whole,
                "prefixes": chains.leaves,
                "orphans": len(chains.orphans),
                "doubled": len(chains.doubled),
                "wrong_key": len(chains.wrong_key),
            },
            "disk": {
                "file_system": self.file_system,
                "bytes": self.file_bytes,
                "allocated_bytes": self.allocated_bytes,
                "free_bytes": self.free_bytes,
            },
            "learned": self.learned,
            **({"groups": [asdict(lane) for lane in state.lanes], "pages": self.pages} if state.lanes else {}),
        }  # fmt: skip

    def print(self, file: TextIO) -> None:
        """For people."""
        now = time.time()
        state, g = self.superblock, self.superblock.geometry
        lines = [
            ("cache directory", self.path),
            ("format", f"{state.major}, made {age(now - state.created_at)} ago, uuid {state.uuid.hex()}"),
            ("fingerprint", state.fingerprint.hex()),
            ("sizes", _sizes(g)),
            *((f"group {n}", str(lane) + self._pages_of(n)) for n, lane in enumerate(state.lanes)),
            ("state", self._state()),
            (
                "slots of group 0" if state.lanes else "slots",
                ", ".join(f"{count:,} {name}" for name, count in self.states.items() if count),
            ),
        ]
        if self.chains is not None:
            c = self.chains
            found = [f"{counted(c.whole, 'block')} in {counted(c.leaves, 'whole prefix', 'whole prefixes')}"]
            found += [f"{len(slots):,} {name}" for name, slots in _odd(c) if slots]
            lines.append(("chains", ", ".join(found)))
        else:
            lines.append(("chains", f"not checked, {self.key} KEY"))
        if state.purges:
            lines.append(("purges on record", f"{len(state.purges):,}"))
        where = f" on {self.file_system}" if self.file_system else ""
        sizes = [format_size(size) for size in (self.file_bytes, self.allocated_bytes, self.free_bytes)]
        lines.append(("on disk", f"{sizes[0]} ({sizes[1]} allocated){where}, {sizes[2]} free"))
        if self.learned:
            lines.append(("learned tables", ", ".join(self.learned)))
        lines += [("problem", problem.detail) for problem in self.problems]
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            print(f"{name.ljust(width)}  {text}", file=file)
        if self.namespaces:
            rows = [
                [
                    digest.hex(), f"{n.blocks:,}", format_size(n.blocks * g.block_bytes),
                    f"{n.tokens:,}", age(now - n.oldest), age(now - n.newest),
                ]
                for digest, n in self._by_size()
            ]  # fmt: skip
            print(file=file)
            size = "bytes of group 0" if state.lanes else "bytes"
            print_table(["namespace", "blocks", size, "tokens", "oldest", "newest"], rows, file)

    def _by_size(self) -> list[tuple[bytes, NamespaceContent]]:
        return sorted(self.namespaces.items(), key=lambda item: (-item[1].blocks, item[0]))

    def _pages_of(self, group: int) -> str:
        return f": {counted(self.pages[group - 1], 'live page')}" if group else ""

    def _state(self) -> str:
        epoch = f"epoch {self.superblock.epoch}"
        if self.open_by is not None:
            return f"open by process {self.open_by}, so counts may change while they are read; {epoch}"
        closed = "closed properly" if self.superblock.clean else "not closed properly, or open in another container"
        return f"{closed}; {epoch}"


def survey(reader: StoreReader, tick: Tick) -> Survey:
    """Read every header; `tick` is called with the bytes read."""
    extents, pages = settled(reader, tick), []
    for view in reader.lanes():
        if view.lane:
            pages.append(len({each.key for batch in batches(view, extents) for each in batch.records.values()}))
            tick(view.form.geometry.num_blocks * view.form.geometry.header_bytes)
    states: Counter[str] = Counter()
    namespaces: dict[bytes, NamespaceContent] = {}
    chains = ChainBuilder(reader.secret) if reader.secret is not None else None
    for batch in batches(reader, extents):
        states.update(batch.states)
        for i, record in batch.records.items():
            written = int(batch.written[i])
            found = namespaces.setdefault(record.namespace, NamespaceContent(0, 0, written, written))
            found.blocks += 1
            found.tokens += int(np.count_nonzero(record.tokens != NO_TOKEN))  # a last block may be partly filled
            found.oldest, found.newest = min(found.oldest, written), max(found.newest, written)
            if chains is not None:
                chains.add(int(batch.slots[i]), int(batch.generations[i]), record)
        tick(batch.headers.nbytes)
    states[LOST] = reader.superblock.geometry.num_blocks - int(reader.readable.sum())
    file_bytes, allocated_bytes = reader.disk_bytes()
    return Survey(
        path=str(reader.path),
        superblock=reader.superblock,
        key=reader.key,
        open_by=reader.open_by,
        problems=reader.problems,
        states={
            name: states[name]
            for name in (*ORDINARY, *DAMAGED, LOST)
            if reader.superblock.lanes or name not in (TAKEN, TORN)
        },
        namespaces=namespaces,
        chains=chains.result() if chains is not None else None,
        file_system=file_system_of(reader.fd),
        file_bytes=file_bytes,
        allocated_bytes=allocated_bytes,
        free_bytes=reader.free_bytes(),
        learned=reader.learned(),
        pages=pages,
    )


def _sizes(g: Geometry) -> str:
    block = f"{format_size(g.block_bytes)} and {g.block_tokens} tokens"
    slots, sums, files = counted(g.num_blocks, "slot"), counted(g.shards, "sum"), counted(g.num_segments, "file")
    return f"{slots} of {block}, {sums} each, in {files}"


def _odd(c: Chains) -> list[tuple[str, list[int]]]:
    return [("orphaned", c.orphans), ("doubled", c.doubled), ("with a wrong key", c.wrong_key)]
