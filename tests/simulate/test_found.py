"""Times to the first token by where the prompt was found."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.lab.simulate import simulate
from pagedkv.lab.simulate.found import by_place, place_of
from pagedkv.lab.simulate.links import LATENCY_S, Rates, TierSize

TIERS = (TierSize("host", 10**9, Rates(1e6, 1e6)), TierSize("disk", 10**9, Rates(1e5, 1e5)))


def test_a_prompt_is_where_its_coldest_part_was_if_half_of_it_was_cached():
    found = np.array([[60, 0, 0], [40, 20, 0], [10, 20, 30], [10, 0, 30], [0, 0, 0], [90, 0, 0]])
    ttft = np.array([1.0, 2.0, 3.0, 4.0, 5.0, np.nan])
    figures = by_place(found, np.full(6, 100), ttft, TIERS, found * 1000)
    assert {kind: (part["requests"], part["ttft_p50_s"]) for kind, part in figures.items()} == {
        "device": (1, 1.0), "host": (1, 2.0), "disk": (1, 3.0), "part": (1, 4.0), "none": (1, 5.0),
    }  # fmt: skip
    assert figures["disk"]["found_tokens"] == 60
    assert figures["device"]["load_s"] == 0
    host, disk = 0.02 + LATENCY_S["host"], 0.3 + LATENCY_S["disk"]
    assert figures["host"]["load_s"] == pytest.approx(host)
    assert figures["disk"]["load_s"] == pytest.approx(host + disk)


def test_what_is_reused_of_a_block_in_part_lies_on_the_device():
    assert [place_of(name) for name in ("device", "host", "disk", "partial")] == [0, 1, 2, 0]


def test_who_comes_back_to_the_device_is_answered_before_whom_the_host_has(machine, requests):
    rows = [(1000 * i, 161, 2) for i in range(4)]
    rows += [(4000, 161, 2, 3, 10), (5000, 161, 2, 0, 10)]
    (result,) = simulate(
        requests(*rows), machine(200, 2000, rate=1e6), ["tiered"], max_running=8, max_batch_tokens=512
    )  # fmt: skip
    found = result.found
    assert {kind: part["requests"] for kind, part in found.items()} == {"device": 1, "host": 1, "none": 4}
    waited = found["host"]["ttft_p50_s"] - found["device"]["ttft_p50_s"]
    assert waited >= found["host"]["load_s"] > 0
    assert result.to_json()["found"]["host"]["requests"] == 1
