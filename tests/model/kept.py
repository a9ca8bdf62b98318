"""One folder per run for compiled native test modules.

The process that asks first makes the folder and removes it at its end; all processes that it starts share it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "PAGEDKV_TEST_MODULES"


def kept() -> Path:
    """The folder of this run."""
    if VARIABLE not in os.environ:
        made = tempfile.mkdtemp(prefix="pagedkv-test-modules-")
        owner = os.getpid()
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(made, ignore_errors=True))
        os.environ[VARIABLE] = made
    return Path(os.environ[VARIABLE])
