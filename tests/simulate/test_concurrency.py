"""Requests at once in equal memory: the formulas, and what is served."""

from __future__ import annotations

import pytest

import pagedkv as pk
from pagedkv.lab.simulate.concurrency import concurrency


def test_formulas_and_service_agree_where_all_requests_are_alike(machine, requests):
    study = concurrency(requests(*[(0, 50, 14)] * 200, (0, 300, 5)), machine(1280), 256, 16, 64, 4096)
    (row,) = study.rows
    assert (row["requests"], row["tokens"]) == ("200", "64")
    assert (row["contiguous, formula"], row["contiguous, most"]) == ("5", "5")
    assert (row["paged, formula"], row["paged, most"]) == ("20", "20")
    assert float(row["contiguous, mean"]) == pytest.approx(5, rel=0.01)
    assert float(row["paged, mean"]) == pytest.approx(20, rel=0.02)
    assert (row["formula, times"], row["served, times"]) == ("4.0", "4.0")


def test_without_a_length_there_is_a_row_for_each_of_some(machine, requests):
    study = concurrency(requests((0, 900, 10), (0, 1800, 10), (0, 3000, 10)), machine(9000), None, 16, 8, 4096)
    assert [(row["regions of"], row["requests"]) for row in study.rows] == [
        ("1,024", "1"), ("2,048", "2"), ("4,096", "3"), ("8,192", "3"),
    ]  # fmt: skip
    assert len(study.curves["paged"]) == len(study.x) == 4


@pytest.mark.parametrize(
    ("longest", "words"), [(20, "no request"), (5000, "does not fit; the memory has room for 1280")]
)
def test_a_region_that_no_request_or_no_memory_is_for_is_refused(machine, requests, longest, words):
    with pytest.raises(pk.InvalidArgument, match=words):
        concurrency(requests((0, 50, 14)), machine(1280), longest, 16, 8, 64)
