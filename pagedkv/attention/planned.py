"""The batch that a plan leaves for runs after it, and the launches over its arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from pagedkv.kernels.batch import Batch

NAMES = ("q", "out", "lse", "k_cache", "v_cache", "k_scale", "v_scale", "sinks")  # a layer's arrays
Arrays = tuple[Any, ...]
Launch = Callable[[Arrays, Any], None]  # of one layer's arrays, on a stream


class Planned(NamedTuple):
    """A batch with the launches that hold its arrays.

    One object that a plan replaces, so that a run meanwhile keeps its launches for the batch it began with.
    """

    batch: Batch
    places: Hashable  # forms and addresses of the arrays
    launches: dict[Hashable, Launch]  # by the layer's form


def no_launch(arrays: Arrays, stream: Any) -> None:
    """The launch of a batch without queries."""
