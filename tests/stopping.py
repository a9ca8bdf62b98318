"""Processes of a test that stand still for a while."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any


def stop(process: subprocess.Popen[Any]) -> None:
    """Stop all threads of a child process, and return once they stand.

    A signal that has been sent need not have arrived: until then the process answers.
    """
    process.send_signal(signal.SIGSTOP)
    found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert found is not None
    assert found.si_code == os.CLD_STOPPED, "it ended instead"


def go_on(process: subprocess.Popen[Any]) -> None:
    """Let a stopped process run again."""
    process.send_signal(signal.SIGCONT)
