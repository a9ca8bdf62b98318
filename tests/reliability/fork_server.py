"""A small clean process that forks others.

It does a thousand kills a minute, without an interpreter's start for each.

Forking out of a test runner with threads is not sound; this process has none, and NumPy and pagedkv imported already.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any


class ForkServer:
    """Calls functions ``"module:name"`` in that process.

    Arguments and results are plain JSON data.
    """

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([*filter(None, sys.path), root])
        alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # or NumPy starts threads when it is imported
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.reliability.fork_server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **alone, "PYTHONPATH": path},
        )  # fmt: skip

    def call(self, function: str, **arguments: Any) -> Any:
        """What the function returns.

        Raises
        ------
        RuntimeError
            It raised, or the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the fork server ended with {self._process.wait()} in {function}{arguments}")
        ok, result = json.loads(answer)
        if not ok:
            raise RuntimeError(f"{function}{arguments}: {result}")
        return result

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()  # its input ends, and it with it


class Child:
    """A forked process that runs ``body(say)``.

    Each ``say(line)`` reaches :meth:`heard` even if the process is killed next.
    """

    def __init__(self, body: Any) -> None:
        self._ear, mouth = os.pipe()
        os.set_blocking(self._ear, True)
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._ear)
                body(lambda line: os.write(mouth, line.encode() + b"\n"))
                code = 0
            except BaseException:
                os.write(mouth, f"raised {traceback.format_exc(limit=-3)!r}\n".encode())
            finally:
                os._exit(code)
        os.close(mouth)
        self._unread = b""

    def line(self) -> str:
        """The next line it says; empty when it has ended."""
        while b"\n" not in self._unread:
            data = os.read(self._ear, 1 << 16)
            if not data:
                return ""
            self._unread += data
        first, self._unread = self._unread.split(b"\n", 1)
        return first.decode()

    def heard(self) -> list[str]:
        """All lines until its end."""
        return list(iter(self.line, ""))

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, 9)

    def end(self) -> int:
        """Wait for its end; the exit code, or minus the signal."""
        os.close(self._ear)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def serve() -> None:
    """Read calls from stdin and answer on stdout until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what a function prints is not an answer
    for line in sys.stdin:
        function, arguments = json.loads(line)
        module, name = function.split(":")
        try:
            answer = [True, getattr(importlib.import_module(module), name)(**arguments)]
        except Exception:
            answer = [False, traceback.format_exc()]
        os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    serve()
