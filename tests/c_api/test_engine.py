"""The engine in C++ has the tokens of the NumPy loop, alone and beside other engines."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv
from tests.c_api.building import SOURCES, built
from tests.reliability.sanitizers import ADDRESS, THREAD, Sanitizer, instrumented

pytestmark = pytest.mark.checkout
LAST = re.compile(r"cached (\d+) of (\d+) prompt tokens; (\d+) blocks went down, (\d+) up; (\d+) copies for forks")
ENGINES = 4


@pytest.fixture(scope="module")
def loop() -> list[str]:
    """The lines of the loop in NumPy."""
    command = [sys.executable, "-W", "error", str(SOURCES / "numpy_loop.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return ran.stdout.splitlines()


def answered(ran: subprocess.CompletedProcess[str], lines: list[str]) -> list[int]:
    """The engine printed these lines; the counts behind them."""
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    *answers, last = ran.stdout.splitlines()
    assert answers == lines
    counts = LAST.fullmatch(last)
    assert counts is not None, last
    return [int(count) for count in counts.groups()]


def run(engine: Path, threads: int = 1) -> subprocess.CompletedProcess[str]:
    package = str(Path(pagedkv.__file__).parents[1])
    environment = {"PYTHONPATH": package, "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [str(engine), str(threads)], capture_output=True, text=True, check=False, timeout=300, env=environment
    )


@pytest.mark.slow
def test_the_engine_has_the_tokens_of_the_numpy_loop(loop: list[str], tmp_path: Path) -> None:
    engine = built(tmp_path)
    cached, prompt, down, up, copies = answered(run(engine), loop)
    assert (prompt, len(loop), len(set(loop))) == (12 * 51, 24, 12)
    assert cached > 12 * 24, "more than the part that all prompts share"
    assert min(down, up, copies) > 10
    assert answered(run(engine, ENGINES), loop)[1] == ENGINES * prompt


@pytest.mark.slow
def test_cmake_builds_the_engine(loop: list[str], tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    built(tmp_path)  # or the test is skipped
    configure = ["cmake", "-S", str(SOURCES), "-B", str(tmp_path / "made"), f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (configure, ["cmake", "--build", str(tmp_path / "made")]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    answered(run(tmp_path / "made" / "engine"), loop)


@pytest.mark.full
@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD], ids=["address", "thread"])
def test_the_sanitizers_find_nothing_in_the_engine_and_the_core_under_it(
    sanitizer: Sanitizer, loop: list[str], tmp_path: Path
) -> None:
    if reason := sanitizer.missing():
        pytest.skip(reason)
    with instrumented(sanitizer) as copy:
        include = str(copy.folder / "pagedkv" / "_core" / "c_api" / "include")
        engine = built(tmp_path, f"-fsanitize={sanitizer.flags}", "-g", include=include)
        environment = copy.sanitizer.surroundings(copy.folder)
        for threads in (1, ENGINES, ENGINES, ENGINES):
            ran = subprocess.run(
                [str(engine), str(threads)], capture_output=True, text=True, errors="replace", check=False,
                timeout=900, env=environment,
            )  # fmt: skip
            assert sanitizer.reports(ran.stderr) == []
            answered(ran, loop)
        if sanitizer is ADDRESS:
            walk = copy.python("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/c_api/test_walk.py")
            assert sanitizer.reports(walk.stdout) == []
            assert walk.returncode == 0, walk.stdout[-4000:]
