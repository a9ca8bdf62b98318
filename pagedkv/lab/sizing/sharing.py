"""What sharing saves, in blocks: common prefixes, and beams that copy on write.

Only full blocks are shared for good. A partly filled one is shared until one owner writes into it, which copies it
first (copy-on-write; arXiv:2309.06180, section 4.4); its last owner writes in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagedkv.errors import InvalidArgument
from pagedkv.lab.sizing.blocks import blocks_needed
from pagedkv.lab.sizing.checks import block_tokens, token_count
from pagedkv.spec.sizes import whole_number

MAX_SEQUENCES = 2**40


@dataclass(frozen=True, slots=True)
class Saving:
    """Blocks of some sequences that share nothing, and of the same that share.

    Attributes
    ----------
    alone, shared : blocks.
    copies : blocks copied on the way, because they were written to while shared; at least. Where all owners write
        within one step, pagedkv copies for the last of them too: the source stays as it is until it is copied.
    """

    alone: int
    shared: int
    copies: int = 0

    @property
    def blocks(self) -> int:
        """Blocks saved."""
        return self.alone - self.shared

    @property
    def fraction(self) -> float:
        """Share of the blocks that is saved, 0..1."""
        return self.blocks / self.alone if self.alone else 0.0


def shareable_blocks(prefix_tokens: int, block_size: int = 16) -> int:
    """Full blocks of a common prefix: ``floor(prefix / block_size)``.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return token_count(prefix_tokens, "prefix_tokens") // block_tokens(block_size)


def prefix_sharing(num_sequences: int, prefix_tokens: int, own_tokens: int = 0, block_size: int = 16) -> Saving:
    """Sequences that begin with the same `prefix_tokens` and go on with `own_tokens` each.

    Raises
    ------
    WrongType, InvalidArgument
    """
    count = whole_number(num_sequences, "num_sequences", 1, MAX_SEQUENCES)
    prefix, own = token_count(prefix_tokens, "prefix_tokens"), token_count(own_tokens, "own_tokens")
    each, common = blocks_needed(prefix + own, block_size), shareable_blocks(prefix, block_size)
    return Saving(count * each, common + count * (each - common))


def fork_sharing(
    num_forks: int, prompt_tokens: int, own_tokens: int, block_size: int = 16, *, common_tokens: int = 0
) -> Saving:
    """Beams or samples of one prompt.

    `common_tokens` generated before they part, then `own_tokens` by each.

    Raises
    ------
    WrongType, InvalidArgument
    """
    count = whole_number(num_forks, "num_forks", 1, MAX_SEQUENCES)
    together = token_count(prompt_tokens, "prompt_tokens") + token_count(common_tokens, "common_tokens")
    each = blocks_needed(together + token_count(own_tokens, "own_tokens"), block_size)
    if own_tokens == 0:
        return Saving(count * each, each)
    common = together // block_size
    return Saving(count * each, common + count * (each - common), count - 1 if together % block_size else 0)


def tree_blocks_per_sequence(path: Iterable[tuple[int, int]]) -> float:
    """A sequence's share of the blocks on its path through the prefix tree.

    Each block is divided by its sequences.

    Parameters
    ----------
    path : (blocks, sequences that share them) of each node, root first; the numbers of sequences never rise.

    Raises
    ------
    WrongType, InvalidArgument
    """
    share, above = 0.0, MAX_SEQUENCES
    for num_blocks, sharers in path:
        count = whole_number(sharers, "sequences of a node", 1, MAX_SEQUENCES)
        if count > above:
            raise InvalidArgument(f"a node is shared by {count} sequences and the one above it by {above}: never more")
        share, above = share + token_count(num_blocks, "blocks of a node") / count, count
    return share
