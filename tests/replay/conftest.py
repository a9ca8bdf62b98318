"""Traces for the replay tests.

Made in memory, written to files, or the shared real ones where they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pagedkv.lab.replay import Trace, load_trace
from tests.replay.hits import shared_folder

HERE = Path(__file__).parent
BLOCK = 512


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    folder = shared_folder()
    if not folder.is_dir():
        pytest.skip("the shared traces are not here: set PAGEDKV_SHARED to the folder that holds traces/")
    return folder


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Exact counts of the two real traces, as published with them."""
    return dict(json.loads((HERE / "golden.json").read_text()))


@pytest.fixture(scope="session")
def data() -> Path:
    """The small traces that are part of the repository."""
    return HERE / "data"


Paths = Sequence[Sequence[int]]


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write paths of ids as Mooncake lines; keyword ``lines`` writes raw lines instead."""

    def write(paths: Paths = (), *, name: str = "trace.jsonl", lines: Sequence[str] | None = None) -> Path:
        if lines is None:
            lines = [json.dumps(record(i, ids)) for i, ids in enumerate(paths)]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def record(i: int, ids: Sequence[int]) -> dict[str, Any]:
    return {
        "timestamp": 1000 * i,
        "input_length": BLOCK * len(ids),
        "output_length": 7,
        "hash_ids": list(ids),
    }


@pytest.fixture
def make_trace(write_jsonl: Callable[..., Path]) -> Callable[[Paths], Trace]:
    """A Trace of the given paths of ids."""
    return lambda paths: load_trace(write_jsonl(paths))


@pytest.fixture
def random_paths() -> Callable[..., list[list[int]]]:
    """Random walks down a small random tree of chained ids."""

    def walks(seed: int, *, requests: int = 40, branches: int = 3, depth: int = 6) -> list[list[int]]:
        random = Random(seed)
        ids: dict[tuple[int, ...], int] = {}
        paths = []
        for _ in range(requests):
            walk: tuple[int, ...] = ()
            path = []
            for _ in range(random.randint(0 if requests > 6 else 1, depth)):
                walk = (*walk, min(random.randrange(branches), random.randrange(branches)))
                path.append(ids.setdefault(walk, len(ids)))
            paths.append(path)
        if not any(paths):
            paths[0] = [ids.setdefault((0,), len(ids))]
        return paths

    return walks


@pytest.fixture
def npz_fields() -> dict[str, Any]:
    """A good .npz trace: two requests share two blocks of 512, the third is new."""
    return {
        "t_ms": np.array([0, 5, 9], np.int64),
        "input_tokens": np.array([1500, 1600, 512], np.int32),
        "output_tokens": np.array([1, 2, 3], np.int32),
        "session": np.array([-1, -1, -1], np.int32),
        "block_size": np.array(512, np.int32),
        "ref": np.array([-1, 0, -1], np.int32),
        "lcp": np.array([0, 2, 0], np.int32),
        "nblk": np.array([3, 4, 1], np.int32),
    }
