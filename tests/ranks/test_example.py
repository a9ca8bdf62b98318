"""examples/ranks: three thirds of a model say the whole model's tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "realmodel" / "goldens.json"
MARGIN = 1e-3  # between the two largest logits, as the goldens have them: below it either token may win

pytestmark = pytest.mark.checkout


def run(*options: str, limit_s: float = 900) -> subprocess.CompletedProcess[str]:
    """Run the example.

    After `limit_s`, which only tells a hang, it is killed, and its ranks end with their pipes.
    """
    command = [sys.executable, "-m", "examples.ranks", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)


def follow(path: Path, *options: str) -> dict[str, Any]:
    ran = run("--json", "--follow", str(path), *options)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def check(found: dict[str, Any], goldens: dict[str, Any]) -> int:
    """Compare both rounds with the goldens; tokens compared."""
    compared = 0
    for answers in found["rounds"]:
        assert list(answers) == list(goldens)
        for name, golden in goldens.items():
            tokens = answers[name]["tokens"]
            assert len(tokens) == len(golden["greedy"])
            for token, wanted, top in zip(tokens, golden["greedy"], golden["top_logits"], strict=True):
                if top[0] - top[1] > MARGIN:
                    compared += 1
                    assert token == wanted, name
    assert found["failed_moves"] == 0
    assert not any(answer["hits"]["host"] for answer in found["rounds"][0].values())
    assert any(answer["hits"]["host"] for answer in found["rounds"][1].values())
    return compared


@pytest.mark.slow
def test_ranks_of_a_tiny_model_say_what_a_plain_float64_llama_says(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.realmodel import tiny
    from tests.realmodel.bed import tiny_goldens

    tensors = tiny.random_tensors()
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tensors)
    goldens = {
        name: {"ids": golden.ids, "greedy": golden.greedy, "top_logits": golden.top_logits.tolist()}
        for name, golden in tiny_goldens(tensors).items()
    }
    (tmp_path / "goldens.json").write_text(json.dumps(goldens), encoding="utf-8")
    found = follow(tmp_path / "goldens.json", "--model", str(path), "--ranks", str(tiny.KV_HEADS))
    assert check(found, goldens) > 200


@pytest.mark.full  # docs/testing.md says why
@pytest.mark.realmodel
def test_three_ranks_of_smollm2_say_the_golden_tokens() -> None:
    source = pytest.importorskip("examples.llama_numpy.source")
    if source.find() is None:
        pytest.skip("SmolLM2's weights are not here: run tests/realmodel, which downloads them")
    goldens = json.loads(GOLDENS.read_text(encoding="utf-8"))
    assert check(follow(GOLDENS, "--block-size", "16"), goldens) > 690


@pytest.mark.slow
@pytest.mark.realmodel
def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused_with_the_reason() -> None:
    source = pytest.importorskip("examples.llama_numpy.source")
    if source.find() is None:
        pytest.skip("SmolLM2's weights are not here: run tests/realmodel, which downloads them")
    ran = run("--ranks", "2")
    assert ran.returncode == 1
    assert ran.stderr == "--ranks 2: 3 KV heads cannot be split evenly over 2 ranks: take one of 1, 3 ranks\n"


def test_the_parts_of_a_model_add_up_to_it() -> None:
    pytest.importorskip("gguf")
    from examples.llama_numpy.config import LlamaConfig
    from examples.llama_numpy.weights import LlamaWeights, stored_shapes
    from examples.ranks.split import part_of

    config = LlamaConfig(11, 2, 12, 9, 9, 3, 4, 64)
    draw = np.random.default_rng(0)
    arrays = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in stored_shapes(config).items()}
    whole = LlamaWeights.from_arrays(config, arrays)
    parts = [part_of(whole, rank, 3) for rank in range(3)]
    x = draw.standard_normal((2, 5, 12)).astype(np.float32)
    hidden = draw.standard_normal((2, 5, 9)).astype(np.float32)
    heads = draw.standard_normal((2, 5, 36)).astype(np.float32)
    down = sum(np.split(hidden, 3, axis=2)[r] @ parts[r].ffn_down.swapaxes(1, 2) for r in range(3))
    np.testing.assert_allclose(down, hidden @ whole.ffn_down.swapaxes(1, 2), atol=1e-5)
    out = sum(np.split(heads, 3, axis=2)[r] @ parts[r].attn_output.swapaxes(1, 2) for r in range(3))
    np.testing.assert_allclose(out, heads @ whole.attn_output.swapaxes(1, 2), atol=1e-5)
    q, k, v = np.split(x @ whole.qkv.swapaxes(1, 2), [36, 48], axis=2)
    gate, up = np.split(x @ whole.gate_up.swapaxes(1, 2), 2, axis=2)
    for rank, part in enumerate(parts):
        mine = np.split(x @ part.qkv.swapaxes(1, 2), [12, 16], axis=2)
        for found, wanted in zip(mine, (q, k, v), strict=True):
            np.testing.assert_allclose(found, np.split(wanted, 3, axis=2)[rank], atol=1e-5)
        for found, wanted in zip(np.split(x @ part.gate_up.swapaxes(1, 2), 2, axis=2), (gate, up), strict=True):
            np.testing.assert_allclose(found, np.split(wanted, 3, axis=2)[rank], atol=1e-5)
