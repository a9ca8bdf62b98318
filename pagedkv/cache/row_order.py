"""Chooses the order of rows within a cache's blocks, where its spec leaves that open.

HND keeps a head's rows of a block together, so that a GPU's kernels read longer runs; NHD is what most callers write
and exchange. Blocks that are already on disk, or that other processes share, keep the order they have.
"""

from __future__ import annotations

from dataclasses import replace

from pagedkv.errors import InvalidArgument
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import LAYOUTS, KVSpec
from pagedkv.tiers.disk.peek import fingerprint_in


def with_row_order(spec: KVSpec, *, on_gpu: bool, disk: Disk | None, shares: bool, owns_memory: bool = True) -> KVSpec:
    """The spec with ``"NHD"`` or ``"HND"`` as its layout.

    Parameters
    ----------
    on_gpu : whether kernels of pagedkv read the blocks on a GPU.
    shares : whether other processes have blocks of this spec: through a remote store, or as ranks.
    owns_memory : False where a ``storage`` of the caller lays out the blocks.

    Raises
    ------
    InvalidArgument
        ``layout="auto"`` for blocks that other processes share, each of which might choose another order.
    """
    if spec.layout in LAYOUTS:
        return spec
    if shares:
        if spec.layout == "auto":
            raise InvalidArgument(
                "layout='auto' lets each process choose, and all that share blocks through a remote store or as ranks "
                "need one order: name layout='NHD' or layout='HND' in each process's KVSpec"
            )
        return replace(spec, layout="NHD")
    there = None if disk is None else fingerprint_in(disk.path)
    for layout in LAYOUTS:
        if replace(spec, layout=layout).fingerprint() == there:
            return replace(spec, layout=layout)
    return replace(spec, layout="HND" if on_gpu and owns_memory else "NHD")
