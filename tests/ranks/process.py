"""A rank in a process of its own, for tests that stop or kill it.

``python -m tests.ranks.process ADDRESS RANK``
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pagedkv as pk
from tests.ranks.conftest import DEVICE, HOST, SPEC, ranks_at

ROOT = Path(__file__).parents[2]


def main(address: str, rank: int) -> None:
    with pk.Rank(SPEC, DEVICE, HOST, ranks=ranks_at(address), rank=rank) as part:
        part.wait()
        try:
            part.check()
        except pk.RankLost as lost:
            print(lost, flush=True)


def start(address: str, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.ranks.process", address, str(rank)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
