"""Sizes as users type them.

Blocks, shares rounded down, bytes rounded down, and strings that are no size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.replay import Capacity, Trace, load_trace, replay, resolve
from pagedkv.spec.sizes import Blocks, Bytes


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("synthetic:chat:0:200")


def test_blocks_shares_and_bytes_resolve_to_blocks(trace: Trace) -> None:
    assert resolve(trace, device_memory="5000 blocks").blocks == (5000, 0, 0)
    assert resolve(trace, device_memory="1 block").blocks == resolve(trace, device_memory=Blocks(1)).blocks == (1, 0, 0)
    assert resolve(trace, device_memory=Bytes(40 << 30)) == resolve(trace, device_memory="40GiB")
    unique = trace.num_unique
    assert resolve(trace, device_memory="5%").device == unique * 5 // 100
    assert resolve(trace, device_memory="12.5%").device == unique // 8
    assert resolve(trace, device_memory="100%").device == unique
    # 512 tokens of 131,072 bytes: 64 MiB a block. 40 GB are 596.05 blocks, 40 GiB are 640.
    assert resolve(trace, device_memory="40GB").device == 596
    assert resolve(trace, device_memory="40GiB").device == 640
    assert resolve(trace, device_memory="40GiB", bytes_per_token=2 * 131072).device == 320
    assert resolve(trace, device_memory="1 block", host_memory="2 blocks", disk="3blocks").blocks == (1, 2, 3)


def test_the_disk_may_name_its_folder(trace: Trace) -> None:
    assert resolve(trace, device_memory="1%", disk="20 blocks:/nvme/kv").disk_dir == Path("/nvme/kv")
    assert resolve(trace, device_memory="1%", disk="20 blocks:/odd:name").disk_dir == Path("/odd:name")
    assert resolve(trace, device_memory="1%", disk="20%").disk_dir is None
    with pytest.raises(InvalidArgument, match="folder after ':'"):
        resolve(trace, device_memory="1%", disk="20 blocks:")


BAD: list[tuple[Any, str]] = [
    ("0 blocks", "less than one block"),
    (Blocks(0), "less than one block"),
    ("5000", "'5000' has no unit: write '5000 blocks'"),
    ("0", "no unit"),
    ("5.5", "no unit"),
    ("0%", "less than one block"),
    ("0.0001%", "less than one block"),
    ("1kB", "less than one block"),
    ("-5", "not a size"),
    ("-5%", "not a size"),
    ("", "not a size"),
    ("five", "not a size"),
    ("nan", "not a size"),
    ("inf", "not a size"),
    ("1e9", "unknown unit|not a size"),
    ("5 parsecs", "unknown unit"),
    ("40Gb", "unknown unit"),
    ("5.5 blocks", "not a whole number"),
    ("101%", "more than all"),
    ("9" * 19 + " blocks", "absurd"),
    ("9" * 400, "not a size"),
    ("999999999PiB", "absurd"),
    ("٥", "not a size"),
]


@pytest.mark.parametrize(("size", "message"), BAD)
def test_what_is_no_size_is_an_error_that_names_the_argument(size: Any, message: str, trace: Trace) -> None:
    with pytest.raises(InvalidArgument, match=f"^device_memory: .*({message})"):
        resolve(trace, device_memory=size)
    with pytest.raises(InvalidArgument, match=f"^host_memory: .*({message})"):
        resolve(trace, device_memory="1%", host_memory=size)


@pytest.mark.parametrize("size", [None, 1.5, True, b"5", 5, 0, -5, np.int64(5)])
def test_a_size_of_the_wrong_type_is_an_error(size: Any, trace: Trace) -> None:
    with pytest.raises(WrongType, match=r"^device_memory: .*write '5000 blocks'.*pagedkv\.Blocks"):
        resolve(trace, device_memory=size)


@pytest.mark.parametrize("size", [float("nan"), 0.5, None, 64, ["5%", 64]])
def test_capacities_of_the_wrong_type_are_an_error(size: Any, trace: Trace) -> None:
    with pytest.raises(WrongType):
        replay(trace, ("lru",), size)


@pytest.mark.parametrize("value", [0, -1, 2**40])
def test_absurd_bytes_per_token_are_refused(value: int, trace: Trace) -> None:
    with pytest.raises(InvalidArgument, match="bytes per token"):
        resolve(trace, device_memory="1GiB", bytes_per_token=value)


def test_a_capacity_checks_itself() -> None:
    with pytest.raises(InvalidArgument, match="at least 1 block"):
        Capacity(0)
    with pytest.raises(InvalidArgument, match="host blocks must be in"):
        Capacity(1, -1)
    with pytest.raises(InvalidArgument, match="disk"):
        Capacity(1, 1, 2**31)
    with pytest.raises(WrongType):
        Capacity(1.5)  # type: ignore[arg-type]
    with pytest.raises(WrongType, match="device blocks is not in bytes"):
        Capacity(Bytes(5))
    assert Capacity(Blocks(5)).blocks == (5, 0, 0)
    assert Capacity(5, 0, 7).total == 12
    assert list(Capacity(5, 0, 7).tiers()) == [("device", 5), ("disk", 7)]
