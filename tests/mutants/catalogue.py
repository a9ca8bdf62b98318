"""All mutants, by the room they are made in. A new one goes into the file of its room; see `Mutant`."""

from __future__ import annotations

from tests.mutants import (
    catalogue_cache,
    catalogue_core,
    catalogue_cpu,
    catalogue_disk,
    catalogue_hazard,
    catalogue_moves,
    catalogue_names,
    catalogue_replay,
    catalogue_scheduler,
)

MUTANTS = (
    catalogue_core.MUTANTS
    + catalogue_cache.MUTANTS
    + catalogue_moves.MUTANTS
    + catalogue_names.MUTANTS
    + catalogue_disk.MUTANTS
    + catalogue_scheduler.MUTANTS
    + catalogue_cpu.MUTANTS
    + catalogue_hazard.MUTANTS
    + catalogue_replay.MUTANTS
)
