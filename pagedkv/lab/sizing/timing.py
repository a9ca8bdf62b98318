"""Times from bytes and rates: moves, decode steps, prefills, requests.

Lower bounds, in seconds.

A decode step reads all weights and all KV of its batch; a prefill does two floating point operations per weight and
token (arXiv:2001.08361, section 2.1) and more for attention. Neither takes less time than memory and arithmetic need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numpy.typing import ArrayLike

from pagedkv.lab.sizing.blocks import contiguous_utilisation, utilisation
from pagedkv.lab.sizing.checks import (
    MAX_PARAMS,
    block_tokens,
    byte_count,
    length_array,
    rate,
    real_number,
    token_count,
)
from pagedkv.spec.sizes import whole_number


def transfer_seconds(num_bytes: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Time to move so many bytes: swapping out, swapping in, loading.

    Raises
    ------
    WrongType, InvalidArgument
    """
    latency = real_number(latency_s, "latency_s")
    return latency + byte_count(num_bytes, "num_bytes") / rate(bytes_per_s, "bytes_per_s")


def decode_seconds(weight_bytes: int, kv_bytes: int, bytes_per_s: float) -> float:
    """Least time of one decode step: weights and KV read once.

    Parameters
    ----------
    kv_bytes : of all sequences of the batch.
    bytes_per_s : rate of the memory that both lie in.

    Raises
    ------
    WrongType, InvalidArgument
    """
    read = byte_count(weight_bytes, "weight_bytes") + byte_count(kv_bytes, "kv_bytes")
    return read / rate(bytes_per_s, "bytes_per_s")


def prefill_seconds(params_per_token: int, num_tokens: int, flops_per_s: float) -> float:
    """Least time to compute KV for so many tokens.

    ``2 * params * tokens`` operations, attention's own left out.

    Raises
    ------
    WrongType, InvalidArgument
    """
    work = 2 * whole_number(params_per_token, "params_per_token", 0, MAX_PARAMS) * token_count(num_tokens)
    return work / rate(flops_per_s, "flops_per_s")


def request_seconds(first_token_s: float, per_token_s: float, output_tokens: int) -> float:
    """A whole request: time to the first token, and `output_tokens` times that of one.

    Raises
    ------
    WrongType, InvalidArgument
    """
    first, each = real_number(first_token_s, "first_token_s"), real_number(per_token_s, "per_token_s")
    return first + token_count(output_tokens, "output_tokens") * each


def tokens_per_second(batch: int, step_s: float, busy: float = 1.0) -> float:
    """Tokens that a batch yields.

    One per sequence and step, for the share `busy` (0..1) of the time.

    Divided by a request's output tokens these are requests per second.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return token_count(batch, "batch") * real_number(busy, "busy", 0, 1) / rate(step_s, "step_s")


@dataclass(frozen=True, slots=True)
class PagedCost:
    """What paging costs a batch in time, and gives it in memory.

    Attributes
    ----------
    blocks : of each sequence.
    compute_s, gather_s : time with contiguous memory, and what fetching by blocks adds.
    utilisation, contiguous_utilisation : share of the allocated slots that hold a token.
    """

    blocks: tuple[int, ...]
    compute_s: float
    gather_s: float
    utilisation: float
    contiguous_utilisation: float

    @property
    def total_s(self) -> float:
        """Time with pages."""
        return self.compute_s + self.gather_s

    @property
    def overhead(self) -> float:
        """What pages add, as a share of the time without; 0 where nothing is computed."""
        return self.gather_s / self.compute_s if self.compute_s else 0.0

    @property
    def more_sequences(self) -> float:
        """How many times as many sequences fit into the same memory; inf where they need none."""
        return self.utilisation / self.contiguous_utilisation if self.contiguous_utilisation else math.inf


def paged_cost(
    lengths: ArrayLike, block_size: int, max_tokens: int, compute_s_per_token: float, gather_s_per_block: float
) -> PagedCost:
    """One pass over sequences of these lengths, with a price per token and per block.

    Lengths are int [num_sequences].

    Raises
    ------
    WrongType, InvalidArgument
    """
    array, size = length_array(lengths), block_tokens(block_size)
    blocks = -(-array // size)
    compute = int(array.sum()) * real_number(compute_s_per_token, "compute_s_per_token")
    gather = int(blocks.sum()) * real_number(gather_s_per_block, "gather_s_per_block")
    room = contiguous_utilisation(array, max_tokens)
    return PagedCost(tuple(blocks.tolist()), compute, gather, utilisation(array, size), room)
