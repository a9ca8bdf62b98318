"""Random walks of twins: C and Python make the same calls and get the same answers.

Block tables, hits, moves, handles and refusals are compared at each operation, and the whole state at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from pagedkv import c_api
from pagedkv.core import BlockTable, Placement
from pagedkv.errors import InvalidArgument, OutOfBlocks, StaleHandle
from tests.c_api.native import BLOCKS, NIL, OK, ROWS, STALE, STATE, Arrays, call, out, rows_of, tokens_of
from tests.core.helpers import sound, state, tiered

BLOCK, ROWS_AT_MOST = 4, 6
MOVE = c_api.struct("pagedkv_move")


class Twins:
    """One cache driven by Python and one driven by C, and the rows and owners that both have."""

    def __init__(self, seed: int) -> None:
        self.choose, self.seen = random.Random(seed), Counter[str]()
        tiers, policy = [((24,), "lru"), ((16, 24), "lru"), ((12, 12, 40), "arc"), ((16, 16, 32), "s3fifo")][seed % 4]
        self.placements: list[Placement] = []
        for _ in range(2):
            self.placements.append(tiered(BLOCK, tiers, policy=policy)[2])
        self.table, self.other = (BlockTable(placement, ROWS_AT_MOST) for placement in self.placements)
        self.placement, self.c = self.placements
        self.rows: list[int] = []
        self.prompts = [self.choose.choices(range(3), k=24) for _ in range(3)]

    def prompt(self) -> list[int]:
        start = self.choose.choice(self.prompts)[: self.choose.randint(1, 24)]
        return start + self.choose.choices(range(3), k=self.choose.randint(0, 6))

    def batch(self) -> list[int]:
        return self.choose.sample(self.rows, self.choose.randint(1, len(self.rows)))

    # ---- operations

    def open(self) -> None:
        tokens = self.prompt()
        given, row, cached = tokens_of(tokens), out(), out()
        code = call("table_open", self.other, 0, given, len(given), 1, NIL, row, cached)
        if len(self.rows) == ROWS_AT_MOST:
            assert code == ROWS
            return
        assert self.table.open(tokens) == (row[0], cached[0])
        self.seen["cached"] += int(cached[0])
        self.rows.append(int(row[0]))

    def request(self) -> None:
        """Own, make room, promote, settle, open."""
        if len(self.rows) == ROWS_AT_MOST:
            return
        tokens = self.prompt()
        most = (len(tokens) - 1) // BLOCK
        given, owner, found = tokens_of(tokens), out(), np.zeros(1, c_api.struct("pagedkv_found"))
        assert call("placement_acquire", self.c, 0, given, len(given), most, owner, found) == OK
        mine, num_blocks = self.placement.acquire(tokens, max_blocks=most)
        assert (mine, num_blocks) == (owner[0], found["num_blocks"][0])
        assert self.placement.blocked_by(mine) == found["blocked"][0]
        cold = int((self.placement.tiers_of(mine) > 0).sum())
        assert cold == found["num_cold"][0]
        self.seen["cold"] += cold
        self.path(mine)
        self.make_room(cold)
        started, needed, settled = out(np.int32), out(), out(np.int32)
        code = call("placement_promote", self.c, mine, started, needed)
        try:
            assert self.placement.promote(mine) == started[0]
            assert code == OK
        except OutOfBlocks:
            assert code == BLOCKS
            self.seen["promotions refused"] += 1
        self.move()
        assert call("placement_settle", self.c, mine, settled) == OK
        assert self.placement.settle(mine) == settled[0]
        row, cached = out(), out()
        if self.choose.random() < 0.1:
            assert call("placement_release", self.c, mine) == OK
            self.placement.release(mine)
            assert call("table_open", self.other, 0, given, len(given), 1, mine, row, cached) == STALE
            return
        assert call("table_open", self.other, 0, given, len(given), 1, mine, row, cached) == OK
        assert self.table.open(tokens, owner=mine) == (row[0], cached[0])
        self.rows.append(int(row[0]))

    def path(self, owner: int) -> None:
        blocks, tiers, num = out(np.int32, 32), out(np.uint8, 32), out()
        assert call("placement_path", self.c, owner, blocks, tiers, 32, num) == OK
        assert blocks[: num[0]].tolist() == self.placement.blocks_of(owner).tolist()
        assert tiers[: num[0]].tolist() == self.placement.tiers_of(owner).tolist()

    def match(self) -> None:
        tokens = self.prompt()
        given, blocks, tiers, num = tokens_of(tokens), out(np.int32, 32), out(np.uint8, 32), out()
        assert call("placement_match", self.c, 0, given, len(given), blocks, tiers, 32, num) == OK
        where, ids, _ = self.placement.match(tokens)
        assert (tiers[: num[0]].tolist(), blocks[: num[0]].tolist()) == (where.tolist(), ids.tolist())

    def make_room(self, blocks: int) -> None:
        for _ in range(4):
            missing = out()
            assert call("placement_reserve", self.c, 0, blocks, missing) == OK
            assert self.placement.reserve(blocks) == missing[0]
            if missing[0] == 0:
                return
            self.move()

    def move(self) -> None:
        """Take the moves, and complete transfers by number or by block; some fail."""
        moves, num = np.zeros(256, MOVE), out(np.int32)
        assert call("placement_take_moves", self.c, moves, 256, num) == OK
        mine, moves = self.placement.take_moves(), moves[: num[0]]
        names = ["transfer", "src_block", "dst_block", "depth", "src_tier", "dst_tier", "reason"]
        assert moves[names].tolist() == mine[names].tolist()
        if not len(mine):
            return
        ids = list(dict.fromkeys(mine["transfer"].tolist()))
        ends = {each: self.choose.choices([1, 0, 2], [8, 1, 1])[0] for each in ids}
        entries = mine["transfer"].tolist() if self.choose.random() < 0.5 else ids
        self.choose.shuffle(entries) if self.choose.random() < 0.3 else None
        outcomes = [ends[each] for each in entries]
        given, told = np.array(entries, np.int64), np.array(outcomes, np.uint8)
        assert call("placement_complete", self.c, given, told, len(given), None) == OK
        self.placement.complete(entries, [each == 1 for each in outcomes], [each != 2 for each in outcomes])
        self.seen.update({f"outcome {each}": outcomes.count(each) for each in (0, 1, 2)})
        flying = out()
        assert call("placement_in_flight", self.c, flying) == OK
        assert flying[0] == self.placement.num_in_flight == 0

    def step(self) -> None:
        batch = self.batch()
        rows, needed, ahead = rows_of(batch), out(), self.choose.choice([0, 0, 3])
        lens = None
        if self.choose.random() < 0.4:
            left = [info.num_tokens - info.num_computed for info in map(self.table.info, batch)]
            lens = tokens_of([self.choose.randint(0, most) for most in left])
        assert call("table_blocks_needed", self.other, rows, len(rows), lens, ahead, needed, None) == OK
        assert self.table.blocks_needed(batch, lens, ahead) == needed[0]
        if self.choose.random() < 0.8:
            self.make_room(int(needed[0]))
        arrays, asked = Arrays(len(batch), 32, 256, 32), 0
        code = call("table_step", self.other, rows, len(rows), lens, ahead, arrays.struct, None)
        try:
            step = self.table.step(batch, lens, ahead)
        except OutOfBlocks as error:
            self.seen["out of blocks"] += 1
            step, asked = None, error.asked
        if step is None:
            assert (code, arrays.num_new_blocks) == (BLOCKS, asked)
            return
        assert code == OK
        assert arrays.equal(step)
        self.seen["copies"] += len(step.copies)
        end = self.choose.random()
        if end < 0.15:
            assert call("table_cancel", self.other, rows, len(rows), arrays.number) == OK
            self.table.cancel(batch, step.number)
            return
        if end < 0.25:
            return
        every = self.choose.random() < 0.5
        given = None if every else arrays.copies
        assert call("table_copies_done", self.other, given, 0 if every else arrays.num_copies) == OK
        self.table.copies_done(None if every else step.copies)
        taken = out()
        assert call("table_commit", self.other, rows, len(rows), arrays.number, taken, None) == OK
        assert self.table.commit(batch, step.number) == taken[0]
        assert call("table_commit", self.other, rows, len(rows), arrays.number, taken, None) == STALE
        self.seen["committed"] += 1

    def append(self) -> None:
        batch = self.batch()
        tokens = tokens_of(self.choose.choices(range(3), k=len(batch)))
        assert call("table_append", self.other, rows_of(batch), tokens, len(batch), None) == OK
        self.table.append(batch, tokens)

    def extend(self) -> None:
        row, tokens = self.choose.choice(self.rows), tokens_of(self.choose.choices(range(3), k=5))
        assert call("table_extend", self.other, row, tokens, 5) == OK
        self.table.extend(row, tokens)

    def fork(self) -> None:
        row, count, forks = self.choose.choice(self.rows), self.choose.randint(1, 2), out(size=2)
        code = call("table_fork", self.other, row, count, forks)
        try:
            made = self.table.fork(row, count).tolist()
        except InvalidArgument:
            assert code in (ROWS, STATE)
            self.seen["forks refused"] += 1
            return
        assert (code, forks[:count].tolist()) == (OK, made)
        self.rows += made

    def truncate(self) -> None:
        row = self.choose.choice(self.rows)
        keep = self.choose.randint(0, self.table.info(row).num_tokens)
        assert call("table_truncate", self.other, row, keep) == OK
        self.table.truncate(row, keep)

    def look(self) -> None:
        row, info = self.choose.choice(self.rows), np.zeros(1, c_api.struct("pagedkv_row"))
        assert call("table_row", self.other, row, info) == OK
        assert info[0].tolist() == tuple(self.table.info(row))
        array, num = out(np.int32, 256), out()
        assert call("table_tokens", self.other, row, array, 256, num) == OK
        assert array[: num[0]].tolist() == self.table.tokens(row).tolist()
        assert call("table_blocks", self.other, row, array, 256, num) == OK
        assert array[: num[0]].tolist() == self.table.blocks(row).tolist()

    def release(self) -> None:
        row, keep = self.rows.pop(self.choose.randrange(len(self.rows))), self.choose.random() < 0.3
        assert call("table_release", self.other, row, int(keep)) == OK
        self.table.release(row, keep_remainder=keep)
        assert call("table_release", self.other, row, 0) == STALE
        with pytest.raises(StaleHandle):
            self.table.info(row)

    def run(self, operations: int) -> None:
        always: list[Any] = [self.open, self.request, self.request, self.match]
        with_rows = [self.step, self.step, self.step, self.append, self.append, self.extend, self.fork, self.truncate]
        for _ in range(operations):
            crowded = len(self.rows) == ROWS_AT_MOST and self.choose.random() < 0.5
            calls = [self.release] if crowded else always + (
                [*with_rows, self.look, self.release, self.release] if self.rows else [])  # fmt: skip
            self.choose.choice(calls)()
        self.same()
        while self.rows:
            self.release()
        self.same()

    def same(self) -> None:
        assert state((self.table, self.rows)) == state((self.other, self.rows))
        sound(self.table, self.other, *self.placements)


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_c_and_python_give_the_same_answers(first: int) -> None:
    for seed in range(first, first + 10):
        Twins(seed).run(150)


def test_the_walks_reach_hits_moves_copies_failures_and_refusals() -> None:
    seen = Counter[str]()
    for seed in range(12):
        twins = Twins(seed)
        twins.run(150)
        seen += twins.seen
    assert all(seen[kind] > 5 for kind in ("cached", "cold", "copies", "committed", "out of blocks", "forks refused"))
    assert all(seen[f"outcome {each}"] > 5 for each in (0, 1, 2))
