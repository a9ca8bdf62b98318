"""Arguments that the layers of one step share: query owners, KV locations, variant numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Batch:
    """Device arrays: the sequence of each query, and where its KV lies.

    Shapes as in AttentionParams.

    ``kv_indptr`` instead of ``block_tables`` where KV is contiguous.
    """

    seq_lens: Any
    block_tables: Any = None
    kv_indptr: Any = None
    q_indptr: Any = None
    mask: Any = None
    mask_indptr: Any = None
    q_positions: Any = None
    position_spans: Any = None


@dataclass(slots=True)
class Options:
    """Run-time numbers and small arrays of the variants."""

    softmax_scale: float
    window: int = 0
    soft_cap: float = 0.0
    alibi_slopes: Any = None
    sinks: Any = None
