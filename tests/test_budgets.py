"""Sizes say their unit, and places are no sizes.

A Disk checks its arguments before anything is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.budgets import Disk, blocks_for
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import Blocks, Bytes, Size

SPEC = KVSpec(32, 8, 128)  # 2 MiB a block


@pytest.mark.parametrize(
    ("size", "num_blocks"),
    [
        ("8GiB", 4096),
        ("2MiB", 1),
        ("4095KiB", 1),
        (Bytes(2**21), 1),
        (Bytes(np.int64(2**33)), 4096),
        (Blocks(1), 1),
        (Blocks(np.int32(7)), 7),
        (Blocks(2**31 - 1), 2**31 - 1),
    ],
)
def test_a_size_is_so_many_blocks(size: Size, num_blocks: int) -> None:
    assert blocks_for(size, SPEC, "size") == num_blocks


TOO_SMALL_OR_LARGE: list[Size] = ["0B", "2047KiB", Blocks(0), Bytes(1), Blocks(2**31), "8192TiB"]


@pytest.mark.parametrize("size", TOO_SMALL_OR_LARGE, ids=repr)
def test_a_size_without_a_whole_block_or_beyond_the_ids_is_refused(size: Size) -> None:
    with pytest.raises(InvalidArgument, match="device_memory="):
        blocks_for(size, SPEC, "device_memory")


@pytest.mark.parametrize("size", [8, 0, -1, np.int64(4096), 1.0, float("nan"), 2**100])
def test_a_bare_number_has_no_unit(size: Any) -> None:
    with pytest.raises(WrongType, match=r"has no unit: write pagedkv\.Blocks\("):
        blocks_for(size, SPEC, "device_memory")


@pytest.mark.parametrize("size", ["8", "", "8 blocks", "-1GiB", "nan"])
def test_a_string_needs_its_unit(size: str) -> None:
    with pytest.raises(InvalidArgument, match="write a number, 0 or more, and a unit"):
        blocks_for(size, SPEC, "device_memory")


@pytest.mark.parametrize("size", [None, True, b"8GiB", ["8GiB"]])
def test_a_size_of_another_type_is_refused(size: Any) -> None:
    with pytest.raises(WrongType):
        blocks_for(size, SPEC, "device_memory")


@pytest.mark.parametrize("kind", [Blocks, Bytes])
@pytest.mark.parametrize("number", [-1, 2**63, 1.5, True, "8", None, float("nan")])
def test_a_number_with_a_unit_is_a_whole_number(kind: Any, number: Any) -> None:
    with pytest.raises((InvalidArgument, WrongType)):
        kind(number)


def test_a_size_reads_as_it_is_written() -> None:
    assert (repr(Blocks(8)), repr(Bytes(9)), Blocks(8) + 1) == ("Blocks(8)", "Bytes(9)", 9)


def test_a_disk_in_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert Disk("~/kv", "1GiB").path == "/somewhere/kv"
    assert Disk("./~/kv", "1GiB").path == "./~/kv"


def test_a_place_is_no_size_and_a_size_is_no_place() -> None:
    spec: Any = KVSpec(1, 1, 8, "float32", 4)
    with pytest.raises(InvalidArgument, match="device='cuda:0'"):
        pk.KVCache(spec, "cuda:0")
    with pytest.raises(InvalidArgument, match="device_memory='8GiB'"):
        pk.KVCache(spec, "1MiB", device="8GiB")
    for wrong in (0, None, 1.5, pk.Blocks(8)):
        with pytest.raises(WrongType, match="device is a place"):
            pk.KVCache(spec, "1MiB", device=wrong)  # type: ignore[arg-type]
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:x", "CPU", "", "cuda:99999"):
        with pytest.raises(InvalidArgument, match="device must be 'cpu'"):
            pk.KVCache(spec, "1MiB", device=wrong)
    with pytest.raises(WrongType, match=r"device_memory is needed.*device= is a place"):
        pk.KVCache(spec, device="8MiB")
    pk.KVCache(spec, "1MiB", device="cpu").close()


@pytest.mark.parametrize("size", [8, "1", Blocks(2**40), -3])
def test_nothing_can_be_pinned_beyond_a_budget_that_is_a_size(size: Any) -> None:
    with pytest.raises((InvalidArgument, WrongType), match="pin_budget"):
        pk.KVCache(KVSpec(1, 1, 8, "float32", 4), "1MiB", pin_budget=size)


def test_a_disk_keeps_its_path_as_text_and_touches_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "kv", "200GiB", segment_size="64MiB", shards=2)
    assert disk.path == str(tmp_path / "kv")
    assert disk.segment_bytes == 64 * 2**20
    assert not list(tmp_path.iterdir())


def test_a_disk_says_how_much_may_be_written() -> None:
    assert Disk("kv", Blocks(8)).write_bytes_per_day is None
    assert Disk("kv", Blocks(8), write_budget="2TB").write_bytes_per_day == 2 * 10**12
    assert Disk("kv", Blocks(8), write_budget=Bytes(4096)).write_bytes_per_day == 4096


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"admission": "some"}, InvalidArgument),
        ({"admission": 3}, WrongType),
        ({"write": 3}, WrongType),
        ({"on_mismatch": "ignore"}, InvalidArgument),
        ({"page_cache": True}, WrongType),
        ({"page_cache": np.array(["drop"])}, WrongType),
        ({"write_budget": 0}, WrongType),
        ({"write_budget": "0B"}, InvalidArgument),
        ({"write_budget": Blocks(3)}, WrongType),
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
        ({"size": 0}, WrongType),
        ({"size": 2.5}, WrongType),
        ({"segment_size": 0}, WrongType),
        ({"segment_size": Bytes(0)}, InvalidArgument),
        ({"segment_size": Blocks(8)}, WrongType),
        ({"segment_size": "1Gb"}, InvalidArgument),
        ({"shards": 0}, InvalidArgument),
        ({"shards": 1025}, InvalidArgument),
        ({"shards": True}, WrongType),
    ],
)
def test_a_disk_refuses_what_it_could_not_open(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Disk(**({"path": "kv", "size": "1GiB"} | fields))


@pytest.mark.parametrize("name", ["segment_size", "write_budget"])
@pytest.mark.parametrize("size", [64, [64], Blocks(64), 1.5], ids=repr)
def test_a_size_in_bytes_alone_does_not_advise_blocks(name: str, size: Any) -> None:
    with pytest.raises(WrongType, match=rf"^{name}\b.*Bytes") as caught:
        Disk("kv", "1GiB", **{name: size})
    assert "Blocks" not in str(caught.value).replace("not Blocks(64)", "")


@pytest.mark.parametrize("unit", [Blocks, Bytes])
def test_tokens_and_layers_have_no_such_unit(unit: type[Blocks | Bytes]) -> None:
    with pytest.raises(WrongType, match="block_size is not in"):
        KVSpec(1, 1, 8, block_size=unit(16))
    with pytest.raises(WrongType, match="num_layers is not in"):
        KVSpec(unit(1), 1, 8)
