"""Rates of tiers: as said, or as `python -m bench.tiers` measured them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pagedkv as pk
from pagedkv.lab.simulate.links import LATENCY_S, Rates, TierSize, parse_tiers, read_moves

MIB = 1 << 20
ROWS = [
    ("device to host", "2048 KiB", 9.0), ("host to device", "2048 KiB", 10.0), ("host to device", "64 KiB", 8.0),
    ("device to host", "64 KiB", 7.0), ("write, 32 sums, drop", "2048 KiB", 4.0),
    ("write and sync, 32 sums, drop", "2048 KiB", 1.5), ("write and sync, 32 sums, drop", "2048 KiB", 1.6),
    ("write and sync, 1 sums, drop", "2048 KiB", 3.0), ("write and sync, 32 sums, keep", "2048 KiB", 3.0),
    ("cold read, 32 sums, direct, drop", "2048 KiB", 1.7), ("cold read, 32 sums, pread, drop", "2048 KiB", 1.2),
    ("cold read, 1 sums, pread, drop", "2048 KiB", 1.1), ("warm read, 32 sums, pread, keep", "2048 KiB", 5.0),
    ("cold read, 32 sums, pread, keep", "2048 KiB", 3.0), ("cold read, 1 sums, direct, drop", "64 KiB", 0.7),
    ("write and sync, 1 sums, drop", "64 KiB", 0.6),
]  # fmt: skip


def bench_file(path: Path, rows: list[tuple[str, str, float]]) -> Path:
    about = {"cpu": "a CPU", "commit": "abc", "date": "a day", "cores": 2}
    plain = [{"case": case, "block": block, "gb_per_s": rate} for case, block, rate in rows]
    path.write_text(json.dumps({"bench": "tiers", "environment": about, "rows": plain}))
    return path


def test_measured_rates_are_those_of_the_defaults_and_of_the_nearest_blocks(tmp_path):
    path = bench_file(tmp_path / "tiers.json", ROWS)
    large = read_moves(path, 3 * MIB)
    assert large.rates == {"host": Rates(10e9, 9e9), "disk": Rates(1.7e9, 1.6e9)}
    assert large.source == {
        "file": "tiers.json", "block": "2048 KiB", "cpu": "a CPU", "commit": "abc", "date": "a day",
    }  # fmt: skip
    small = read_moves(path, 16 << 10)
    assert small.rates == {"host": Rates(8e9, 7e9), "disk": Rates(0.7e9, 0.6e9)}


@pytest.mark.checkout
def test_the_repositorys_own_measurement_is_read():
    path = Path(__file__).parents[2] / "bench" / "results" / "tiers.json"
    rates = read_moves(path, 2 * MIB).rates
    assert 0 < rates["disk"].up < rates["host"].up


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"rows": 5}', '{"rows": [], "environment": {"cpu": "", "commit": "", "date": ""}}', "[" * 10**5],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(pk.InvalidArgument, match=r"--moves: .*x.json is no result of python -m bench.tiers"):
        read_moves(path, MIB)


@pytest.mark.parametrize("change", [("host to device", "2048 KiB", 0.0), ("host to device", "much", 1.0)], ids=str)
def test_rates_and_blocks_that_are_none_are_refused(tmp_path, change):
    rows = [change if row[:2] == ("host to device", "2048 KiB") else row for row in ROWS]
    with pytest.raises(pk.InvalidArgument, match="no result"):
        read_moves(bench_file(tmp_path / "x.json", rows), 2 * MIB)


def test_a_tier_without_a_rate_has_the_measured_one_and_a_rate_that_is_said_counts(tmp_path):
    measured = read_moves(bench_file(tmp_path / "x.json", ROWS), 2 * MIB)
    tiers = parse_tiers("disk=1TB,host=1GiB@20GB/s", measured)
    assert tiers == (TierSize("host", 2**30, Rates(20e9, 20e9)), TierSize("disk", 10**12, Rates(1.7e9, 1.6e9)))
    with pytest.raises(pk.InvalidArgument, match=r"host has no rate: say host=1GiB@50GB/s, or .* --moves FILE"):
        parse_tiers("host=1GiB")


def test_a_move_takes_its_bytes_over_the_rate_of_its_direction():
    tier = TierSize("disk", 10**12, Rates(2e9, 1e9))
    assert tier.up_s(10**9) == pytest.approx(0.5 + LATENCY_S["disk"])
    assert tier.down_s(10**9) == pytest.approx(1.0 + LATENCY_S["disk"])
