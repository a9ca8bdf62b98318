"""Checks the lists of a spec that have an entry for each layer: windows, chunks, reads."""

from __future__ import annotations

from typing import Any

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.layers import MOST_TOKENS
from pagedkv.spec.sizes import whole_number


def reach_of_layers(given: Any, name: str, num_layers: int) -> tuple[int | None, ...] | None:
    """A number or None for each layer; None where all are None.

    Raises
    ------
    WrongType, InvalidArgument
        The message names the layer.
    """
    if given is None:
        return None
    if not isinstance(given, list | tuple):
        raise WrongType(f"{name} must be a list with a number or None for each layer, not {type(given).__name__}")
    if len(given) != num_layers:
        raise InvalidArgument(f"{name} must have an entry for each of {num_layers} layers, got {len(given)}")
    limits = tuple(
        None if limit is None else whole_number(limit, f"{name}[{layer}]", 1, MOST_TOKENS)
        for layer, limit in enumerate(given)
    )
    return None if limits.count(None) == num_layers else limits


def checked_reads(given: Any, num_layers: int) -> tuple[int, ...] | None:
    """The layers that a model's layers read; None where each reads its own.

    Raises
    ------
    WrongType, InvalidArgument
        The message names the layer.
    """
    if given is None:
        return None
    if not isinstance(given, list | tuple):
        raise WrongType(f"reads must be a list with a number for each layer, not {type(given).__name__}")
    reads, own = [], 0
    for layer, read in enumerate(given):
        reads.append(whole_number(read, f"reads[{layer}]", 0, num_layers - 1))
        if reads[-1] > own:
            raise InvalidArgument(f"reads[{layer}] = {read}, but only {own} of the layers before have KV of their own")
        own += reads[-1] == own
    if own != num_layers:
        raise InvalidArgument(f"reads names {own} layers with KV of their own, and num_layers is {num_layers}")
    return None if len(reads) == num_layers else tuple(reads)
