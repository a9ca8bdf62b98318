"""The names of all mutants by room, with those of the CUDA kernels as one more room."""

from __future__ import annotations

from tests.kernels import (
    test_decode_mla_wgmma,
    test_mutants_cache,
    test_mutants_decode,
    test_mutants_parts,
    test_mutants_prefill,
    test_prefill_wgmma,
)
from tests.mutants.catalogue import ROOMS

KERNELS = "CUDA kernels"
KERNEL_MODULES = (
    test_mutants_cache,
    test_mutants_decode,
    test_mutants_parts,
    test_mutants_prefill,
    test_prefill_wgmma,
    test_decode_mla_wgmma,
)
NAMES: dict[str, tuple[str, ...]] = {
    **{room: tuple(mutant.name for mutant in mutants) for room, mutants in ROOMS.items()},
    KERNELS: tuple(mutant.name for module in KERNEL_MODULES for mutant in module.MUTANTS),
}
