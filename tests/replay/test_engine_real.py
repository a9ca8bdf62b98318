"""The real engine: the same hits as the sim engine, every byte right.

It finds and reports a wrong byte.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.cache.cache import KVCache
from pagedkv.cli import main
from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay import POLICIES, Capacity, Options, References, Trace, engine_real, load_trace, replay
from pagedkv.lab.replay.payload import Bytes, Payload
from pagedkv.spec.sizes import Blocks
from pagedkv.tiers import DeviceTier, HostTier, RamTier
from tests.slices import one_in

REAL = Options(engine="real", block_bytes=4096)
TIERS = [Capacity(5), Capacity(5, 9), Capacity(4, 0, 12), Capacity(4, 6, 15), Capacity(60, 3, 3)]


@pytest.mark.parametrize("name", ["synthetic:chat:0:150", "synthetic:agent:0:60"])
def test_lru_hits_what_it_hits_in_the_sim_engine(name: str) -> None:
    trace = load_trace(name)
    small, middle, large = (trace.num_unique * share // 100 for share in (5, 10, 25))
    sim_options = Options(bytes_per_token=8)  # times 512: 4096 bytes, too
    (real,), (sim,) = (replay(trace, ["lru"], Blocks(small), options=o) for o in (REAL, sim_options))
    assert real.hits_per_request.tolist() == sim.hits_per_request.tolist()
    for capacity in (Capacity(small, middle), Capacity(small, 0, large), Capacity(small, middle, large)):
        (real,), (sim,) = (replay(trace, ["lru"], capacity, options=o) for o in (REAL, sim_options))
        # with a spare block for the last token, a block may leave the device one request later
        assert real.hit_blocks["total"] == pytest.approx(sim.hit_blocks["total"], rel=0.02)
        assert real.bytes == {way: pytest.approx(moved, rel=0.05) for way, moved in sim.bytes.items()}


@pytest.mark.parametrize("demotion", one_in(2, ["oldest_first", "leaf_first"]))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_byte_served_is_right_and_no_policy_passes_the_bound(
    policy: str, demotion: str, make_trace: Callable[..., Trace], random_paths: Callable[..., list[list[int]]]
) -> None:
    options = Options(engine="real", block_bytes=4096, demotion=demotion)
    trace = make_trace(random_paths(4, requests=120, depth=7))
    references = References(trace)
    for capacity in TIERS:
        (result,) = replay(trace, [policy], capacity, options=options, references=references)
        assert result.wrong_bytes == 0
        assert result.verified_bytes == 4096 * result.hit_blocks["total"]
        assert result.hit_blocks["total"] <= references.total("min-bypass", capacity.total)
        assert result.counters["failed_moves"] == 0


def test_lru_of_the_real_cache_meets_the_published_counts(shared_traces: Path) -> None:
    trace = load_trace(shared_traces / "mooncake_conversation_dev.npz").head(300)
    references = References(trace)
    for capacity in (238, 1000):
        (result,) = replay(trace, ["lru"], Blocks(capacity), options=REAL, references=references)
        assert result.hits_per_request.tolist() == references.hits("lru", capacity).tolist()


@pytest.mark.slow
def test_the_conversation_trace_over_three_tiers_has_no_wrong_byte(shared_traces: Path) -> None:
    trace = load_trace(shared_traces / "mooncake_conversation_dev.npz").head(2000)
    (result,) = replay(trace, ["lru"], Capacity(500, 1500, 4000), options=REAL)
    assert result.wrong_bytes == 0
    assert all(result.hit_blocks[tier] > 0 for tier in ("device", "host", "disk"))
    assert result.verified_bytes == 4096 * result.hit_blocks["total"]


def test_one_wrong_byte_fails_the_run_and_is_in_the_report(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_badly(self: Payload, block: int, out: Bytes, real: Callable[..., None] = Payload.fill) -> None:
        real(self, block, out)
        out[1234] ^= block == 0

    monkeypatch.setattr(Payload, "fill", fill_badly)
    out = tmp_path / "report.json"
    argv = ["replay", str(data / "chat.npz"), "--policy", "lru", "--device-memory", "200 blocks"]
    argv += ["--host-memory", "300 blocks"]
    assert main([*argv, "--engine", "real", "--block-bytes", "4KiB", "--json", str(out)]) == 1
    result = json.loads(out.read_text())["results"][0]
    assert result["wrong_bytes"] > 0
    assert capsys.readouterr().err == f"pagedkv: error: {result['wrong_bytes']} wrong bytes were served\n"


@pytest.mark.parametrize("tier", [DeviceTier, HostTier])
def test_a_byte_that_changes_in_a_tier_is_found_when_it_is_served(
    tier: type[RamTier], make_trace: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [[1, 2, 3], [4, 5, 6], [1, 2, 3]]  # on a device of 3, the second request demotes the first
    tiers: list[RamTier] = []
    requests = 0
    open_tier, serve = tier.__init__, engine_real.RealCache.request

    def opened(self: RamTier, *arguments: Any, **options: Any) -> None:
        open_tier(self, *arguments, **options)
        tiers.append(self)

    def request(self: engine_real.RealCache, path: Any, session: int = -1) -> Any:
        nonlocal requests
        if requests == 2:
            tiers[0].arena[:, 77] ^= 1
        requests += 1
        return serve(self, path, session)

    monkeypatch.setattr(tier, "__init__", opened)
    monkeypatch.setattr(engine_real.RealCache, "request", request)
    capacity = Capacity(3, 6) if tier is HostTier else Capacity(6)
    (result,) = replay(make_trace(paths), ["lru"], capacity, options=REAL)
    assert result.hits_per_request.tolist() == [0, 0, 3]
    assert result.wrong_bytes == 3


def test_the_disk_folder_is_left_as_it_was(tmp_path: Path) -> None:
    trace = load_trace("synthetic:chat:0:30")
    for _ in range(2):  # the second replay starts cold as well
        (result,) = replay(trace, ["lru"], Capacity(60, 0, 100, tmp_path), options=REAL)
        assert result.bytes["device_to_disk"] > 0
        assert list(tmp_path.iterdir()) == []


def test_a_disk_folder_is_made_with_those_above_it_and_none_where_a_file_is(tmp_path: Path) -> None:
    trace = load_trace("synthetic:chat:0:30")
    (result,) = replay(trace, ["lru"], Capacity(60, 0, 100, tmp_path / "a" / "b"), options=REAL)
    assert result.bytes["device_to_disk"] > 0
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "b"]
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InvalidArgument, match=r"disk: .*file is no folder"):
        replay(trace, ["lru"], Capacity(60, 0, 100, tmp_path / "file" / "b"), options=REAL)
    replay(trace, ["lru"], Capacity(60, 0, 100, tmp_path / "c"))
    assert not (tmp_path / "c").exists(), "a replay without bytes makes none"


def test_tiers_larger_than_the_machine_are_refused_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = load_trace("synthetic:chat:0:30")
    monkeypatch.setattr(engine_real, "_available_memory", lambda: 1 << 20)
    with pytest.raises(InvalidArgument, match=r"device and host: .* of memory are available"):
        replay(trace, ["lru"], Blocks(2**31 - 1), options=REAL)


@pytest.mark.parametrize("block_bytes", [0, -4096, 4095, 5000, 1 << 40])
def test_a_payload_that_is_no_number_of_pages_is_refused(block_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="block bytes"):
        Options(engine="real", block_bytes=block_bytes)


def test_the_policy_hazard_goes_by_the_traces_clock_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    learned: list[Any] = []

    class Watched(KVCache):
        def sequence(self, *arguments: Any, **options: Any) -> Any:
            times.append(self.moves.now_ns() / 1e6)
            return super().sequence(*arguments, **options)

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            learned.append(self.placement.hazard)

    monkeypatch.setattr(engine_real, "KVCache", Watched)
    trace = load_trace("synthetic:chat:0:150")
    silent = dataclasses.replace(trace, output_tokens=np.zeros_like(trace.output_tokens))
    for each in (trace, silent):
        replay(each, ["hazard"], Capacity(trace.num_unique // 10, 20, 40), options=REAL)
    assert times[: trace.num_requests] == pytest.approx(np.maximum.accumulate(trace.t_ms))
    told, nothing = learned
    assert min(told.stats()["hits"], nothing.stats()["hits"]) > 0
    assert not np.array_equal(told.tables(), nothing.tables())
