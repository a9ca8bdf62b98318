"""Attention of one layer, worked out once and repeated for arrays of the same form.

``AttentionPlan.layer_launch`` makes one for a batch. A launch then writes at most eight addresses into a struct, and
with tensor maps those of the layer's K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagedkv.kernels.backend import Backend
from pagedkv.kernels.kv_maps import kv_map
from pagedkv.kernels.params import Params
from pagedkv.kernels.recipe import Recipe
from pagedkv.kernels.tensor_map import TENSOR_MAP_BYTES

LAYER_ARRAYS = ("q", "o", "lse", "kv.k", "kv.v", "kv.k_scale", "kv.v_scale", "sinks")  # of AttentionParams
_K, _V = LAYER_ARRAYS.index("kv.k"), LAYER_ARRAYS.index("kv.v")
_MAP_WORDS = slice(0, 2 * TENSOR_MAP_BYTES // 8)
MAX_MAPS = 4096  # layers of which a launch keeps the tensor maps

Finish = Callable[[Params, int, Any], None]


class LayerLaunch:
    """Launches over arrays of fixed shapes, strides, dtypes and alignments.

    Parameters
    ----------
    backend : launches.
    recipe : of AttentionParams; with ``box_tokens`` of TmaAttentionParams, whose first words are the two maps.
    fixed : arrays that the struct points into from the start: the batch's and the schedule's.
    num_seqs : sequences of the batch.
    finish : launches what follows, from AttentionParams, ``num_seqs`` and the stream; None: nothing does.
    box_tokens : tokens of a copy through tensor maps; 0: the kernel takes addresses.
    """

    __slots__ = ("_backend", "_box_tokens", "_finish", "_fixed", "_maps", "_num_seqs", "_recipe")

    def __init__(
        self,
        backend: Backend,
        recipe: Recipe,
        fixed: tuple[Any, ...],
        num_seqs: int,
        *,
        finish: Finish | None,
        box_tokens: int,
    ) -> None:
        self._backend, self._recipe, self._fixed, self._num_seqs = backend, recipe, fixed, num_seqs
        self._finish, self._box_tokens = finish, box_tokens
        self._maps: dict[tuple[int, int], memoryview] = {}  # of K and V, by their addresses

    def __call__(self, arrays: Sequence[Any], stream: Any) -> None:
        """Launch.

        Parameters
        ----------
        arrays : those of LAYER_ARRAYS, of the form that this was made for; None where there is none.
        stream : of the backend.
        """
        recipe = self._recipe
        filled = recipe.take(arrays)
        params = filled.params
        params.arrays = (*arrays, *self._fixed)
        if self._box_tokens:
            words, places = filled.words, recipe.places
            at = words[places[_K]], words[places[_V]]
            words[_MAP_WORDS] = self._maps.get(at) or self._new_maps(arrays[_K], arrays[_V], at)
        self._backend.launch(
            recipe.variant, recipe.grid, recipe.block, params, shared_bytes=recipe.shared_bytes, stream=stream
        )
        if self._finish is not None:
            attention = Params(params.record["attention"], params.arrays) if self._box_tokens else params
            self._finish(attention, self._num_seqs, stream)
        recipe.give_back(filled)

    def _new_maps(self, k: Any, v: Any, at: tuple[int, int]) -> memoryview:
        """Both tensor maps as words; they depend on nothing but the form and the addresses."""
        if len(self._maps) >= MAX_MAPS:
            self._maps.clear()
        both = b"".join(kv_map(self._backend, array, self._box_tokens).tobytes() for array in (k, v))
        found = self._maps[at] = memoryview(both).cast("Q")
        return found
