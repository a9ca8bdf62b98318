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


CARELESS = """
    n = coldest(links, list_no)
    while n >= 0 and links.next[n] >= 0:
        n = links.next[n]
    return n if seen >= 0 else best
"""
ABSURD = """
    limit[0] = -5
    return 1 << 30 if seen >= 0 else best
"""


@pytest.mark.parametrize(("name", "ends"), [("careless", CARELESS), ("absurd", ABSURD)], ids=["careless", "absurd"])
def test_a_policy_that_names_what_may_not_go_is_passed_over(tmp_path: Path, name: str, ends: str) -> None:
    """One names the hottest run although a sequence may hold it, one a run that is none."""
    for source in FOLDER.iterdir():
        if source.is_file():
            shutil.copy(source, tmp_path)
    text = (FOLDER / "policy_lfu.pyx").read_text()
    assert text.count("    return best\n") == 1
    (tmp_path / "policy_lfu.pyx").write_text(text.replace("    return best\n", ends.lstrip("\n")))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", SERVE], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{name}: status {ran.returncode}: {ran.stderr[-4000:]}"


SERVE = """
import random
import policy_lfu
import pagedkv as pk
from tests.cache.conftest import SPEC, Toy
for seed in range(3):
    choose = random.Random(seed)
    with pk.KVCache(SPEC, pk.Blocks(24), pk.Blocks(12), policy="lfu") as cache:
        toy, held = Toy(cache), []
        for number in range(400):
            tokens = [choose.randrange(3) for _ in range(choose.randrange(2, 28))]
            seq = cache.sequence(tokens)
            toy.run(seq)
            toy.check(seq)
            held.append(seq)
            if len(held) > 2:
                held.pop(choose.randrange(3)).release()
            if number % 20 == 0:
                cache.check_integrity()
        for seq in held:
            toy.check(seq)
            seq.release()
        cache.check_integrity()
"""


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
