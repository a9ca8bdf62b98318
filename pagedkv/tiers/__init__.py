"""Tiers hold blocks of bytes, and the mover moves them.

Nothing here knows tokens, policies or caches.
"""

from pagedkv.tiers.base import Name, OpenTier, RamTier, Record, StoreTier
from pagedkv.tiers.device import DeviceTier
from pagedkv.tiers.disk.stats import DiskStats
from pagedkv.tiers.disk.tier import DiskTier, StoredBlock
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.mover.mover import Mover
from pagedkv.tiers.mover.ticket import Ticket
from pagedkv.tiers.mover.work_queue import DirectionStats

__all__ = [
    "DeviceTier",
    "DirectionStats",
    "DiskStats",
    "DiskTier",
    "HostTier",
    "Mover",
    "Name",
    "OpenTier",
    "RamTier",
    "Record",
    "StoreTier",
    "StoredBlock",
    "Ticket",
]
