"""Small workloads and machines, made in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv.lab.replay.trace import Trace, from_segments
from pagedkv.lab.replay.weights import ModelShape as Shape
from pagedkv.lab.simulate import Workload
from pagedkv.lab.simulate.hardware import GPUS, MODELS, Gpu, Hardware
from pagedkv.lab.simulate.links import Rates, TierSize
from pagedkv.lab.simulate.served import ServedModel
from pagedkv.lab.sizing import LayerGroup, Model

TINY = ServedModel(Model("tiny", (LayerGroup(2, 1, 8),), 7000), Shape("tiny", 2, 2, 1, 8, 16, 32))
SIX = Shape("six", 6, 2, 1, 8, 16, 32)


def uneven(**short: int) -> ServedModel:
    """Two layers that see everything, and four with this window or chunk."""
    return ServedModel(Model("uneven", (LayerGroup(2, 1, 8), LayerGroup(4, 1, 8, **short)), 20_000), SIX)


WINDOWS, CHUNKS = uneven(window=65), uneven(chunk=128)


@pytest.fixture
def machine() -> Callable[..., Hardware]:
    """A machine with room for so many tokens of KV beside the weights of a tiny model."""

    def build(tokens: int, host_tokens: int = 0, rate: float = 1e9, model: ServedModel = TINY) -> Hardware:
        memory = model.weight_bytes + tokens * model.kv_bytes_per_token
        tiers = (TierSize("host", host_tokens * model.kv_bytes_per_token, Rates(rate, rate)),) if host_tokens else ()
        return Hardware(Gpu("toy", memory, 1e9, 1e9, 1e9), 1, model, tiers, memory_share=1.0, overhead_s=0.001)

    return build


@pytest.fixture
def requests() -> Callable[..., Workload]:
    """Build requests from rows of numbers.

    (arrival ms, prompt, output, request it shares a prefix with, blocks of 16 shared).
    """

    def build(*rows: tuple[int, ...], speed: float = 1.0) -> Workload:
        full = [(*row, *(-1, 0)[len(row) - 3 :]) for row in rows]
        t_ms, prompts, outputs, refs, shared = (np.array(column, np.int64) for column in zip(*full, strict=True))
        trace: Trace = from_segments(
            "toy", "0" * 64, 16, t_ms, prompts.astype(np.int32), outputs.astype(np.int32), refs, shared,
            -(-prompts // 16),
        )  # fmt: skip
        return Workload(trace, speed)

    return build


__all__ = ["CHUNKS", "GPUS", "MODELS", "TINY", "WINDOWS", "uneven"]
