"""A device whose kernels take times that a test makes up, for trials on the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.kernels import autotune, trial
from pagedkv.kernels.backend import Dim3
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.params import Params
from pagedkv.kernels.select import make_plan
from pagedkv.kernels.trial import Budget
from pagedkv.kernels.variant import Variant
from tests.ptxsim.backend import PtxsimBackend

CONFIG = AttentionConfig(64, 64, 4)
COMPILING_S = 1000.0
SIZES = {"num_kv_heads": 1, "max_sequences": 1}


class Timed(PtxsimBackend):
    """The interpreter as a device with a name and times by kernel.

    Attributes
    ----------
    tried : kernels in the order of their launches, attention kernels alone.
    wrong : kernels whose output is spoilt after a launch; broken: those that do not launch.
    computes : whether launches run; else all outputs are 0.
    timing : whether a time is being taken.
    clock : seconds of a launch (`each_s`), of compiling, and of the timings, which take all that they are given.
    """

    device_name, driver, compiler, l2_bytes = "a device", "12.8", "12.9", 4 << 20

    def __init__(self, us: dict[str, float], wrong: tuple[str, ...] = (), broken: tuple[str, ...] = ()) -> None:
        super().__init__((9, 0), races=False)
        self.us, self.wrong, self.broken = us, wrong, broken
        self.tried: list[str] = []
        self.computes = True
        self.clock, self.each_s, self.given_s = 0.0, 0.0, []
        self.error: Exception = RuntimeError("an illegal instruction")
        self.timing = False

    def free_bytes(self) -> int:
        return 1 << 30

    def launch(
        self,
        variant: Variant,
        grid: Dim3,
        block: Dim3,
        params: Params,
        *,
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        if not variant.kernel.startswith(("decode", "prefill_m", "prefill_w")):
            if self.computes:
                super().launch(variant, grid, block, params, shared_bytes=shared_bytes)
            return
        self.tried.append(variant.kernel)
        self.clock += self.each_s
        if variant.kernel in self.broken:
            raise self.error
        if self.timing:
            return
        if self.computes:
            super().launch(variant, grid, block, params, shared_bytes=shared_bytes)
        if variant.kernel in self.wrong:
            params.arrays[1][-1, -1, -1] += 1  # the output, in one place

    def prepare(self, variants: Iterable[Variant], threads: int = 1) -> None:
        self.clock += COMPILING_S

    def time_us(self, launch: Callable[[Any], None], runs: int, most_s: float) -> float:
        self.given_s.append(most_s)
        self.clock += most_s
        self.timing = True
        launch(5)
        launch(5)
        self.timing = False
        return self.us[self.tried[-1]]


def tuning_folder() -> Any:
    """Make a module's fixture: an empty folder of verdicts, and trials that take no time."""

    @pytest.fixture(autouse=True)
    def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Any) -> Path:
        monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
        monkeypatch.delenv("PAGEDKV_AUTOTUNE", raising=False)
        monkeypatch.setattr(autotune, "Budget", lambda seconds: Budget(seconds, lambda: 0.0))  # no test times anything
        monkeypatch.setattr(trial, "DIVIDED_LEN", 300)  # which the interpreter computes in a second
        monkeypatch.setattr(autotune, "CHECKED_RUNS", [(trial.FEW_CTAS, True, "HND")])  # the one that finds most
        monkeypatch.setattr(autotune, "_put_off", {})
        monkeypatch.setattr(autotune, "_settled_at", 0.0)
        again(monkeypatch)
        return tmp_path

    return folder


def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process: verdicts come from the file."""
    monkeypatch.setattr(autotune, "_verdicts", {})


def chosen(device: Any, config: AttentionConfig = CONFIG, **options: Any) -> str:
    return str(make_plan(device, config, **{**SIZES, **options}).tiling.kernel)
