"""Byte-level BPE: text to tokens and back, whole or token by token."""

from __future__ import annotations

import codecs
import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from examples.llama_numpy.errors import PromptTooLong
from examples.llama_numpy.vocabulary import CONTROL, USER_DEFINED, Vocabulary
from pagedkv import extras

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {  # rules applied one after the other; each cuts what the one before left
    "gpt-2": (GPT2_WORDS,),
    "smollm": (r"\p{N}", GPT2_WORDS),  # digits one by one
}


class Tokenizer:
    """Turns text into tokens and back.

    Parameters
    ----------
    vocabulary : Vocabulary

    Raises
    ------
    ImportError
        The package ``regex`` is not installed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            import regex
        except ImportError as error:
            raise ImportError(f"the tokenizer needs the package regex: {extras.command('examples')}") from error
        self.vocabulary = vocabulary
        self._ids = {text: i for i, text in enumerate(vocabulary.tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(vocabulary.merges)}
        self._written = dict(enumerate(printable_bytes()))
        self._bytes = {character: byte for byte, character in self._written.items()}
        self._rules: list[Any] = [regex.compile(rule) for rule in PRE_TOKENIZERS[vocabulary.pre]]
        marks = sorted(self.specials, key=len, reverse=True)
        self._marks: Any = regex.compile(f"({'|'.join(map(regex.escape, marks))})") if marks else None
        self._words: dict[str, list[int]] = {}

    @property
    def specials(self) -> dict[str, int]:
        """Tokens that stand for themselves, such as ``<|im_start|>``."""
        texts = zip(self.vocabulary.tokens, self.vocabulary.kinds, strict=True)
        return {text: i for i, (text, kind) in enumerate(texts) if kind in (CONTROL, USER_DEFINED)}

    def encode(self, text: str, *, special: bool = False, most: int | None = None) -> list[int]:
        """Tokens of a text.

        Bytes without a token (SmolLM2 knows no U+0004, for one) are left out, as in llama.cpp.

        Parameters
        ----------
        text : anything; what is no valid Unicode (lone surrogates) is replaced.
        special : read ``<|im_start|>`` and its like as tokens. Never for text that others wrote: it could end its turn.
        most : tokens that the text may have; the words after that many are not looked at.

        Raises
        ------
        PromptTooLong
            It has more than `most` tokens.
        """
        text = text.encode("utf-8", "replace").decode()
        parts = [text] if not special or self._marks is None else self._marks.split(text)
        ids: list[int] = []
        for i, part in enumerate(parts):  # every second part is a mark
            for known in [[self._ids[part]]] if i % 2 else self._encode_plain(part):
                ids += known
                if most is not None and len(ids) > most:
                    raise PromptTooLong(f"a text of more than {most} tokens")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD, special tokens are written out."""
        stream = self.stream()
        return "".join(map(stream.feed, ids)) + stream.end()

    def stream(self) -> TextStream:
        """Text of tokens that come one at a time."""
        return TextStream(self)

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for."""
        text = self.vocabulary.tokens[token]
        if self.vocabulary.kinds[token] in (CONTROL, USER_DEFINED):
            return text.encode()
        return b"".join(bytes([self._bytes[c]]) if c in self._bytes else c.encode() for c in text)

    def _encode_plain(self, text: str) -> Iterator[list[int]]:
        """Tokens of each word."""
        pieces = [text]
        for rule in self._rules:
            pieces = [cut for piece in pieces for cut in _cut(rule, piece)]
        for piece in pieces:
            known = self._words.get(piece)
            if known is None:
                known = self._merge([self._written[byte] for byte in piece.encode()])
                if len(self._words) < 1 << 16:
                    self._words[piece] = known
            yield known

    def _merge(self, parts: list[str]) -> list[int]:
        """Join neighbours until no pair is a merge.

        The most important pair first, everywhere it stands, from the left. A heap of the pairs keeps this at n log n
        steps: a word may be as long as its writer likes.
        """
        ranks, end = self._ranks, len(parts)
        before, after = list(range(-1, end - 1)), list(range(1, end + 1))  # a part that was joined to its left is ""
        found = ((ranks.get(pair), i) for i, pair in enumerate(itertools.pairwise(parts)))
        waiting = [(rank, i) for rank, i in found if rank is not None]
        heapq.heapify(waiting)
        while waiting:
            best, places = waiting[0][0], []
            while waiting and waiting[0][0] == best:
                places.append(heapq.heappop(waiting)[1])
            for i in places:
                right = after[i]
                if not parts[i] or right == end or ranks.get((parts[i], parts[right])) != best:
                    continue  # one of its parts was joined to another since
                parts[i] += parts[right]
                parts[right], after[i] = "", after[right]
                if after[i] < end:
                    before[after[i]] = i
                for left in (before[i], i):
                    if left >= 0 and after[left] < end:
                        rank = ranks.get((parts[left], parts[after[left]]))
                        if rank is not None:
                            heapq.heappush(waiting, (rank, left))
        return [self._ids[part] for part in parts if part and part in self._ids]  # only single bytes can be missing


class TextStream:
    """Text as its tokens come: a character appears when its last byte has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """What one more token completes; it may be nothing yet."""
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def end(self) -> str:
        """What is left unfinished."""
        return self._decoder.decode(b"", final=True)


def printable_bytes() -> list[str]:
    """GPT-2's character for each byte.

    Printable ones are themselves, the others follow from U+0100 on.
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + hidden.index(byte)) for byte in range(256)]


def _cut(rule: Any, text: str) -> Iterator[str]:
    """A text as the matches of a rule and what lies between them."""
    last = 0
    for match in rule.finditer(text):
        if match.start() > last:
            yield text[last : match.start()]
        yield match.group()
        last = match.end()
    if last < len(text):
        yield text[last:]
