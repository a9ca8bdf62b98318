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
