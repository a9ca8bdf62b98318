"""Commands run in a fork as Python's command line runs them, and leave nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mutants.prepared import Prepared

LIMIT_S = 300.0
Run = Callable[[str, float], int]

pytestmark = [pytest.mark.checkout, pytest.mark.slow]


@pytest.fixture(scope="module")
def server() -> Iterator[Prepared]:
    """One for all tests here: it imports for seconds."""
    prepared = Prepared()
    yield prepared
    prepared.close()


@pytest.fixture
def run(server: Prepared, tmp_path: Path) -> Run:
    """Run a script in `tmp_path`, and return how it ended."""

    def run(script: str, limit_s: float) -> int:
        (tmp_path / "script.py").write_text(script)
        return server.run(["script.py", "an argument"], tmp_path, {"A": "variable"}, tmp_path / "output", limit_s)

    return run


def test_a_script_has_its_arguments_folder_variables_and_output(run: Run, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    script = "import beside, os, sys\nprint(sys.argv, os.getcwd(), dict(os.environ), beside.VALUE)\nsys.exit(7)"
    assert run(script, LIMIT_S) == 7
    expected = f"{['script.py', 'an argument']} {tmp_path} {{'A': 'variable'}} 3\n"
    assert (tmp_path / "output").read_text() == expected


def test_an_exception_is_exit_code_1_and_a_signal_is_its_number(run: Run, tmp_path: Path) -> None:
    assert run("raise ValueError('so')", LIMIT_S) == 1
    assert "ValueError: so" in (tmp_path / "output").read_text()
    assert run("import os; os.abort()", LIMIT_S) == -signal.SIGABRT
    assert run("pass", LIMIT_S) == 0


def test_a_hang_is_killed_at_the_limit(run: Run) -> None:
    assert run("import threading; threading.Event().wait()", 0.2) == -signal.SIGKILL
    assert run("pass", LIMIT_S) == 0


def test_a_process_left_behind_is_killed_at_the_end(run: Run, tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script = f"import os, time\nheld = os.open({str(fifo)!r}, os.O_WRONLY)\nif not os.fork(): time.sleep(1e6)"
    assert run(script, LIMIT_S) == 0
    os.set_blocking(held, True)
    assert os.read(held, 1) == b""  # once no process has the other end; until then it waits
    os.close(held)
