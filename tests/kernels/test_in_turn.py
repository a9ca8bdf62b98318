"""A workspace serves one stream at a time: another waits, and never for a capture."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagedkv.attention import CascadeAttention, PagedAttention
from pagedkv.errors import ClosedError, InvalidArgument
from pagedkv.kernels.in_turn import InTurn
from tests.attention.noting import Noting, aligned
from tests.kernels.fake_cupy import FakeCupy, RuntimeFailure, asked_of_captures


class Streams:
    """CuPy's events between streams, noted."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.captured: set[int] = set()
        self.current = 77
        self.cupy = SimpleNamespace(
            cuda=SimpleNamespace(
                Event=lambda disable_timing: SimpleNamespace(ptr=5),
                runtime=SimpleNamespace(
                    streamIsCapturing=lambda stream: asked_of_captures(self.captured, stream, RuntimeFailure(906)),
                    eventRecord=lambda event, stream: self.done.append(("record", stream)),
                    streamWaitEvent=lambda stream, event: self.done.append(("wait", stream)),
                ),
            )
        )
        self.turns = InTurn(self.cupy, self.of, contextlib.nullcontext)

    def of(self, stream: Any) -> Any:
        if hasattr(stream, "ptr"):
            return stream
        return SimpleNamespace(ptr=self.current if stream is None else stream)


class Turning(Noting):
    """A device with streams; launches are noted among their events."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.during = lambda: streams.done.append(("launch",))

    def in_turn(self) -> Any:
        return self.streams.turns


def attention(backend: Noting, kernel: str = "decode_mma") -> PagedAttention:
    return PagedAttention(num_qo_heads=4, num_kv_heads=1, head_dim=64, max_sequences=2, kernel=kernel, device=backend)


def test_a_cascade_serves_one_stream_at_a_time() -> None:
    """Its levels' results and the queries' positions lie in one workspace."""
    streams = Streams()
    cascade = CascadeAttention(
        [16, 16], max_groups=[1, 1], num_qo_heads=4, num_kv_heads=1, head_dim=64, window=9, device=Turning(streams),
        kernel="decode_mma",
    )  # fmt: skip
    level = (np.zeros((1, 1), np.int32), np.array([5], np.int32), np.array([0, 1], np.int32))
    for stream in (3, 4):
        streams.done.clear()
        cascade.plan([level, level], stream=stream)
        assert streams.done[-1] == ("launch",)
    assert streams.done[:3] == [("record", 3), ("wait", 4), ("launch",)]


def arrays() -> tuple[Any, Any, Any]:
    k, v = (aligned((4, 16, 1, 64), np.float16) for _ in "kv")
    return aligned((1, 4, 64), np.float16), k, v


PLAN = (aligned((1, 4), np.int32), aligned((1,), np.int32))


def test_a_run_on_another_stream_waits_for_the_runs_before_it() -> None:
    streams = Streams()
    paged, layer = attention(Turning(streams)), arrays()
    paged.plan(*PLAN)
    paged.run(*layer)
    paged.run(*layer, stream=77)
    assert streams.done == [("launch",)] * 3
    paged.run(*layer, stream=8)
    assert streams.done[3:] == [("record", 77), ("wait", 8), ("launch",)]
    paged.plan(*PLAN, stream=9)
    assert streams.done[6:] == [("record", 8), ("wait", 9), ("launch",)]
    streams.current = 10
    paged.run(*layer)
    assert streams.done[9:] == [("record", 9), ("wait", 10), ("launch",)]


def test_a_run_beside_a_capture_of_the_same_workspace_is_refused_before_it_is_launched() -> None:
    streams = Streams()
    paged, layer = attention(Turning(streams)), arrays()
    streams.captured = {7}
    paged.plan(*PLAN, stream=7)
    paged.run(*layer, stream=7)
    streams.done.clear()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"captured into a graph on stream 0x7.*stream 0x8"):
            paged.run(*layer, stream=8)
    assert streams.done == []
    paged.run(*layer, stream=7)
    streams.captured = {7, 8}  # a fork of the capture
    paged.run(*layer, stream=8)
    assert streams.done == [("launch",), ("record", 7), ("wait", 8), ("launch",)]
    streams.captured = set()
    paged.run(*layer, stream=9)
    assert streams.done[4:] == [("record", 7), ("wait", 9), ("record", 8), ("wait", 9), ("launch",)]


def test_a_thread_that_runs_during_anothers_launch_waits_for_that_launch() -> None:
    streams = Streams()
    backend = Turning(streams)
    paged, layer = attention(backend), arrays()
    paged.plan(*PLAN, stream=7)
    paged.run(*layer, stream=7)
    streams.done.clear()
    other = threading.Thread(target=paged.run, args=layer, kwargs={"stream": 8}, daemon=True)

    def meanwhile() -> None:
        backend.during = lambda: streams.done.append(("launch",))
        other.start()
        other.join(0.1)  # it cannot be done before this launch is
        streams.done.append(("launch",))

    backend.during = meanwhile
    paged.run(*layer, stream=7)
    other.join(30.0)  # only tells a hang
    assert streams.done == [("launch",), ("record", 7), ("wait", 8), ("launch",)]


def test_a_capture_does_not_wait_for_work_outside_and_what_follows_does() -> None:
    streams = Streams()
    paged, layer = attention(Turning(streams)), arrays()
    paged.plan(*PLAN, stream=7)
    streams.captured = {8}
    paged.plan(*PLAN, stream=8)
    paged.run(*layer, stream=8)
    assert streams.done == [("launch",)] * 3
    streams.captured = set()
    paged.run(*layer, stream=9)
    assert sorted(streams.done[3:-1]) == [("record", 7), ("record", 8), ("wait", 9), ("wait", 9)]
    assert [streams.done[at][0] for at in (3, 4, 5, 6)] == ["record", "wait"] * 2
    streams.done.clear()
    paged.run(*layer, stream=9)
    assert streams.done == [("launch",)], "the earlier ones are waited for already"


@pytest.mark.parametrize("last", [9, SimpleNamespace(ptr=9)], ids=["pointer", "object"])
def test_work_on_the_stream_of_an_ended_capture_waits_for_that_before_the_capture(last: Any) -> None:
    streams = Streams()
    paged, layer = attention(Turning(streams)), arrays()
    paged.plan(*PLAN, stream=7)
    streams.captured = {8, 9}
    for stream in (8, last):  # a fork
        paged.run(*layer, stream=stream)
    streams.captured = set()
    streams.done.clear()
    for _ in range(2):
        paged.run(*layer, stream=last)
    assert streams.done == [("record", 7), ("wait", 9), ("record", 8), ("wait", 9), ("launch",), ("launch",)]


def test_the_null_stream_counts_as_never_captured() -> None:
    """As the page's example has it: a run there, then a capture of a blocking stream."""
    streams = Streams()
    streams.current = 0
    paged, layer = attention(Turning(streams)), arrays()
    paged.plan(*PLAN)
    paged.run(*layer)
    streams.captured = {8}
    paged.plan(*PLAN, stream=8)
    paged.run(*layer, stream=8)
    with pytest.raises(InvalidArgument, match=r"captured into a graph on stream 0x8.*stream 0x0"):
        paged.run(*layer)
    assert streams.done == [("launch",)] * 4
    streams.captured = set()
    paged.run(*layer, stream=8)
    assert streams.done[4:] == [("record", 0), ("wait", 8), ("launch",)]


@pytest.mark.parametrize(
    ("kernel", "names"), [("decode_mma", ["arrivals"]), ("prefill_wgmma", ["next_item", "arrivals"])]
)
def test_reset_zeroes_the_counters_and_asks_for_a_plan(kernel: str, names: list[str]) -> None:
    backend = Noting()
    paged, layer = attention(backend, kernel), arrays()
    paged.plan(*PLAN)
    paged.run(*layer)
    assert paged._plan is not None
    counters = [paged._plan.division.arrays[name] for name in names]
    for one in counters:
        one[...] = 3
    paged.reset()
    assert not any(one.any() for one in counters)
    with pytest.raises(ClosedError):
        paged.run(*layer)
    paged.plan(*PLAN)
    paged.run(*layer)
    attention_on_cpu = PagedAttention(num_qo_heads=1, num_kv_heads=1, head_dim=8, max_sequences=1, device="cpu")
    attention_on_cpu.reset()


def test_the_backend_orders_by_its_own_devices_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkv.kernels.cupy_backend import CupyBackend

    fake = FakeCupy(devices=2)
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    waits: list[Any] = []
    fake.cuda.Event = lambda disable_timing: SimpleNamespace(ptr=fake.current)
    fake.cuda.runtime.eventRecord = lambda event, stream: waits.append((stream, event, fake.current))
    fake.cuda.runtime.streamWaitEvent = lambda stream, event: waits.append((stream, event, fake.current))
    fake.cuda.get_current_stream = lambda: SimpleNamespace(ptr=100 + fake.current)
    cache: Any = SimpleNamespace(get=None, nvrtc=SimpleNamespace(version=(12, 9)))
    turns = CupyBackend(1, cache).in_turn()
    turns.take(None, waits.append, "on the current one")
    turns.take(101, waits.append, "on the same")
    turns.take(7, waits.append, "on another")
    assert waits == ["on the current one", "on the same", (101, 1, 1), (7, 1, 1), "on another"]
    assert fake.current == 0
