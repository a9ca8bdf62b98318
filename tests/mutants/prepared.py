"""A server that has imported pytest, NumPy and Cython, and forks for each command.

These imports take longer than most killers of mutants. `Prepared` starts the server, which is this file as a script.
Each command has a fork of its own, one at a time; processes that it leaves behind are killed at its end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

IMPORTED = ("hypothesis.stateful", "numpy", "pytest", "setuptools")
PATHS = ("PYTHONPATH", "PYTHONSAFEPATH")  # modules come from the command's folder, not from the caller's
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork would not have the others


class Prepared:
    """Runs modules and scripts as Python's command line does, in forks of the server."""

    def __init__(self) -> None:
        """Start the server; it ends by `close`, or with this process."""
        environment = {name: value for name, value in os.environ.items() if name not in PATHS}
        self._server = subprocess.Popen(
            [sys.executable, __file__], cwd=os.sep, env=environment | ONE_THREAD,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(
        self, arguments: list[str], folder: Path, environment: Mapping[str, str], output: Path, limit_s: float
    ) -> int:
        """Run a command to its end.

        Parameters
        ----------
        arguments : ``["-m", "module", ...]`` or ``["script.py", ...]``.
        folder : where it runs; Python looks for modules there first.
        environment : all variables that the command sees.
        output : the file that gets its output and its errors.
        limit_s : seconds after which it is killed.

        Returns
        -------
        The exit code, or minus the number of the signal that ended it.
        """
        orders, answers = self._server.stdin, self._server.stdout
        assert orders is not None
        assert answers is not None
        order = {"arguments": arguments, "folder": str(folder), "environment": dict(environment), "output": str(output)}
        orders.write(json.dumps(order) + "\n")
        orders.flush()
        timer = threading.Timer(limit_s, _end, [int(answers.readline())])
        timer.start()
        try:
            return int(answers.readline())
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the server and wait for it."""
        with self._server:  # closes its pipes, and the server reads the end of its orders
            pass


def _end(group: int) -> None:
    """Kill a command with its children; does nothing after they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _serve() -> None:
    """Obey the orders on standard input, one a line.

    Prints two lines for each: the number of the command's process, then its exit code.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    _compile_something()
    for order in sys.stdin:
        fork = os.fork()
        if fork == 0:
            _become(**json.loads(order))
        with contextlib.suppress(OSError):  # the fork was first
            os.setpgid(fork, fork)
        print(fork, flush=True)
        os.waitid(os.P_PID, fork, os.WEXITED | os.WNOWAIT)
        _end(fork)  # before its number can be another's
        status = os.waitpid(fork, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


def _compile_something() -> None:
    """Cython imports most of itself when it first compiles."""
    from Cython.Build import cythonize

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "something.pyx")
        source.write_text("cdef class Something:\n    cpdef int it(self, int[::1] numbers): return numbers[0]\n")
        cythonize(str(source), quiet=True, language_level=3)


def _become(arguments: list[str], folder: str, environment: dict[str, str], output: str) -> NoReturn:
    """Run the command in this fork, and end."""
    os.setpgid(0, 0)
    nothing, printed = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for opened, number in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(opened, number)
    os.close(nothing)
    os.close(printed)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, folder)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    del sys.path[0]  # this folder, where Python looks for modules first
    _serve()
