"""Many threads on one mover and on the disk tier itself, each served byte compared.

The mover works over device, host and disk memory.

Every thread owns a stripe of the blocks of each tier, as a caller that submits moves must, and knows what lies in them.

    python -m tests.reliability.tier_hammer OPERATIONS SEED [MOST_THREADS]
"""

from __future__ import annotations

import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ClosedError
from pagedkv.tiers import DeviceTier, DiskTier, HostTier, Mover, OpenTier, Record
from tests.reliability import child
from tests.reliability.api_world import MOVE
from tests.reliability.crowd import restless, together
from tests.reliability.proof import Tally
from tests.tiers.conftest import BLOCK_BYTES, BLOCK_TOKENS, FINGERPRINT, bytes_of, name_of

DEVICE, HOST, DISK = 0, 1, 2
STRIPE = 12  # blocks of a thread in each tier
CONTENTS = 60  # that a thread knows; no two threads know the same
OPERATIONS = 3000  # of a round, all threads together

content = lru_cache(maxsize=4096)(bytes_of)
name = lru_cache(maxsize=4096)(name_of)


class Wrong(AssertionError):
    """Bytes that were not stored, or none where there are some."""


@dataclass
class World:
    """The tiers and their mover.

    Attributes
    ----------
    named : the name of what lies in each block of the disk, or is on its way there.
    closing : whether a thread closes all of it, and moves may come to nothing.
    """

    device: DeviceTier
    host: HostTier
    disk: DiskTier
    threads: int
    named: dict[int, int] = field(default_factory=dict)
    closing: bool = False

    def __post_init__(self) -> None:
        tiers: dict[int, OpenTier] = {DEVICE: self.device, HOST: self.host, DISK: self.disk}
        self.mover = Mover(tiers, threads=self.threads, describe=self.describe, max_queued_blocks=16)

    def describe(self, moves: NDArray[np.void]) -> list[Record]:
        """Records for the mover."""
        blocks = np.where(moves["dst_tier"] == DISK, moves["dst_block"], moves["src_block"])
        return [name(self.named[block]) for block in blocks.tolist()]


@dataclass
class Owner:
    """One thread.

    `there[tier]` is the content of each of its blocks that holds anything it may read.
    """

    world: World
    choose: random.Random
    blocks: range
    there: dict[int, dict[int, int]] = field(default_factory=lambda: {DEVICE: {}, HOST: {}, DISK: {}})
    operations: int = 0
    hits: int = 0
    refused: int = 0
    given_up: int = 0
    ended: bool = False

    def work(self, operations: int) -> None:
        """Calls, until so many are made."""
        ways = [self.fill, self.move, self.ask, self.ask_for_another, self.forget, self.look]
        try:
            while self.operations < operations:
                self.choose.choices(ways, weights=[25, 50, 8, 6, 3, 3])[0]()
                self.operations += 1
        finally:
            self.ended = True

    def arena(self, tier: int) -> NDArray[np.uint8]:
        arena: NDArray[np.uint8] = (self.world.device if tier == DEVICE else self.world.host).arena
        return arena

    def some(self, blocks: list[int]) -> list[int]:
        return self.choose.sample(blocks, self.choose.randint(0, min(4, len(blocks))))

    def fill(self) -> None:
        """New contents in memory."""
        tier = self.choose.choice([DEVICE, HOST])
        for block in self.some(list(self.blocks)):
            self.there[tier][block] = number = CONTENTS * self.blocks.start + self.choose.randrange(CONTENTS)
            self.arena(tier)[block] = content(number)

    def move(self) -> None:
        """A batch of moves in all directions; some batches are given up."""
        rows, free = [], {tier: set(self.blocks) for tier in self.there}
        for transfer in range(self.choose.randint(1, 3)):
            src, dst = self.choose.sample([DEVICE, HOST, DISK], 2)
            sources = [block for block in self.there[src] if block in free[src]]
            for block in self.some(sources):
                target = self.choose.choice(list(self.blocks))
                if block in free[src] and target in free[dst]:
                    free[src].discard(block)
                    free[dst].discard(target)
                    rows.append((transfer, src, dst, block, target))
        numbers = [self.there[src][block] for _, src, _, block, _ in rows]
        for (_, _, dst, _, target), number in zip(rows, numbers):
            self.there[dst].pop(target, None)
            if dst == DISK:
                self.world.named[target] = number
        given_up = self.choose.random()
        ticket = self.world.mover.submit(np.array(rows, MOVE), deadline_s=0.0 if given_up < 0.1 else None)
        if given_up > 0.9:
            ticket.cancel()
        arrived = dict(zip(*(array.tolist() for array in ticket.results())))
        for (transfer, _, dst, _, target), number in zip(rows, numbers):
            if arrived[transfer]:
                self.there[dst][target] = number
                if dst != DISK:
                    self.compare(self.arena(dst)[target], number)
            elif 0.1 <= given_up <= 0.9 and not self.world.closing:
                raise Wrong(f"a move to tier {dst} failed without any reason")
            else:
                self.given_up += 1

    def compare(self, found: NDArray[np.uint8], number: int) -> None:
        if not np.array_equal(found, content(number)):
            raise Wrong(f"other bytes than those stored as number {number}")
        self.hits += 1

    def ask(self) -> None:
        """Read from the disk directly."""
        blocks = self.some(list(self.there[DISK]))
        numbers = [self.there[DISK][block] for block in blocks]
        rows = np.zeros((len(blocks), BLOCK_BYTES), np.uint8)
        served = self.world.disk.read(blocks, [name(n) for n in numbers], rows, range(len(blocks)))
        if not served.all():
            raise Wrong(f"one of the blocks {blocks} is not served any more")
        for row, number in zip(rows, numbers):
            self.compare(row, number)

    def ask_again(self) -> None:
        """Ask a store that was opened again: every content is in a block.

        It may be in the block of a move that was given up late.
        """
        numbers = {name(number).key: number for number in self.there[DISK].values()}
        found = [stored for stored in self.world.disk.records() if stored.record.key in numbers]
        rows = np.zeros((len(found), BLOCK_BYTES), np.uint8)
        blocks, names = [stored.block for stored in found], [stored.record for stored in found]
        served = self.world.disk.read(blocks, names, rows, range(len(blocks)))
        for record, row in zip(names, rows):
            self.compare(row, numbers[record.key])
        if not served.all() or len(found) < len(numbers):
            raise Wrong(f"of {len(numbers)} contents {len(found)} were found again, {served.sum()} are served")

    def ask_for_another(self) -> None:
        """A block under another name is a miss."""
        blocks = self.some(list(self.there[DISK]))
        names = [name(self.there[DISK][block] + 1) for block in blocks]
        rows = np.zeros((len(blocks), BLOCK_BYTES), np.uint8)
        if self.world.disk.read(blocks, names, rows, range(len(blocks))).any():
            raise Wrong(f"one of the blocks {blocks} is served under another name")
        self.refused += len(blocks)

    def forget(self) -> None:
        """Make slots hold nothing."""
        blocks = self.some(list(self.blocks))
        self.world.disk.invalidate(blocks)
        for block in blocks:
            self.there[DISK].pop(block, None)

    def look(self) -> None:
        """Counters."""
        self.world.mover.stats()
        self.world.disk.stats()


def open_disk(path: str, threads: int, read_path: str) -> DiskTier:
    """A tier with a stripe for each thread."""
    return DiskTier(
        path, threads * STRIPE, BLOCK_BYTES, fingerprint=FINGERPRINT, block_tokens=BLOCK_TOKENS, shards=4,
        segment_bytes=5 * 8192, read_path="mapping" if read_path == "mapping" else "pread",
    )  # fmt: skip


def one_round(path: str, operations: int, seed: int, most_threads: int, tally: Tally) -> None:
    """One store from opening to a second opening, at which everything must be served still."""
    choose = random.Random(seed)
    threads, read_path = choose.randint(2, most_threads), choose.choice(["pread", "mapping"])
    where = f"round {seed}, {threads} threads, {read_path}"
    size = threads * STRIPE, BLOCK_BYTES
    world = World(DeviceTier(*size), HostTier(*size), open_disk(path, threads, read_path), choose.randint(1, 3))
    owners = [Owner(world, random.Random(seed * 100 + k), range(k * STRIPE, (k + 1) * STRIPE)) for k in range(threads)]
    closing = choose.random() < 0.2
    jobs: list[Callable[[], object]] = [partial(owner.work, max(1, operations // threads)) for owner in owners]
    if closing:
        until = choose.randrange(1, 400)  # or when all have ended before
        jobs.append(partial(close_after, world, owners, until, how=choose.choice(["finish", "cancel", "disk first"])))
    for error in together(jobs):
        if not (closing and isinstance(error, ClosedError)):
            tally.fail(f"{where}: {''.join(traceback.format_exception(error)[-4:])}")
    world.mover.close()
    world.disk.close()
    stats = world.disk.stats()
    if stats.write_errors or stats.misses["io_error"] or stats.misses["short"]:
        tally.fail(f"{where}: a file was closed under a call: {stats}")
    if not closing:  # a thread that was shut out does not know what became of its last moves
        with open_disk(path, threads, read_path) as world.disk:
            for error in together([owner.ask_again for owner in owners]):
                tally.fail(f"{where}, opened again: {error}")
    tally.add("closed under the threads" if closing else "opened again")
    for owner in owners:
        tally.count += owner.operations
        tally.hits += owner.hits
        tally.add("refused under another name", owner.refused)
        tally.add("moves given up", owner.given_up)


def close_after(world: World, owners: list[Owner], operations: int, *, how: str) -> None:
    """Close the mover and the disk once the threads are in the middle of their work."""
    while sum(owner.operations for owner in owners) < operations and not all(owner.ended for owner in owners):
        world.mover.stats()
    world.closing = True
    if how == "disk first":  # under the mover's calls
        world.disk.close()
    world.mover.close(cancel=how == "cancel")
    world.disk.close()


def main(operations: int, seed: int, most_threads: int = 16) -> Tally:
    """Rounds until so many calls are made."""
    tally, number = Tally(), 0
    with restless():
        while tally.count < operations and tally.wrong < 10:
            before = tally.count
            with tempfile.TemporaryDirectory() as folder:
                one_round(f"{folder}/kv", min(operations, OPERATIONS), seed * 1_000_003 + number, most_threads, tally)
            number += 1
            child.done(tally.count - before)
    return tally


if __name__ == "__main__":
    child.answer(main(*map(int, sys.argv[1:])))
