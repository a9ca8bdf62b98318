"""SentencePiece's byte-pair encoding by scores: text to tokens and back."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass

SPACE = "▁"  # stands for a blank in the tokens' texts
CONTROL, USER_DEFINED, BYTE = 3, 4, 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The parts of a tokenizer.

    Parameters
    ----------
    tokens, scores, kinds : text, score and GGUF's token type of each token.
    bos_id, eos_id : the token in front of every prompt, and the one that ends a generation.

    Raises
    ------
    ValueError
        The parts do not fit together.
    """

    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[int, ...]
    bos_id: int
    eos_id: int

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.scores) == len(self.kinds):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.scores)} scores, kinds of {len(self.kinds)}")
        for name in ("bos_id", "eos_id"):
            if not 0 <= getattr(self, name) < len(self.tokens):
                raise ValueError(f"{name} is {getattr(self, name)}, and there are {len(self.tokens)} tokens")


class Tokenizer:
    """Turns text into tokens and back.

    Parameters
    ----------
    vocabulary : Vocabulary
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._ids = {text: i for i, text in enumerate(vocabulary.tokens)}
        kinds = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        marks = sorted((text for text, kind in kinds if kind in (CONTROL, USER_DEFINED)), key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, marks))})") if marks else None
        self._bytes = [self._ids.get(f"<0x{byte:02X}>", vocabulary.eos_id) for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, the beginning's token in front; texts of special tokens stand for them."""
        found = [self.vocabulary.bos_id]
        for place, part in enumerate(self._marks.split(text) if self._marks else [text]):
            found += [self._ids[part]] if place % 2 else self._merged(part.replace(" ", SPACE))
        return found

    def _merged(self, text: str) -> list[int]:
        """Join neighbours, the pair with the highest score first.

        Of equal pairs the first in the text comes first.
        """
        pieces: list[str | None] = list(text)
        after = [*range(1, len(pieces)), -1]
        before = list(range(-1, len(pieces) - 1))
        heap: list[tuple[float, int, str]] = []

        def offer(left: int) -> None:
            if left >= 0 and after[left] >= 0:
                joined = f"{pieces[left]}{pieces[after[left]]}"
                found = self._ids.get(joined)
                if found is not None:
                    heapq.heappush(heap, (-self.vocabulary.scores[found], left, joined))

        for left in range(len(pieces) - 1):
            offer(left)
        while heap:
            _, left, joined = heapq.heappop(heap)
            right = after[left]
            if pieces[left] is None or right < 0 or f"{pieces[left]}{pieces[right]}" != joined:
                continue
            pieces[left], pieces[right] = joined, None
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left])
            offer(left)
        return [token for piece in pieces if piece is not None for token in self._of_piece(piece)]

    def _of_piece(self, piece: str) -> list[int]:
        found = self._ids.get(piece)
        return [self._bytes[byte] for byte in piece.encode()] if found is None else [found]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; special ones as they are written, broken UTF-8 replaced."""
        found = bytearray()
        for token in tokens:
            text, kind = self.vocabulary.tokens[token], self.vocabulary.kinds[token]
            found += bytes([int(text[3:5], 16)]) if kind == BYTE else text.replace(SPACE, " ").encode()
        return found.decode(errors="replace")
