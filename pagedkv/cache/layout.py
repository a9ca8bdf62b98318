"""The layout of a cache's blocks where its KVSpec leaves the choice to the cache."""

from __future__ import annotations

import dataclasses

from pagedkv.errors import InvalidArgument
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import AUTO, LAYOUTS, KVSpec
from pagedkv.tiers.disk.peek import stored_fingerprint


def with_layout(spec: KVSpec, disk: Disk | None, *, on_gpu: bool, shared: bool) -> KVSpec:
    """The spec with a layout that is named: its own, or the one that suits the cache.

    A store that another process makes between this and its opening is refused then, as one of another layout is.

    Parameters
    ----------
    disk : the cache's directory: a store in it keeps the layout that it was made with.
    on_gpu : whether kernels on a GPU read the blocks.
    shared : whether other processes must name the same layout: over a remote store, and with ranks.

    Raises
    ------
    InvalidArgument
        The choice is left to the cache by name, and its KV is shared.
    """
    if spec.layout in LAYOUTS:
        return spec
    if shared:
        if spec.layout == AUTO:
            raise InvalidArgument(
                "KVSpec(layout='auto') lets each process choose, and processes that share KV in a remote store or as "
                "ranks must agree: name the layout, layout='NHD' or layout='HND', in all of them"
            )
        return dataclasses.replace(spec, layout="NHD")
    stored = None if disk is None else stored_fingerprint(disk.path)
    order = ("HND", "NHD") if on_gpu else ("NHD", "HND")
    named = [dataclasses.replace(spec, layout=layout) for layout in order]
    return next((one for one in named if one.fingerprint() == stored), named[0])
