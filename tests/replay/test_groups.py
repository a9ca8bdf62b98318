"""Replays of models whose layers keep only tokens that they can still read."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument, UnsupportedVariant, WrongType
from pagedkv.lab.replay import Options, Trace, load_trace, replay
from pagedkv.lab.replay.engine_groups import GroupCache
from pagedkv.lab.replay.pages import ModelPages, Pages, model_pages
from pagedkv.lab.sizing.models import Model, find_model
from pagedkv.lab.sizing.shape import LayerGroup, StateGroup, token_bytes
from pagedkv.spec.sizes import Bytes
from tests.replay.groups_oracle import Oracle
from tests.replay.hits import HERE, source

GiB = 1 << 30
MODELS = {
    "Gemma 3 27B": (LayerGroup(10, 16, 128), LayerGroup(52, 16, 128, window=1024)),
    "gpt-oss-120b": (LayerGroup(18, 8, 64), LayerGroup(18, 8, 64, window=128)),
    "Llama 4 Scout": (LayerGroup(12, 8, 128), LayerGroup(36, 8, 128, chunk=8192)),
}
GOLDEN: dict[str, Any] = json.loads((HERE / "group_hits.json").read_text(encoding="utf-8"))
CASES = [
    (trace, model, gib)
    for trace, models in GOLDEN.items()
    for model, sizes in models.items()
    for gib in sizes
]


def named(model: str) -> Model:
    return Model(model, MODELS[model], 0)


def trace_of(name: str) -> Trace:
    if not Path(source(name)).exists():
        pytest.skip(f"{name} is not here: set PAGEDKV_SHARED to the folder that holds traces/")
    return load_trace(source(name)).head(3000)


def replayed(trace: Trace, model: Model, size: Bytes, **options: Any) -> Any:
    options = {"layers": model, "bytes_per_token": token_bytes(model.groups)} | options
    (result,) = replay(trace, ["lru"], size, options=Options(**options))
    return result


@pytest.mark.parametrize(("trace", "model", "gib"), CASES)
def test_the_hits_are_those_of_the_rule_as_exact_integers(trace: str, model: str, gib: str) -> None:
    """group_hits.json is by another implementation, without tree, pools and recency lists.

    By the blocks between regular points: none, and those that a replay takes.
    """
    requests = load_trace("mooncake:conversation") if trace == "mooncake_conversation_dev" else trace_of(trace)
    pages = model_pages(model, MODELS[model], requests.block_size)
    assert pages is not None
    for every, expected in GOLDEN[trace][model][gib].items():
        if int(every):
            assert int(every) == pages.point_every
            result = replayed(requests, named(model), Bytes(int(gib) * GiB))
            assert result.hit_blocks["total"] == expected
        else:
            cache = GroupCache(pages, (int(gib) * GiB, 0, 0), 0)
            paths = [requests.path(i)[: requests.input_tokens[i] // 512] for i in range(requests.num_requests)]
            assert sum(cache.request(path).hit for path in paths) == expected
            cache.placement.check_integrity()


@pytest.mark.parametrize("seed", range(120))
def test_every_request_hits_as_the_rule_says(seed: int) -> None:
    random = Random(seed)
    windows, chunks = ((random.randint(1, 4), 0) for _ in range(2)), ((0, random.randint(2, 5)) for _ in range(2))
    reaches = [next(random.choice((windows, chunks))) for _ in range(random.randint(1, 2))]
    groups = (Pages(random.choice((1, 2, 5))), *(Pages(random.choice((1, 2, 3, 5)), *reach) for reach in reaches))
    model = ModelPages("random", groups, sum(pages.page_bytes for pages in groups))
    budget, every = random.randint(10, 150), random.choice((0, 0, 3, 7))
    cache, oracle = GroupCache(model, (budget, 0, 0), every), Oracle(groups, budget, every)
    paths: list[tuple[int, ...]] = [()]
    for number in range(60):
        base = random.choice(paths)
        path = base[: random.randint(0, len(base))] + tuple(1000 * number + i for i in range(random.randint(0, 8)))
        paths.append(path)
        found = cache.request(np.array(path, np.int32))
        assert found.hit == oracle.request(path), (number, path)
        pools = cache.placement.pools[0].extents
        assert pools.num_extents - pools.num_free == -(-oracle.held() // model.unit), number
        cache.placement.check_integrity()
        pools.check_integrity()


@pytest.mark.parametrize("host", [0, 40, 400])
@pytest.mark.parametrize("seed", range(8))
def test_tiers_below_hit_blocks_that_the_device_lost(seed: int, host: int) -> None:
    """A request never hits more than in endless memory, and moves go both ways."""
    random = Random(seed)
    groups = (Pages(2), Pages(3, window=2))
    model = ModelPages("two", groups, 5)
    cache, endless = GroupCache(model, (60, host, 0), 0), GroupCache(model, (10_000, 0, 0), 0)
    paths: list[tuple[int, ...]] = [()]
    lost = 0
    for number in range(150):
        base = random.choice(paths[-20:])
        path = base[: random.randint(0, len(base))] + tuple(1000 * number + i for i in range(random.randint(1, 5)))
        path = path[:16]
        paths.append(path)
        found, most = cache.request(np.array(path, np.int32)), endless.request(np.array(path, np.int32))
        assert found.hit <= most.hit
        assert len(found.tiers) == found.hit
        lost += most.hit - found.hit
        cache.placement.check_integrity()
    down, up = cache.moved[0 * 3 + 1], cache.moved[1 * 3 + 0]
    assert (down > 0) == (host > 0)
    assert (up > 0) == (host > 0)
    if host == 40:
        assert lost > 0


def test_a_model_without_short_layers_is_replayed_as_ever() -> None:
    trace = load_trace("synthetic:chat:0:200")
    plain = Model("plain", (LayerGroup(4, 2, 64),), 0)
    (expected,) = replay(trace, ["lru"], "5%", options=Options(bytes_per_token=token_bytes(plain.groups)))
    found = replayed(trace, plain, Bytes(expected.capacity.device * trace.block_size * 2048))
    assert found.hit_blocks == expected.hit_blocks
    windows_alone = Model("windows", (LayerGroup(4, 2, 64, window=100),), 0)
    assert model_pages("windows", windows_alone.groups, 512) is None


def test_pages_of_a_window_shorter_than_a_block_hold_the_tokens_that_a_boundary_needs() -> None:
    pages = model_pages("gpt-oss-120b", MODELS["gpt-oss-120b"], 512)
    assert pages is not None
    token = 18 * 8 * 64 * 2 * 2
    assert pages.groups == (Pages(512 * token), Pages(128 * token, window=1))
    assert (pages.all_bytes, pages.unit, pages.point_every) == (2 * 512 * token, 128 * token, 4)
    wide = model_pages("wide", (LayerGroup(1, 1, 1), LayerGroup(1, 1, 1, window=1025)), 512)
    assert wide is not None
    assert wide.groups[1] == Pages(2048, window=2)
    assert wide.kept_bytes(5, [2, 3, 5]) == 5 * 2048 + 5 * 2048


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        ((LayerGroup(1, 1, 1), StateGroup(1, 8)), UnsupportedVariant, "recurrent states"),
        ((LayerGroup(1, 1, 1), LayerGroup(1, 1, 1, chunk=700)), InvalidArgument, "chunks of 700 tokens"),
        (
            (LayerGroup(1, 1, 1), *(LayerGroup(1, 1, 1, window=n * 1024) for n in range(1, 5))),
            InvalidArgument,
            "5 groups of layers; at most 4",
        ),
    ],
)
def test_layers_that_cannot_be_replayed_are_named(layers: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        replayed(load_trace("synthetic:chat:0:20"), Model("odd", layers, 0), Bytes(GiB))


def test_options_that_layers_which_keep_less_do_not_have_are_refused() -> None:
    trace, gemma = load_trace("synthetic:chat:0:20"), find_model("gemma-2-9b")
    for policies, options, word in (
        (["arc"], {}, "'arc'"),
        (["lru"], {"generating": 20.0}, "generating"),
        (["lru"], {"engine": "real"}, "'real'"),
    ):
        with pytest.raises(InvalidArgument, match=word):
            replay(trace, policies, "64GiB", options=Options(layers=gemma, **options))
    with pytest.raises(WrongType, match=r"pagedkv\.lab\.sizing"):
        Options(layers="gemma-2-9b")  # type: ignore[arg-type]


def test_memory_that_its_pages_cannot_be_counted_in_is_refused() -> None:
    model = ModelPages("odd", (Pages(1 << 20), Pages((1 << 20) + 1, window=1)), 1 << 21)
    with pytest.raises(InvalidArgument, match="cannot be counted in units of 1 B"):
        GroupCache(model, (64 * GiB, 0, 0), 0)


def test_no_move_is_under_way_when_the_next_request_comes() -> None:
    """The host is smaller than the device."""
    cache = GroupCache(ModelPages("two", (Pages(1), Pages(2, window=3)), 3), (30, 10, 0), 0)
    for path in ([0, 0, 1, 1], [0, 1, 0, 1, 1, 1, 1, 0, 1], [0, 1, 0, 1, 1, 0, 1, 0], [0, 0, 1]):
        cache.request(np.array(path, np.int32))
        assert cache.placement.num_in_flight == 0
        cache.placement.check_integrity()
