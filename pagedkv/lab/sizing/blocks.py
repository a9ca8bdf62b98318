"""Blocks and the waste in them, in tokens: exact for known lengths, else expected.

`n` tokens in blocks of `B` take ``ceil(n / B)`` blocks; the last one has room for ``-n mod B`` more: none if `n` is a
multiple of `B`, else ``B - n mod B``. If every remainder is equally likely, that is ``(B - 1) / 2`` tokens on average;
the texts of docs/sizing.md say ``B / 2``, half a token more. Paging: arXiv:2309.06180, section 4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.sizing.checks import block_tokens, length_array, real_number, token_count

TABLE_ENTRY_BYTES = 4  # block tables are int32


def blocks_needed(num_tokens: int, block_size: int = 16) -> int:
    """Blocks for a sequence of so many tokens.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return -(-token_count(num_tokens) // block_tokens(block_size))


def wasted_tokens(num_tokens: int, block_size: int = 16) -> int:
    """Unused tokens of a sequence's last block, 0..block_size - 1: internal fragmentation.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return -token_count(num_tokens) % block_tokens(block_size)


def expected_waste(block_size: int = 16) -> float:
    """Mean of :func:`wasted_tokens` if every remainder is equally likely.

    ``(block_size - 1) / 2``.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return (block_tokens(block_size) - 1) / 2


def total_blocks(lengths: ArrayLike, block_size: int = 16) -> int:
    """Blocks for sequences of these lengths, int [num_sequences], that share nothing.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return int(np.sum(-(-length_array(lengths) // block_tokens(block_size))))


def mean_waste(lengths: ArrayLike, block_size: int = 16, weights: ArrayLike | None = None) -> float:
    """Mean of :func:`wasted_tokens` over a distribution of lengths.

    Parameters
    ----------
    lengths : int [num_lengths].
    weights : how often each length comes, [num_lengths], not negative, not all 0; default: each once.

    Raises
    ------
    WrongType, InvalidArgument
    """
    array = length_array(lengths)
    try:
        weight = np.ones(len(array)) if weights is None else np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise WrongType("weights must be numbers, [num_lengths]") from None
    if weight.shape != array.shape or not np.isfinite(weight).all() or weight.min() < 0 or weight.sum() == 0:
        raise InvalidArgument(f"weights must be {len(array)} finite numbers of at least 0, and not all 0")
    return float(np.average(-array % block_tokens(block_size), weights=weight))


def utilisation(lengths: ArrayLike, block_size: int = 16) -> float:
    """Share of the allocated token slots that hold a token, 0..1; 1 where nothing is allocated.

    Parameters
    ----------
    lengths : int [num_sequences], or the length of one.

    Raises
    ------
    WrongType, InvalidArgument
    """
    array = length_array(np.atleast_1d(lengths))
    slots = total_blocks(array, block_size) * block_size
    return int(array.sum()) / slots if slots else 1.0


def contiguous_utilisation(lengths: ArrayLike, max_tokens: int) -> float:
    """The same where every sequence gets room for `max_tokens` at once.

    Raises
    ------
    WrongType
    InvalidArgument
        Among others: a sequence is longer than `max_tokens`.
    """
    array, room = length_array(np.atleast_1d(lengths)), token_count(max_tokens, "max_tokens", 1)
    if array.max() > room:
        raise InvalidArgument(f"a sequence of {array.max()} tokens does not fit into max_tokens={room}")
    return int(array.sum()) / (len(array) * room)


def expected_utilisation(mean_tokens: float, waste_tokens: float) -> float:
    """Share of slots that hold a token.

    For sequences that use `mean_tokens` and lose `waste_tokens` on average.

    Parameters
    ----------
    mean_tokens, waste_tokens : tokens per sequence; the latter from :func:`expected_waste`, or ``block_size / 2`` as in
        the texts.

    Raises
    ------
    WrongType, InvalidArgument
    """
    used, lost = real_number(mean_tokens, "mean_tokens"), real_number(waste_tokens, "waste_tokens")
    return used / (used + lost) if used + lost else 1.0


def waste_ratio(num_tokens: int, block_size: int, max_tokens: int) -> float:
    """Tokens' room lost in blocks, as a share of the loss with `max_tokens` reserved.

    Raises
    ------
    WrongType
    InvalidArgument
        Among others: the sequence fills `max_tokens`, so nothing is lost to compare with.
    """
    room = token_count(max_tokens, "max_tokens", 1)
    count = token_count(num_tokens)
    if count >= room:
        raise InvalidArgument(f"num_tokens must be less than max_tokens={room}, got {count}")
    return wasted_tokens(count, block_size) / (room - count)


def table_bytes(num_tokens: int, block_size: int = 16) -> int:
    """Bytes of a sequence's block table: an int32 for each block.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return blocks_needed(num_tokens, block_size) * TABLE_ENTRY_BYTES
