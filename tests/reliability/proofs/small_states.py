"""Every operation in every state of tiny caches, on the real core beside the oracle."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from tests.model.search import EMPTY, FULL, SHAPES, SPREAD, Search
from tests.reliability.proof import Proof, Tally, Tick

STARTS = (EMPTY, FULL, SPREAD)
AT_ONCE = 2_000  # states that a search goes on by, in a process of its own, before it comes back


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Share the states among all shapes and starts, round by round.

    When a search is exhausted, the others use what it leaves.
    """
    tally, left = Tally(), count
    searches = [Search(shape, start) for shape in SHAPES for start in STARTS]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        while left and (open_ones := [i for i, search in enumerate(searches) if not search.exhausted]):
            shares = [min(AT_ONCE, (left + i) // len(open_ones)) for i in range(len(open_ones))]
            begun = [pool.submit(_go_on, searches[i], share) for i, share in zip(open_ones, shares, strict=True)]
            for i, future in zip(open_ones, begun, strict=True):
                before = searches[i].states
                try:
                    searches[i] = future.result()
                except AssertionError as error:
                    tally.fail(str(error))
                    return tally
                done = searches[i].states - before
                left -= done
                tick(done)
    for search in searches:
        tally.count += search.states
        tally.hits += search.reads
        tally.add("operations compared", search.edges)
        tally.add("searches that met every state there is", int(search.exhausted))
    return tally


def _go_on(search: Search, more: int) -> Search:
    search.run(more)
    return search


PROOF = Proof(
    "every operation in each of the first states of tiny caches of two and three tiers, breadth first, agrees with the "
    "oracle",
    "states",
    quick=30_000,
    full=1_000_000,
    run=run,
)
