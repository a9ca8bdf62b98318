"""examples/prefill_decode: decoders say the same as a lone one, from another's blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.remote.servers import redis_server, server

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.checkout]


def run(*options: str) -> dict[str, Any]:
    redis_server()
    command = [sys.executable, "-m", "examples.prefill_decode", "--json", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def check(found: dict[str, Any], blocks: int) -> None:
    alone, prefill, waiting, late = found.values()
    assert alone["from_store"] == prefill["from_store"] == 0
    assert prefill["published"] == blocks
    assert waiting["from_store"] == late["from_store"] == blocks * 16
    assert alone["tokens"] == waiting["tokens"] == late["tokens"]
    assert len(alone["tokens"]) == 16


def test_a_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.realmodel import tiny

    path = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_tensors())
    with server() as running:
        check(run("--model", str(path), "--tokens", "100", "--url", running.tcp), 6)


@pytest.mark.realmodel
def test_smollm2() -> None:
    source = pytest.importorskip("examples.llama_numpy.source")
    if source.find() is None:
        pytest.skip("SmolLM2's weights are not here: run tests/realmodel, which downloads them")
    check(run("--tokens", "600"), 37)
