"""The plugin keeps pytest's verdict whatever threads a mutant has left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABORTING = """
import atexit, os
atexit.register(os.abort)  # as a thread does that the interpreter's end stops inside C++
def test_it():
    assert {passes}
"""

pytestmark = pytest.mark.checkout


@pytest.mark.parametrize(("passes", "code"), [pytest.param(True, 0, marks=pytest.mark.slow), (False, 1)])
def test_the_exit_code_is_pytests_own_though_the_interpreters_end_aborts(
    tmp_path: Path, passes: bool, code: int
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(ABORTING.format(passes=passes))
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.mutants.leaving", f"--rootdir={tmp_path}"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, str(file)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == code, ran.stdout
    assert ("1 passed" if passes else "1 failed") in ran.stdout
