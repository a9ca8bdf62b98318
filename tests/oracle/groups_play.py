"""The core over groups of layers under random requests, beside the model or alone.

Every position that a layer reads is looked up in the step's tables, and the page there must hold the KV of the row's
own tokens. Beside the model hits, shortages and pages in use must be the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from pagedkv.core import BlockTable, ExtentPool, GroupArrays, Placement, RadixTree, StepArrays
from pagedkv.errors import OutOfBlocks
from pagedkv.spec.layers import Attention
from tests.oracle.groups_model import Block, GroupsModel, NoRoom, Row, reads

FULL = Attention(1, 1)


def window(tokens: int) -> Attention:
    return Attention(1, 1, window=tokens)


def chunk(tokens: int) -> Attention:
    return Attention(1, 1, chunk=tokens)


MIXES: dict[str, list[Attention]] = {
    "window 5": [FULL, window(5)], "window 2": [FULL, window(2)], "window 16": [FULL, window(16)],
    "windows 9 and 2": [FULL, window(9), window(2)], "chunk 6 and window 4": [FULL, chunk(6), window(4)],
    "windows 3 and 7, chunk 12": [FULL, window(3), window(7), chunk(12)], "a window of itself": [FULL, window(1)],
    "chunk 6": [FULL, chunk(6)], "chunk 12": [FULL, chunk(12)], "chunks 4 and 12": [FULL, chunk(4), chunk(12)],
}  # fmt: skip


class PointsAlone(GroupsModel):
    """The model with the core's choice.

    Also a point at which a row ends may go, for the row holds its pages itself.
    """

    def _may_go(self) -> list[Block]:
        return [block for block in self.blocks() if block.used]


@dataclass
class Running:
    """A row of the core, with the tokens that it should have, and the model's row."""

    handle: int
    tokens: list[int]
    namespace: int
    twin: Row | None = None


@dataclass
class Core:
    """The core, and the content of its pages.

    Attributes
    ----------
    content : by group and page, of each offset the namespace and the tokens up to it.
    """

    layers: list[Attention]
    per_extent: Sequence[int]
    size: int
    extents: int
    point_every: int = 0
    content: list[dict[int, dict[int, tuple[int, ...]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared = ExtentPool(self.extents, self.per_extent)
        groups = [
            (pool, -(-((layer.window or 1) - 1) // self.size), (layer.chunk or 0) // self.size)
            for pool, layer in zip(self.shared.pools[1:], self.layers[1:], strict=True)
        ]
        self.placement = Placement(
            RadixTree(self.size), [self.shared.pools[0]], groups=groups, point_every=self.point_every
        )
        self.table = BlockTable(self.placement, 16)
        self.content = [{} for _ in self.layers]

    def computed(self, row: Running) -> int:
        return self.table.info(row.handle).num_computed

    def step(self, rows: list[Running], q_lens: list[int], lookahead: int = 0) -> None:
        """One step up to its commit; each read is checked.

        Raises
        ------
        OutOfBlocks
        """
        arrays = self.table.step([row.handle for row in rows], q_lens, lookahead)
        parts: list[StepArrays | GroupArrays] = [arrays, *arrays.groups]
        for group, part in enumerate(parts):
            for source, target in part.copies.tolist():
                self.content[group][target] = dict(self.content[group].get(source, {}))
            if len(part.copies):
                self.table.copies_done(part.copies, group)
        for number, row in enumerate(rows):
            for group, layer in enumerate(self.layers):
                self._compute(arrays, parts[group], group, layer, number, row)

    def _compute(
        self, arrays: StepArrays, part: StepArrays | GroupArrays, group: int, layer: Attention, number: int,
        row: Running,
    ) -> None:  # fmt: skip
        at, end = (int(bound) for bound in arrays.q_indptr[number : number + 2])
        last, size, content = int(arrays.seq_lens[number]), self.size, self.content[group]
        begin, first = last - int(part.seq_lens[number]), last - (end - at)
        table = part.block_tables[number].tolist()
        assert begin % size == 0 <= begin
        for token in range(first, last):
            page, offset = divmod(int(part.slot_mapping[at + token - first]), size)
            assert (page, offset) == (table[(token - begin) // size], token % size), "a slot beside the table"
            for position in reads(layer, token):
                if position < token:
                    assert position >= begin, f"{layer} at {token} reads a hole at {position}"
                    known = content.get(table[(position - begin) // size], {}).get(position % size)
                    wanted = (row.namespace, *row.tokens[: position + 1])
                    assert known == wanted, f"{layer} at {token} reads KV of other tokens at {position}"
            there = content.setdefault(page, {})
            for old in [old for old in there if old >= offset]:
                del there[old]
            there[offset] = (row.namespace, *row.tokens[: token + 1])

    def check(self) -> None:
        """The core's own equations."""
        self.placement.check_integrity()
        self.table.check_integrity()

    def in_use(self) -> int:
        """Blocks and pages that anything holds."""
        counts = [pool.counts() for pool in self.shared.pools]
        return sum(count["live"] + count["cached"] for count in counts)

    def end(self, rows: list[Running]) -> None:
        """Release all, evict all: nothing is left."""
        for row in rows:
            self.table.release(row.handle)
        self.check()
        self.placement.drop_namespace(0)
        self.check()
        assert self.shared.num_free == self.extents, "pages without a holder"


def prompt_of(rng: Random, history: list[list[int]]) -> list[int]:
    base = rng.choice(history)
    return base[: rng.randrange(len(base) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(1, 12))]


def sizes_of(layers: Sequence[Attention]) -> list[int]:
    return [size for size in (1, 2, 3) if not any((layer.chunk or 6) % size for layer in layers)]


def beside_the_model(layers: list[Attention], seed: int, moves: int, check_every: int = 1) -> tuple[int, int]:
    """The model's moves on both; tokens asked for and hit."""
    rng = Random(seed)
    size, budget = rng.choice(sizes_of(layers)), rng.randrange(20, 100)
    core = Core(layers, [1] * len(layers), size, budget)
    model = PointsAlone(layers, [1] * len(layers), size, budget)
    history: list[list[int]] = [[]]
    rows: list[Running] = []
    asked = hit = 0
    for move in range(moves):
        draw = rng.random()
        row = rng.choice(rows) if rows else None
        if draw < 0.3 and len(rows) < 3:
            prompt = prompt_of(rng, history)
            handle, cached = core.table.open(np.array(prompt, np.int32))
            twin = model.open(prompt)
            assert twin.num_computed == cached, "another hit"
            rows.append(Running(handle, list(prompt), 0, twin))
            asked, hit = asked + len(prompt), hit + cached
        elif row is not None:
            assert row.twin is not None
            over = draw >= 0.85 or not _both_step(core, model, row, row.twin, rng)
            if over:
                history = [*history[-8:], row.tokens[: core.computed(row)]]
                core.table.release(row.handle)
                model.release(row.twin)
                rows.remove(row)
        if move % check_every == 0:
            core.check()
            model.check()
            assert core.in_use() == model.bytes, "other pages"
    assert core.placement.stats()["lagging"] * size == model.lagging_tokens
    core.end(rows)
    return asked, hit


def _both_step(core: Core, model: PointsAlone, row: Running, twin: Row, rng: Random) -> bool:
    if core.computed(row) == len(row.tokens):
        row.tokens.append(rng.randrange(2))
        core.table.append([row.handle], row.tokens[-1:])
        twin.tokens.append(row.tokens[-1])
    count = rng.randrange(1, len(row.tokens) - core.computed(row) + 1)
    fits = there_is_room = True
    try:
        core.step([row], [count])
        core.table.commit([row.handle])
    except OutOfBlocks:
        fits = False
    try:
        model.step(twin, count)
    except NoRoom:
        there_is_room = False
    assert fits == there_is_room, "room in one of both alone"
    return fits


def alone(layers: list[Attention], seed: int, moves: int, check_every: int = 1) -> tuple[int, int]:
    """All moves that the core knows, reads and equations checked; tokens asked for and hit."""
    rng = Random(seed)
    size = rng.choice(sizes_of(layers))
    core = Core(layers, [rng.randrange(1, 4) for _ in layers], size, rng.randrange(12, 80), rng.choice((0, 0, 1, 5)))
    names = [core.placement.tree.namespace(name) for name in (b"", b"other")]
    history: list[list[int]] = [[]]
    rows: list[Running] = []
    owners: list[int] = []
    asked = hit = 0
    for move in range(moves):
        draw = rng.random()
        row = rng.choice(rows) if rows else None
        if draw < 0.2 and len(rows) < 5:
            prompt, name = prompt_of(rng, history), rng.choice(names)
            handle, cached = core.table.open(np.array(prompt, np.int32), name)
            rows.append(Running(handle, list(prompt), name))
            asked, hit = asked + len(prompt), hit + cached
            if rng.random() < 0.2:
                core.table.retain(handle, rng.randrange(101))
        elif draw < 0.24:
            owners.append(core.placement.acquire(np.array(prompt_of(rng, history), np.int32), rng.choice(names))[0])
        elif draw < 0.28 and owners:
            owner = owners.pop(rng.randrange(len(owners)))
            if rng.random() < 0.3:
                core.placement.shorten(owner, rng.randrange(6))
            core.placement.release(owner)
        elif draw < 0.285:
            core.placement.set_quota(names[1], rng.choice((2, 8, None)))
        elif draw < 0.33 and row is not None and len(rows) < 6:
            rows += [Running(int(one), list(row.tokens), row.namespace) for one in core.table.fork(row.handle)]
        elif draw < 0.4 and row is not None:
            row.tokens = row.tokens[: rng.randrange(max(0, len(row.tokens) - rng.choice((3, 30))), len(row.tokens) + 1)]
            core.table.truncate(row.handle, len(row.tokens))
        elif draw < 0.48 and row is not None:
            history = [*history[-8:], row.tokens[: core.computed(row)]]
            core.table.release(row.handle)
            rows.remove(row)
        elif rows:
            _step_some(core, rng, rng.sample(rows, rng.randrange(1, len(rows) + 1)))
        if move % check_every == 0:
            core.check()
    for owner in owners:
        core.placement.release(owner)
    for row in [row for row in rows if row.namespace == names[1]]:
        core.table.release(row.handle)
        rows.remove(row)
    core.placement.drop_namespace(names[1])
    core.end(rows)
    return asked, hit


def _step_some(core: Core, rng: Random, rows: list[Running]) -> None:
    for row in rows:
        if core.computed(row) == len(row.tokens):
            drafts = [rng.randrange(2) for _ in range(rng.choice((1, 1, 3)))]
            row.tokens += drafts
            core.table.extend(row.handle, drafts)
    counts = [rng.randrange(1, len(row.tokens) - core.computed(row) + 1) for row in rows]
    handles = [row.handle for row in rows]
    try:
        core.step(rows, counts, rng.choice((0, 0, 1, 4)))
    except OutOfBlocks:
        return
    if rng.random() < 0.1:
        core.table.cancel(handles)
    else:
        core.table.commit(handles)
