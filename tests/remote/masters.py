"""Mooncake's master and a process that lends it memory, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.remote.servers import BEGINS_S, free_port
from tests.stopping import go_on


def is_installed() -> bool:
    """Whether Mooncake can be imported here."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError:
        return False
    return True


class Master:
    """A master, and a process that lends memory."""

    def __init__(self, port: int, lent: int) -> None:
        import mooncake

        self.port, self.address = port, f"127.0.0.1:{port}"
        folder = str(Path(mooncake.__path__[0]))
        self._command = [f"{folder}/mooncake_master", f"--rpc_port={port}", "--rpc_address=127.0.0.1"]
        self._command += [f"--metrics_port={free_port()}", "--enable_http_metadata_server=false"]
        self._environment = {**os.environ, "LD_LIBRARY_PATH": folder}
        self.begin()
        self.lender = subprocess.Popen(
            [sys.executable, "-m", "tests.remote.lender", self.address, str(lent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.lender.stdout is not None
        assert self.lender.stdout.readline() == "lends\n"

    def begin(self) -> None:
        """Start the master, and wait until it listens."""
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self._environment
        )
        until = time.monotonic() + BEGINS_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert time.monotonic() < until, "the master does not begin"
            time.sleep(0.05)

    def end(self) -> None:
        """End both."""
        for process in (self.lender, self.process):
            go_on(process)
            process.kill()
            process.wait()
        for pipe in (self.lender.stdin, self.lender.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def lent(size: int) -> Iterator[Master]:
    """A master and a lender of so many bytes."""
    found = Master(free_port(), size)
    try:
        yield found
    finally:
        found.end()
