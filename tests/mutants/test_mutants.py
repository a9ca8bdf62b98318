"""Does the suite notice mistakes? Each mutant is put into a copy of the source, and named tests must fail on it.

Two copies are worked on at a time. The same tests must pass on a copy that is built in the same way and has no mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.workshop import ROOT, Outcome, ids_of, misfits, trial

pytestmark = [pytest.mark.slow, pytest.mark.checkout]

AT_A_TIME = 2
FEW_CASES = 200  # of each proof among the killers, where nothing is wrong
ALL_KILLERS = tuple(sorted({test for mutant in MUTANTS for test in mutant.killers}))
ALL_MODULES = tuple(sorted({mutant.module for mutant in MUTANTS if mutant.module}))
NONE = Mutant("nothing is wrong", "", (), ALL_KILLERS)

Verdict = Callable[[Mutant], Outcome]


def sentence(mutant: Mutant) -> str:
    return mutant.name.replace(" ", "_")


def judge(mutant: Mutant, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("mutant") / "copy"
    if mutant is NONE:
        return trial(folder, [], ALL_MODULES, ALL_KILLERS, FEW_CASES)
    return trial(folder, [mutant], [mutant.module] if mutant.module else [], mutant.killers, mutant.proof_count)


@pytest.fixture(scope="module")
def verdict(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verdict]:
    """What came of a mutant. All that are selected are under way from the first question on."""
    tmp_path_factory.getbasetemp()  # made here, as the threads below would make two
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="mutants") as pool:
        trials: dict[str, Future[Outcome]] = {}
        for item in request.session.items:
            mutant = getattr(item, "callspec", None) and item.callspec.params.get("mutant")  # type: ignore[attr-defined]
            if isinstance(mutant, Mutant):
                trials[mutant.name] = pool.submit(judge, mutant, tmp_path_factory)
        yield lambda mutant: trials[mutant.name].result()
        pool.shutdown(cancel_futures=True)


def test_every_mutant_fits_the_source_and_has_tests_that_exist() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    stale = [problem for mutant in MUTANTS for problem in misfits((ROOT / mutant.file).read_text(), mutant)]
    assert not stale, "\n".join(stale)
    assert len(ids_of(ROOT, ALL_KILLERS)) == len(ALL_KILLERS)


@pytest.mark.parametrize("mutant", [NONE], ids=sentence)
def test_the_same_tests_pass_where(mutant: Mutant, verdict: Verdict) -> None:
    outcome = verdict(mutant)
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.parametrize("mutant", MUTANTS, ids=sentence)
def test_the_suite_notices_that(mutant: Mutant, verdict: Verdict) -> None:
    outcome = verdict(mutant)
    assert outcome.exit_code != 0, f"it survived {', '.join(mutant.killers)}"
    assert outcome.exit_code == 1, f"pytest could not say, and ended with {outcome.exit_code}:\n{outcome.output}"
