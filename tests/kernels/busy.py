"""``python -m tests.kernels.busy``: the table of busy multiprocessors in docs/kernels.md.

The kernel ``prefill_plan`` makes the list of every problem in the interpreter, for a device with the H100's 132
multiprocessors; CTAs take its items in order. The table computes and measures nothing: an item's time is its key tiles
and an overhead, as ``parts.cuh`` counts it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagedkv.kernels.attention import Batch
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.select import make_plan
from tests.kernels.part_split import OVERHEAD_UNITS, Device

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- counts: python -m tests.kernels.busy -->", "<!-- end of counts -->"
NUM_SMS = 132
GROUP_SIZE, HEAD_DIM = 4, 128
KERNELS = ("prefill_mma", "prefill_wgmma")


@dataclass(frozen=True)
class Problem:
    """Keys and queries of each sequence of a batch; 4 query heads for each KV head."""

    name: str
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    num_kv_heads: int = 8
    causal: bool = True


PROBLEMS = (
    Problem("chunk of 64 at 32k", (1 << 15,), (64,)),
    Problem("chunk of 64 at 32k, one KV head", (1 << 15,), (64,), 1),
    Problem("chunk of 512 at 32k", (1 << 15,), (512,)),
    Problem("chunk of 2k at 32k", (1 << 15,), (1 << 11,)),
    Problem("prompt of 16k", (1 << 14,), (1 << 14,)),
    Problem("decode at 128k beside a prompt of 2k", (1 << 17, 1 << 11), (1, 1 << 11)),
    Problem("cascade, 32k shared by 64 requests", (1 << 15,), (64,), causal=False),
)


@dataclass(frozen=True)
class Load:
    """How a kernel's CTAs share a problem.

    Attributes
    ----------
    row_tiles : row tiles of all KV heads: CTAs with work if none were divided.
    items : row tiles and parts of all KV heads.
    longest : key tiles of the longest item.
    busy_sms : multiprocessors with work.
    share : of the time until the last item ends, the part in which a place for a CTA has work.
    """

    row_tiles: int
    items: int
    longest: int
    busy_sms: int
    share: float


def load(problem: Problem, kernel: str) -> Load:
    """Plan a problem in the interpreter, and share its list out.

    Raises
    ------
    KernelsUnavailable
        There is no NVRTC.
    """
    from tests.ptxsim.backend import PtxsimBackend

    backend = PtxsimBackend((9, 0), NUM_SMS)
    config = AttentionConfig(HEAD_DIM, HEAD_DIM, GROUP_SIZE, "bfloat16", "bfloat16", causal=problem.causal)
    heads = problem.num_kv_heads
    plan = make_plan(
        backend, config, kernel=kernel, num_kv_heads=heads, max_sequences=len(problem.seq_lens),
        max_q_len=max(problem.q_lens), max_tokens=sum(problem.q_lens),
    )  # fmt: skip
    indptr = np.concatenate([[0], np.cumsum(problem.q_lens)]).astype(np.int32)
    plan.update(Batch(np.array(problem.seq_lens, np.int32), q_indptr=indptr))
    division = plan.division
    count = int(division.arrays["num_items"][0])
    device = Device(
        GROUP_SIZE, plan.tiling.row_tile, plan.tiling.tile_tokens, heads, division.num_ctas, division.part_slots,
        division.min_part_tiles, problem.causal,
    )  # fmt: skip
    tiles = []
    for seq, row_tile, part, parts, _ in division.arrays["work_list"][:count].tolist():
        whole = device.key_tiles(problem.seq_lens[seq], problem.q_lens[seq], row_tile)
        tiles += [whole // parts + (part < whole % parts)] * heads
    row_tiles = sum(device.row_tiles(q_len) for q_len in problem.q_lens) * heads
    ends = [0] * division.num_ctas
    for own in tiles:
        heapq.heapreplace(ends, ends[0] + own + OVERHEAD_UNITS)
    share = sum(ends) / (max(ends) * len(ends))
    return Load(row_tiles, len(tiles), max(tiles), min(len(tiles), NUM_SMS), share)


def table() -> str:
    """The table in Markdown."""
    head = ("problem", "kernel", "row tiles", "with parts", "longest", "multiprocessors with work", "time with work")
    lines = [f"| {' | '.join(head)} |", "|---|---|---:|---:|---:|---:|---:|"]
    for problem in PROBLEMS:
        for kernel in KERNELS:
            own = load(problem, kernel)
            row = (f"{own.row_tiles:,}", f"{own.items:,}", f"{own.longest:,}", str(own.busy_sms), f"{own.share:.0%}")
            lines.append(f"| {' | '.join((problem.name, f'`{kernel}`', *row))} |")
    return "\n".join(lines)


def drawn(page: str) -> str:
    """The page with its table drawn anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
