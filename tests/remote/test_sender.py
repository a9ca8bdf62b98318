"""Blocks on their way to the store: held until their call is back, and bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv._core.dispatch import Dispatch
from pagedkv._core.held import Holder
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.remote.claims import Claims
from pagedkv.cache.remote.sender import Asked, Sender
from pagedkv.core import BlockPool, Placement, RadixTree


class Ticket:
    """Settled when the test says so; its blocks may be left inside the store."""

    def __init__(self, count: int, on_done: Callable[[Any], object]) -> None:
        self.count, self.on_done = count, on_done
        self.is_settled, self.ok, self.inside = False, np.ones(count, bool), np.zeros(count, bool)
        self.seconds = 0.001
        self._back: list[Callable[[NDArray[np.intp]], object]] = []

    def results(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return np.arange(self.count), self.ok

    def left(self) -> NDArray[np.bool_]:
        return self.inside

    def when_back(self, tell: Callable[[NDArray[np.intp]], object]) -> None:
        self._back.append(tell)

    def comes_back(self, blocks: list[int]) -> None:
        for tell in self._back:
            tell(np.array(blocks))


class Carrier:
    """Takes moves, and does nothing."""

    block_bytes = 1 << 20
    is_synchronous = False

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.names: list[list[Any]] = []
        self.raises: Exception | None = None

    def submit(self, moves: Any, *, on_done: Any = None, records: Any = None, **_: Any) -> Ticket:
        if self.raises is not None:
            raise self.raises
        assert len(moves) == len(records)
        self.tickets.append(Ticket(len(moves), on_done))
        self.names.append(list(records))
        return self.tickets[-1]

    def watch(self, ticket: Ticket) -> float:
        return 1.0


@pytest.fixture
def core() -> Placement:
    pools = [BlockPool(64), None, None, BlockPool(16)]
    return Placement(RadixTree(1, 4), pools, beside=(False, False, False, True), send="all")


class World:
    """A sender over a core, with a carrier that the test drives."""

    def __init__(self, core: Placement, max_bytes: int = 64 << 20) -> None:
        self.core, self.carrier, self.open = core, Carrier(), True
        self.dispatch, self.root = Dispatch(core), core.tree.namespace(bytes(32))
        costs = CostModel(1, 1 << 20, 1000.0)
        claims = Claims(core, bytes(32), 1 << 20)
        self.sender = Sender(core, self.carrier, claims, costs, lambda: self.open, self.dispatch, max_bytes)  # type: ignore[arg-type]

    def put(self, *tokens: int) -> None:
        device = self.core.pools[0]
        assert device is not None
        owner, found = self.core.acquire(list(tokens), self.root)
        self.core.insert(owner, list(tokens[found:]), device.alloc(len(tokens) - found))
        self.core.release(owner)

    @property
    def live(self) -> int:
        device = self.core.pools[0]
        assert device is not None
        return device.counts()["live"]


def test_a_path_is_held_until_its_call_is_over(core: Placement) -> None:
    world = World(core)
    world.put(1, 2, 3)
    assert world.sender.pump() == 1.0
    assert world.live == 3
    assert world.dispatch.num_coming == 1, "a caller without room does not wait for it"
    world.carrier.tickets[0].is_settled = True
    assert world.sender.pump() is None
    assert (world.live, world.dispatch.num_coming) == (0, 0)
    core.check_integrity()


def test_a_path_whose_call_was_left_is_held_until_it_is_back(core: Placement) -> None:
    world = World(core)
    world.put(1, 2, 3)
    world.sender.pump()
    ticket = world.carrier.tickets[0]
    ticket.inside[:], ticket.ok[:], ticket.is_settled = True, False, True
    assert world.sender.pump() is None
    assert world.live == 3, "blocks that a call may still read were let go of"
    assert world.dispatch.num_coming == 0
    ticket.comes_back([0, 1])
    assert world.live == 3
    ticket.comes_back([2])
    assert world.live == 0
    core.check_integrity()


def test_what_was_not_stored_is_sent_with_its_next_use(core: Placement) -> None:
    world = World(core)
    world.put(1, 2, 3)
    world.sender.pump()
    ticket = world.carrier.tickets[0]
    ticket.ok[1:], ticket.is_settled = False, True
    world.sender.pump()
    world.put(1, 2, 3)
    core.release(core.acquire([1, 2, 3], world.root)[0])
    world.sender.pump()
    assert [len(names) for names in world.carrier.names] == [3, 2]
    assert world.carrier.names[1] == world.carrier.names[0][1:]


def test_a_bounded_number_of_bytes_is_held(core: Placement) -> None:
    world = World(core, max_bytes=10 << 20)
    for first in range(0, 40, 4):
        world.put(*range(100 * first, 100 * first + 4))
    world.sender.pump()
    assert 8 <= world.live <= 12
    for ticket in list(world.carrier.tickets):
        ticket.is_settled = True
    world.sender.pump()
    assert 8 <= world.live <= 12
    assert world.sender.num_blocks == world.live


def test_a_long_path_is_sent_in_windows(core: Placement) -> None:
    world = World(core)
    world.put(*range(30))
    world.sender.pump()
    assert sum(len(names) for names in world.carrier.names) == 30
    assert max(len(names) for names in world.carrier.names) == 8  # of 1 MiB
    assert len({name.key for names in world.carrier.names for name in names}) == 30


def test_nothing_is_taken_while_the_store_takes_nothing(core: Placement) -> None:
    world = World(core)
    world.open = False
    world.put(1, 2)
    again_s = world.sender.pump()
    assert again_s is not None, "it would never be asked again"
    assert again_s < 1
    assert (world.live, core.num_unsent) == (0, 1)
    assert world.sender.pump(begins=False) is None, "a cache that closes would never end"
    world.open = True
    world.sender.pump()
    assert core.num_unsent == 0


def test_a_carrier_that_raises_costs_the_send_and_no_block(core: Placement) -> None:
    world = World(core)
    world.carrier.raises = MemoryError()
    world.put(1, 2)
    assert world.sender.pump() is None
    assert (world.live, world.sender.failures, world.dispatch.num_coming) == (0, 1, 0)
    world.carrier.raises = None
    core.release(core.acquire([1, 2], world.root)[0])
    world.sender.pump()
    assert [len(names) for names in world.carrier.names] == [2]


def test_blocks_that_compute_faster_than_they_load_are_not_sent(core: Placement) -> None:
    world = World(core)
    world.sender._costs.observe_prefill(1000, 0.001)
    world.sender._costs.observe_load(3, 1 << 20, 10.0)
    world.put(1, 2)
    assert world.sender.pump() is None
    assert (world.live, world.sender.declined_blocks, world.carrier.names) == (0, 2, [])


def test_claims_that_another_thread_made_needless_are_given_back(core: Placement) -> None:
    world = World(core)
    world.put(1, 2, 3)
    claims = world.sender._claims
    claims.graft(np.array([1, 2, 3, 4], np.int32), world.root, 1, [bytes([i]) * 32 for i in range(3)])
    remote = core.pools[3]
    assert remote is not None
    assert remote.counts()["free"] == 15
    assert core.match([1, 2, 3, 4], world.root)[0].tolist() == [0, 0, 0, 3]
    core.check_integrity()


def asked(world: World, tokens: list[int], first: int = 0) -> Asked:
    wish = Asked(np.array(tokens, np.int32), world.root, len(tokens), first)
    world.sender.ask(wish)
    return wish


def committed(core: Placement, *tokens: int) -> World:
    """A world whose committed blocks were sent, or declined, before the test."""
    world = World(core)
    world.open = False
    world.put(*tokens)
    return world


def test_a_publish_whose_caller_has_gone_holds_its_path(core: Placement) -> None:
    world = committed(core, 1, 2, 3)
    wish = asked(world, [1, 2, 3])
    del wish
    assert not world.sender.is_idle
    world.sender.pump()
    assert (world.live, world.dispatch.num_coming, len(world.carrier.names[0])) == (3, 1, 3)
    world.carrier.tickets[0].is_settled = True
    world.sender.pump()
    assert (world.live, world.dispatch.num_coming, world.sender.is_idle) == (0, 0, True)
    core.check_integrity()


def test_a_publish_says_what_was_sent_and_stored(core: Placement) -> None:
    world = committed(core, 1, 2, 3)
    wish = asked(world, [1, 2, 3], first=1)
    world.sender.pump()
    assert not world.sender.wait(wish, 0.0)
    world.carrier.tickets[0].is_settled = True
    world.carrier.tickets[0].ok[1] = False
    world.sender.pump()
    assert world.sender.wait(wish, 0.0)
    assert (wish.num_sent, wish.num_stored) == (2, 1)


def test_blocks_that_left_the_device_before_their_publish_are_not_sent() -> None:
    pools = [BlockPool(4), BlockPool(4), None, BlockPool(4)]
    core = Placement(RadixTree(1, 4), pools, beside=(False, False, False, True))
    world = committed(core, 1, 2)
    wish = asked(world, [1, 2])
    core.reserve(4)
    moves = core.take_moves()
    core.complete(moves["transfer"], np.ones(len(moves), bool))
    assert core.match([1, 2], world.root)[0].tolist() == [1, 1]
    world.sender.pump()
    assert (wish.is_over, wish.num_sent, world.carrier.names) == (True, 0, [])
    assert (world.live, world.dispatch.num_coming) == (0, 0)
    core.check_integrity()


def test_a_publish_ends_when_the_cache_closes(core: Placement) -> None:
    world = committed(core, 1, 2)
    before = asked(world, [1, 2])
    world.sender.close()
    behind = asked(world, [1, 2])
    assert behind.is_over
    assert not before.is_over
    world.sender.pump(begins=False)
    assert before.is_over
    assert world.carrier.names == []
    assert world.sender.is_idle


def test_a_send_whose_end_finds_no_memory_ends_with_the_next_round(
    core: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(core)
    world.put(1, 2)
    world.sender.pump()
    ticket = world.carrier.tickets[0]
    ticket.is_settled, real = True, ticket.left
    monkeypatch.setattr(ticket, "left", _raises)
    world.sender.pump()
    assert (world.live, world.dispatch.num_coming, world.sender.failures) == (2, 1, 1)
    monkeypatch.setattr(ticket, "left", real)
    world.sender.pump()
    assert (world.live, world.dispatch.num_coming, world.sender.is_idle) == (0, 0, True)


def _raises() -> NDArray[np.bool_]:
    raise MemoryError


def test_a_holder_counts_until_its_end_or_its_own(core: Placement) -> None:
    dispatch = Dispatch(core)
    holder, other = Holder(dispatch), Holder(dispatch)
    assert dispatch.num_coming == 2
    seen = dispatch.num_announced
    holder.end()
    holder.end()
    assert (dispatch.num_coming, dispatch.num_announced) == (1, seen + 1)
    del other
    assert dispatch.num_coming == 0
    del holder
    assert dispatch.num_coming == 0


def test_a_purge_waits_for_a_call_that_was_left_inside_the_store(core: Placement) -> None:
    world = World(core)
    world.put(1, 2)
    world.sender.pump()
    ticket = world.carrier.tickets[0]
    ticket.is_settled, ticket.inside = True, np.array([False, True])
    world.sender.pump()
    assert world.sender.is_idle, "a cache that closes would wait for it"
    assert world.sender.may_still_write
    ticket.comes_back([1])
    assert not world.sender.may_still_write
    assert world.live == 0
