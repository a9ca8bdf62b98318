"""Serves traces without a model.

The real scheduler and cache, a cost model instead of compute, and a virtual clock.
"""

from pagedkv.lab.simulate.hardware import Hardware, parse_gpus
from pagedkv.lab.simulate.links import parse_tiers, read_moves
from pagedkv.lab.simulate.result import SimResult
from pagedkv.lab.simulate.run import simulate
from pagedkv.lab.simulate.served import MODELS
from pagedkv.lab.simulate.systems import SYSTEMS
from pagedkv.lab.simulate.workload import Workload, load_workload
from pagedkv.lab.sizing.machines import GPUS

__all__ = [
    "GPUS",
    "MODELS",
    "SYSTEMS",
    "Hardware",
    "SimResult",
    "Workload",
    "load_workload",
    "parse_gpus",
    "parse_tiers",
    "read_moves",
    "simulate",
]
