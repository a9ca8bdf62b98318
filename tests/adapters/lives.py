"""Processes that are killed once the disk has their blocks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNTIL = """
import time
until = time.monotonic() + 120
while cache.stats().cache.disk["blocks_written"] < {blocks}:
    assert time.monotonic() < until, f"written: {{cache.stats().cache.disk['blocks_written']}} of {blocks} blocks"
    time.sleep(0.01)
print("written", flush=True)
import sys
sys.stdin.read()
"""


def kill_once_written(script: str, blocks: int) -> None:
    """Run a script that leaves an adapter in `cache`; kill it once its disk has so many blocks.

    Raises
    ------
    AssertionError
        The script ended, or did not write them within two minutes.
    """
    whole = textwrap.dedent(script) + UNTIL.format(blocks=blocks)
    command = [sys.executable, "-c", whole]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.kill()
