"""Continuous batching over a KVCache.

Who runs in the next step, with how many tokens, and who has to wait.
"""

from pagedkv.scheduler.beams import expand_beams
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.plan import Plan
from pagedkv.scheduler.request import Branch, Request
from pagedkv.scheduler.scheduler import Scheduler, SchedulerStats

__all__ = ["Branch", "Plan", "Request", "Scheduler", "SchedulerOptions", "SchedulerStats", "expand_beams"]
