"""Replays traces through the cache: the gain of a policy and of tiers, beside the optimum."""

from pagedkv.lab.replay.capacity import Capacity, resolve
from pagedkv.lab.replay.load import load_trace
from pagedkv.lab.replay.options import KNOWN, POLICIES, Options
from pagedkv.lab.replay.references import References
from pagedkv.lab.replay.result import Result
from pagedkv.lab.replay.run import replay
from pagedkv.lab.replay.trace import Trace

__all__ = [
    "KNOWN",
    "POLICIES",
    "Capacity",
    "Options",
    "References",
    "Result",
    "Trace",
    "load_trace",
    "replay",
    "resolve",
]
