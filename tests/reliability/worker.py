"""A process in which a proof's cases run.

``python -m tests.reliability.worker MODULE FUNCTION COUNT SEED``.

Says on its standard output, a JSON value a line, how many more cases are done, and last the tally. Cases that stop
making progress end it by SIGALRM.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
from dataclasses import asdict

from tests.reliability.proof import Tally

PATIENCE_S = 300
TELL_EVERY = 50


def main(module: str, function: str, count: str, seed: str) -> None:
    """Run it."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may appear between the lines
    logging.disable()  # thousands of faults are about to happen
    waiting = 0

    def tick(n: int) -> None:
        nonlocal waiting
        signal.alarm(PATIENCE_S)
        waiting += n
        if waiting >= TELL_EVERY:
            print(json.dumps(waiting), file=told, flush=True)
            waiting = 0

    signal.alarm(PATIENCE_S)
    tally: Tally = getattr(importlib.import_module(module), function)(int(count), int(seed), tick)
    print(json.dumps(waiting), file=told)
    print(json.dumps(asdict(tally)), file=told, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
