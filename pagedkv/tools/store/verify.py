"""``pagedkv verify``: every header, payload sum, chain key and parent.

Repairs nothing.

Content that no tier wrote, or that makes a tier refuse the directory, is wrong. Blocks that are merely of no use (a
block whose beginning has gone, an older copy of a block, a block of a purged namespace) come from ordinary work and are
counted apart. While another process has the store open, a slot that changes between two looks is neither.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from pagedkv.spec.sizes import format_size
from pagedkv.tiers.disk.settle import Settlement
from pagedkv.tools.store.reader import Problem, StoreReader
from pagedkv.tools.store.scan import DAMAGED, USELESS, Batch, ChainBuilder, Tick, batches, look_at, settled
from pagedkv.tools.store.show import counted

BATCH_BYTES = 64 << 20  # of slots read and checked at a time
SHOWN = 20  # slots listed per reason for people; JSON has all


@dataclass
class Verdict:
    """The findings of the check.

    Attributes
    ----------
    path : the directory.
    num_slots : slots of the store; those that are lost with their file are among the problems, not listed.
    blocks, num_bytes : live blocks whose payload was checked, and their bytes; of groups of layers, pages of every one.
    num_groups : of layers; 0 of a store that keeps all tokens of every layer.
    wrong : by reason, the slots: `scan.DAMAGED`, ``"payload"``, ``"wrong_key"``.
    useless : by reason, the slots: ``"orphan"``, ``"doubled"`` and `scan.USELESS`.
    problems : of the directory as a whole.
    changed : slots that another process changed while they were checked.
    chains_checked : False without the right KEY.
    repaired : the repair's report, in words; None without one.

    A reason of a group's slots is followed by the group, ``"payload of group 1"``; group 0 is not named.
    """

    path: str
    num_slots: int = 0
    blocks: int = 0
    num_bytes: int = 0
    num_groups: int = 0
    wrong: dict[str, list[int]] = field(default_factory=dict)
    useless: dict[str, list[int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    changed: int = 0
    chains_checked: bool = False
    repaired: list[str] | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong and not self.problems

    def reasons_of(self, group: int) -> dict[int, str]:
        """By slot of a group, why it is wrong or useless."""
        listed = [(reason, slots) for found in (self.wrong, self.useless) for reason, slots in found.items()]
        return {slot: reason for reason, slots in listed if reason == named(reason.split()[0], group) for slot in slots}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; ``num_groups`` where there are groups of layers."""
        data = {"ok": self.ok, **asdict(self)}
        if not self.num_groups:
            del data["num_groups"]
        return data

    def print(self, file: TextIO) -> None:
        """For people."""
        slots = counted(self.num_slots, "slot")
        blocks = counted(self.blocks, "page" if self.num_groups else "block")
        of = f" of {self.num_groups} groups of layers" if self.num_groups else ""
        print(f"{self.path}: {slots}, {blocks}{of} ({format_size(self.num_bytes)})", file=file)
        for problem in self.problems:
            print(f"wrong    {problem.reason:10} {problem.detail}", file=file)
        for said, found in (("wrong", self.wrong), ("useless", self.useless)):
            for reason, numbers in found.items():
                print(f"{said:8} {reason:10} {_listed(numbers)}", file=file)
        if self.changed:
            slots = counted(self.changed, "slot")
            print(f"changed  {slots} while being read: another process works on the store", file=file)
        if not self.chains_checked:
            print("skipped  chain keys and parents: they need the right KEY", file=file)
        for line in self.repaired or ():
            print(f"repair   {line}", file=file)
        is_ = "is" if self.repaired is None else "was"
        print(f"{'nothing' if self.ok else 'something'} {is_} wrong", file=file)


def verify(reader: StoreReader, tick: Tick) -> Verdict:
    """Check everything; `tick` is called with the bytes read.

    Of a store for groups of layers the chains are those of group 0. The other groups' pages are of use where the block
    of group 0 is whole. Whether a prefix can go on from its last block is not judged here.
    """
    verdict = Verdict(str(reader.path), reader.form.geometry.num_blocks, problems=list(reader.problems))
    verdict.num_groups = len(reader.superblock.lanes)
    extents, spine = settled(reader, tick), None
    for view in reader.lanes():
        chains = ChainBuilder(reader.secret) if reader.secret is not None else None
        _look_through(view, extents, verdict, chains, tick)
        if chains is None:
            continue
        verdict.chains_checked = True
        found = chains.result() if spine is None else chains.pages(spine)
        spine = spine or found
        for reason, slots in (("orphan", found.orphans), ("doubled", found.doubled)):
            if slots:
                verdict.useless[named(reason, view.lane)] = slots
        if found.wrong_key:
            verdict.wrong[named("wrong_key", view.lane)] = sorted(found.wrong_key)
    return verdict


def named(reason: str, group: int) -> str:
    """A reason with its group; see `Verdict`."""
    return f"{reason} of group {group}" if group else reason


def _look_through(
    reader: StoreReader, extents: Settlement | None, verdict: Verdict, chains: ChainBuilder | None, tick: Tick
) -> None:
    """Check every slot of one size."""
    g = reader.form.geometry
    step = min(max(1, BATCH_BYTES // g.slot_bytes), g.num_blocks, g.segment_slots)
    rows = np.zeros((step, g.block_bytes), np.uint8)
    wrong: dict[int, str] = {}
    for batch in batches(reader, extents, step):
        verdict.blocks += len(batch.records)
        verdict.num_bytes += len(batch.records) * g.block_bytes
        reasons = {i: state for i, state in enumerate(batch.states) if state in DAMAGED}
        reasons.update(_wrong_payloads(reader, batch, rows))
        doubted = np.array(sorted(reasons), np.intp)
        again = look_at(reader, extents, batch.slots[doubted]) if doubted.size else batch
        for place, i in enumerate(doubted.tolist()):
            if reader.open_by is not None and (again.headers[place] != batch.headers[i]).any():
                verdict.changed += 1
            else:
                wrong[int(batch.slots[i])] = reasons[i]
        for i, record in batch.records.items():
            if chains is not None and i not in reasons:
                chains.add(int(batch.slots[i]), int(batch.generations[i]), record)
        for i, state in enumerate(batch.states):
            if state in USELESS:
                verdict.useless.setdefault(named(state, reader.lane), []).append(int(batch.slots[i]))
        reader.forget_cached(batch.slots)
        tick(batch.headers.nbytes + len(batch.records) * g.block_bytes)
    for slot, reason in sorted(wrong.items()):
        verdict.wrong.setdefault(named(reason, reader.lane), []).append(slot)


def _wrong_payloads(reader: StoreReader, batch: Batch, rows: NDArray[np.uint8]) -> dict[int, str]:
    """Reasons why live blocks of a batch would be misses, by index into the batch."""
    form, g = reader.form, reader.form.geometry
    places = np.array(sorted(batch.records), np.intp)
    if not places.size:
        return {}
    slots = batch.slots[places]
    names = [(int(batch.generations[i]), batch.records[i]) for i in places.tolist()]
    seeds = np.array([form.seed(*name) for name in names], np.uint64)
    headers, outcomes, sums = reader.slots(slots, rows, seeds)
    found: dict[int, str] = {}
    for place, i in enumerate(places.tolist()):
        reason: str | None
        if outcomes[place] < 0:
            reason = "io_error"
        elif outcomes[place] != g.header_bytes + g.block_bytes:
            reason = "short"
        else:
            reason = form.mismatch(int(slots[place]), *names[place], memoryview(headers[place]), sums[place])
        if reason is not None:
            found[i] = reason
    return found


def total_bytes(reader: StoreReader) -> int:
    """Bytes that `verify` reads at most."""
    sizes = [view.form.geometry for view in reader.lanes()]
    return header_bytes(reader) + sum(g.num_blocks * g.block_bytes for g in sizes)


def header_bytes(reader: StoreReader) -> int:
    """Bytes of headers that a tool reads at most; those of groups of layers are read twice."""
    sizes = [view.form.geometry for view in reader.lanes()]
    return min(len(sizes), 2) * sum(g.num_blocks * g.header_bytes for g in sizes)


def _listed(slots: list[int]) -> str:
    shown = ", ".join(map(str, slots[:SHOWN]))
    more = f" and {len(slots) - SHOWN:,} more" if len(slots) > SHOWN else ""
    return f"{len(slots):,} slots: {shown}{more}" if len(slots) > 1 else f"slot {shown}"
