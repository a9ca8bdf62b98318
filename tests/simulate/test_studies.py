"""The studies: waste by block size, and what sharing saves.

Savings over a prefix, and of copy-on-write in beam search.
"""

from __future__ import annotations

import pytest

import pagedkv as pk
from pagedkv.lab.simulate import studies


def test_waste_is_what_the_last_blocks_leave_empty(requests):
    study = studies.waste(requests((0, 10, 7), (0, 30, 2), (0, 16, 16)), None, 10)
    held = {row["allocation"]: int(row["slots"].replace(",", "")) for row in study.rows}
    tokens = 17 + 32 + 32
    assert held["blocks of 1"] == tokens
    assert held["blocks of 16"] == 32 + 32 + 32
    assert held["blocks of 64"] == 3 * 64
    assert held["contiguous, max"] == 3 * 32
    assert held["contiguous, pow2"] == 3 * 32
    assert study.rows[-1]["waste %"] == f"{100 * (1 - tokens / (3 * 256)):.1f}"


def test_requests_over_one_prefix_hold_it_once(requests):
    study = studies.prefix(requests(*[(0, 40, 8)] * 50), 16)
    by_count = {row["requests"]: row for row in study.rows}
    assert by_count["10"]["blocks each for itself"] == "190"
    assert by_count["10"]["blocks held"] == str(16 + 10 * 3)
    assert by_count["10"]["saved of the prefix %"] == "90.0"
    with pytest.raises(pk.InvalidArgument, match="50 are needed"):
        studies.prefix(requests(*[(0, 40, 8)] * 20), 16)


def test_beams_hold_less_than_a_copy_each_and_more_beams_save_more(requests):
    study = studies.beams(requests((0, 30, 40), (0, 10, 50)), 8, 2, 3.0)
    saved = study.curves["of all blocks"]
    assert saved == sorted(saved)
    assert 10 < saved[0] < 50, "two beams save half at most"
    assert saved[-1] < 100 * (1 - 1 / 8)
    beyond = study.curves["of those beyond the prompt"]
    assert all(0 < part < whole for part, whole in zip(beyond, saved, strict=True))


def test_a_workload_without_a_second_token_has_nothing_to_search(requests):
    with pytest.raises(pk.InvalidArgument, match="second token"):
        studies.beams(requests((0, 30, 1)), 8, 1, 3.0)
