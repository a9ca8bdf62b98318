"""Drives a KVCache with a trace: real blocks, real moves between real tiers, and every byte served is checked.

A block id becomes a block of two equal tokens, and every prompt ends with one token more that no other prompt
continues: what an engine always has to compute itself. So all of the trace's blocks can hit, and the extra token
lies in a partly filled block that never enters the tree. That block is why the device gets one more than asked.

Each block is filled with bytes that follow from its whole prefix (payload.py) when it is computed, and compared on
the device whenever it is served: after promotion, whatever tier it lay in. One wrong byte fails the run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from pagedkv.budgets import Disk
from pagedkv.cache import KVCache
from pagedkv.replay.capacity import TIER_NAMES, Capacity
from pagedkv.replay.engine_sim import flat_counters
from pagedkv.replay.payload import Payload
from pagedkv.replay.progress import Progress
from pagedkv.replay.result import Outcome
from pagedkv.replay.trace import Int32, Trace
from pagedkv.spec import KVSpec
