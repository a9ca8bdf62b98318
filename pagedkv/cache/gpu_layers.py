"""A layer of the device arena on a GPU as the kernels take it: its views, and its scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.kernels.backend import Backend
from pagedkv.kernels.layer_kv import LayerKv
from pagedkv.spec.block_layout import plane_view
from pagedkv.spec.dtypes import BYTES
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.scales import Scales


def with_v(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """K and V as kernels take them: None in the place of a V of no width."""
    k, v = pair
    return k, None if getattr(v, "shape", ())[-1:] == (0,) else v


def layer_kv(spec: KVSpec, backend: Backend, views: tuple[Any, Any], scales: dict[str, Any]) -> LayerKv:
    """A layer of these views; one without V has no scales of V."""
    k, v = with_v(views)
    if v is None and scales:
        scales = scales | {"v_scale": None}
    return LayerKv(backend, k, v, dtype=_kernel_dtype(spec), scale_mode=spec.scale_mode, **scales)  # type: ignore[arg-type]


def scales_of(arena: Any, spec: KVSpec, layer: int, backend: Backend, row_bytes: int | None) -> dict[str, Any]:
    """Keywords with a layer's scales; none where the dtype has none."""
    if spec.scales is None:
        return {}
    if isinstance(spec.scales, Scales):
        k, v = (backend.asarray(scale) for scale in spec.scales.of_layer(layer))
    else:
        k, v = (plane_view(arena, spec, name, row_bytes)[:, layer] for name in ("k_scale", "v_scale"))
    return {"k_scale": k, "v_scale": v}


def _kernel_dtype(spec: KVSpec) -> str:
    """The dtype that kernels take blocks for: bytes are copied as int8."""
    return "int8" if spec.dtype == BYTES else spec.dtype


def as_kernels_take(array: Any) -> Any:
    """Bytes as int8, which kernels copy."""
    return array.view(np.int8) if array.dtype == np.uint8 else array
