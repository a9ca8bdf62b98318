"""Every proof with few cases; ``python -m tests.reliability --full`` runs them with many.

The quick run has the proofs of QUICK, the slow run the others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import pagedkv
from tests.reliability.interrupt_points import room_of
from tests.reliability.proofs import interrupts
from tests.reliability.running import load, names, problem

SEED = 1
QUICK = frozenset({"processes", "truncation"})
COUNT = os.environ.get("PAGEDKV_PROOF_COUNT")  # instead of each proof's own quick figure


def marked() -> list[Any]:
    """Each proof as a case, slow unless it is one of the quick ones."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names()]


@pytest.mark.parametrize("name", marked())
def test_the_proof_holds(name: str) -> None:
    proof = load(name)
    count = proof.quick if COUNT is None else int(COUNT)
    if not count:
        pytest.skip("only worth its full run: python -m tests.reliability --full")
    tally = proof.run(count, SEED, lambda n: None)
    print(f"{proof.claim}: {tally.count:,} {proof.unit}, {tally.hits:,} hits compared, {tally.wrong} wrong")
    print("found:", tally.found)
    for reason in tally.skipped:
        print("not done:", reason)
    if tally.skipped and not (tally.count or tally.wrong):
        pytest.skip("; ".join(tally.skipped))
    assert not problem(tally, count), f"seed {SEED}: {problem(tally, count)}"


def test_every_room_of_the_package_is_interrupted_or_said_not_to_be() -> None:
    package = Path(pagedkv.__file__).parent
    sources = [path for kind in ("py", "pyx") for path in package.rglob(f"*.{kind}")]
    assert {room_of(str(path.relative_to(package))) for path in sources} == {
        *interrupts.ROOMS,
        *interrupts.NOT_OF_A_CACHE,
    }
