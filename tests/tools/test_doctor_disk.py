"""``pagedkv doctor --disk``: what it tries, what it says, and that nothing is left of it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.tiers import DiskTier
from pagedkv.tiers.disk.format import SlotFormat
from pagedkv.tools.store import trial
from pagedkv.tools.store.benchmark import Contents, geometry_for, measure, measured_bytes, open_store, record_of
from tests.tools.conftest import Run, is_refused

SIZE = "32MiB"
NAMES = [
    "file system", "space", "store", "lock", "write, buffered", "write, synced", "read, cold", "read, page cache",
    "round trip", "reopen", "damage", "verdict",
]  # fmt: skip


@pytest.fixture
def try_disk(tmp_path: Path, run: Run) -> Callable[[], tuple[int, dict[str, Any]]]:
    """Exit code and report of a run; nothing may be left."""

    def try_it() -> tuple[int, dict[str, Any]]:
        ran = run("doctor", "--disk", tmp_path, "--size", SIZE, "--json")
        assert ran.err == ""
        assert not list(tmp_path.iterdir())
        return ran.code, ran.json

    return try_it


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in report["checks"]}


def test_everything_is_tried_and_measured(try_disk: Callable[[], tuple[int, dict[str, Any]]]) -> None:
    code, report = try_disk()
    assert code == 0
    assert report["ok"] is True
    assert [check["name"] for check in report["checks"]] == NAMES
    assert "failed" not in statuses(report).values()
    disk = report["disk"]
    assert disk["store_bytes"] == 15 * ((2 << 20) + 4096)
    assert disk["block_bytes"] == 2 << 20
    measured = disk["measured"]
    assert measured["wrong"] == 0
    for side in ("store", "ceiling"):
        assert measured[side].keys() == {"write", "write_synced", "read_cold", "read_warm"}
        assert all(rate > 0 for rate in measured[side].values())
        assert measured[side]["write_synced"] <= measured[side]["write"]
    pays = disk["pays_below_tokens_per_s"]
    assert pays["Llama 3 8B"] == measured["store"]["read_cold"] / (2 * 32 * 8 * 128 * 2)
    assert pays["Llama 3 70B"] == measured["store"]["read_cold"] / (2 * 80 * 8 * 128 * 2)
    assert pays["Qwen 2.5 7B"] == measured["store"]["read_cold"] / (2 * 28 * 4 * 128 * 2)


def test_the_text_has_a_line_for_each_check_and_the_verdict_in_words(tmp_path: Path, run: Run) -> None:
    ran = run("doctor", "--disk", tmp_path, "--size", SIZE)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert len(lines) == len(NAMES) + 2
    for name, line in zip(NAMES, lines[1:]):
        assert line[9:].startswith(name)
    assert "GB/s with checksums" in lines[5]
    assert "a disk hit pays while prefill makes fewer tokens/s than" in lines[-2]
    assert "(131,072 bytes per token)" in lines[-2]
    assert lines[-1] == "nothing failed"
    assert ran.err == ""


def test_it_works_in_a_private_directory_inside_the_one_named(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = trial.measure

    def looking(folder: Path, *rest: Any) -> Any:
        seen.append((folder.parent, stat.S_IMODE(folder.stat().st_mode)))
        seen.extend((path, stat.S_IMODE(path.stat().st_mode)) for path in (folder / "kv").iterdir())
        return real(folder, *rest)

    monkeypatch.setattr(trial, "measure", looking)
    before = os.umask(0)
    try:
        assert run("doctor", "--disk", tmp_path, "--size", SIZE).code == 0
    finally:
        os.umask(before)
    assert seen[0] == (tmp_path, 0o700)
    assert {mode for _, mode in seen[1:]} == {0o600}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error"), MemoryError("x")])
def test_nothing_is_left_however_it_ends(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def ends(folder: Path, *_: object) -> None:
        assert list(folder.iterdir())
        raise error

    monkeypatch.setattr(trial, "measure", ends)
    ran = run("doctor", "--disk", tmp_path, "--size", SIZE, "--json")
    assert ran.code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert not list(tmp_path.iterdir())


INTERRUPTS_ITSELF = """
import os, signal, sys
from pagedkv.cli import main
from pagedkv.tiers import DiskTier

real, calls = DiskTier.write, []

def write(self, *arguments):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return real(self, *arguments)

DiskTier.write = write
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background is born with it ignored
sys.exit(main(sys.argv[1:]))
"""


def test_control_c_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTS_ITSELF, "doctor", "--disk", str(tmp_path), "--size", "64MiB"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 130, ran.stderr
    assert ran.stderr == "pagedkv: interrupted\n"
    assert not list(tmp_path.iterdir())


def test_a_block_that_comes_back_different_fails(
    try_disk: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskTier.read

    def wrong(self: DiskTier, blocks: Any, expected: Any, arena: Any, rows: Any) -> Any:
        hit = real(self, blocks, expected, arena, rows)
        arena[0, 77] ^= 1
        return hit

    monkeypatch.setattr(DiskTier, "read", wrong)
    code, report = try_disk()
    assert code == 1
    assert statuses(report)["round trip"] == "failed"
    assert report["disk"]["measured"]["wrong"] > 0


def test_blocks_that_are_refused_fail(
    try_disk: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskTier, "write", lambda self, blocks, *_: np.zeros(len(blocks), np.bool_))
    code, report = try_disk()
    assert code == 1
    found = statuses(report)
    assert found["round trip"] == found["reopen"] == "failed"


def test_locks_that_do_not_lock_fail(
    try_disk: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    code, report = try_disk()
    assert code == 1
    assert statuses(report)["lock"] == "failed"


def test_damage_that_is_not_seen_fails(
    try_disk: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotFormat, "mismatch", lambda *_: None)
    code, report = try_disk()
    assert code == 1
    assert {name for name, status in statuses(report).items() if status == "failed"} == {"damage"}


def test_a_disk_that_is_too_full_is_told_before_anything_is_written(
    try_disk: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_free", lambda folder: 40 << 20)
    code, report = try_disk()
    assert code == 1
    assert list(statuses(report)) == ["file system", "space"]
    assert "pass a smaller --size" in report["checks"][1]["detail"]


@pytest.mark.parametrize(("kind", "words"), [("nfs4", "network_fs=True"), ("tmpfs", "is memory")])
def test_a_file_system_that_is_no_disk_is_a_warning(
    try_disk: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    monkeypatch.setattr(trial, "file_system_of", lambda fd: kind)
    code, report = try_disk()
    assert code == 0
    assert statuses(report)["file system"] == "warning"
    assert words in report["checks"][0]["detail"]
    assert report["disk"]["network"] is (kind == "nfs4")
    cold = next(check for check in report["checks"] if check["name"] == "read, cold")
    assert (cold["status"] == "warning") is (kind == "tmpfs" or not report["disk"]["measured"]["cold"])


def test_bad_input_is_one_line(tmp_path: Path, run: Run) -> None:
    is_refused(run("doctor", "--disk", tmp_path / "nowhere"), "nowhere", "not a directory")
    (tmp_path / "file").write_text("x")
    is_refused(run("doctor", "--disk", tmp_path / "file"), "not a directory")
    is_refused(run("doctor", "--disk", tmp_path, "--size", "1"), "not a size")
    is_refused(run("doctor", "--disk", tmp_path, "--size", "8MiB"), "at least 32.0 MiB")
    is_refused(run("doctor", "--size", "1GiB"), "--size is for --disk")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    script = (
        "import os, sys\n"
        "from pagedkv.cli import main\n"
        "main(['doctor', '--disk', '/nowhere'])\n"  # what is imported when it is first used is imported as root
        "os.chdir(sys.argv[1]); os.setuid(65534)\n"
        "sys.exit(main(['doctor', '--disk', '.']))\n"
    )
    tmp_path.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "Permission denied" in done.stderr.splitlines()[1]
    assert len(done.stderr.splitlines()) == 2


def test_every_block_has_a_name_and_bytes_of_its_own() -> None:
    records = [record_of(number) for number in range(300)]
    assert len({record.key for record in records}) == 300
    contents = Contents()
    stamps = {
        row[:4].tobytes()
        for first in range(0, 64, 8)
        for row in contents.of(np.arange(first, first + 8, dtype=np.int32))
    }
    assert len(stamps) == 64


def test_the_progress_ends_at_its_total(tmp_path: Path) -> None:
    g = geometry_for(32 << 20)
    ticks: list[int] = []
    with open_store(tmp_path / "kv", g) as tier:
        measure(tmp_path, tier, g, ticks.append)
    assert sum(ticks) == measured_bytes(g)
    assert not (tmp_path / "raw").exists()
