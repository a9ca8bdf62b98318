"""``KVCache(memory=)`` is the one tier of a host without a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pagedkv as pk
from tests.cache.conftest import SPEC, Toy, prompt
from tests.shown import shown


def test_memory_is_the_first_tier(tmp_path: Path) -> None:
    with pk.KVCache(SPEC, memory="64KiB", disk=pk.Disk(str(tmp_path / "kv"), "1MiB", admission="all")) as cache:
        toy = Toy(cache)
        toy.use(prompt(1))
        assert toy.use(prompt(1)) == {"device": 12}
        assert cache.match(prompt(1)) == {"device": 12, "disk": 0}
        with pk.KVCache(SPEC, device_memory="64KiB") as same:
            assert cache.stats().blocks["device"]["capacity"] == same.stats().blocks["device"]["capacity"] == 128


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"device_memory": "64KiB"}, "memory and device_memory both say"),
        ({"host_memory": "64KiB"}, "device_memory and host_memory for two tiers"),
        ({"device": "cuda"}, "device='cuda' is one: give device_memory"),
        ({"device": "cuda:1"}, "device='cuda:1' is one: give device_memory"),
        ({"backend": object()}, "with a backend is one: give device_memory"),
    ],
    ids=shown,
)
def test_memory_beside_a_device_is_refused_with_what_to_give(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(pk.InvalidArgument, match=advice):
        pk.KVCache(SPEC, memory="64KiB", **options)


@pytest.mark.parametrize(
    ("size", "error"), [(64, pk.WrongType), (True, pk.WrongType), ("0B", pk.InvalidArgument)]
)
def test_a_size_that_is_none_is_refused_by_the_name_that_was_given(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^memory"):
        pk.KVCache(SPEC, memory=size)
    with pytest.raises(pk.WrongType, match="or memory='8GiB' on a host without a device"):
        pk.KVCache(SPEC)
