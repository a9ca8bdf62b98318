"""Pieces of styled text, and the measures of the text form."""

from __future__ import annotations

from typing import Literal

from pagedkv.lab.recording import Recording

Style = Literal["", "head", "dim", "shared", "copied", "moving"]
Line = list[tuple[str, Style]]

WIDTH = 100
MOST_ROWS = 64  # of a tier, or of a group's pages there
BAR = 8  # characters that show how full a block is, at most
MARKS: dict[Style, str] = {"copied": "+", "shared": "*", "": " "}


def filled(recording: Recording, num_tokens: int) -> str:
    """A bar that shows how full a block is."""
    bar = min(BAR, recording.block_size)
    full = -(-bar * num_tokens // recording.block_size)
    return "#" * full + "." * (bar - full)


def cut(text: str, width: int) -> str:
    """Printable, in one line, and not longer than there is room for."""
    text = printable(text)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def printable(text: str) -> str:
    """Text without control characters: the file may come from a stranger."""
    return "".join(c if c.isprintable() else "?" for c in text)


def counted(number: int, noun: str) -> str:
    """``1 page``, ``2 pages``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
