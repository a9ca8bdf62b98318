"""Sizes as users type them.

Blocks, shares rounded down, bytes rounded down, and strings that are no size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.replay import Capacity, Trace, load_trace, replay, resolve
from pagedkv.spec.sizes import Blocks, Bytes


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("synthetic:chat:0:200")


def test_blocks_shares_and_bytes_resolve_to_blocks(trace: Trace) -> None:
    assert resolve(trace, device="5000").blocks == (5000, 0, 0)
    assert resolve(trace, device=5000).device == resolve(trace, device=Blocks(5000)).device == 5000
    assert resolve(trace, device=Bytes(40 << 30)) == resolve(trace, device="40GiB")
    unique = trace.num_unique
    assert resolve(trace, device="5%").device == unique * 5 // 100
    assert resolve(trace, device="12.5%").device == unique // 8
    assert resolve(trace, device="100%").device == unique
    # 512 tokens of 131,072 bytes: 64 MiB a block. 40 GB are 596.05 blocks, 40 GiB are 640.
    assert resolve(trace, device="40GB").device == 596
    assert resolve(trace, device="40GiB").device == 640
    assert resolve(trace, device="40GiB", bytes_per_token=2 * 131072).device == 320
    assert resolve(trace, device="1", host="2", disk="3").blocks == (1, 2, 3)


def test_the_disk_may_name_its_folder(trace: Trace) -> None:
    assert resolve(trace, device=1, disk="20:/nvme/kv").disk_dir == Path("/nvme/kv")
    assert resolve(trace, device=1, disk="20:/odd:name").disk_dir == Path("/odd:name")
    assert resolve(trace, device=1, disk="20").disk_dir is None
    with pytest.raises(InvalidArgument, match="folder after ':'"):
        resolve(trace, device=1, disk="20:")


BAD: list[tuple[Any, str]] = [
    ("0", "less than one block"),
    (0, "less than one block"),
    ("0%", "less than one block"),
    ("0.0001%", "less than one block"),
    ("1kB", "less than one block"),
    ("-5", "not a size"),
    (-5, "not a size"),
    ("-5%", "not a size"),
    ("", "not a size"),
    ("five", "not a size"),
    ("nan", "not a size"),
    ("inf", "not a size"),
    ("1e9", "unknown unit|not a size"),
    ("5 parsecs", "unknown unit"),
    ("40Gb", "unknown unit"),
    ("5.5", "not a whole number"),
    ("101%", "more than all"),
    ("9" * 19, "absurd"),
    ("9" * 400, "not a size"),
    ("999999999PiB", "absurd"),
    ("٥", "not a size"),
]


@pytest.mark.parametrize(("size", "message"), BAD)
def test_what_is_no_size_is_an_error_that_names_the_tier(size: Any, message: str, trace: Trace) -> None:
    with pytest.raises(InvalidArgument, match=f"^device: .*({message})"):
        resolve(trace, device=size)
    with pytest.raises(InvalidArgument, match=f"^host: .*({message})"):
        resolve(trace, device=1, host=size)


@pytest.mark.parametrize("size", [None, 1.5, True, b"5"])
def test_a_size_of_the_wrong_type_is_an_error(size: Any, trace: Trace) -> None:
    with pytest.raises(WrongType):
        resolve(trace, device=size)


@pytest.mark.parametrize("size", [float("nan"), 0.5, None])
def test_capacities_of_the_wrong_type_are_an_error(size: Any, trace: Trace) -> None:
    with pytest.raises(WrongType):
        replay(trace, ("lru",), size)


@pytest.mark.parametrize("value", [0, -1, 2**40])
def test_absurd_bytes_per_token_are_refused(value: int, trace: Trace) -> None:
    with pytest.raises(InvalidArgument, match="bytes per token"):
        resolve(trace, device="1GiB", bytes_per_token=value)


def test_a_capacity_checks_itself() -> None:
    with pytest.raises(InvalidArgument, match="at least 1 block"):
        Capacity(0)
    with pytest.raises(InvalidArgument, match="host blocks must be in"):
        Capacity(1, -1)
    with pytest.raises(InvalidArgument, match="disk"):
        Capacity(1, 1, 2**31)
    with pytest.raises(WrongType):
        Capacity(1.5)  # type: ignore[arg-type]
    assert Capacity(5, 0, 7).total == 12
    assert list(Capacity(5, 0, 7).tiers()) == [("device", 5), ("disk", 7)]
