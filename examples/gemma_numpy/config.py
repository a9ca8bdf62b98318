"""The numbers of a Gemma 3 model, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from examples.llama_numpy.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class GemmaConfig(LlamaConfig):
    """Shape of a model; fields of :class:`LlamaConfig`, and three more.

    Parameters
    ----------
    window : tokens that a query of a local layer sees, its own included.
    period : every so many layers, the last one sees all tokens.
    local_rope_base : of local layers; ``rope_base`` is the others'.
    """

    window: int = 512
    period: int = 6
    local_rope_base: float = 10000.0

    def is_local(self, layer: int) -> bool:
        """Whether a layer has a window."""
        return layer % self.period < self.period - 1
