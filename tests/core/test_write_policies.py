"""The real core counts blocks as an exact simulator of write policies does.

Where the disk overflows, or a use has to be remembered longer than its block is cached, only the simulator with the
core's order of victims and its memory does. So these explain each difference.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import NamedTuple

import pytest

from pagedkv.lab.replay import load_trace

from .write_model import CoreOrder, Simulator
from .write_policies import Driver, chats

MOONCAKE = 0  # in place of a number of system prompts: a real trace
SIZES = {4096: (512, 2000), 1024: (512, 2000), 8192: (4096, 6000)}  # disk -> memory, request before which is counted


class Case(NamedTuple):
    """A load, a disk, and the blocks that were counted.

    Hit in memory, hit on disk, computed, written, dropped; then held and on disk before a request. `simulated` has the
    counts by the simulator's own rules, `counts` those of the core.
    """

    systems: int
    disk: int
    write: str
    second_hit: bool
    simulated: tuple[int, ...]
    counts: tuple[int, ...]


SAME = [
    Case(1, 4096, "evicted", False, (65037, 9075, 2677, 2636, 0, 1996, 1922), (65037, 9075, 2677, 2636, 0, 1996, 1922)),
    Case(1, 4096, "reused", False, (65037, 9075, 2677, 2645, 0, 1996, 1939), (65037, 9075, 2677, 2645, 0, 1996, 1939)),
]
DIFFERENT = [
    Case(
        20, 1024, "reused", False,
        (52239, 13524, 11026, 11014, 9990, 1045, 1024), (52239, 14185, 10365, 10224, 9200, 1154, 1024),
    ),
    Case(1, 4096, "reused", True, (65037, 7695, 4057, 2427, 0, 1803, 1746), (65037, 5977, 5775, 1903, 0, 1520, 1352)),
]  # fmt: skip
REAL = [
    Case(
        MOONCAKE, 8192, "evicted", False,
        (16856, 25330, 148414, 145009, 136817, 11085, 8192), (16856, 23885, 149859, 146456, 138264, 11175, 8192),
    ),
    Case(
        MOONCAKE, 8192, "reused", True,
        (16856, 23057, 150687, 30801, 22609, 10271, 8192), (16856, 6463, 167281, 5482, 0, 7992, 4465),
    ),
    Case(
        MOONCAKE, 8192, "reused", False,
        (16856, 24389, 149355, 146713, 138521, 10271, 8192), (16856, 23576, 150168, 146788, 138596, 11021, 8192),
    ),
]  # fmt: skip
CASES = [*SAME, *DIFFERENT, *(pytest.param(*case, marks=pytest.mark.slow) for case in REAL)]
LEAF_FIRST = [
    (1, 4096, (65037, 9075, 2677, 2616, 0, 1996, 1902)),
    pytest.param(MOONCAKE, 8192, (16856, 25637, 148107, 144598, 136406, 11302, 8192), marks=pytest.mark.slow),
]


def paths(systems: int):
    """The load's requests, root first."""
    if systems != MOONCAKE:
        return chats(systems)
    trace = load_trace("mooncake:conversation")
    return [path for i in range(trace.num_requests) if len(path := trace.path(i))]


def serve(server: Driver | Simulator, systems: int, disk: int) -> tuple[int, ...]:
    """All counts of a case, of a server that has served nothing."""
    held = ()
    for number, path in enumerate(paths(systems)):
        if number == SIZES[disk][1]:
            held = server.held()
        server.request(path)
    return (*astuple(server.counts), *held)


@pytest.mark.parametrize(Case._fields, CASES)
def test_the_core_counts_as_the_simulator_does_with_the_cores_order_of_victims(
    systems, disk, write, second_hit, simulated, counts
):
    driver = Driver(SIZES[disk][0], disk, write, second_hit=second_hit)
    assert serve(driver, systems, disk) == counts
    driver.core.check_integrity()
    assert serve(CoreOrder(SIZES[disk][0], disk, write, second_hit=second_hit), systems, disk) == counts


@pytest.mark.parametrize(Case._fields, CASES)
def test_by_its_own_rules_the_simulator_gives_the_counts_of_decision_20(
    systems, disk, write, second_hit, simulated, counts
):
    assert serve(Simulator(SIZES[disk][0], disk, write, second_hit=second_hit), systems, disk) == simulated


@pytest.mark.parametrize(("systems", "disk", "simulated"), LEAF_FIRST)
def test_so_it_does_for_a_disk_that_is_written_leaf_first(systems, disk, simulated):
    assert serve(Simulator(SIZES[disk][0], disk, "leaf first"), systems, disk) == simulated
