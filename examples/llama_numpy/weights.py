"""The weights of a model.

One float32 array per kind, layers stacked, what is multiplied together side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.llama_numpy.config import LlamaConfig

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All matrices as [out, in], so that a single token's product is ``W @ x``.

    Attributes
    ----------
    embedding, output : float32 [vocab_size, width]; the same array in a tied model.
    output_norm : float32 [width]
    attn_norm, ffn_norm : float32 [num_layers, width]
    qkv : float32 [num_layers, qo_width + 2 * kv_width, width], queries, keys, values; their pairs (0, 1), (2, 3), ...
        are what the rotary embedding turns.
    attn_output : float32 [num_layers, width, qo_width]
    gate_up : float32 [num_layers, 2 * ff_width, width], the gate, then what it gates.
    ffn_down : float32 [num_layers, width, ff_width]

    Raises
    ------
    ValueError
        An array has another shape or dtype.
    """

    config: LlamaConfig
    embedding: Floats
    output: Floats
    output_norm: Floats
    attn_norm: Floats
    qkv: Floats
    attn_output: Floats
    ffn_norm: Floats
    gate_up: Floats
    ffn_down: Floats

    def __post_init__(self) -> None:
        for name, shape in array_shapes(self.config).items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != np.float32:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, not float32 {shape}")

    @classmethod
    def from_arrays(cls, config: LlamaConfig, arrays: Mapping[str, NDArray[Any]]) -> LlamaWeights:
        """From the arrays of :func:`array_shapes`; a tied model needs no ``output``.

        Raises
        ------
        ValueError
            An array is missing, has another shape or dtype, or does not belong to the model.
        """
        wanted = stored_shapes(config)
        if missing := sorted(set(wanted) - set(arrays)):
            raise ValueError(f"without {', '.join(missing)}")
        if unknown := sorted(set(arrays) - set(wanted)):
            raise ValueError(f"with {', '.join(unknown)}, which this model does not have")
        output = arrays["embedding" if config.tied else "output"]
        return cls(config, **{**{name: arrays[name] for name in wanted}, "output": output})

    def stored(self) -> dict[str, Floats]:
        """What :meth:`from_arrays` needs."""
        return {name: getattr(self, name) for name in stored_shapes(self.config)}

    def on(self, xp: Any) -> LlamaWeights:
        """These weights as arrays of another module than NumPy, such as CuPy.

        Copies, each of them once.
        """
        if xp is np:
            return self
        return self.from_arrays(self.config, {name: xp.asarray(array) for name, array in self.stored().items()})


def array_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every array of the weights, by attribute."""
    layers, width = config.num_layers, config.width
    return {
        "embedding": (config.vocab_size, width),
        "output": (config.vocab_size, width),
        "output_norm": (width,),
        "attn_norm": (layers, width),
        "qkv": (layers, config.qo_width + 2 * config.kv_width, width),
        "attn_output": (layers, width, config.qo_width),
        "ffn_norm": (layers, width),
        "gate_up": (layers, 2 * config.ff_width, width),
        "ffn_down": (layers, width, config.ff_width),
    }


def stored_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Those of the arrays that are the model's own.

    Without the output layer where it is the embedding.
    """
    shapes = array_shapes(config)
    return {name: shape for name, shape in shapes.items() if not (config.tied and name == "output")}
