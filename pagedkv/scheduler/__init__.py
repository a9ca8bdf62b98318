"""Continuous batching over a KVCache.

Who runs in the next step, with how many tokens, and who has to wait.
"""

from pagedkv.observe.stats import SchedulerStats
from pagedkv.scheduler.beams import expand_beams
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.plan import NewTokens, Plan
from pagedkv.scheduler.request import Branch, Request
from pagedkv.scheduler.scheduler import Scheduler

__all__ = [
    "Branch", "NewTokens", "Plan", "Request", "Scheduler", "SchedulerOptions", "SchedulerStats", "expand_beams",
]  # fmt: skip
