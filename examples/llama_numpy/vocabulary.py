"""What a tokenizer is made of: the tokens' texts and kinds, and the merges in their order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that stand for themselves and are never merged from text


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level BPE vocabulary, as GGUF carries it.

    Parameters
    ----------
    tokens : text of each token, bytes written as GPT-2's printable characters.
    kinds : GGUF's token type of each.
    merges : pairs that are joined, as ``"left right"``, the most important first.
    pre : name of the rule that cuts text into words before merging.
    eos_id : the token that ends a generation.

    Raises
    ------
    ValueError
        The parts do not fit together.
    """

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    pre: str
    eos_id: int

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, but kinds of {len(self.kinds)}")
        if not 0 <= self.eos_id < len(self.tokens):
            raise ValueError(f"the end token is {self.eos_id}, and there are {len(self.tokens)} tokens")
        known = set(self.tokens)
        for merge in self.merges:
            if len(merge.split(" ")) != 2 or merge.replace(" ", "") not in known:
                raise ValueError(f"the merge {merge!r} is no pair that makes a token")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Vocabulary:
        """From what :meth:`to_dict` gave, also after JSON made lists of it."""
        return cls(
            tokens=tuple(data["tokens"]),
            kinds=tuple(data["kinds"]),
            merges=tuple(data["merges"]),
            pre=data["pre"],
            eos_id=data["eos_id"],
        )
