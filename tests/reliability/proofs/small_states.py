"""Every operation in every state of tiny caches, on the real core beside the oracle."""

from __future__ import annotations

from tests.model.search import EMPTY, FULL, SHAPES, SPREAD, Search
from tests.reliability.proof import Proof, Tally, Tick

STARTS = (EMPTY, FULL, SPREAD)


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Share the states among all shapes and starts; what one that is exhausted leaves, the next may use."""
    tally = Tally()
    searches = [Search(shape, start) for shape in SHAPES for start in STARTS]
    for i, search in enumerate(searches):
        try:
            search.run((count - tally.count) // (len(searches) - i), tick)
        except AssertionError as error:
            tally.fail(str(error))
        tally.count += search.states
        tally.hits += search.reads
        tally.add("operations compared", search.edges)
        tally.add("searches that met every state there is", int(search.exhausted))
    return tally


PROOF = Proof(
    "every operation in each of the first states of tiny caches of two and three tiers, breadth first, agrees with the "
    "oracle",
    "states",
    quick=30_000,
    full=1_000_000,
    run=run,
)
