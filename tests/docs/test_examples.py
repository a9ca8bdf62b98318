"""Every script in ``examples/`` runs to its end, with warnings as errors.

It needs no more than the test install.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FROM_3_11 = {
    "interop_jax.py", "interop_mlx.py", "interop_onnx_paged_attention.py", "interop_onnxruntime.py",
    "interop_tinygrad.py",
}  # fmt: skip
GUESTS = {"interop_torch.py": ["torch"], "transformers_cache.py": ["torch", "transformers"]}  # .ci/run installs them

pytestmark = [pytest.mark.slow, pytest.mark.checkout]


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    for guest in GUESTS.get(script.name, ()):
        pytest.importorskip(guest, reason=f"{guest} is not installed: the wheels of torch bring 3 GB of CUDA along")
    if script.name in FROM_3_11 and sys.version_info < (3, 11):
        pytest.skip("the test extra has this framework from Python 3.11 on")
    command = [sys.executable, "-W", "error", str(script)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
