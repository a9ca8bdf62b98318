"""What this device's memory and tensor cores can do at most, measured in the same run.

Shares are taken of these.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from bench.attention.arena import Arena
from bench.attention.device import Device
from bench.attention.systems import Entry, Group, Prepared
from pagedkv.kernels.bench_read import PageRead, num_sums, read_pages

ROW_BYTES = 256  # of one head of one token: 128 dims of bfloat16
HEADS = 8
PAGE_TOKENS = 16
MATMUL_SIZE = 8192

COPY, READ, PAGED_READ, HEAD_READ, MATMUL = (
    "device copy",
    "contiguous read",
    "paged read, whole pages",
    "paged read, head by head",
    "matmul",
)
CASE = "ceiling"


def groups(device: Device, arena: Arena, num_bytes: int) -> tuple[Group, ...]:
    """Reads and copies of ``num_bytes``, far more than the cache.

    And a large matrix product where there is torch.
    """
    page = HEADS * PAGE_TOKENS * ROW_BYTES
    num_bytes = num_bytes // page * page
    reads = {
        READ: PageRead(page, paged=False),
        PAGED_READ: PageRead(page),
        HEAD_READ: PageRead(page, HEADS, ROW_BYTES),
    }
    entries = [
        Entry(
            CASE, name, partial(_read, device, arena, how, num_bytes), num_bytes, 0.0, True, "", _compile(device, how)
        )
        for name, how in reads.items()
    ]
    copy = Entry(CASE, COPY, lambda: _copy(device, arena, num_bytes // 2), num_bytes, own=True)
    product = Entry(
        CASE,
        MATMUL,
        lambda: _matmul(device),
        3 * 2 * MATMUL_SIZE**2,
        2.0 * MATMUL_SIZE**3,
        False,
        "" if device.kind == "cuda" and importlib.util.find_spec("torch") else "not installed: torch with CUDA",
    )
    return Group((copy, *entries)), Group((product,))


def shares(row: Mapping[str, Any], ceilings: Mapping[str, float]) -> dict[str, float]:
    """A row's shares of the ceilings that were measured.

    ``of_read``, ``of_paged_read``, ``of_copy`` and ``of_matmul``.
    """
    found = {}
    for field, name, figure in (
        ("of_read", READ, "tb_per_s"),
        ("of_paged_read", HEAD_READ, "tb_per_s"),
        ("of_copy", COPY, "tb_per_s"),
        ("of_matmul", MATMUL, "tflop_per_s"),
    ):
        if row.get(figure) and ceilings.get(name):
            found[field] = row[figure] / ceilings[name]
    return found


def ceilings_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """TB/s and TFLOP/s by name, from the rows of this section."""
    return {
        row["system"]: row["tflop_per_s" if row["system"] == MATMUL else "tb_per_s"]
        for row in rows
        if row["section"] == "ceilings" and row["status"] == "measured" and "tb_per_s" in row
    }


def _compile(device: Device, how: PageRead) -> Any:
    return lambda: device.backend.prepare([how.variant()])


def _read(device: Device, arena: Arena, how: PageRead, num_bytes: int) -> Prepared:
    arena.hold("bfloat16")
    data = arena.memory(0, num_bytes)
    count = num_bytes // how.page_bytes
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    pages = device.array(order) if how.paged else None
    sums = device.empty((num_sums(device.backend),), np.uint32)
    expected = arena.words_sum(num_bytes)

    def error() -> float:
        return float(int(device.host(sums).astype(np.uint64).sum()) % 2**32 != expected)

    return Prepared(
        lambda copy: read_pages(device.backend, how, data, sums, pages=pages, stream=device.stream),
        1,
        lambda: device.fill(sums, 0xFF),
        error,
        bound=0.0,
    )


def _copy(device: Device, arena: Arena, num_bytes: int) -> Prepared:
    arena.hold("bfloat16")
    source, to = arena.memory(0, num_bytes), device.empty((num_bytes,), np.uint8)

    def error() -> float:
        at = np.unique(np.linspace(0, num_bytes - 16, 64).astype(np.int64) // 16 * 16)
        found = [device.host(to[first : first + 16]).view(np.uint16) for first in at]
        wanted = [arena.bits(int(first) // 2, 8) for first in at]
        return float(not np.array_equal(found, wanted))

    return Prepared(lambda copy: device.copy(to, source), 1, lambda: device.fill(to, 0xFF), error, bound=0.0)


def _matmul(device: Device) -> Prepared:
    from bench.attention.peers.torch_side import TorchSide

    return TorchSide(device).matmul(MATMUL_SIZE)
