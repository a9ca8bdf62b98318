"""``examples/policy_lfu``, compiled as its users compile it, beside a slow model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "policy_lfu"

pytestmark = [pytest.mark.slow, pytest.mark.checkout]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its module compiled."""
    folder = tmp_path_factory.mktemp("lfu")
    for source in FOLDER.iterdir():
        if source.is_file():
            shutil.copy(source, folder)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return folder


def test_it_evicts_what_its_model_evicts(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(built))
    import policy_lfu  # type: ignore[import-not-found]  # noqa: F401 - registers itself

    from tests.core.policy_models import Lfu
    from tests.core.test_policies import MODELS, replay, trace

    monkeypatch.setitem(MODELS, "lfu", Lfu)
    differs = 0
    for seed in range(12):
        rng = Random(seed)
        requests, capacity = trace(rng, 90), rng.choice([2, 5, 10, 20, 33])
        replay("lfu", requests, capacity=capacity, max_run=1)
        lru, lfu = MODELS["lru"](capacity), Lfu(capacity)
        differs += [lru.request(one) for one in requests] != [lfu.request(one) for one in requests]
    assert differs > 6, "a policy that is LRU would pass, too"


def test_its_run_prints_hits_of_both_policies(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(FOLDER / "run.py")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "policies: lru, arc, s3fifo, hazard, lfu" in ran.stdout
    assert "lfu: 42,546 of 301,838 blocks hit" in ran.stdout


def test_the_command_finds_it_by_its_entry_point(built: Path) -> None:
    """As after `pip install`: only the package's metadata says that there is such a policy."""
    installed = built / "policy_lfu-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: policy-lfu\nVersion: 0.1\n")
    (installed / "entry_points.txt").write_text("[pagedkv.policies]\nlfu = policy_lfu\n")
    path = os.pathsep.join([str(built), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pagedkv", "replay", "--policy", "lfu", "--device-memory", "5%", "--quiet"]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "lfu" in ran.stdout


def test_it_stands_in_few_lines_and_touches_no_other_file() -> None:
    lines = (FOLDER / "policy_lfu.pyx").read_text().splitlines()
    assert len(lines) <= 60
    assert not [line for line in lines if "hazard" in line]
    assert np.count_nonzero(["cimport" in line for line in lines]) < 10
