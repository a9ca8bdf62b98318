"""The state of one row of a block table."""

from __future__ import annotations

from typing import NamedTuple


class RowInfo(NamedTuple):
    """The counts of one row of a :class:`pagedkv.core.BlockTable`.

    Attributes
    ----------
    num_tokens : int
        Tokens of the sequence, the prompt's included.
    num_computed : int
        Leading tokens whose KV is in the row's blocks.
    num_blocks : int
        Blocks that the row holds.
    num_committed : int
        Leading blocks that the row shares with the prefix tree.
    """

    num_tokens: int
    num_computed: int
    num_blocks: int
    num_committed: int
