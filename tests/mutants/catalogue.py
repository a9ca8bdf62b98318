"""All mutants, by the room they are made in.

A new one goes into the file of its room; see `Mutant`.
"""

from __future__ import annotations

from tests.mutants import (
    catalogue_cache,
    catalogue_core,
    catalogue_cpu,
    catalogue_disk,
    catalogue_hazard,
    catalogue_moves,
    catalogue_names,
    catalogue_remainders,
    catalogue_replay,
    catalogue_scheduler,
)

ROOMS = {
    "core": catalogue_core.MUTANTS,
    "cache": catalogue_cache.MUTANTS,
    "moves": catalogue_moves.MUTANTS,
    "names": catalogue_names.MUTANTS,
    "remainders": catalogue_remainders.MUTANTS,
    "disk": catalogue_disk.MUTANTS,
    "scheduler": catalogue_scheduler.MUTANTS,
    "cpu": catalogue_cpu.MUTANTS,
    "hazard": catalogue_hazard.MUTANTS,
    "replay": catalogue_replay.MUTANTS,
}
MUTANTS = tuple(mutant for mutants in ROOMS.values() for mutant in mutants)
