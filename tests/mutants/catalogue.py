"""All mutants, by the room they are made in.

A new one goes into the file of its room; see `Mutant`.
"""

from __future__ import annotations

from tests.mutants import (
    catalogue_adapters,
    catalogue_bench,
    catalogue_c_api,
    catalogue_cache,
    catalogue_choice,
    catalogue_core,
    catalogue_cpu,
    catalogue_disk,
    catalogue_events,
    catalogue_groups,
    catalogue_hazard,
    catalogue_launches,
    catalogue_moves,
    catalogue_names,
    catalogue_ranks,
    catalogue_remainders,
    catalogue_remote,
    catalogue_replay,
    catalogue_scheduler,
    catalogue_simulate,
    catalogue_spec,
    catalogue_tilings,
)

ROOMS = {
    "core": catalogue_core.MUTANTS,
    "groups": catalogue_groups.MUTANTS,
    "cache": catalogue_cache.MUTANTS,
    "moves": catalogue_moves.MUTANTS,
    "names": catalogue_names.MUTANTS,
    "remainders": catalogue_remainders.MUTANTS,
    "disk": catalogue_disk.MUTANTS,
    "remote": catalogue_remote.MUTANTS,
    "ranks": catalogue_ranks.MUTANTS,
    "events": catalogue_events.MUTANTS,
    "scheduler": catalogue_scheduler.MUTANTS,
    "cpu": catalogue_cpu.MUTANTS,
    "spec": catalogue_spec.MUTANTS,
    "hazard": catalogue_hazard.MUTANTS,
    "replay": catalogue_replay.MUTANTS,
    "simulate": catalogue_simulate.MUTANTS,
    "adapters": catalogue_adapters.MUTANTS,
    "c_api": catalogue_c_api.MUTANTS,
    "launches": catalogue_launches.MUTANTS,
    "choice": catalogue_choice.MUTANTS,
    "tilings": catalogue_tilings.MUTANTS,
    "bench": catalogue_bench.MUTANTS,
}
MUTANTS = tuple(mutant for mutants in ROOMS.values() for mutant in mutants)
