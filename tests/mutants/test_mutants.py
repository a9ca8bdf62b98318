"""Does the suite notice mistakes? Named tests must fail on each mutant.

The workshop puts each mutant into a copy of the source.

The same tests must pass on a copy that is built in the same way and has no mistake. Mutants whose `quick` is set are
part of the quick run; the slow run tries the others, or every Nth of them where ``PAGEDKV_MUTANTS=K/N`` says so.
Workers of pytest-xdist try one mutant each at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.catalogue import MUTANTS, ROOMS
from tests.mutants.edits import Stale, edited
from tests.mutants.mutant import Mutant
from tests.mutants.workshop import ROOT, ids_of, trial

pytestmark = pytest.mark.checkout

QUICK_ROOMS = frozenset({"core", "groups", "cache", "disk", "scheduler"})
FEW_CASES = 200  # of each proof among the killers, where nothing is wrong
ALL_KILLERS = tuple(sorted({test for mutant in MUTANTS for test in mutant.killers}))


def share(mutants: Sequence[Mutant], asked: str) -> list[Mutant]:
    """The quick mutants, and every Nth of the others from the Kth on.

    Parameters
    ----------
    mutants : of all rooms, in their order.
    asked : ``K/N`` with 0 <= K < N, or nothing for all.

    Raises
    ------
    ValueError
        `asked` is neither.
    """
    number, of = (int(part) for part in (asked or "0/1").split("/"))
    if not 0 <= number < of:
        raise ValueError(f"PAGEDKV_MUTANTS={asked}: expected K/N with 0 <= K < N")
    return [mutant for place, mutant in enumerate(mutants) if mutant.quick or place % of == number]


TRIED = share(MUTANTS, os.environ.get("PAGEDKV_MUTANTS", ""))


def marked() -> Iterator[Any]:
    """The mutants to try as cases, slow unless they are among the quick ones."""
    for mutant in TRIED:
        marks = [] if mutant.quick else [pytest.mark.slow]
        yield pytest.param(mutant, id=mutant.name.replace(" ", "_"), marks=marks)


def misfit(mutant: Mutant) -> str:
    """Why the mutant no longer fits its source; empty if it does."""
    try:
        edited(mutant.file, (ROOT / mutant.file).read_text(), mutant.edits)
    except Stale as problem:
        return str(problem)
    return ""


def test_every_mutant_fits_the_source_and_has_tests_that_exist() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    stale = [f"{mutant.name}: {problem}" for mutant in MUTANTS if (problem := misfit(mutant))]
    assert not stale, "\n".join(stale)
    assert len(ids_of(ROOT, ALL_KILLERS)) == len(ALL_KILLERS)


def test_a_few_rooms_have_one_mutant_in_the_quick_run() -> None:
    quick = {room: sum(mutant.quick for mutant in mutants) for room, mutants in ROOMS.items()}
    assert quick == {room: int(room in QUICK_ROOMS) for room in ROOMS}


def test_the_shares_together_are_all_mutants() -> None:
    shares = [share(MUTANTS, f"{number}/4") for number in range(4)]
    quick = {mutant.name for mutant in MUTANTS if mutant.quick}
    assert all(quick < {mutant.name for mutant in part} for part in shares)
    slow = [mutant.name for part in shares for mutant in part if not mutant.quick]
    assert sorted(slow) == sorted(mutant.name for mutant in MUTANTS if not mutant.quick)
    assert share(MUTANTS, "") == list(MUTANTS)
    for wrong in ("4/4", "-1/4", "1", "a/b", "0/0"):
        with pytest.raises(ValueError, match=r"."):
            share(MUTANTS, wrong)


@pytest.mark.slow
def test_the_same_tests_pass_where_nothing_is_wrong(tmp_path: Path) -> None:
    modules = {mutant.module for mutant in TRIED if mutant.module}
    killers = {test for mutant in TRIED for test in mutant.killers}
    outcome = trial(tmp_path / "copy", [], modules, killers, FEW_CASES)
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.parametrize("mutant", list(marked()))
def test_the_suite_notices_that(mutant: Mutant, tmp_path: Path) -> None:
    modules = [mutant.module] if mutant.module else []
    outcome = trial(tmp_path / "copy", [mutant], modules, mutant.killers, mutant.proof_count)
    assert not misfit(mutant), "the mistake is in the source itself, not in a copy"
    assert outcome.exit_code != 0, f"it survived {', '.join(mutant.killers)}"
    assert outcome.exit_code == 1, f"pytest could not say, and ended with {outcome.exit_code}:\n{outcome.output}"
