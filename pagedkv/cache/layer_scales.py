"""The scales of quantised KV in CPU memory, layer by layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv import cpu
from pagedkv.spec.block_layout import plane_view
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.scales import Scales


class LayerScales:
    """Scales of quantised KV: in an arena's blocks, or fixed.

    Parameters
    ----------
    arena : uint8 [num_blocks, block_bytes] in CPU memory.
    spec : of a dtype with scales.
    """

    def __init__(self, arena: NDArray[np.uint8], spec: KVSpec) -> None:
        self._spec = spec
        self._planes: tuple[NDArray[np.float32], ...] = ()
        if isinstance(spec.scales, Scales):
            self._layers = [spec.scales.of_layer(layer) for layer in range(spec.num_layers)]
        else:
            self._planes = tuple(plane_view(arena, spec, name) for name in ("k_scale", "v_scale"))
            k_scales, v_scales = self._planes
            self._layers = [(k_scales[:, layer], v_scales[:, layer]) for layer in range(spec.num_layers)]

    def of(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Scales of K and V of a layer, as :meth:`DeviceKV.layer_scales`."""
        return self._layers[layer]

    def gathered(self, blocks: NDArray[np.int32], start: int, stop: int) -> tuple[NDArray[np.float32], ...]:
        """K's and V's scales of a sequence's tokens.

        To be multiplied with [num_layers, tokens, heads, dim].
        """
        if not self._planes:
            k, v = (np.array(side, np.float32)[:, None, :, None] for side in zip(*self._layers, strict=True))
            return k, v
        shape = (self._spec.num_layers, stop - start, self._spec.num_kv_heads, 1)
        k_out, v_out = np.empty(shape, np.float32), np.empty(shape, np.float32)
        k_scales, v_scales = (plane[..., None] for plane in self._planes)
        cpu.gather(k_scales, v_scales, blocks, start, stop, k_out, v_out)
        return k_out, v_out
