"""How many requests run at once in equal memory.

A region of the longest length for each, against blocks.

Beside what was served stands what the sizing formulas say: regions, or sequences of the requests' mean final length in
blocks, that fit into what the weights leave. Everything arrives at once, so that a request always waits for room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.errors import InvalidArgument
from pagedkv.lab.simulate.hardware import Hardware
from pagedkv.lab.simulate.made import without_prefixes
from pagedkv.lab.simulate.run import simulate
from pagedkv.lab.simulate.studies import Study
from pagedkv.lab.simulate.table import Row
from pagedkv.lab.simulate.workload import Workload
from pagedkv.lab.sizing import batch_size, paged_batch_size

LONGEST = (1024, 2048, 4096, 8192)


def concurrency(
    workload: Workload,
    hardware: Hardware,
    longest: int | None,
    block_size: int,
    max_running: int,
    max_batch_tokens: int,
) -> Study:
    """Serve the requests that fit into a region, contiguous and paged.

    A row for each length of regions.

    Raises
    ------
    InvalidArgument
        No request fits into any of them, or a region is longer than the memory.
    """
    rows: list[Row] = []
    curves: dict[str, list[float]] = {"contiguous": [], "paged": []}
    lengths = LONGEST if longest is None else (longest,)
    slots = hardware.kv_bytes // hardware.model.kv_bytes_per_token
    for region in lengths:
        fitting = _up_to(workload, region)
        if region > slots:
            raise InvalidArgument(
                f"--longest: a region of {region} tokens does not fit; the memory has room for {slots}"
            )
        results = simulate(
            fitting, hardware, ("contiguous", "paged"),
            block_size=block_size, max_running=max_running, max_batch_tokens=max_batch_tokens, longest=region,
        )  # fmt: skip
        mean = _mean_tokens(fitting)
        said = _formulas(hardware, region, mean, block_size)
        ran = [result.mean_running for result in results]
        row = {"regions of": f"{region:,}", "requests": f"{len(fitting):,}", "tokens": f"{mean:,}"}
        for result, formula in zip(results, said, strict=True):
            row |= {
                f"{result.system}, formula": f"{formula:,}",
                f"{result.system}, mean": f"{result.mean_running:.1f}",
                f"{result.system}, most": f"{result.most_running:,}",
            }
            curves[result.system].append(result.mean_running)
        rows.append({**row, "formula, times": f"{said[1] / said[0]:.1f}", "served, times": f"{ran[1] / ran[0]:.1f}"})
    return Study(rows, lengths, curves, "longest request, tokens", "requests at once, mean")


def _up_to(workload: Workload, longest: int) -> Workload:
    """Its requests that are no longer, all at the start, without what they share."""
    lengths = np.array([workload.num_tokens(i) for i in range(len(workload))], np.int64)
    lengths = lengths[lengths.sum(axis=1) <= longest]
    if not len(lengths):
        raise InvalidArgument(f"no request of the workload fits into a region of {longest} tokens: give --longest N")
    trace = workload.trace
    return Workload(
        without_prefixes(trace.name, trace.sha256, np.zeros(len(lengths), np.int64), lengths[:, 0], lengths[:, 1]), 0.0
    )


def _mean_tokens(workload: Workload) -> int:
    return max(1, round(sum(sum(workload.num_tokens(i)) for i in range(len(workload))) / len(workload)))


def _formulas(hardware: Hardware, region: int, mean: int, block_size: int) -> Sequence[int]:
    """Requests at once by arithmetic: contiguous and paged."""
    model, memory = hardware.model, hardware.kv_bytes + hardware.model.weight_bytes
    token = model.kv_bytes_per_token
    return (
        batch_size(memory, model.weight_bytes, region * token),
        paged_batch_size(memory, model.weight_bytes, token, mean, block_size),
    )
