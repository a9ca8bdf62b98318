"""The library logs to the logger ``pagedkv`` and nowhere else.

The command shows warnings.
"""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.cli import main
from tests.test_import_arrows import PACKAGE, called_name, literal, module_of, room_of

SPEAKS = {
    "lab.traces",
    *(
        "cli",
        "kernels",
        "lab.replay",
        "lab.show",
        "lab.simulate",
        "lab.sizing",
        "tools.choice",
        "tools.doctor",
        "tools.store",
    ),
}  # rooms with a command's output

LEFT_OUT = """
import sys
import pagedkv as pk
open("file", "w").close()
disk = pk.Disk("file", pk.Blocks(8), required=False)
pk.KVCache(pk.KVSpec(1, 1, 2, "float32", 4, model="m"), device_memory=pk.Blocks(8), disk=disk).close()
"""


def test_a_program_that_set_up_no_logging_hears_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_OUT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_program_that_set_up_logging_hears_it(tmp_path: Path) -> None:
    code = f"import logging; logging.basicConfig()\n{LEFT_OUT}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.startswith("WARNING:pagedkv.cache:the disk tier file is left out: ")


def test_the_library_adds_a_null_handler_and_sets_nothing_else() -> None:
    log = logging.getLogger("pagedkv")
    assert [type(handler) for handler in log.handlers] == [logging.NullHandler]
    assert log.level == logging.NOTSET
    assert log.propagate


def test_the_command_shows_warnings_while_it_runs_and_cleans_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(arguments: object, argv: object) -> int:
        logging.getLogger("pagedkv.tiers.disk").warning("the disk is slow")
        logging.getLogger("pagedkv.tiers.disk").info("not this")
        return 0

    monkeypatch.setattr("pagedkv.lab.show.command.run", warn)
    before = list(logging.getLogger("pagedkv").handlers)
    assert main(["show"]) == 0
    assert capsys.readouterr().err == "the disk is slow\n"
    assert logging.getLogger("pagedkv").handlers == before


def calls_of(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def test_no_file_prints_but_those_of_the_commands_and_none_configures_logging() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(module_of(path, PACKAGE))
        calls = calls_of(path)
        if room not in SPEAKS:
            assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"], path
        names = {called_name(call) for call in calls}
        assert not names & {"basicConfig", "dictConfig", "fileConfig", "setLevel"} or room == "cli", path
        loggers = {literal(call) for call in calls if called_name(call) == "getLogger"}
        assert all(name == "pagedkv" or name.startswith("pagedkv.") for name in loggers), (path, loggers)


def test_everything_is_logged_so_that_a_handler_that_raises_stops_nothing() -> None:
    """A logger's own methods let a handler's exception out.

    It would reach the call, or the thread, that has something to say.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        shown = str(path.relative_to(PACKAGE))
        if shown in ("__init__.py", "cli.py", "tools/store/trial.py"):  # they add and remove handlers and filters
            continue
        loggers = [call for call in calls_of(path) if called_name(call) == "getLogger"]
        said = [call.args[0] for call in calls_of(path) if called_name(call) == "Log" and call.args]
        safe = [call for call in said if isinstance(call, ast.Call) and called_name(call) == "getLogger"]
        assert len(loggers) == len(safe), f"{shown}: take callbacks.Log(logging.getLogger(...))"
