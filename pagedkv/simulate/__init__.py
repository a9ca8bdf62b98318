"""Serves traces without a model: the real scheduler and cache, a cost model instead of compute, and a virtual clock."""

from pagedkv.simulate.hardware import MODELS, Hardware, parse_gpus
from pagedkv.simulate.links import parse_tiers, read_moves
from pagedkv.simulate.result import SimResult
from pagedkv.simulate.run import simulate
from pagedkv.simulate.systems import SYSTEMS
from pagedkv.simulate.workload import Workload, load_workload
from pagedkv.sizing.machines import GPUS

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
