"""The KV of an mlx-lm model's layers as NumPy arrays, and new layers from arrays.

The attributes ``keys``, ``values`` and ``offset`` of ``KVCache`` are used. Its ``state`` is not: no page promises the
members of that tuple.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.adapters.probe import Probe
from pagedkv.errors import NotSupported
from pagedkv.spec.kv_spec import KVSpec

PROBED = 8  # tokens
_DTYPES = ("bfloat16", "float16", "float32")


class Layers:
    """The shape and type of one model's caches; it does not keep the model.

    Parameters
    ----------
    model : a model of mlx-lm.
    mx : the module ``mlx.core``.
    caches : the module ``mlx_lm.models.cache``.

    Attributes
    ----------
    probe : Probe
        K and V of the fixed tokens.

    Raises
    ------
    NotSupported
        Its layers do not all keep K and V of each token, in one shape.
    """

    def __init__(self, model: Any, mx: Any, caches: Any) -> None:
        self._mx, self._kind = mx, caches.KVCache
        self._what = f"this {type(model).__name__}"
        fresh = caches.make_prompt_cache(model)
        self._check_plain(fresh)
        model(mx.array([_probed_ids(model)]), cache=fresh)
        mx.eval([side for layer in fresh for side in (layer.keys, layer.values)])
        first = fresh[0].keys
        self._num_layers, self._dtype = len(fresh), first.dtype
        self._name = str(first.dtype).rpartition(".")[2]
        self._num_heads, self._head_dim = first.shape[1], first.shape[3]
        if self._name not in _DTYPES:
            raise NotSupported(self._what, f"its K and V are {self._name}, not one of {', '.join(_DTYPES)}")
        reason = self.reason_against(fresh)
        if reason or fresh[0].offset != PROBED:
            raise NotSupported(self._what, reason or f"its layers hold {fresh[0].offset} of {PROBED} tokens")
        k, v = ([side[0, :, :PROBED].astype(mx.float32) for side in sides] for sides in _sides(fresh))
        self.probe = Probe(np.stack([np.array(side) for side in k]), np.stack([np.array(side) for side in v]))

    def spec(self, block_size: int, model: str) -> KVSpec:
        """The spec of a cache of these layers."""
        return KVSpec(
            self._num_layers, self._num_heads, self._head_dim, self._name, block_size, layout="HND", model=model
        )  # fmt: skip

    def reason_against(self, layers: Sequence[Any]) -> str:
        """Why these caches do not hold KV of this model's layers for a text; empty if they do."""
        if len(layers) != self._num_layers:
            return f"it has caches of {len(layers)} layers instead of {self._num_layers} (a draft model?)"
        for number, layer in enumerate(layers):
            if type(layer) is not self._kind:
                return f"layer {number} has a {type(layer).__name__}, not a plain KVCache"
            if layer.keys is None or layer.values is None or layer.offset != layers[0].offset:
                return f"layer {number} does not hold as many tokens as layer 0"
            for name, side in (("K", layer.keys), ("V", layer.values)):
                wanted = (1, self._num_heads, self._head_dim)
                shape = tuple(side.shape)
                if (*shape[:2], *shape[3:]) != wanted or shape[2] < layer.offset or side.dtype != self._dtype:
                    return (
                        f"{name} of layer {number} is {side.dtype} {shape}, not {self._dtype} "
                        f"(1, {self._num_heads}, tokens, {self._head_dim}): layers of several shapes are not cached"
                    )
        return ""

    def read(self, layers: Sequence[Any], start: int, stop: int) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """K and V of a range of tokens, of each layer [num_kv_heads, stop - start, head_dim].

        Views of MLX's memory.
        """
        mx = self._mx
        k, v = _sides(layers)
        if self._name == "bfloat16":
            k, v = ([side.view(mx.uint16) for side in sides] for sides in (k, v))
        mx.eval(k, v)
        views = ([np.array(side, copy=False)[0, :, start:stop] for side in sides] for sides in (k, v))
        dtype = self.spec(1, "").np_dtype
        of_k, of_v = ([view.view(dtype) for view in side] for side in views)
        return of_k, of_v

    def room(self, num_tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Zeros for K and V, each [num_layers, num_kv_heads, num_tokens, head_dim]."""
        shape = self._num_layers, self._num_heads, num_tokens, self._head_dim
        dtype = self.spec(1, "").np_dtype
        return np.zeros(shape, dtype), np.zeros(shape, dtype)

    def make(self, k: NDArray[Any], v: NDArray[Any], num_tokens: int) -> list[Any]:
        """New caches whose first `num_tokens` tokens are those of the arrays; they are copied.

        The rest of the arrays is room to grow.
        """
        made = []
        for of_k, of_v in zip(k, v, strict=True):
            layer = self._kind()
            layer.keys, layer.values, layer.offset = self._array(of_k), self._array(of_v), num_tokens
            made.append(layer)
        self._mx.eval([side for layer in made for side in (layer.keys, layer.values)])
        return made

    def capacity(self, num_tokens: int) -> int:
        """Tokens for which a cache that holds so many has room: whole steps of KVCache."""
        step = int(self._kind.step)
        return -(-num_tokens // step) * step

    def _array(self, side: NDArray[Any]) -> Any:
        if self._name != "bfloat16":
            return self._mx.array(side[None])
        return self._mx.array(side[None].view(np.uint16)).view(self._dtype)

    def _check_plain(self, layers: Sequence[Any]) -> None:
        """Raise NotSupported where a layer keeps something else than K and V of each token."""
        others = sorted({type(layer).__name__ for layer in layers if type(layer) is not self._kind})
        if others or not layers:
            reason = f"layers with {', '.join(others)} do not keep K and V of each token" if others else "no layers"
            raise NotSupported(self._what, reason)


def _sides(layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return [layer.keys for layer in layers], [layer.values for layer in layers]


def _probed_ids(model: Any) -> list[int]:
    """The fixed tokens: ids that every vocabulary has."""
    size = getattr(getattr(model, "args", None), "vocab_size", None)
    return [(17 + 29 * number) % (size if isinstance(size, int) and size > 0 else 256) for number in range(PROBED)]
