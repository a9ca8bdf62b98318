"""The most blocks that a request can come to hold: what admission and refusal go by."""

from __future__ import annotations


def blocks_at_most(prompt_tokens: int, max_new_tokens: int, width: int, block_size: int, lookahead: int = 0) -> int:
    """Device blocks that a request needs when it runs alone, at its largest.

    The last token that it generates is never computed. The whole blocks of the prompt are held once; each of `width`
    branches holds the rest for itself, and one block more while its partly filled one is copied.

    Parameters
    ----------
    prompt_tokens, max_new_tokens, lookahead : tokens.
    width : branches.
    block_size : tokens of a block.
    """
    longest = prompt_tokens + max_new_tokens - 1 + lookahead
    blocks = -(-longest // block_size)
    if width == 1:
        return blocks
    shared = prompt_tokens // block_size
    return shared + width * (blocks - shared + 1)


def pages_at_most(longest: int, width: int, reach: int, most: int, block_size: int, lookahead: int = 0) -> int:
    """Pages of a short group of layers that a request needs when it runs alone, at its largest.

    One branch computes its tokens, and the others decode: each holds the blocks that its layers reach back to, those of
    its step, and one that is copied.

    Parameters
    ----------
    longest : tokens of a branch that are ever computed.
    width : branches.
    reach : blocks before a boundary that the group needs at most.
    most : tokens of a step.
    block_size : tokens of a block.
    lookahead : tokens.
    """
    blocks = -(-(longest + lookahead) // block_size)
    computing, decoding = (
        min(blocks, reach + 1 - (-(tokens + 2 * lookahead) // block_size)) for tokens in (min(longest, most), 1)
    )
    return computing if width == 1 else computing + 1 + (width - 1) * (decoding + 1)
