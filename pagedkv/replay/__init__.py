"""Replays traces through the cache: what a policy and its tiers are worth, and how far from optimal."""

from pagedkv.replay.capacity import Capacity, resolve
from pagedkv.replay.load import load_trace
from pagedkv.replay.options import KNOWN, POLICIES, Options
from pagedkv.replay.references import References
from pagedkv.replay.result import Result
from pagedkv.replay.run import replay
from pagedkv.replay.trace import Trace

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
