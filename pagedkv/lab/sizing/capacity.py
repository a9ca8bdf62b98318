"""How many whole sequences some memory holds, in whole blocks, beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.errors import InvalidArgument
from pagedkv.lab.sizing.blocks import blocks_needed
from pagedkv.lab.sizing.checks import block_tokens, byte_count, real_number, token_count
from pagedkv.lab.sizing.sharing import MAX_SEQUENCES
from pagedkv.spec.sizes import format_size, whole_number


def batch_size(memory_bytes: int, weight_bytes: int, sequence_bytes: int) -> int:
    """Sequences of so many bytes each that fit beside the weights.

    For contiguous allocation `sequence_bytes` is that of the longest sequence allowed.

    Raises
    ------
    WrongType
    InvalidArgument
        Among others: the weights alone do not fit.
    """
    return _left(memory_bytes, weight_bytes) // byte_count(sequence_bytes, "sequence_bytes", 1)


def paged_batch_size(
    memory_bytes: int, weight_bytes: int, token_bytes: int, num_tokens: int, block_size: int = 16
) -> int:
    """The same in blocks: as many sequences of `num_tokens` as there are blocks for.

    Parameters
    ----------
    token_bytes : KV of one token over all layers; see :func:`pagedkv.lab.sizing.token_bytes`.

    Raises
    ------
    WrongType, InvalidArgument
    """
    block = byte_count(token_bytes, "token_bytes", 1) * block_tokens(block_size)
    num_blocks = _left(memory_bytes, weight_bytes) // block
    return num_blocks // blocks_needed(token_count(num_tokens, low=1), block_size)


def users_on_gpus(num_gpus: int, gpu_bytes: int, kv_share: float, sequence_bytes: int) -> int:
    """Users whose KV lies on the GPUs if `kv_share` (0..1) of their memory holds KV.

    ``G * M * a / M_seq``.

    :func:`pagedkv.lab.sizing.plan` also counts weights, whole blocks, and GPUs that work together.

    Raises
    ------
    WrongType, InvalidArgument
    """
    total = whole_number(num_gpus, "num_gpus", 1, 2**32) * byte_count(gpu_bytes, "gpu_bytes", 1)
    share = real_number(kv_share, "kv_share", 0, 1)
    return int(total * share / byte_count(sequence_bytes, "sequence_bytes", 1))


@dataclass(frozen=True, slots=True)
class MemorySavings:
    """Bytes of a batch, contiguous and paged.

    Attributes
    ----------
    contiguous_bytes, paged_bytes : allocated.
    used_bytes : bytes of the tokens' KV.
    """

    contiguous_bytes: int
    paged_bytes: int
    used_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What paging does not allocate.

        Negative if a block is larger than the room that the longest sequence leaves.
        """
        return self.contiguous_bytes - self.paged_bytes

    @property
    def saved_fraction(self) -> float:
        """Share of the contiguous bytes that is saved."""
        return self.saved_bytes / self.contiguous_bytes

    @property
    def contiguous_utilisation(self) -> float:
        """Share of the contiguous bytes that is used."""
        return self.used_bytes / self.contiguous_bytes

    @property
    def paged_utilisation(self) -> float:
        """Share of the blocks' bytes that is used."""
        return self.used_bytes / self.paged_bytes


def memory_savings(
    num_sequences: int, num_tokens: int, max_tokens: int, block_size: int = 16, token_bytes: int = 1
) -> MemorySavings:
    """Sequences of `num_tokens` each, paged against room for `max_tokens` each.

    With a mean for `num_tokens` this is the texts' calculator, and exact only if all are that long: otherwise each
    loses :func:`pagedkv.lab.sizing.expected_waste` tokens or so, whatever the mean's own remainder is.

    Raises
    ------
    WrongType
    InvalidArgument
        Among others: a sequence longer than `max_tokens`.
    """
    count = whole_number(num_sequences, "num_sequences", 1, MAX_SEQUENCES)
    used, room = token_count(num_tokens, low=1), token_count(max_tokens, "max_tokens", 1)
    if used > room:
        raise InvalidArgument(f"a sequence of {used} tokens does not fit into max_tokens={room}")
    each = byte_count(token_bytes, "token_bytes", 1)
    paged = blocks_needed(used, block_size) * block_size
    return MemorySavings(count * room * each, count * paged * each, count * used * each)


def _left(memory_bytes: int, weight_bytes: int) -> int:
    memory, weights = byte_count(memory_bytes, "memory_bytes"), byte_count(weight_bytes, "weight_bytes")
    if weights > memory:
        raise InvalidArgument(f"weights of {format_size(weights)} do not fit into {format_size(memory)}")
    return memory - weights
