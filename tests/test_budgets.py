"""Budgets: a string is bytes, an integer is blocks; and what a Disk checks before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.budgets import Disk, blocks_for
from pagedkv.spec.kv_spec import KVSpec

SPEC = KVSpec(32, 8, 128)  # 2 MiB a block


@pytest.mark.parametrize(
    ("budget", "num_blocks"),
    [
        ("8GiB", 4096),
        ("2MiB", 1),
        ("4095KiB", 1),
        (1, 1),
        (5000, 5000),
        (np.int32(7), 7),
        (2**31 - 1, 2**31 - 1),
    ],
)
def test_a_string_is_bytes_and_an_integer_is_blocks(budget: Any, num_blocks: int) -> None:
    assert blocks_for(budget, SPEC) == num_blocks


@pytest.mark.parametrize("budget", ["0B", "2047KiB", 0, -1, 2**31, "8192TiB", "8", ""])
def test_budgets_without_a_whole_block_or_beyond_the_ids_are_refused(budget: Any) -> None:
    with pytest.raises(InvalidArgument):
        blocks_for(budget, SPEC)


@pytest.mark.parametrize("budget", [None, True, 1.0, float("nan"), b"8GiB", ["8GiB"]])
def test_a_budget_of_another_type_is_refused(budget: Any) -> None:
    with pytest.raises(WrongType):
        blocks_for(budget, SPEC)


def test_a_disk_keeps_its_path_as_text_and_touches_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "kv", "200GiB", segment_size="64MiB", shards=2)
    assert disk.path == str(tmp_path / "kv")
    assert disk.segment_bytes == 64 * 2**20
    assert not list(tmp_path.iterdir())


def test_a_disk_says_how_much_may_be_written() -> None:
    assert Disk("kv", 8).write_bytes_per_day is None
    assert Disk("kv", 8, write_budget="2TB").write_bytes_per_day == 2 * 10**12
    assert Disk("kv", 8, write_budget=4096).write_bytes_per_day == 4096


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"admission": "some"}, InvalidArgument),
        ({"admission": None}, WrongType),
        ({"on_mismatch": "ignore"}, InvalidArgument),
        ({"page_cache": True}, WrongType),
        ({"page_cache": np.array(["drop"])}, WrongType),
        ({"write_budget": 0}, InvalidArgument),
        ({"write_budget": "lots"}, InvalidArgument),
        ({"write_budget": 1.5}, WrongType),
        ({"network_fs": 1}, WrongType),
        ({"required": None}, WrongType),
        ({"on_progress": "yes"}, WrongType),
        ({"path": ""}, InvalidArgument),
        ({"path": "a\0b"}, InvalidArgument),
        ({"path": None}, WrongType),
        ({"path": b"kv"}, WrongType),
        ({"path": 3}, WrongType),
        ({"size": "200"}, InvalidArgument),
        ({"size": 0}, InvalidArgument),
        ({"size": 2.5}, WrongType),
        ({"segment_size": 0}, InvalidArgument),
        ({"segment_size": "1Gb"}, InvalidArgument),
        ({"shards": 0}, InvalidArgument),
        ({"shards": 1025}, InvalidArgument),
        ({"shards": True}, WrongType),
    ],
)
def test_a_disk_refuses_what_it_could_not_open(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Disk(**({"path": "kv", "size": "1GiB"} | fields))
