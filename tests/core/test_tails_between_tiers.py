"""Points and their tails in two and three tiers, with the content of every page."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv._core.dispatch import Dispatch
from pagedkv.core import BlockTable, ExtentPool, Placement, RadixTree
from tests.slices import one_in

SIZE = 2
DEVICE, HOST = 0, 1


class Core:
    """A core over several tiers, whose pages' contents are prefixes."""

    def __init__(
        self,
        device: int = 24,
        *colder: int,
        window: int = 2,
        chunk: int = 0,
        per_extent: tuple[int, int] = (1, 1),
        point_every: int = 0,
        write: str = "",
    ) -> None:
        self.pools = [ExtentPool(size, per_extent).pools for size in (device, *(colder or (40,)))]
        self.placement = Placement(
            RadixTree(SIZE, len(self.pools), keep_names=True),
            [tier[0] for tier in self.pools],
            closed=(*(False,) * (len(self.pools) - 1), bool(write)),
            write=write or "never",
            groups=[(tuple(tier[1] for tier in self.pools), window, chunk)],
            point_every=point_every,
            event_words=1 << 18,
        )
        self.told: dict[tuple[str, int, int], int] = {}  # kind, tier and hash of the last block -> blocks before it
        self.table = BlockTable(self.placement, 16)
        self.content: dict[tuple[int, int, int], tuple[int, ...]] = {}  # (tier, group, id) -> the prefix up to its end
        self.sizes, self.window, self.chunk = (device, *(colder or (40,))), window, chunk
        self.per_extent, self.closed = per_extent, len(self.pools) - 1 if write else -1
        self.stored: dict[tuple[int, int], tuple[int, ...]] = {}  # of the closed tier, (group, id) -> the same
        self.moves = np.empty(0, self.placement.take_moves().dtype)
        self.moved = [0, 0]  # blocks of each group, upwards

    # ---- moves

    def take(self) -> None:
        self.moves = np.concatenate([self.moves, self.placement.take_moves()])

    def end(self, number: int, ok: bool = True, tried: bool = True) -> None:
        """Carry out one transfer."""
        chosen = self.moves["transfer"] == number
        for move in self.moves[chosen]:
            src = int(move["src_tier"]), int(move["lane"]), int(move["src_block"])
            dst = int(move["dst_tier"]), int(move["lane"]), int(move["dst_block"])
            if ok:
                self.content[dst] = self.content[src]
                if dst[0] == self.closed:
                    self.store(dst[1], dst[2], self.content[src])
                self.moved[move["lane"]] += move["dst_tier"] == DEVICE
        self.moves = self.moves[~chosen]
        self.placement.complete([number], [ok], [tried])

    def store(self, group: int, page: int, prefix: tuple[int, ...]) -> None:
        """Write a page where what other groups had in its extent is lost."""
        extent = page // self.per_extent[group]
        for other, there in list(self.stored):
            if other != group and there // self.per_extent[other] == extent:
                del self.stored[other, there]
        self.stored[group, page] = prefix

    def settle(self) -> None:
        """Carry out all that is decided."""
        self.take()
        while self.moves.size:
            self.end(int(self.moves["transfer"][0]))
            self.take()

    # ---- requests

    def lift(self, tokens: Sequence[int]) -> tuple[int, int]:
        """An owner of the longest prefix, all of it on the device; and its blocks."""
        owner, _ = self.placement.acquire(np.array(tokens, np.int32), max_blocks=(len(tokens) - 1) // SIZE)
        while (cold := self.placement.cold_pages(owner)).any():
            if self.placement.reserve_pages(cold):
                self.placement.promote(owner)
                self.settle()
                break
            self.take()
            if not self.moves.size:
                break
            self.settle()
        return owner, self.placement.settle(owner)

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        owner, blocks = self.lift(tokens)
        row, cached = self.table.open(np.array(tokens, np.int32), owner=owner)
        assert cached == blocks * SIZE
        return row, cached

    def step(self, row: int, count: int) -> bool:
        while not hasattr(step := self.table.try_step([row], [count]), "slot_mapping"):
            if not self.placement.reserve_pages(step):
                self.take()
                if not self.moves.size:
                    return False
                self.settle()
        info = self.table.info(row)
        tokens = tuple(self.table.tokens(row).tolist())
        self.check_reads(row, tokens, info.num_computed)
        for group, part in enumerate([step, *step.groups]):
            for token, slot in enumerate(part.slot_mapping.tolist(), info.num_computed):
                end = (token // SIZE + 1) * SIZE
                self.content[DEVICE, group, slot // SIZE] = tokens[: min(end, token + 1)]
        self.table.commit([row])
        return True

    def check_reads(self, row: int, tokens: tuple[int, ...], computed: int) -> None:
        """The row's whole blocks hold their own prefixes."""
        first, pages = self.table.pages(row, 1)
        for group, begin, ids in ((0, 0, self.table.blocks(row)), (1, first, pages)):
            for block, page in enumerate(ids.tolist(), begin):
                if (block + 1) * SIZE <= computed:
                    assert self.content[DEVICE, group, page] == tokens[: (block + 1) * SIZE], (group, block)

    def compute(self, row: int, at_once: int = 1000) -> bool:
        while (info := self.table.info(row)).num_computed < info.num_tokens:
            if not self.step(row, min(at_once, info.num_tokens - info.num_computed)):
                return False
        return True

    def run(self, tokens: Sequence[int], at_once: int = 1000) -> int:
        row, cached = self.open(tokens)
        assert self.compute(row, at_once)
        self.table.release(row)
        self.sound()
        return cached

    def sound(self) -> None:
        self.placement.check_integrity()
        self.table.check_integrity()

    def hear(self) -> None:
        """Follow the events: blocks and boundaries come and go one by one."""
        events, lost = self.placement.take_events()
        assert lost == 0
        for event in events:
            for i, name in enumerate(event.hashes):
                key = event.kind.removeprefix("not_").replace("removed", "stored"), int(event.tier), name
                if event.kind in ("stored", "resumable"):
                    assert key not in self.told, "it was there"
                    self.told[key] = event.depth + i
                else:
                    assert self.told.pop(key) == event.depth + i

    def check_events(self) -> None:
        """They have told what there is, and boundaries only behind blocks that are there."""
        self.hear()
        told, self.told = self.told, {}
        anew = {
            (event.kind, int(event.tier), name): event.depth + i
            for event in self.placement.snapshot_events()[0]
            for i, name in enumerate(event.hashes)
        }
        assert anew == told
        stored = {name for kind, _, name in told if kind == "stored"}
        boundaries = {name for kind, _, name in told if kind == "resumable"}
        assert boundaries <= stored
        assert len(boundaries) == self.placement.stats()["points"]

    def tiers(self, tokens: Sequence[int]) -> NDArray[np.uint8]:
        return self.placement.match(np.array(tokens, np.int32))[0]


    def lacking(self, extents: int) -> NDArray[np.int64]:
        """Blocks of the first group, so many more than there is room for."""
        return np.array([self.pools[DEVICE][0].num_available + extents, 0])


def prompt(name: int, length: int = 13) -> list[int]:
    return [100 * name + i for i in range(length)]


def test_what_leaves_the_device_is_found_again_as_a_whole() -> None:
    core = Core()
    for name in range(6):
        assert core.run(prompt(name)) == 0
    core.settle()
    stats = core.placement.stats()
    assert stats["dropped"] == {"device": 0, "host": 0}
    assert stats["points"] == 6
    for name in range(6):
        assert core.run([*prompt(name)[:12], 9999]) == 12, name
    assert core.placement.stats()["dropped"] == {"device": 0, "host": 0}


def test_a_hit_loads_the_spine_and_the_tail_and_no_page_more() -> None:
    core = Core(40, 80)
    core.run(prompt(1, 13))
    core.run([*prompt(1, 12), 7, 8, 9, 10, 11])  # another point further on: its tail is not needed
    for name in range(2, 9):
        core.run(prompt(name))
    core.settle()
    assert core.tiers(prompt(1, 13)).tolist() == [HOST] * 6
    core.moved = [0, 0]
    assert core.run([*prompt(1, 12), 99]) == 12
    assert core.moved == [6, 2]


def test_a_tail_goes_before_its_spine_and_a_hit_brings_it_alone() -> None:
    core = Core(40)
    for name in range(3):
        core.run(prompt(name))
    wanted = core.lacking(2)
    assert not core.placement.reserve_pages(wanted)
    core.settle()
    assert core.placement.reserve_pages(wanted)
    assert core.tiers(prompt(0)).tolist() == [DEVICE] * 6
    owner, blocks = core.placement.acquire(np.array(prompt(0), np.int32))
    assert blocks == 6
    assert core.placement.cold_pages(owner).tolist() == [0, 2]
    core.placement.release(owner)
    assert core.run([*prompt(0, 12), 99]) == 12
    assert core.moved == [0, 2]


def test_room_that_is_on_its_way_is_not_made_twice() -> None:
    core = Core(40)
    for name in range(3):
        core.run(prompt(name))
    wanted = core.lacking(2)
    assert not core.placement.reserve_pages(wanted)
    core.take()
    assert core.moves.size == 2
    for _ in range(3):
        assert not core.placement.reserve_pages(wanted)
    core.take()
    assert core.moves.size == 2
    core.settle()
    assert core.placement.reserve_pages(wanted)
    core.sound()


def test_a_full_host_loses_its_coldest_points_whole() -> None:
    core = Core(24, 24)
    for name in range(12):
        core.run(prompt(name))
    core.settle()
    core.sound()
    hits = [core.tiers(prompt(name)).size for name in range(12)]
    assert set(hits) <= {0, 6}
    assert hits == sorted(hits)
    assert hits.count(6) >= 5


def test_a_request_that_comes_back_during_a_demotion_finds_all_of_it() -> None:
    core = Core(40)
    for name in range(3):
        core.run(prompt(name))
    assert not core.placement.reserve_pages(core.lacking(2))
    core.take()
    assert core.moves["lane"].tolist() == [1, 1]
    owner, blocks = core.placement.acquire(np.array(prompt(0), np.int32))
    assert blocks == 6
    core.settle()
    core.sound()
    core.placement.release(owner)
    core.sound()
    owner, blocks = core.placement.acquire(np.array(prompt(0), np.int32))
    assert blocks == 6
    assert core.placement.cold_pages(owner).tolist() == [0, 0], "it has just been used"
    core.placement.release(owner)


def test_a_tail_that_cannot_be_read_costs_its_hit_and_nothing_else() -> None:
    core = Core()
    for name in range(6):
        core.run(prompt(name))
    core.settle()
    owner, _ = core.placement.acquire(np.array(prompt(0), np.int32))
    assert core.placement.reserve_pages(core.placement.cold_pages(owner)) or core.settle() is None
    core.placement.promote(owner)
    core.take()
    for number in np.unique(core.moves["transfer"]).tolist():
        core.end(number, ok=bool(core.moves["lane"][core.moves["transfer"] == number][0] == 0))
    assert core.placement.settle(owner) == 0
    core.placement.release(owner)
    core.sound()
    assert core.tiers(prompt(0)).size == 0
    assert core.run(prompt(0)) == 0
    assert core.run([*prompt(0, 12), 99]) == 12


def test_a_run_that_cannot_be_read_takes_along_the_path_that_only_it_continued() -> None:
    core = Core(40, 80)
    core.run(prompt(1))
    longer = [*prompt(1, 12), *prompt(7, 5)]
    core.run(longer)
    while not core.placement.reserve_pages(np.array([40, 0])):
        core.settle()
    for tokens, lane in ((prompt(1), 1), (longer[:16], 0)):  # a tail is lost, then the run behind it
        owner, _ = core.placement.acquire(np.array(tokens, np.int32))
        while not core.placement.reserve_pages(core.placement.cold_pages(owner)):
            core.settle()
        core.placement.promote(owner)
        core.take()
        for number in np.unique(core.moves["transfer"]).tolist():
            first = core.moves[core.moves["transfer"] == number][0]
            core.end(number, ok=bool(first["lane"] != lane or (lane == 0 and first["depth"] < 6)))
        assert core.placement.settle(owner) == 0
        core.sound()
        core.placement.release(owner)
        core.sound()
    assert core.placement.stats()["cached_blocks"] == 0


def test_two_requests_that_load_one_tail_share_it() -> None:
    core = Core(30)
    for name in range(6):
        core.run(prompt(name))
    core.settle()
    first, _ = core.placement.acquire(np.array(prompt(0), np.int32), max_blocks=6)
    while not core.placement.reserve_pages(core.placement.cold_pages(first)):
        core.settle()
    core.placement.promote(first)
    second, blocks = core.placement.acquire(np.array(prompt(0), np.int32), max_blocks=6)
    assert blocks == 0
    assert core.placement.blocked_by(second) >= 0
    core.placement.release(second)
    core.settle()
    second, blocks = core.placement.acquire(np.array(prompt(0), np.int32), max_blocks=6)
    assert blocks == 6
    assert not core.placement.cold_pages(second).any()
    assert core.placement.settle(first) == core.placement.settle(second) == 6
    core.placement.release(first)
    core.placement.release(second)
    core.sound()


def test_a_tail_that_comes_for_nobody_is_room_to_come() -> None:
    core = Core(40)
    dispatch = Dispatch(core.placement)
    core.run(prompt(0))
    assert not core.placement.reserve_pages(core.lacking(1))
    assert dispatch.num_coming == 2, "pages of the tail, which leaves"
    core.settle()
    owner, _ = core.placement.acquire(np.array(prompt(0), np.int32))
    assert core.placement.cold_pages(owner).tolist() == [0, 2]
    core.placement.promote(owner)
    assert dispatch.num_coming == dispatch.num_unowned == 0
    core.placement.release(owner)
    assert dispatch.num_unowned == 2
    core.settle()
    assert dispatch.num_unowned == 0
    core.sound()


def play(seed: int, steps: int, tiers: int, *, closed: bool = False) -> Core:
    random = Random(seed)
    core = Core(
        random.choice([16, 24, 40]),
        *(random.choice([8, 24, 60]) for _ in range(tiers - 1)),
        **random.choice([{"window": 1}, {"window": 2}, {"window": 5}, {"window": 0, "chunk": 4}]),
        per_extent=random.choice([(1, 1), (2, 3), (4, 1)]),
        point_every=random.choice([0, 0, 3]),
        write=random.choice(["evicted", "reused", "all"]) if closed else "",
    )
    stems = [[random.randrange(4) for _ in range(30)] for _ in range(3)]
    rows: list[int] = []
    owners: list[int] = []
    for _ in range(steps):
        what = random.random()
        if what < 0.3 and len(rows) < 4:
            tokens = random.choice(stems)[: random.randrange(1, 30)]
            tokens += [random.randrange(4) for _ in range(random.randrange(1, 6))]
            row, _ = core.open(tokens)
            rows.append(row)
        elif what < 0.6 and rows:
            row = random.choice(rows)
            info = core.table.info(row)
            if info.num_computed < info.num_tokens:
                core.step(row, random.randrange(1, min(7, info.num_tokens - info.num_computed) + 1))
            else:
                core.table.append([row], [random.randrange(4)])
        elif what < 0.75 and rows:
            core.table.release(rows.pop(random.randrange(len(rows))))
        elif what < 0.8 and len(owners) < 3:
            owner, _ = core.placement.acquire(np.array(random.choice(stems)[: random.randrange(2, 30)], np.int32))
            owners.append(owner)
            if random.random() < 0.7 and core.placement.reserve_pages(core.placement.cold_pages(owner)):
                core.placement.promote(owner)
        elif what < 0.85 and owners:
            core.placement.release(owners.pop(random.randrange(len(owners))))
        elif what < 0.9:
            core.placement.reserve_pages(np.array([random.randrange(6), random.randrange(6)]), random.randrange(tiers))
        elif what < 0.93 and closed:
            core.placement.copy_wanted(random.randrange(1, 8))
        elif what < 0.94 and closed:
            core.placement.copy(core.placement.uncopied(tiers - 1)[0], tiers - 1, random.randrange(1, 20))
        elif what < 0.945 and closed:
            core.placement.set_quota(0, random.choice([6, 14, 30]), random.randrange(1, tiers))
        else:
            core.take()
            if core.moves.size:
                ok = random.random() < 0.8
                core.end(int(random.choice(core.moves["transfer"])), ok, ok or random.random() < 0.5)
        core.sound()
        core.hear()
    core.settle()
    for row in rows:
        core.table.release(row)
    for owner in owners:
        core.placement.release(owner)
    core.settle()
    core.sound()
    core.check_events()
    return core


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("seed", one_in(3, [49, *range(24)]))
def test_random_requests_read_what_they_stand_for(seed: int, tiers: int) -> None:
    core = play(seed, 600, tiers)
    assert all(pool.counts()["live"] == 0 for tier in core.pools for pool in tier), "not free, and without a holder"


def down(core: Core) -> tuple[int, int]:
    """Carry out all that is decided: pages of short groups that went, and different ones."""
    moved: list[int] = []
    core.take()
    while core.moves.size:
        first = core.moves[core.moves["transfer"] == core.moves["transfer"][0]]
        moved += first["src_block"][first["lane"] > 0].tolist()
        core.end(int(first["transfer"][0]))
        core.placement.reserve_pages(np.array([core.sizes[0], 0]))
        core.take()
    return len(moved), len(set(moved))


def test_pages_that_points_share_go_down_once() -> None:
    """Eight prompts part behind the same twenty blocks, and all of their points leave at once."""
    core = Core(80, 200, window=6)
    for number in range(8):
        core.run([*range(40), 100 + number, 200 + number, 7])
    core.placement.reserve_pages(np.array([core.sizes[0], 0]))
    moved, different = down(core)
    assert moved == different > 8
    core.sound()
    assert [core.run([*range(40), 100 + number, 200 + number, 8]) for number in range(8)] == [42] * 8


def test_pages_that_points_share_are_copied_once_to_a_closed_tier() -> None:
    core = Core(80, 200, window=6, write="reused")
    for number in range(8):
        core.run([*range(40), 100 + number, 200 + number, 7])
    nodes, at, pages = core.placement.uncopied(1)[0], 0, list[int]()
    while at < len(nodes):  # as a checkpoint: a node that is done with is not asked for again
        at += core.placement.copy(nodes[at:], 1)[1]
        core.take()
        pages += core.moves["src_block"][core.moves["lane"] > 0].tolist()
        core.settle()
    assert len(pages) == len(set(pages)) > 8
    core.sound()
    assert core.placement.resumable(1) == 20 + 8
