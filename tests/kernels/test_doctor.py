"""``pagedkv doctor``: what it reports, and when its exit code is 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import cpu
from pagedkv.cli import main
from pagedkv.errors import KernelsUnavailable
from pagedkv.kernels import cupy_backend
from pagedkv.kernels.nvrtc import Nvrtc, default_nvrtc
from pagedkv.kernels.recorder import Recorder
from pagedkv.kernels.shipped import shipped
from pagedkv.kernels.source import kernel_names
from pagedkv.kernels.variant import variant
from pagedkv.tools import doctor
from pagedkv.tools.doctor import Check
from tests.kernels.fake_cupy import FakeCupy

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def nvrtc() -> Nvrtc:
    try:
        return default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without driver and without CuPy, whatever this one has."""
    for module in (doctor, cupy_backend):
        monkeypatch.setattr(module, "driver_version", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """A machine with a driver and a stand-in for CuPy that sees an H100."""
    for module in (doctor, cupy_backend):
        monkeypatch.setattr(module, "driver_version", lambda: (13, 0))
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small kernel is compiled instead of one of each."""
    monkeypatch.setattr(doctor, "typical", lambda capability: [variant("plan")])


def report(capsys: Capture, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a run."""
    code = main(["doctor", "--json", *options])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out)


def statuses(found: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in found["checks"]}


def test_without_a_gpu_kernels_are_compiled_and_the_rest_is_skipped(
    no_gpu: None, quick: None, nvrtc: Nvrtc, capsys: Capture
) -> None:
    code, found = report(capsys)
    assert code == 0
    assert found["ok"] is True
    states = statuses(found)
    assert states["sources"] == states["NVRTC"] == states["CUDA headers"] == states["compile plan"] == "ok"
    assert states["driver"] == states["CuPy"] == states["self-test"] == "skipped"
    details = {check["name"]: check["detail"] for check in found["checks"]}
    assert details["self-test"] == "no GPU"
    assert details["compile plan"].startswith("sm_90, ")
    assert "0 bytes spilled" in details["compile plan"]
    assert "pip install" in details["CuPy"]
    chosen = next(check["detail"] for check in found["checks"] if check["name"] == "NVRTC")
    assert str(nvrtc.library) in chosen


def test_the_text_has_a_line_for_each_check_and_says_the_outcome_last(
    no_gpu: None, quick: None, nvrtc: Nvrtc, capsys: Capture
) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("pagedkv ")
    assert lines[-1] == "nothing failed"
    assert all(line.split()[0] in ("ok", "warning", "failed", "skipped") for line in lines[1:-1])
    assert any(line.split()[:2] == ["skipped", "self-test"] and line.endswith("no GPU") for line in lines)


def no_nvrtc(driver: object) -> None:
    raise KernelsUnavailable("NVRTC was not found: pip install cupy-cuda12x")


def test_on_a_gpu_without_nvrtc_it_fails_with_the_command_that_installs_it(
    gpu: FakeCupy, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(doctor, "nvrtc_for", no_nvrtc)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "failed   NVRTC" in out
    assert "pip install cupy-cuda12x" in out
    assert "skipped  compile" in out
    assert "NVRTC" in out.splitlines()[-1]


def test_with_neither_gpu_nor_nvrtc_nothing_fails_and_the_cpu_is_tested(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(doctor, "nvrtc_for", no_nvrtc)
    code, found = report(capsys, "--retune")
    assert code == 0
    states = statuses(found)
    assert states["NVRTC"] == states["compile"] == states["kernels chosen"] == "skipped"
    assert {name for name in states if name.startswith("CPU kernels")} == {f"CPU kernels {name}" for name in cpu.isas()}
    assert states["CPU kernels portable"] == "ok"


@pytest.mark.parametrize("other", [("--disk", "."), ("--remote", "valkey://localhost:1/0")], ids=["disk", "remote"])
def test_kernels_are_not_tried_again_beside_another_examination(other: tuple[str, str], capsys: Capture) -> None:
    assert main(["doctor", "--retune", *other]) != 0
    assert "--retune tries the CUDA kernels again, and --disk and --remote" in capsys.readouterr().err


def test_wrong_results_of_the_cpu_kernels_are_a_failure(
    no_gpu: None, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(cpu, "attend", lambda q, *_, **__: np.zeros_like(q))
    code, found = report(capsys)
    assert code == 1
    assert statuses(found)["CPU kernels portable"] == "failed"


def test_a_kernel_that_does_not_compile_fails_and_shows_the_compilers_words(
    no_gpu: None, nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    broken = variant("decode_reduce")  # without its macros
    monkeypatch.setattr(doctor, "typical", lambda capability: [broken, variant("plan")])
    code, found = report(capsys)
    assert code == 1
    assert found["ok"] is False
    assert statuses(found)["compile decode_reduce"] == "failed"
    assert statuses(found)["compile plan"] == "ok"
    assert "error: identifier" in next(c["detail"] for c in found["checks"] if c["name"] == "compile decode_reduce")


def test_missing_sources_end_the_examination(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def none() -> None:
        raise KernelsUnavailable("the CUDA sources are missing")

    monkeypatch.setattr(doctor, "kernel_names", none)
    code, found = report(capsys)
    cpu_too = {f"CPU kernels {name}": "ok" for name in cpu.isas()}
    assert (code, statuses(found)) == (1, {**cpu_too, "sources": "failed"})


def test_a_driver_without_cupy_is_a_failure(
    no_gpu: None, quick: None, nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for module in (doctor, cupy_backend):
        monkeypatch.setattr(module, "driver_version", lambda: (13, 0))
    code, found = report(capsys)
    assert (code, statuses(found)["CuPy"]) == (1, "failed")
    assert "[cuda13]" in next(c["detail"] for c in found["checks"] if c["name"] == "CuPy")


def test_a_driver_without_a_device_is_no_failure(gpu: FakeCupy, quick: None, nvrtc: Nvrtc, capsys: Capture) -> None:
    gpu.failure = 100
    code, found = report(capsys)
    assert code == 0
    assert (statuses(found)["device"], statuses(found)["self-test"]) == ("skipped", "skipped")


def test_a_driver_older_than_cupy_is_a_failure(gpu: FakeCupy, quick: None, nvrtc: Nvrtc, capsys: Capture) -> None:
    gpu.failure = 35
    code, found = report(capsys)
    assert (code, statuses(found)["device"]) == (1, "failed")


def test_on_a_gpu_the_device_is_described_and_the_self_test_runs(
    gpu: FakeCupy, quick: None, nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda backend: iter([Check("self-test x", "ok", backend.name)]))
    code, found = report(capsys)
    details = {check["name"]: check["detail"] for check in found["checks"]}
    assert code == 0
    assert details["device 0"] == "NVIDIA H100, compute capability 9.0, 132 multiprocessors, 80.0 GiB"
    assert details["self-test x"] == "cupy"
    assert details["kernels chosen"].startswith("none yet")
    asked: list[bool] = []
    monkeypatch.setattr(
        doctor, "verdict_checks", lambda backend, retune: asked.append(retune) or iter([Check("kernel", "ok", "x")])
    )
    assert [check["name"] for check in report(capsys, "--retune")[1]["checks"]][-1] == "kernel"
    report(capsys)
    assert asked == [True, False]


def test_a_gpu_whose_backend_cannot_be_made_is_a_failure(
    gpu: FakeCupy, quick: None, nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def none() -> None:
        raise KernelsUnavailable("no room")

    monkeypatch.setattr(doctor, "CupyBackend", none)
    code, found = report(capsys)
    assert (code, statuses(found)["self-test"]) == (1, "failed")


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert doctor.cache_check(in_the_way / "cache").status == "warning"
    assert doctor.cache_check(None).status == "warning"
    assert doctor.cache_check(tmp_path / "not" / "yet").status == "ok"
    (tmp_path / "plan-0-0.cubin").write_bytes(bytes(2**20))
    assert doctor.cache_check(tmp_path).detail == f"1 files of 1.0 MiB together in {tmp_path}"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_one_variant_of_every_kernel_of_a_device_is_compiled(capability: tuple[int, int]) -> None:
    chosen = doctor.typical(capability)
    names = [one.kernel for one in chosen]
    assert len(names) == len(set(names))
    assert set(names) == {one.kernel for one in shipped(capability)} <= set(kernel_names())


class Wrong(Recorder):
    """A device whose results are what the test says."""

    def __init__(self, answer: Any) -> None:
        super().__init__((9, 0))
        self.answer = answer

    def to_host(self, array: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return np.full(array.shape, self.answer, np.float16)


@pytest.mark.parametrize("answer", [0.0, np.nan, np.inf, RuntimeError("an illegal memory access was encountered")])
def test_wrong_results_and_crashes_fail_the_self_test(answer: Any) -> None:
    found = list(doctor.self_test(Wrong(answer)))
    assert found
    assert {check.status for check in found} == {"failed"}


def test_the_expected_results_of_the_self_test_are_finite() -> None:
    _, expected = doctor._problem()
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0.1


@pytest.mark.slow
def test_the_self_test_passes_where_the_kernels_are_right(nvrtc: Nvrtc) -> None:
    from tests.ptxsim.backend import PtxsimBackend

    found = list(doctor.self_test(PtxsimBackend()))
    assert "self-test decode_simt" in {check.name for check in found if check.status == "ok"}
    assert {check.status for check in found} <= {"ok", "skipped"}, found
