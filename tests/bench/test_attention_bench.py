"""The control flow of the attention bench, without a GPU.

The tests cover every section, peers of every kind, time that runs out, and crashes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bench.attention import bars, views
from bench.attention.arena import FP8_SCALE, SMALL_PERIOD, Arena, to_e4m3
from bench.attention.ceilings import COPY, READ
from bench.attention.child import Problems
from bench.attention.cuda import CudaDevice
from bench.attention.plots import plot
from bench.attention.problems import choose_copies
from bench.attention.runner import DeviceLost, Row, Runner, Watcher
from bench.attention.scales import FULL, QUICK, TINY
from bench.attention.sections import NAMES, PARTS, Bench, Peers, sections
from bench.attention.shapes import Model, Shape, zipf_lens
from bench.attention.simulated import LABEL, PtxsimDevice
from bench.attention.supervisor import supervise
from bench.attention.systems import Entry, Group, Prepared, Section, attention_entry
from bench.report import NO_RUN, NO_TABLE, fill, render_view
from bench.results import ROOT, read_results
from pagedkv.errors import KernelsUnavailable
from pagedkv.kernels.nvrtc import default_nvrtc
from tests.bench.attention_fakes import all_fakes, on_host

MODEL = Model("tiny", 4, 2, 16)


@pytest.fixture
def device() -> PtxsimDevice:
    try:
        default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return PtxsimDevice()


@pytest.fixture
def problems(device: PtxsimDevice) -> Problems:
    return Problems(device, Arena(device, 1 << 20, SMALL_PERIOD), TINY)


@pytest.mark.slow
def test_every_section_runs_without_a_device_and_says_that_nothing_was_timed(tmp_path: Path) -> None:
    try:
        default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    out = tmp_path / "attention.json"
    command = [sys.executable, "-m", "bench.attention", "--device", "ptxsim", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    document = read_results(out)
    assert document["label"] == LABEL
    assert LABEL in done.stdout
    rows = document["rows"]
    assert {row["section"] for row in rows if row["own"] and row["status"] == "measured"} == set(NAMES)
    assert not [row for row in rows if row["own"] and row["status"] not in ("measured", "unsupported")]
    assert not [row for row in rows if "us" in row or "tb_per_s" in row]
    peers = {row["system"] for row in rows if not row["own"]}
    assert {"FlashInfer cascade", "XQA", "FA3", "torch SDPA, contiguous", "FlashInfer prefill, fa3"} <= peers
    assert all(row["status"] in ("not installed", "no CUDA device") for row in rows if row["system"] == "XQA")
    assert str(tmp_path) not in json.dumps(document)


def test_each_kind_of_peer_comes_to_a_row_that_says_what_happened(device: PtxsimDevice, problems: Problems) -> None:
    shape = Shape(MODEL, (20, 7))
    fakes = all_fakes()
    entries = [attention_entry("case", fake, shape, device, problems.of) for fake in fakes.values()]
    rows = Runner(device, TINY, 1e9).run([Section("core", "Core", 1.0, (Group(tuple(entries)),))])
    found = {row["system"]: row for row in rows}
    for status, fake in fakes.items():
        assert found[fake.name]["status"] == status.removesuffix(" as a graph"), status
    assert found["right"]["error"] < 5e-3
    assert found["another copy"]["error"] > 0.1
    assert "a graph" in found["right once"]["note"]
    assert found["raises"]["note"] == "RuntimeError: a peer's kernel refused"
    assert found["absent"]["note"] == "some-package"
    shown = views.unmeasured(rows)
    assert {line["system"] for line in shown} == {fake.name for fake in fakes.values()} - {"right"}


def test_peers_of_all_kinds_take_part_in_their_sections(device: PtxsimDevice, problems: Problems) -> None:
    fake = all_fakes()["measured"]
    named = {kind: replace(fake, name=kind) for kind in ("decode", "prefill", "cascade", "contiguous")}
    bench = Bench(device, problems._arena, TINY, Peers(**{kind: (peer,) for kind, peer in named.items()}), problems.of)
    where = {
        part.name: {entry.system for group in part.groups for entry in group.entries} & named.keys()
        for part in sections(bench)
    }
    decode = {name: {"decode"} for name in ("skew", "blocks", "small", "fp8")}
    none: dict[str, set[str]] = {"ceilings": set(), "paging": set(), "moves": set()}
    more = {"core": {"decode", "contiguous"}, "prefill": {"prefill"}, "cascade": {"cascade"}}
    assert where == {**decode, **none, **more}


class Clock:
    """A clock that goes on by one second whenever an entry begins."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(system: str, clock: Clock, seconds: float, result: Any = None) -> Entry:
    """An entry that takes some time by a clock.

    ``result`` is what its check returns, or the exception that it raises.
    """

    def call(copy: int) -> None:
        clock.now += seconds / 2
        if isinstance(result, Exception):
            raise result

    return Entry("case", system, lambda: Prepared(call, 1, lambda: None, lambda: result or 0.0), 1)


def test_a_section_keeps_to_its_time_and_what_is_left_out_is_listed() -> None:
    clock = Clock()
    host = HostDevice()
    groups = tuple(Group((entry(f"slow {i}", clock, 4.0),)) for i in range(4))
    later = tuple(Group((entry(f"later {i}", clock, 1.0),)) for i in range(4))
    parts = [Section("core", "", 8.0, groups), Section("skew", "", 10.0, later)]
    rows = Runner(host, TINY, 18.0, clock=clock).run(parts)
    statuses = {row["system"]: row["status"] for row in rows}
    assert statuses["slow 0"] == statuses["later 0"] == statuses["later 3"] == "measured"
    assert statuses["slow 2"] == statuses["slow 3"] == "out of time"
    assert [line["cases"] for line in views.unmeasured(rows)] == [1, 1]


def test_time_that_an_early_section_leaves_over_goes_to_the_next() -> None:
    clock = Clock()
    quick = Section("core", "", 10.0, (Group((entry("quick", clock, 1.0),)),))
    slow = Section("skew", "", 4.0, tuple(Group((entry(f"slow {i}", clock, 3.0),)) for i in range(3)))
    rows = Runner(HostDevice(), TINY, 14.0, clock=clock).run([quick, slow])
    assert [row["status"] for row in rows] == ["measured"] * 4


class HostDevice:
    """A device without anything: calls run at once, and it can be lost."""

    kind, unit, stream, l2_bytes = "host", "s", None, 0
    backend = None
    lost = False

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def record(self, calls: Sequence[Any]) -> Any:
        return SimpleNamespace(launch=lambda: [call() for call in calls])

    def time(self, recordings: Sequence[Any], rounds: int) -> list[list[float]]:
        return [[1e-3] * rounds for _ in recordings]


def test_figures_are_per_call_and_shares_of_the_ceilings_of_the_same_run() -> None:
    clock = Clock()
    known: list[Row] = [
        {"section": "ceilings", "case": "ceiling", "system": READ, "status": "measured", "tb_per_s": 4.0},
        {"section": "ceilings", "case": "ceiling", "system": COPY, "status": "measured", "tb_per_s": 2.0},
    ]
    one = replace(entry("one", clock, 0.0), num_bytes=2 * 10**9, flops=1e9)
    scale = replace(TINY, calls=20, rounds=(5, 9))
    rows = Runner(HostDevice(), scale, 1e9, known=known, clock=clock).run([Section("core", "", 1.0, (Group((one,)),))])
    row = rows[-1]
    assert row["calls"] == 20
    assert row["rounds"] == 9
    assert row["us"] == pytest.approx(50.0)
    assert row["tb_per_s"] == pytest.approx(40.0)
    assert row["tflop_per_s"] == pytest.approx(20.0)
    assert row["of_read"] == pytest.approx(10.0)
    assert row["of_copy"] == pytest.approx(20.0)


def test_an_error_that_stays_with_the_device_ends_the_process_but_keeps_what_is_known() -> None:
    clock, host = Clock(), HostDevice()
    rows: list[Row] = []

    class Keep(Watcher):
        def done(self, row: Row) -> None:
            rows.append(row)

    def break_it(copy: int) -> None:
        host.lost = True
        raise RuntimeError("launch failed")

    broken = Entry("case", "broken", lambda: Prepared(break_it, 1, lambda: None, lambda: 0.0), 1)
    parts = [Section("core", "", 1.0, (Group((entry("good", clock, 0.0),)), Group((broken,)), Group((broken,))))]
    with pytest.raises(DeviceLost, match="launch failed"):
        Runner(host, TINY, 1e9, watcher=Keep(), clock=clock).run(parts)
    assert [(row["system"], row["status"]) for row in rows] == [("good", "measured"), ("broken", "failed")]


def test_what_has_a_row_already_is_not_measured_again() -> None:
    clock = Clock()
    known: list[Row] = [{"section": "core", "case": "case", "system": "first", "status": "crashed"}]
    parts = [Section("core", "", 1.0, (Group((entry("first", clock, 0.0), entry("second", clock, 0.0))),))]
    rows = Runner(HostDevice(), TINY, 1e9, known=known, clock=clock).run(parts)
    assert [(row["system"], row["status"]) for row in rows] == [("first", "crashed"), ("second", "measured")]


class Said:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.rows: list[Row] = []
        self.entries = 0

    def total(self, entries: int) -> None:
        self.entries = entries

    def say(self, text: str) -> None:
        self.texts.append(text)

    def row(self, row: Row) -> None:
        self.rows.append(row)


def test_a_crash_and_a_hang_cost_one_row_each_and_the_rest_is_measured(tmp_path: Path) -> None:
    said, now = Said(), [0.0]

    def clock() -> float:
        """Stands still but for the entry that hangs, however slow the machine is."""
        written = (tmp_path / "journal.jsonl").read_text().splitlines(keepends=True)
        lines = [json.loads(line) for line in written if line.endswith("\n")]
        begun = [dict(line["begin"]["keys"])["case"] for line in lines if "begin" in line]
        if begun[-1:] == ["hangs"] and not any(line.get("row", {}).get("system") == "hangs" for line in lines):
            now[0] += 1.0
        return now[0]

    (tmp_path / "journal.jsonl").touch()
    child = "tests.bench.crashing_child"
    outcome = supervise([], tmp_path, said, seconds=600, silence_s=3.0, module=child, clock=clock)
    assert outcome.starts == 3
    assert outcome.failure == ""
    assert {row["system"]: row["status"] for row in outcome.rows} == {
        "crashes": "crashed", "hangs": "crashed", "works": "measured",
    }  # fmt: skip
    notes = {row["system"]: row.get("note", "") for row in outcome.rows}
    assert "status 9 while first run" in notes["crashes"]
    assert "nothing was heard" in notes["hangs"]
    assert said.rows == outcome.rows
    assert said.entries == 3


def test_a_process_that_cannot_even_start_is_not_started_again(tmp_path: Path) -> None:
    outcome = supervise(["--nonsense"], tmp_path, Said(), seconds=60, silence_s=30.0)
    assert outcome.starts == 1
    assert "without a result" in outcome.failure


@pytest.mark.parametrize(
    "shape",
    [
        Shape(MODEL, (20, 7)),
        Shape(MODEL, (20, 7), (5, 1)),
        Shape(MODEL, (20, 7), layout="contiguous"),
        Shape(MODEL, (20, 7), layout="sequential", block_size=8),
        Shape(MODEL, (20, 7), layout="pool"),
        Shape(MODEL, (21, 35, 18), prefix=16),
    ],
    ids=str,
)
def test_what_is_expected_is_what_the_reference_computes_from_the_devices_arrays(
    problems: Problems, shape: Shape
) -> None:
    problem = problems.of(shape)
    assert problem.error(on_host(problem, 0), problem.expected) < 5e-3
    assert problem.error(on_host(problem, 1), problem.expected) > 5e-2
    assert len({tuple(row[row >= 0]) for row in shape.block_tables()}) == shape.num_seqs


def test_shared_prefixes_name_the_same_blocks_and_nothing_else_is_shared() -> None:
    tables = Shape(MODEL, (40, 35, 50), prefix=32).block_tables()
    assert np.array_equal(tables[0, :2], tables[1, :2])
    own = [int(block) for row in tables for block in row[2:] if block >= 0]
    assert len(set(own)) == len(own) == 1 + 1 + 2
    assert not set(own) & set(tables[0, :2].tolist())


def test_the_arena_holds_what_it_says_and_only_after_it_was_filled_again(device: PtxsimDevice) -> None:
    arena = Arena(device, 300_000, SMALL_PERIOD)
    arena.hold("bfloat16")
    at = np.arange(140_000, 140_100)
    bits = np.asarray(arena.elements(140_000, (100,)))
    assert np.array_equal(bits.view(ml_dtypes.bfloat16).astype(np.float32), arena.values(at, "bfloat16"))
    assert np.array_equal(bits, arena.bits(140_000, 100))
    words = np.asarray(arena.memory(0, 299_996)).view(np.uint32)
    assert arena.words_sum(299_996) == int(words.sum(dtype=np.uint64)) % 2**32
    device.fill(arena.memory(0, 1000), 0)
    arena.forget()
    arena.hold("float8_e4m3")
    held = np.asarray(arena.elements(0, (300_000,))).view(ml_dtypes.float8_e4m3fn).astype(np.float32) * FP8_SCALE
    assert np.array_equal(held, arena.values(np.arange(300_000), "float8_e4m3"))


def test_our_rounding_to_e4m3_is_that_of_ml_dtypes() -> None:
    values = np.random.default_rng(0).standard_normal(20_000, np.float32) * 64
    assert np.array_equal(to_e4m3(values), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_copies_of_kv_leave_the_cache_behind_and_stay_within_the_memory() -> None:
    small = Shape(Model("8B", 32, 8), (1024,))
    assert choose_copies(small, 50 << 20, 1 << 40) == 50
    assert choose_copies(small, 50 << 20, 10 * small.pool_bytes) == 10
    assert choose_copies(Shape(Model("8B", 32, 8), (2048,) * 64), 50 << 20, 1 << 40) == 3
    assert choose_copies(replace(small, layout="pool"), 50 << 20, 1 << 40) == 32
    with pytest.raises(MemoryError, match="one copy of KV needs"):
        choose_copies(small, 50 << 20, 1 << 20)


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_the_sizes_for_a_gpu_are_those_of_the_plan(scale: Any) -> None:
    shapes = [Shape(model, lens) for model in scale.models for _, lens in scale.core]
    assert max(shape.pool_bytes for shape in shapes) <= scale.arena_bytes
    assert all(Shape(model, lens).pool_bytes <= 32 << 20 for model, (_, lens) in scale.small)
    assert scale.calls == 20
    assert scale.rounds[0] >= 5
    lens = zipf_lens(*scale.zipf)
    assert (max(lens), min(lens), len(lens)) == (scale.zipf[1], scale.zipf[2], scale.zipf[0])
    assert sum(part.seconds for part in PARTS) < 500


def test_bytes_and_operations_are_those_of_the_tables_in_the_documents() -> None:
    seventy = Shape(Model("70B", 64, 8), (8192,) * 64)
    assert seventy.kv_bytes == 2048 << 20
    assert seventy.moved_bytes == pytest.approx(2.148e9, rel=5e-3)
    assert Shape(Model("8B", 32, 8), (8192,), (512,)).flops == pytest.approx(66.6e9, rel=1e-3)
    assert Shape(Model("8B", 32, 8), (8192,), (8192,)).flops == pytest.approx(550e9, rel=1e-3)


def full_rows() -> Iterator[Row]:
    """Rows of an invented run that meets some bars."""
    common: Row = {"status": "measured", "error": 1e-3, "own": True, "default": True, "kv_mib": 512.0}
    for section, case, system, us, more in (
        ("core", "8B 64x2K", "decode_mma", 100.0, {"of_read": 0.95}),
        ("core", "8B 64x2K", "FA3", 110.0, {"default": False, "own": False}),
        ("core", "8B 1x32K", "decode_mma", 100.0, {"of_read": 0.85, "kv_mib": 128.0}),
        ("core", "8B 1x32K", "XQA", 90.0, {"default": False, "own": False}),
        ("paging", "a", "decode_mma", 100.0, {"layout": "contiguous", "batch": "b"}),
        ("paging", "b", "decode_mma", 103.0, {"layout": "shuffled", "batch": "b"}),
        ("skew", "zipf", "decode_mma", 100.0, {"lengths": "zipf", "tb_per_s": 2.8}),
        ("skew", "uniform", "decode_mma", 100.0, {"lengths": "uniform", "tb_per_s": 3.0}),
        ("blocks", "16", "decode_mma", 101.0, {"block_size": 16, "tb_per_s": 2.8}),
        ("blocks", "128", "decode_mma", 100.0, {"block_size": 128, "tb_per_s": 2.8}),
        ("prefill", "8B 8K/8K", "prefill_mma", 100.0, {"tflop_per_s": 310.0}),
        ("prefill", "8B 8K/8K", "FlashInfer prefill, fa2", 105.0, {"tflop_per_s": 300.0, "default": False}),
        ("cascade", "prefix 32768 x 256", "cascade", 10.0, {"prefix": 32768, "requests": 256}),
        ("cascade", "prefix 32768 x 256", "flat decode", 150.0, {"prefix": 32768, "requests": 256}),
        ("fp8", "x", "decode_mma", 100.0, {"batch": "x", "kv_dtype": "bfloat16"}),
        ("fp8", "x", "decode_mma", 50.0, {"batch": "x", "kv_dtype": "float8_e4m3"}),
    ):
        row = {**common, "section": section, "case": case, "system": system, "us": us, **more}
        yield {"tb_per_s": 3.0, **row}


def test_bars_are_met_missed_or_said_not_to_be_measured() -> None:
    found = {(line["bar"], line["case"]): line for line in bars.compare(list(full_rows()))}
    met = {key: line["met"] for key, line in found.items()}
    assert met["decode: share of the read ceiling", "8B 64x2K"] == "met"
    assert ("decode: share of the read ceiling", "8B 1x32K") not in met
    assert met["decode: against the best peer", "8B 64x2K"] == "met"
    assert met["decode: against the best peer", "8B 1x32K"] == "missed"
    assert met["paged against contiguous: time", "b"] == "missed"
    assert met["skewed lengths: share of the uniform batch's bandwidth", "zipf"] == "met"
    assert met["small decode: against FlashInfer", "-"] == "not measured"
    assert met["block size 16 against 128: bandwidth", "16"] == "met"
    assert met["prefill_mma: TFLOP/s", "8B 8K/8K"] == "met"
    assert met["prefill_wgmma: TFLOP/s", "8K/8K"] == "not measured"
    assert met["prefill_mma: against FA2", "8B 8K/8K"] == "met"
    assert met["cascade: against FlashInfer's", "prefix 32768 x 256"] == "not measured"
    assert met["cascade: times faster than flat decode", "prefix 32768 x 256"] == "met"
    assert met["fp8 KV: tokens/s of bfloat16", "x"] == "met"
    assert all(line["met"] == "not measured" for line in bars.compare([]))


def test_plots_are_drawn_for_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = plot(list(full_rows()), tmp_path / "plots", "a device")
    assert {path.stem for path in written} >= {"attention_core", "attention_blocks", "attention_prefill"}
    assert all(path.stat().st_size > 1000 for path in written)


def test_the_page_says_that_no_run_was_made_until_there_is_one_and_takes_no_run_without_a_device(
    tmp_path: Path,
) -> None:
    page = "<!-- table: attention.json environment -->\nold\n<!-- end -->\n"
    assert NO_RUN in fill(page, tmp_path)
    assert NO_TABLE in fill(page.replace("environment", "all"), tmp_path)
    with pytest.raises(FileNotFoundError):
        fill(page.replace("attention", "other"), tmp_path)
    document: dict[str, Any] = {"bench": "attention", "device": {"kind": "ptxsim"}, "rows": [], "environment": {}}
    with pytest.raises(ValueError, match="with no device"):
        render_view(document, "bars")
    document |= {"device": {"kind": "cuda", "device": "A GPU"}, "rows": list(full_rows())}
    assert "| 8B 64x2K | decode_mma |" in render_view(document, "core")
    assert "| met |" in render_view(document, "bars")
    whole = render_view(document, "all")
    assert whole.index("### Bars") < whole.index("### Decode, the core set") < whole.index("### fp8 KV")
    assert "### Ceilings" not in whole


class FakeStream:
    """As much of a CuPy stream as the bench uses."""

    ptr = 1

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append("wait")

    def begin_capture(self) -> None:
        self.log.append("begin")

    def end_capture(self) -> Any:
        self.log.append("end")
        return SimpleNamespace(launch=lambda stream: self.log.append("launch"))


def cuda_device(log: list[str]) -> CudaDevice:
    """A CudaDevice on a CuPy that only keeps a log."""
    found = object.__new__(CudaDevice)
    found.stream = FakeStream(log)
    event = lambda: SimpleNamespace(record=lambda stream: log.append("event"))  # noqa: E731
    runtime = SimpleNamespace(CUDARuntimeError=ValueError)
    found._runtime = runtime
    found._cupy = SimpleNamespace(
        cuda=SimpleNamespace(Event=event, get_elapsed_time=lambda begin, end: 2.0, runtime=runtime)
    )
    return found


def test_on_cuda_calls_are_captured_and_all_launches_are_queued_before_anybody_waits() -> None:
    log: list[str] = []
    found = cuda_device(log)
    graph = found.record([lambda: log.append("call")] * 2)
    assert log == ["wait", "begin", "call", "call", "end"]
    log.clear()
    assert found.time([graph, graph], 2) == [[2e-3, 2e-3]] * 2
    assert log == ["event", "launch", "event"] * 4 + ["wait"]


def test_on_cuda_a_capture_that_fails_is_left_before_the_error_goes_on() -> None:
    log: list[str] = []

    def fails() -> None:
        raise RuntimeError("not while capturing")

    with pytest.raises(RuntimeError, match="not while capturing"):
        cuda_device(log).record([fails])
    assert log[-1] == "end"
