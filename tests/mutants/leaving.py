"""A plugin of pytest that ends the process once pytest has said how its tests ended.

A mutant may leave daemon threads at work. At its end the interpreter stops a thread where it waits for the GIL. A
thread that waits inside C++ (NumPy's) then takes the process with it by SIGABRT, and the verdict, pytest's exit code,
would be lost.
"""

from __future__ import annotations

import os
import sys

import pytest


class Leaving:
    """Keeps the exit code of the session until the last hook."""

    exit_code = int(pytest.ExitCode.INTERNAL_ERROR)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Remember how the tests ended."""
        self.exit_code = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Write what was printed, and leave without the interpreter's own end."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code)


def pytest_configure(config: pytest.Config) -> None:
    """Join the run."""
    config.pluginmanager.register(Leaving())
