"""Hints to the policy ``hazard``.

What a session left behind, and when a caller expects a prefix again.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import ModuleType
from typing import Any

import pytest

from pagedkv.core import BlockTable, Requests
from pagedkv.errors import InvalidArgument, StaleHandle, WrongType
from tests.core.hazard_requests import NS, HazardCache, Prompt
from tests.core.helpers import nothing_changes

INF, NAN = float("inf"), float("nan")
LEFT, EXPECTED = 14, 15  # features
NOT_LEFT = 9


def ask(cache: HazardCache, path: Prompt, now: float, session: int | None = None, **hints: Any) -> int:
    """The hits of a request of this session, which comes and goes at `now` seconds."""
    cache.hazard.tick(int(now * NS))
    owner, hits = cache.arrive(path)
    cache.hazard.hint(owner, session=session, **hints)
    cache.leave(owner)
    return hits


def feature(native_hazard: ModuleType, cache: HazardCache, which: int) -> dict[tuple[int, int], int]:
    """One feature of each past, by the blocks [first, last) of its prefix."""
    found = native_hazard.pasts(cache.placement).values()
    return {(past["depth"], past["depth"] + past["length"]): past["x"][which] for past in found if past["open"]}


# ---- sessions


def test_what_a_session_does_not_use_again_was_left_behind(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    ask(cache, [1, 2, 3, 4, 5, 6], 0, session=7)
    assert feature(native_hazard, cache, LEFT) == {(0, 5): NOT_LEFT, (5, 6): NOT_LEFT}
    ask(cache, [1, 2, 3, 14, 15], 5, session=7)
    by_place = feature(native_hazard, cache, LEFT)
    assert by_place == {(0, 3): NOT_LEFT, (3, 4): NOT_LEFT, (4, 5): NOT_LEFT, (3, 5): 2, (5, 6): 1}
    assert cache.hazard.stats()["left_behind"] == 2
    assert native_hazard.history_problems(cache.placement) == []


def test_others_and_those_who_name_no_session_leave_nothing_behind(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    ask(cache, [1, 2, 3], 0, session=7)
    ask(cache, [4, 5, 6], 1, session=8)
    ask(cache, [7, 8, 9], 2)
    ask(cache, [1, 2, 10], 3)
    assert cache.hazard.stats()["left_behind"] == 0
    marks = [past["x"][LEFT] for past in native_hazard.pasts(cache.placement).values()]
    assert sorted(set(marks)) == [0, NOT_LEFT]


def test_what_others_have_used_since_was_not_left_behind(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    ask(cache, [1, 2, 3, 4], 0, session=7)
    ask(cache, [1, 2, 30], 1, session=8)
    ask(cache, [50, 51], 2, session=7)
    assert cache.hazard.stats()["left_behind"] == 2  # blocks 3 and 4, but not what session 8 goes on with
    assert feature(native_hazard, cache, LEFT)[0, 2] == NOT_LEFT


def test_the_same_number_in_another_namespace_is_another_session() -> None:
    cache = HazardCache(40)
    other = cache.tree.namespace(b"other")
    ask(cache, [1, 2, 3], 0, session=7)
    owner, _ = cache.arrive([4, 5, 6], other)
    cache.hazard.hint(owner, session=7)
    cache.leave(owner)
    assert cache.hazard.stats()["left_behind"] == 0


def test_what_was_left_behind_has_not_been_used_up_to_then_and_says_so_once(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    ask(cache, [1, 2, 3], 0, session=7)
    ask(cache, [11, 12], 12, session=7)
    noted = native_hazard.noted(cache.placement)
    assert [(sample["first"], sample["last"], sample["reused"]) for sample in noted] == [(0, 5, False)] * 2
    ask(cache, [21, 22], 13, session=7)  # leaves behind what was used at 12, and not once more what was used at 0
    assert [sample["last"] for sample in native_hazard.noted(cache.placement)] == [5, 5, 1, 1]
    ask(cache, [1, 2, 3], 13.5)
    ages = [(sample["first"], sample["last"], sample["reused"]) for sample in native_hazard.noted(cache.placement)[4:]]
    assert ages == [(5, 6, True)] * 2  # from the age on that was learned


def test_requests_of_a_session_that_overlap_leave_behind_what_is_over(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    first, _ = cache.arrive([1, 2, 3])
    cache.hazard.hint(first, session=7)
    second, _ = cache.arrive([11, 12, 13])
    cache.hazard.hint(second, session=7)
    assert cache.hazard.stats()["left_behind"] == 0  # nothing is over yet
    cache.leave(first)
    assert cache.hazard.stats()["left_behind"] == 0
    cache.leave(second)
    assert cache.hazard.stats()["left_behind"] == 2
    assert sorted(feature(native_hazard, cache, LEFT).values()) == [NOT_LEFT, NOT_LEFT]
    ask(cache, [1, 2, 3], 1, session=7)
    assert cache.hazard.stats()["left_behind"] == 4


def test_a_request_that_computed_nothing_leaves_nothing_behind() -> None:
    cache = HazardCache(40)
    owner, _ = cache.placement.acquire([1, 2, 3])
    cache.hazard.hint(owner, session=7)
    cache.leave(owner, used=False)
    ask(cache, [4], 1, session=7)
    assert cache.hazard.stats()["left_behind"] == 0


def test_the_first_session_that_a_request_names_counts() -> None:
    cache = HazardCache(40)
    ask(cache, [1, 2], 0, session=7)
    owner, _ = cache.arrive([3, 4])
    cache.hazard.hint(owner, session=8)
    cache.hazard.hint(owner, session=7)
    cache.leave(owner)
    assert cache.hazard.stats()["left_behind"] == 0


def test_sessions_without_end_take_no_more_memory_and_old_ones_are_forgotten() -> None:
    cache = HazardCache(64, history_blocks=64)
    sizes = []
    for i in range(27_000):
        ask(cache, [i], i * 0.01, session=i * 0x10001)
        if i % 9_000 == 8_999:
            sizes.append(cache.hazard.stats()["bytes"])
    assert sizes[0] == sizes[1] == sizes[2]
    before = cache.hazard.stats()["left_behind"]
    ask(cache, [50_000], 401, session=5 * 0x10001)
    assert cache.hazard.stats()["left_behind"] == before
    ask(cache, [50_001], 402, session=26_999 * 0x10001)
    assert cache.hazard.stats()["left_behind"] == before + 1


def test_a_purged_namespace_leaves_sessions_that_lead_nowhere() -> None:
    cache = HazardCache(40)
    ask(cache, [1, 2, 3], 0, session=7)
    cache.placement.drop_namespace(cache.root)
    ask(cache, [1, 2], 1, session=7)
    ask(cache, [1, 2], 2, session=7)
    assert cache.hazard.stats()["left_behind"] == 0
    cache.placement.check_integrity()


def sessions_that_move_on(rng: Random, count: int) -> Sequence[tuple[int, Prompt]]:
    """Requests of ten sessions.

    Half of all turns continue the last prompt; half abandon it and begin another.
    """
    fresh = iter(range(2**30))
    prompts: dict[int, list[int]] = {}
    out: list[tuple[int, Prompt]] = []
    for _ in range(count):
        session = rng.randrange(10)
        if session not in prompts or rng.random() < 0.5:
            prompts[session] = []
        prompts[session] = prompts[session] + [next(fresh) for _ in range(8)]
        out.append((session, tuple(prompts[session])))
    return out


def test_it_pays_to_say_whose_request_it_is() -> None:
    requests = sessions_that_move_on(Random(3), 3000)
    hits = {}
    for told in (False, True):
        cache = HazardCache(80, study=64)
        hits[told] = sum(ask(cache, path, i, session if told else None) for i, (session, path) in enumerate(requests))
        cache.placement.check_integrity()
    assert hits[True] > hits[False] + 500


# ---- expected returns


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(INF, 1), (0, 2), (1, 2), (1.99, 2), (2, 3), (3.9, 3), (4, 4), (4095, 13), (4096, 14), (1e9, 14), (1e300, 14)],
)
def test_an_expected_return_is_a_bucket_of_octaves_and_never_is_one_of_its_own(
    native_hazard: ModuleType, seconds: float, bucket: int
) -> None:
    cache = HazardCache(40)
    ask(cache, [1, 2, 3], 0, expected_return_s=seconds)
    assert feature(native_hazard, cache, EXPECTED) == {(0, 2): bucket * 8 + 1, (2, 3): bucket * 8}
    ask(cache, [1, 2, 3], 5)
    assert set(feature(native_hazard, cache, EXPECTED).values()) == {0}


def test_the_last_word_before_the_end_counts(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    owner, _ = cache.arrive([1])
    cache.hazard.hint(owner, expected_return_s=5)
    cache.hazard.hint(owner, expected_return_s=INF)
    cache.leave(owner)
    assert list(feature(native_hazard, cache, EXPECTED).values()) == [8]


def test_it_pays_to_say_what_never_comes_again() -> None:
    rng, fresh = Random(5), iter(range(2**30))
    paths: list[tuple[float, Prompt]] = []
    for i in range(3000):
        come, prompt = rng.random() < 0.5, [next(fresh) for _ in range(4)]
        paths.append((i, prompt))
        if come:
            paths.append((i + 30.5, prompt))
    paths.sort(key=lambda entry: entry[0])
    again = {tuple(path) for when, path in paths if when % 1}
    hits = {}
    for told in (False, True):
        cache, hits[told] = HazardCache(80, study=64), 0
        for when, path in paths:
            returns = 30.5 if tuple(path) in again and not when % 1 else INF
            hits[told] += ask(cache, path, when, expected_return_s=returns if told else None)
    assert hits[True] > hits[False] + 2000


# ---- through a block table


def test_any_row_of_a_request_takes_its_hints(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    table = BlockTable(cache.placement, 8)
    row, _ = table.open([1, 2, 3, 4])
    table.step([row])
    table.commit([row])
    fork = int(table.fork(row, 1)[0])
    Requests(table).hint(fork, session=7, expected_return_s=INF)
    table.release(row)
    table.release(fork)
    assert set(feature(native_hazard, cache, LEFT).values()) == {NOT_LEFT}
    assert min(feature(native_hazard, cache, EXPECTED).values()) >= 8
    with pytest.raises(StaleHandle):
        Requests(table).hint(row, session=7)


# ---- what makes no sense


@pytest.mark.parametrize("session", [-1, 2**63, 1.5, "name", True, b"x"])
@pytest.mark.parametrize("through", ["policy", "table"])
def test_a_session_that_is_no_number_is_refused(session: Any, through: str) -> None:
    wrong(through, (InvalidArgument, WrongType), session=session)


@pytest.mark.parametrize("seconds", [-1, -INF, NAN, "soon", True, [1]])
@pytest.mark.parametrize("through", ["policy", "table"])
def test_a_return_that_is_no_time_is_refused(seconds: Any, through: str) -> None:
    wrong(through, (InvalidArgument, WrongType), session=7, expected_return_s=seconds)


def wrong(through: str, errors: tuple[type[Exception], ...], **hints: Any) -> None:
    cache = HazardCache(20)
    table = BlockTable(cache.placement, 8)
    ask(cache, [1, 2], 0, session=7)
    owner, _ = cache.arrive([3])
    row, _ = table.open([4, 5])
    before = cache.hazard.stats()
    hint, handle = (cache.hazard.hint, owner) if through == "policy" else (Requests(table).hint, row)
    with nothing_changes(cache.placement), pytest.raises(errors):
        hint(handle, **hints)
    assert cache.hazard.stats() == before


def test_hints_for_nobody_change_nothing() -> None:
    cache = HazardCache(20)
    owner, _ = cache.placement.acquire([1, 2], request=False)
    before = cache.hazard.stats()
    cache.hazard.hint(owner, session=7, expected_return_s=3)
    cache.hazard.hint(owner)
    assert cache.hazard.stats() == before
    cache.placement.release(owner)
    for stale in (owner, -1, 2**62, 2**70):
        with pytest.raises(StaleHandle):
            cache.hazard.hint(stale, session=7)
