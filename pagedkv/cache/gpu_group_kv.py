"""The KV of groups of layers on a GPU: each group's pages go to the kernels.

The kernels take the distance between pages as a stride, and tables of a short group as those of a shorter sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.gpu_kv import GpuKV, new_lock
from pagedkv.cache.group_kv import GroupKV
from pagedkv.kernels.backend import Backend
from pagedkv.spec.block_layout import check_outputs
from pagedkv.spec.groups import Group, GroupLayout
from pagedkv.spec.kv_spec import KVSpec


class GpuGroupKV(GroupKV):
    """As :class:`GroupKV`, over an arena on the backend's device.

    Parameters
    ----------
    spec, layout, arena : as :class:`GroupKV`.
    backend, on_work, before_work : as :class:`GpuKV`; all groups share them.
    """

    is_synchronous = False

    def __init__(
        self,
        spec: KVSpec,
        layout: GroupLayout,
        arena: Any,
        backend: Backend,
        on_work: Callable[[Any], object],
        before_work: Callable[[Any], Any],
    ) -> None:
        self.backend, self._on_work, self._before_work = backend, on_work, before_work
        self._lock = new_lock()
        super().__init__(spec, layout, arena)

    def _opened(self, group: Group, rows: Any) -> GpuKV:
        shared = self.backend, self._on_work, self._before_work
        return GpuKV(group.spec, rows, *shared, int(rows.shape[1]), self._lock)

    @property
    def overflowing_writes(self) -> int:
        """Not counted on a GPU: 0."""
        return 0

    def _outputs(self, out: tuple[Any, Any] | None, shapes: tuple[tuple[int, ...], ...]) -> tuple[Any, Any]:
        dtype = self.spec.value_dtype
        if out is None:
            k_shape, v_shape = shapes
            out = (self.backend.empty(k_shape, dtype), self.backend.empty(v_shape, dtype))
        check_outputs(out, shapes, dtype)
        return out

    def _gather_group(
        self, number: int, pages: NDArray[np.int32], start: int, stop: int, out: tuple[Any, Any], layout: str
    ) -> None:
        kv: GpuKV = self._kvs[number]
        kv.gather_layers(pages, start, stop, out, self.layout.groups[number].layers, layout)
