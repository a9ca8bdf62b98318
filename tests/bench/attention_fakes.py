"""Fake peers: one computes on the host, the others fail in every way a peer can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.attention.device import Device
from bench.attention.problems import Problem
from bench.attention.systems import Prepared, Unsupported
from pagedkv.reference import paged_attention
from pagedkv.spec.dtypes import bfloat16_to_float32, float32_to_bfloat16


def on_host(problem: Problem, copy: int) -> np.ndarray:
    """Return the float64 reference's attention over the problem's own arrays, as bfloat16 bits."""
    k, v = (np.asarray(side) for side in problem.kv(copy))
    k, v = bfloat16_to_float32(k), bfloat16_to_float32(v)
    tables = problem.host_tables
    if tables is None:
        k, v = k[:, None], v[:, None]
        tables = problem.host_kv_indptr[:-1, None] + np.arange(max(problem.shape.kv_lens), dtype=np.int32)
    o = paged_attention(bfloat16_to_float32(problem.q), k, v, tables, problem.host_lens, problem.host_q_indptr)
    return float32_to_bfloat16(np.asarray(o, np.float32))


@dataclass
class FakePeer:
    """A peer whose ``behave(problem, copy, out)`` fills ``out``, or does not."""

    name: str
    behave: Callable[[Problem, int, np.ndarray], None]
    missing: str = ""
    refuses: Exception | None = None

    def absence(self, device: Device) -> str:
        return self.missing

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        if self.refuses is not None:
            raise self.refuses
        out = np.zeros(problem.q.shape, np.uint16)
        return Prepared(
            lambda copy: self.behave(problem, copy, out),
            problem.copies,
            lambda: out.fill(0xFFFF),
            lambda: problem.error(out, problem.expected),
            note="a fake",
        )


def right(problem: Problem, copy: int, out: np.ndarray) -> None:
    out[...] = on_host(problem, copy)


def reads_another_copy(problem: Problem, copy: int, out: np.ndarray) -> None:
    out[...] = on_host(problem, (copy + 1) % problem.copies)


def raises(problem: Problem, copy: int, out: np.ndarray) -> None:
    raise RuntimeError("a peer's\n kernel   refused")


class RightOnce:
    """Right the first time; later calls, as in a graph, compute nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, problem: Problem, copy: int, out: np.ndarray) -> None:
        self.calls += 1
        if self.calls == 1:
            right(problem, copy, out)


def all_fakes() -> dict[str, Any]:
    """Peers by name, with the status that each comes to."""
    return {
        "measured": FakePeer("right", right),
        "wrong": FakePeer("another copy", reads_another_copy),
        "failed": FakePeer("raises", raises),
        "wrong as a graph": FakePeer("right once", RightOnce()),
        "unsupported": FakePeer("refuses", right, refuses=Unsupported("only on Tuesdays")),
        "not installed": FakePeer("absent", right, missing="not installed: some-package"),
    }
