"""The bench of policies on small traces.

The tests compare its measures with plain loops and its page with its results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.policies.cases import FILES, GOLDEN
from bench.policies.measures import against_lru
from bench.policies.serving import POLICIES
from bench.policies.views import view
from bench.report import BLOCK, fill
from bench.results import ROOT, read_results

VIEWS = ("environment", "traces", "weights", "worst", "prefix", "price", "times", "memory", "verdict")
PAGE = ROOT / "docs" / "policies.md"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.policies", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def small_traces(tmp_path: Path) -> Path:
    """Thirty conversations of ten turns each, in turn, under all three names.

    golden.json has figures for two sizes of one of them.
    """
    folder, turn = tmp_path / "traces", np.arange(300) // 30
    folder.mkdir()
    fields: dict[str, Any] = {
        "t_ms": np.arange(300) * 1000, "input_tokens": 16 * (turn + 1), "output_tokens": np.full(300, 5),
        "session": np.full(300, -1), "block_size": np.array(16), "ref": np.where(turn > 0, np.arange(300) - 30, -1),
        "lcp": turn, "nblk": turn + 1,
    }  # fmt: skip
    for stem in FILES.values():
        np.savez(folder / f"{stem}.npz", **fields)
    known = {f"{share}%": {"blocks": 3 * share, "reference": {"LHD": 7, "FIFO": 3}} for share in (20, 10)}
    (folder / GOLDEN).write_text(json.dumps({"traces": {FILES["chat"]: {"capacities": known}}}))
    return folder


@pytest.mark.slow
def test_a_run_has_every_policy_at_every_size_and_all_of_its_views(small_traces: Path, tmp_path: Path) -> None:
    out, pictures = tmp_path / "policies.json", tmp_path / "pictures"
    arguments = ("--traces", str(small_traces), "--rounds", "1", "--only", "chat", "--only", "miniswe")
    done = bench(*arguments, "--json", str(out))
    assert done.returncode == 0, done.stderr
    document = read_results(out)
    sizes = {
        name: [row["capacity"] for row in document["rows"] if (row["trace"], row["policy"]) == (name, "lru")]
        for name in FILES
    }
    assert sizes == {"chat": ["10%", "20%"], "agents": [], "miniswe": ["1%", "2%", "5%", "10%", "20%", "50%"]}
    assert {row["policy"] for row in document["rows"] if row["trace"] == "miniswe"} == {*POLICIES, "min"}
    assert str(tmp_path) not in out.read_text()
    page = "".join(
        f"<!-- table: policies.json {name} -->\n<!-- end -->\n" for name in (*VIEWS, "gap/chat", "gap/miniswe")
    )
    assert "LHD, published" in fill(page, tmp_path)
    with pytest.raises(ValueError, match="no trace 'agents' in this run; there are chat, miniswe"):
        view(document, "gap/agents")
    with pytest.raises(ValueError, match="no view 'nothing'"):
        view(document, "nothing")
    pytest.importorskip("matplotlib")
    drawn = bench("--drawn", str(out), "--plot", str(pictures))
    assert drawn.returncode == 0, drawn.stderr
    assert sorted(path.name for path in pictures.iterdir()) == ["policies_chat.png", "policies_miniswe.png"]
    assert bench("--drawn", str(out)).returncode == 2


def test_traces_that_are_not_there_are_named(tmp_path: Path) -> None:
    done = bench("--traces", str(tmp_path))
    assert done.returncode == 2
    assert "mooncake_conversation_dev.npz" in done.stderr
    assert "--traces DIR" in done.stderr


@pytest.mark.parametrize("seed", range(20))
def test_what_is_worst_beside_lru_agrees_with_looking_at_every_stretch(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, window = int(random.integers(3, 40)), int(random.integers(2, 45))
    accesses = random.integers(1, 9, count)
    hits, lru = (random.integers(0, accesses + 1).astype(np.int32) for _ in range(2))
    width = min(window, count)
    ahead = [int((hits[:i].astype(int) - lru[:i]).sum()) for i in range(count + 1)]
    asked = [int(accesses[:i].sum()) for i in range(count + 1)]
    windows = [(ahead[i] - ahead[i - width]) / (asked[i] - asked[i - width]) for i in range(width, count + 1)]
    stretches = [
        (ahead[i] - ahead[j]) / (asked[i] - asked[max(0, i - width)])
        for i in range(1, count + 1) for j in range(max(0, i - width), i + 1)
    ]  # fmt: skip
    prefixes = [ahead[i] / asked[i] for i in range(1, count + 1)]
    found = against_lru(accesses, hits, lru, window)
    wanted = {"worst_window": min(windows), "worst_prefix": min(prefixes), "worst_stretch": min(stretches)}
    assert found == pytest.approx({name: 100 * value for name, value in wanted.items()})


@pytest.mark.checkout
def test_the_page_says_what_the_results_say() -> None:
    text = PAGE.read_text()
    assert len(BLOCK.findall(text)) > 10
    assert fill(text) == text
