"""One measured figure, and the frame of every runner.

A process that runs workloads and writes figures.

A runner is started as ``python -m bench.core.<runner> --workloads ab --out FILE [--quick]`` in a process of
its own, perhaps under another interpreter; it imports nothing of pagedkv unless it measures pagedkv.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.core.workloads import FULL, QUICK, WORKLOADS, Scale
from bench.timing import Sample

UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of one system.

    Attributes
    ----------
    workload : str
        Letter of the workload.
    case : str
        What was done, the same word in every runner; figures of one case can be compared.
    variant : str
        How the system was set up (``"sha256"``, ``"rust"``); empty if there is one way.
    value : float
        Median, in `unit`.
    unit : str
        ``"us"``, ``"ns/block"``, ``"B/block"``, ``"ratio"``.
    p99, best : float or None
        99th percentile and minimum over the rounds, in `unit`; None where there is one round.
    """

    workload: str
    case: str
    variant: str
    value: float
    unit: str
    p99: float | None = None
    best: float | None = None


def timed(
    workload: str, case: str, sample: Sample, unit: str, *, per: float = 1.0, variant: str = ""
) -> Figure:
    """The figure of a :class:`~bench.timing.Sample`, divided by `per` items a call.

    `unit` starts with ``ns``, ``us`` or ``ms``; what follows (``"/block"``) names the item.
    """
    scale = UNIT_SECONDS[unit[:2]] * per
    return Figure(
        workload, case, variant, sample.median_s / scale, unit, sample.p99_s / scale, sample.min_s / scale
    )


Workload = Callable[[Scale], Iterable[Figure]]


def run(workloads: Mapping[str, Workload]) -> None:
    """Run the workloads of the command line, and write their figures as JSON to ``--out``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    figures = [asdict(figure) for letter in options.workloads for figure in workloads[letter](scale)]
    Path(options.out).write_text(json.dumps(figures))
