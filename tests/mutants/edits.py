"""Edits of a source text, of which all mutants are made.

An edit names text that stands there exactly once, and what replaces it.
"""

from __future__ import annotations

from typing import TypeAlias

Edits: TypeAlias = tuple[tuple[str, str], ...]


class Stale(AssertionError):
    """An edit no longer fits its source: fit the mutant to the new text."""


def edited(where: str, text: str, edits: Edits) -> str:
    """The text after all edits, made in their order.

    Parameters
    ----------
    where : what the error calls the text.

    Raises
    ------
    Stale
        At its turn, an edit's old text does not occur exactly once.
    """
    for old, new in edits:
        if text.count(old) != 1:
            raise Stale(f"{where} has this {text.count(old)} times instead of once:\n{old}")
        text = text.replace(old, new)
    return text
