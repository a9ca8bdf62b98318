"""This library's kernels as systems: the one place of the bench that calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.attention.device import Device
from bench.attention.problems import Problem
from bench.attention.shapes import Shape
from bench.attention.systems import Prepared, Unsupported
from pagedkv.attention import CascadeAttention, PagedAttention
from pagedkv.errors import InvalidArgument, UnsupportedVariant

NAN_BYTE = 0xFF  # repeated, it is NaN in bfloat16


@dataclass(frozen=True, slots=True)
class Kernel:
    """One of our attention kernels under one schedule.

    Parameters
    ----------
    name : in the results.
    kernel, schedule : as :class:`pagedkv.attention.PagedAttention` names them.
    plan_too : every call also computes the plan, as the first layer of a step does.
    """

    name: str
    kernel: str = "auto"
    schedule: str = "auto"
    plan_too: bool = False

    def is_default(self, chosen: str) -> bool:
        """Whether this is what the library does by itself where it chooses that kernel."""
        return self.kernel == chosen and self.schedule in ("auto", "even") and not self.plan_too

    def absence(self, device: Device) -> str:
        """Empty: what a kernel does not compute shows when it is asked."""
        return ""

    def compile(self, device: Device, shape: Shape) -> None:
        """Compile and load everything for a shape."""
        self._attention(device, shape).prepare()

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        """Plan, and get an output."""
        attention = self._attention(device, problem.shape)
        out = device.empty(problem.q.shape, np.uint16)
        views = [problem.kv(copy) for copy in range(problem.copies)]

        def plan() -> None:
            decode, paged = problem.shape.is_decode, problem.shape.paged
            attention.plan(
                problem.block_tables,
                problem.seq_lens,
                None if decode else problem.q_indptr,
                kv_indptr=None if paged else problem.kv_indptr,
                stream=device.stream,
            )

        def call(copy: int) -> None:
            if self.plan_too:
                plan()
            k, v = views[copy]
            attention.run(problem.q, k, v, out=out, k_scale=problem.scale, v_scale=problem.scale, stream=device.stream)

        plan()
        return _prepared(device, problem, out, call, note=_described(attention))

    def _attention(self, device: Device, shape: Shape) -> PagedAttention:
        model = shape.model
        try:
            return PagedAttention(
                num_qo_heads=model.num_qo_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                dtype="bfloat16",
                kv_dtype=shape.kv_dtype,
                block_size=shape.block_size if shape.paged else 0,
                max_sequences=shape.num_seqs,
                max_q_len=max(shape.queries),
                max_tokens=shape.num_tokens,
                max_seq_len=max(shape.kv_lens),
                scale_mode="tensor" if shape.kv_dtype == "float8_e4m3" else "none",
                kernel=self.kernel,
                schedule=self.schedule,
                device=device.backend,
            )
        except (UnsupportedVariant, InvalidArgument) as error:
            raise Unsupported(str(error)) from error


@dataclass(frozen=True, slots=True)
class Cascade:
    """The shared prefix once for all requests, their own KV, and the merge."""

    name: str = "cascade"
    kernel: str = "auto"

    def absence(self, device: Device) -> str:
        """Empty."""
        return ""

    def compile(self, device: Device, shape: Shape) -> None:
        """Compile and load the kernels of both levels."""
        for level in self._attention(device, shape).levels:
            level.prepare()

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        """Plan both levels."""
        shape, tables = problem.shape, problem.host_tables
        if not shape.prefix or tables is None:
            raise Unsupported("there is no shared prefix")
        attention = self._attention(device, shape)
        shared, tokens = shape.prefix // shape.block_size, shape.num_tokens
        arrays: list[tuple[Any, Any, Any]] = [
            (tables[:1, :shared], np.full(1, shape.prefix, np.int32), np.array([0, tokens], np.int32)),
            (tables[:, shared:], problem.host_lens - np.int32(shape.prefix), problem.host_q_indptr),
        ]
        levels = [tuple(device.array(np.ascontiguousarray(array)) for array in level) for level in arrays]
        attention.plan(levels, stream=device.stream)
        out = device.empty(problem.q.shape, np.uint16)
        views = [problem.kv(copy) for copy in range(problem.copies)]

        def call(copy: int) -> None:
            attention.run(problem.q, views[copy], out=out, stream=device.stream)

        kernels = " + ".join(level.kernel for level in attention.levels)
        return _prepared(device, problem, out, call, note=kernels, keep=levels)

    def _attention(self, device: Device, shape: Shape) -> CascadeAttention:
        model = shape.model
        try:
            return CascadeAttention(
                (shape.block_size, shape.block_size),
                max_groups=(1, shape.num_seqs),
                max_q_len=max(shape.queries),
                num_qo_heads=model.num_qo_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                dtype="bfloat16",
                kernel=self.kernel,
                device=device.backend,
            )
        except (UnsupportedVariant, InvalidArgument) as error:
            raise Unsupported(str(error)) from error


DECODE = (Kernel("decode_mma", "decode_mma", "even"), Kernel("decode_tma", "decode_tma", "even"))
STUDY = (
    Kernel("decode_mma, v1", "decode_mma", "whole"),
    Kernel("decode_mma, v2", "decode_mma", "partitioned"),
    Kernel("decode_simt", "decode_simt", "even"),
)
PREFILL = (Kernel("prefill_mma", "prefill_mma"), Kernel("prefill_wgmma", "prefill_wgmma"))
ANY = Kernel("pagedkv")  # whatever kernel the library chooses


def default_kernel(device: Device, shape: Shape) -> str:
    """Name of the kernel that the library chooses for a shape; empty if it has none."""
    try:
        return ANY._attention(device, shape).kernel
    except Unsupported:
        return ""


def _described(attention: PagedAttention) -> str:
    return f"{attention.kernel}, workspace {attention.workspace_bytes / 2**20:.1f} MiB"


def _prepared(device: Device, problem: Problem, out: Any, call: Any, *, note: str = "", keep: Any = None) -> Prepared:
    def error(kept: Any = keep) -> float:  # `kept` lives as long as this does
        return problem.error(device.host(out), problem.expected)

    return Prepared(call, problem.copies, lambda: device.fill(out, NAN_BYTE), error, note=note)
